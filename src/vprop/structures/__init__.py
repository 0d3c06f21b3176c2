"""How a Gaussian over the weights is kept: diagonal, in an eigenbasis or full, or a structure of your own."""

from vprop.structures.base import MEAN, Snapshot, Structure, TensorSpec
from vprop.structures.choice import NAMED, part_of, structure_for
from vprop.structures.composed import Composed
from vprop.structures.diagonal import Diagonal
from vprop.structures.eigenbasis import Eigenbasis
from vprop.structures.full import Full
from vprop.structures.members import GroupStep, Marginal, Member, RateFactor, State, mean_of
from vprop.structures.plans import KeptPlan, Plan
from vprop.structures.rules import NATURAL, RIEMANNIAN, VADAM, Rule

__all__ = [
    "MEAN",
    "NAMED",
    "NATURAL",
    "RIEMANNIAN",
    "VADAM",
    "Composed",
    "Diagonal",
    "Eigenbasis",
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
    "part_of",
    "structure_for",
]
