"""Named optimizers, one per file."""

from vprop.optim._base import VariationalOptimizer
from vprop.optim.vprop import Vprop

__all__ = ["VariationalOptimizer", "Vprop"]
