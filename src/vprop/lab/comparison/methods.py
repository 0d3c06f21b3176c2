"""The methods that are compared: every named optimizer of the library, and what people use without it."""

from __future__ import annotations

from torch.optim import Adam

from vprop import CVI, IVON, VOGN, VON, VONG, MeanField, Vadam, Vprop
from vprop.baselines import BBVI
from vprop.lab.engine.grid import by_name, grid, only_lr
from vprop.lab.engine.method import Method
from vprop.lab.engine.problem import Problem

MOMENTUM = 0.9
"""β₁, the same for every method, so that they differ in what they are compared for."""

_ADAM = only_lr(0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
# Runs are short: the averages are so too, or they would end at the curvature that they began with.
_NATURAL = grid((0.02, 0.1, 0.5), (0.98, 0.995))
# The long one is IVON's default, for curvature from a single sample.
_IVON = grid((0.02, 0.1, 0.5), (0.999, 0.99999))
_BETAS = {"betas": (MOMENTUM, 0.999)}
_PAIR = {"mc_samples": 2, "antithetic": True}
_CENTERED = _PAIR | {"centered": True}
_HUTCHINSON = {"curvature": "hutchinson", "riemannian": True}
_CHUNK = {"chunk_size": 128}
"""Rows of the Hessian at a time: all of them."""

METHODS = (
    Method("adam", "Adam (point estimate)", Adam, _ADAM, _BETAS, kind="point", effort=0.5),
    Method("mc-dropout", "MC dropout with Adam", Adam, _ADAM, _BETAS, kind="dropout", problems=("cnn",), dropout=0.2,
           effort=0.6),
    Method("vprop-0", "Vprop-0", Vprop, _NATURAL, {"mc_samples": 0}, MOMENTUM, effort=0.6),
    Method("vprop-1", "Vprop-1", Vprop, _NATURAL, beta1=MOMENTUM),
    Method("vprop-2-centered", "Vprop-2, centred antithetic", Vprop, _NATURAL, _CENTERED, MOMENTUM, gradients=2),
    Method("vprop-fisher", "Vprop-1, sampled Fisher", Vprop, _NATURAL, {"sampled_fisher": True}, MOMENTUM, effort=1.6),
    Method("vogn", "VOGN", VOGN, _NATURAL, beta1=MOMENTUM, effort=2.2),
    # Its average of squares starts at zero and is debiased, as published: a first curvature would be scaled up.
    Method("vadam", "Vadam", Vadam, _ADAM, {"hess_init": 0.0}, MOMENTUM),
    Method("ivon", "IVON", IVON, _IVON, beta1=MOMENTUM),
    Method("ivon-antithetic", "IVON-2, antithetic", IVON, _NATURAL, _PAIR, MOMENTUM, gradients=2),
    Method("hutchinson", 'MeanField("hutchinson")', MeanField, _NATURAL, _HUTCHINSON, MOMENTUM, effort=2.5),
    Method("cvi", "CVI", CVI, _NATURAL, beta1=MOMENTUM, problems=("logreg", "mlp"), effort=2.0),
    Method("bbvi-adam", "BBVI with Adam steps", BBVI, _ADAM, {"method": "adam"}, MOMENTUM, effort=1.6),
    Method("vong-2-centered", "VONG-2, centred antithetic", VONG, _NATURAL, _CENTERED, MOMENTUM, gradients=2,
           problems=("logreg",), full_covariance=True, effort=2.0),
    Method("von", "VON", VON, _NATURAL, _CHUNK, MOMENTUM, problems=("logreg",), full_covariance=True, effort=3.0),
)  # fmt: skip

BY_NAME = by_name(METHODS)


def taking_part(task: Problem) -> tuple[Method, ...]:
    """The methods that the task's table has."""
    return tuple(method for method in METHODS if task.name in method.problems)
