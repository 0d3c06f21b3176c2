"""Which of Lightning's two packages is in use: ``lightning`` or ``pytorch_lightning``, which share no class."""

from __future__ import annotations

import sys
from importlib import import_module, metadata

from vprop.integrations._requirements import require

PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
"""Modules, and the packages that they come in."""


def modules_in_use() -> list[str]:
    """Those that are imported; if none is, the first that is installed. All must be new enough."""
    chosen = [module for module in PACKAGES if module in sys.modules]
    chosen = chosen or [module for module, package in PACKAGES.items() if _is_installed(package)][:1]
    for package in [PACKAGES[module] for module in chosen] or ["lightning"]:
        require(package, "2.2")
    return chosen


def callback_class() -> type:
    """A base class that the Trainers of all packages in use know as a callback."""
    return type("Callback", tuple(import_module(module).Callback for module in modules_in_use()), {})


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
