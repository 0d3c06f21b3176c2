"""Result files: what they say about where they come from, and that they can be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vprop.lab.bench import peers
from vprop.lab.bench.errors import BenchError
from vprop.lab.engine.store import require_writable
from vprop.lab.environment import environment


def require_file(path: Path) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    if path.is_dir():
        raise BenchError(f"Cannot write to {path}: it is a folder. Choose a file with --json.")
    require_writable(path.parent, path, "Choose another file with --json.")


def surroundings(device: torch.device) -> dict[str, Any]:
    """The environment, with what matters to speed."""
    found = environment() | {"device": device.type, "processor": _processor(), "triton": peers.version("triton")}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device_memory": properties.total_memory, "cuda_version": torch.version.cuda}
    return found | {"peers": peers.versions()}


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def load(path: Path) -> dict[str, Any]:
    """Read a result file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"Cannot read {path}: {error.strerror}.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} is no result of `vprop bench`: it is not JSON.") from error
    if not isinstance(result, dict) or not str(result.get("command", "")).startswith("vprop bench"):
        raise BenchError(f"{path} is no result of `vprop bench`.")
    return result
