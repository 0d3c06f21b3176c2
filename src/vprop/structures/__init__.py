"""How a Gaussian over the weights is kept: diagonal or full, or a structure of your own."""

from vprop.structures.base import Structure, TensorSpec
from vprop.structures.diagonal import Diagonal
from vprop.structures.full import Full
from vprop.structures.members import GroupStep, Marginal, Member, RateFactor
from vprop.structures.plans import Plan
from vprop.structures.rules import NATURAL, RIEMANNIAN, VADAM, Rule

__all__ = [
    "NATURAL",
    "RIEMANNIAN",
    "VADAM",
    "Diagonal",
    "Full",
    "GroupStep",
    "Marginal",
    "Member",
    "Plan",
    "RateFactor",
    "Rule",
    "Structure",
    "TensorSpec",
]
