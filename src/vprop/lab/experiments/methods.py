"""The methods of the paper's figures, ours beside them, and others that belong into the picture."""

from __future__ import annotations

from torch.optim import RMSprop

from vprop import CVI, VOGN, VON, VONG, Vprop
from vprop.baselines import BBVI
from vprop.lab.engine.grid import by_name, grid, only_lr
from vprop.lab.engine.method import Method

_NATURAL = grid((0.03, 0.1, 0.3, 1.0), (0.9, 0.99))
_RMSPROP = grid((0.001, 0.003, 0.01, 0.03), (0.9, 0.99))
_PAIR = {"mc_samples": 2, "antithetic": True, "centered": True}

METHODS = (
    Method("bbvi", "BBVI", BBVI, only_lr(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), {"method": "sgd"}, beta1=0.9,
           group="paper"),
    Method("cvi-10", "CVI-10", CVI, _NATURAL, {"mc_samples": 10}, gradients=10, group="paper", effort=3),
    Method("vprop-2", "Vprop-2", Vprop, _NATURAL, {"mc_samples": 2}, gradients=2, group="paper"),
    Method("vprop-1", "Vprop-1", Vprop, _NATURAL, group="paper"),
    Method("vprop-0", "Vprop-0", Vprop, _NATURAL, {"mc_samples": 0}, group="paper"),
    Method("rmsprop", "RMSprop", RMSprop, _RMSPROP, kind="point", group="paper", effort=0.5),
    Method("vprop-2-centered", "Vprop-2, centred", Vprop, _NATURAL, _PAIR, gradients=2, group="ours"),
    Method("von-10", "VON-10", VON, _NATURAL, {"mc_samples": 10, "chunk_size": 128}, gradients=10, group="ours",
           full_covariance=True, effort=4),
    Method("vong-2-centered", "VONG-2, centred", VONG, _NATURAL, _PAIR, gradients=2, group="ours",
           full_covariance=True, effort=4),
    Method("vong-2", "VONG-2", VONG, _NATURAL, {"mc_samples": 2}, gradients=2, full_covariance=True, effort=4),
    Method("vogn-10", "VOGN-10", VOGN, _NATURAL, {"mc_samples": 10, "chunk_size": 4096}, gradients=10, effort=3),
    Method("vprop-2-fisher", "Vprop-2, sampled Fisher", Vprop, _NATURAL, {"mc_samples": 2, "sampled_fisher": True},
           gradients=4),
    Method("bbvi-rmsprop", "BBVI with RMSprop", BBVI, _RMSPROP, {"method": "rmsprop"}, beta1=0.9),
    Method("bbvi-adam", "BBVI with Adam", BBVI, _RMSPROP, {"method": "adam"}, beta1=0.9),
    Method("vprop-1-momentum", "Vprop-1 with momentum", Vprop, _NATURAL, beta1=0.9),
    Method("rmsprop-momentum", "RMSprop with momentum", RMSprop, _RMSPROP, {"momentum": 0.9}, kind="point", effort=0.5),
    Method("mc-dropout", "MC dropout", RMSprop, _RMSPROP, kind="dropout", dropout=0.1, problems=("mlp",), effort=0.5),
)  # fmt: skip

BY_NAME = by_name(METHODS)
