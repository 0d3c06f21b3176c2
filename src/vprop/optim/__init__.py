"""Named optimizers, one per file."""

from vprop.help.auto_prior import AutoPrior
from vprop.help.diagnosis import Diagnosis
from vprop.help.lr_find import LrTrials, lr_find
from vprop.optim.cvi import CVI
from vprop.optim.cycles import CosineCycles
from vprop.optim.ensemble import train_mixture
from vprop.optim.ivon import IVON
from vprop.optim.mean_field import MeanField
from vprop.optim.optimizer import VariationalOptimizer
from vprop.optim.vadam import Vadam
from vprop.optim.vario import Vario
from vprop.optim.vogn import VOGN
from vprop.optim.von import VON
from vprop.optim.vong import VONG
from vprop.optim.vprop import Vprop
from vprop.structures import Marginal

__all__ = [
    "CVI",
    "IVON",
    "VOGN",
    "VON",
    "VONG",
    "AutoPrior",
    "CosineCycles",
    "Diagnosis",
    "LrTrials",
    "Marginal",
    "MeanField",
    "Vadam",
    "VariationalOptimizer",
    "Vario",
    "Vprop",
    "lr_find",
    "train_mixture",
]
