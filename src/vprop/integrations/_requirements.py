"""Frameworks that an integration needs, and what to say when one is missing or too old."""

from __future__ import annotations

from importlib import metadata

from torch.torch_version import TorchVersion


def require(package: str, at_least: str) -> None:
    """Refuse to go on without ``package`` in a version of ``at_least`` or newer."""
    needs, command = f"This part of vprop needs {package} >= {at_least}", f"pip install '{package}>={at_least}'"
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{needs}, which is not installed. Install it with: {command}") from None
    if TorchVersion(installed) < at_least:
        raise ImportError(f"{needs}, but version {installed} is installed. Upgrade it with: {command}")
