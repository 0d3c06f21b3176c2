"""Where a result was obtained: goes into every JSON file."""

from __future__ import annotations

import os
import platform
from pathlib import Path

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


def processor() -> str | None:
    """The name of the CPU, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
