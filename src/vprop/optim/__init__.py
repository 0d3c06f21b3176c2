"""Named optimizers, one per file."""

from vprop.optim._base import VariationalOptimizer
from vprop.optim.cvi import CVI
from vprop.optim.vogn import VOGN
from vprop.optim.von import VON
from vprop.optim.vong import VONG
from vprop.optim.vprop import Vprop

__all__ = ["CVI", "VOGN", "VON", "VONG", "VariationalOptimizer", "Vprop"]
