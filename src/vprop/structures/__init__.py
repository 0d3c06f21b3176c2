"""How a Gaussian over the weights is kept: diagonal or full, or a structure of your own."""

from vprop.structures.base import MEAN, Snapshot, Structure, TensorSpec
from vprop.structures.diagonal import Diagonal
from vprop.structures.full import Full
from vprop.structures.members import GroupStep, Marginal, Member, RateFactor, State, mean_of
from vprop.structures.plans import KeptPlan, Plan
from vprop.structures.rules import NATURAL, RIEMANNIAN, VADAM, Rule

__all__ = [
    "MEAN",
    "NATURAL",
    "RIEMANNIAN",
    "VADAM",
    "Diagonal",
    "Full",
    "GroupStep",
    "KeptPlan",
    "Marginal",
    "Member",
    "Plan",
    "RateFactor",
    "Rule",
    "Snapshot",
    "State",
    "Structure",
    "TensorSpec",
    "mean_of",
]
