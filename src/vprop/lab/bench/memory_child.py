"""The process in which the memory of one contender is measured: prints one line of JSON."""

from __future__ import annotations

import json
import sys

import torch

from vprop.lab.bench.contenders import by_name
from vprop.lab.bench.errors import Unavailable
from vprop.lab.bench.memory import measure_resident


def main(name: str, params: str, tensors: str, threads: str) -> None:
    """Measure the contender of that name."""
    torch.set_num_threads(int(threads))
    try:
        found = measure_resident(by_name(name), float(params), int(tensors))
    except Unavailable as reason:
        found = {"reason": str(reason)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
