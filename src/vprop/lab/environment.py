"""Where a result was obtained: goes into every JSON file."""

from __future__ import annotations

import os
import platform

import torch

import vprop


def environment() -> dict[str, object]:
    """Versions and hardware, without names or paths of the machine."""
    return {
        "vprop": vprop.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "cuda": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
