"""The table of optimizers: one row enrols an optimizer in every behaviour test.

A row names the constructor and the configurations to run it with. ``configurations`` are keyword arguments on top
of ``lr`` and ``num_data``; ``bad_arguments`` are (keyword arguments, pattern of the message) pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import vprop
from vprop.baselines import BBVI, Newton
from vprop.curvature import AntitheticSpread, Hutchinson

SHARED_BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, r"Invalid lr=-1\.0: must be a finite number >= 0\. "),
    ({"lr": float("nan")}, r"Invalid lr=nan: must be a finite number >= 0\. "),
    ({"lr": "0.1"}, r"Invalid lr='0\.1': must be"),
    ({"lr": torch.tensor(-0.5)}, r"Invalid lr=tensor\(-0\.5000\): must be"),
    ({"num_data": 0}, r"Invalid num_data=0: must be a finite number > 0\. .*len\(train_set\)"),
    ({"num_data": None}, r"Invalid num_data=None: must be"),
    ({"prior_precision": -0.1}, r"Invalid prior_precision=-0\.1: must be a finite number >= 0"),
    ({"prior_precision": float("inf")}, r"Invalid prior_precision=inf: must be"),
    ({"prior_precision": [torch.ones(2)]}, r"Invalid prior_precision: has 1 tensors, must have one for each of .* 2 "),
    ({"prior_mean": 0.0}, r"Invalid prior_mean=0\.0: must be None or a list"),
    ({"prior_mean": [torch.zeros(3), torch.zeros(1)]}, r"Invalid prior_mean\[0\]: is \(3,\), must be .* \(2,\)"),
    ({"prior_mean": [torch.full((2,), torch.nan), torch.zeros(1)]}, r"Invalid prior_mean=.* finite everywhere"),
    ({"prior_precision": [-torch.ones(2), torch.ones(1)]}, r"Invalid prior_precision=.* >= 0 everywhere"),
    ({"betas": (1.0, 0.9)}, r"Invalid betas\[0\]=1\.0: must be a number in \[0, 1\)"),
    ({"betas": (0.9, -0.1)}, r"Invalid betas\[1\]=-0\.1: must be"),
    ({"betas": 0.9}, r"Invalid betas=0\.9: must be a pair"),
    ({"mc_samples": -1}, r"Invalid mc_samples=-1: must be an integer >= 0"),
    ({"mc_samples": 1.5}, r"Invalid mc_samples=1\.5: must be an integer >= 0"),
    ({"mc_samples": 1, "antithetic": True}, r"Invalid mc_samples=1: must be >= 2 when antithetic=True"),
    ({"antithetic": 1}, r"Invalid antithetic=1: must be True or False"),
    ({"temperature": 0.0}, r"Invalid temperature=0\.0: must be a finite number > 0"),
    ({"hess_init": -1.0}, r"Invalid hess_init=-1\.0: must be a finite number >= 0"),
    ({"hess_init": 0.0, "prior_precision": 0.0}, r"Invalid hess_init=0\.0: must be > 0 when prior_precision is 0"),
    ({"clip_radius": 0.0}, r"Invalid clip_radius=0\.0: must be a number > 0"),
    ({"clip_radius": float("nan")}, r"Invalid clip_radius=nan: must be a number > 0"),
    ({"seed": -1}, r"Invalid seed=-1: must be an integer in \[0, 2\*\*64\)"),
    ({"seed": 0.5}, r"Invalid seed=0\.5: must be an integer"),
    ({"maximize": "yes"}, r"Invalid maximize='yes': must be True or False"),
    ({"foreach": True, "fused": True}, r"Invalid fused=True: must be None or False with foreach=True"),
    ({"foreach": "all"}, r"Invalid foreach='all': must be None, True or False"),
    ({"lr": 10**400}, r"Invalid lr=1000.*… \(401 characters\): must be a finite number >= 0\. "),
    ({"lr": 1e39}, r"Invalid lr=1e\+39: must be <= 3\.4e\+38, the largest float32\. Useful step sizes are 1"),
    ({"lr": torch.tensor(float("nan"))}, r"Invalid lr=tensor\(nan\): must be a finite number >= 0"),
    ({"lr": torch.tensor(0.1, device="meta")}, r"Invalid lr=tensor\(\.\.\., device='meta'.* a tensor with one such"),
    ({"lr": torch.tensor([0.1]).to_sparse()}, r"layout=torch\.sparse_coo\): must be a finite number .* Pass e\.g\."),
    ({"lr": torch.tensor([0.1, 0.2])}, r"Invalid lr=tensor\(\[0\.1000, 0\.2000\]\): must be .* one such number"),
    ({"lr": torch.tensor(1)}, r"Invalid lr=tensor\(1\): must be .* of a floating-point dtype"),
    (
        {"lr": torch.tensor(0.1, requires_grad=True)},
        r"Invalid lr=tensor\(0\.1000, .*: must be .* without a gradient",
    ),
    ({"num_data": 10**400}, r"Invalid num_data=1000.*: must be a finite number > 0"),
    ({"num_data": 1e308}, r"Invalid num_data/temperature=1e\+308: must be between 1\.2e-38 and 8\.5e\+37"),
    ({"num_data": 1e308, "temperature": 1e-10}, r"Invalid num_data/temperature=inf: must be between"),
    ({"num_data": 1e-30, "temperature": 1e300}, r"Invalid num_data/temperature=0\.0: must be between"),
    ({"num_data": 1e30, "hess_init": 1e30}, r"Invalid num_data/temperature\*\(hess_init \+ .*=1[.0-9]*e\+60: must be"),
    (
        {"num_data": 1e-30, "prior_precision": 1e30},
        r"Invalid \(hess_init \+ prior_precision\*.*=1[.0-9]*e\+60: must",
    ),
    ({"num_data": 1e30, "prior_precision": 1e-30, "hess_init": 0}, r"Invalid \(hess_init \+ .*=1[.0-9]*e-60: must be"),
    ({"temperature": 10**400}, r"Invalid temperature=1000.*: must be a finite number > 0"),
    ({"prior_precision": 10**400}, r"Invalid prior_precision=1000.*: must be a finite number >= 0"),
    ({"prior_precision": 1e-300}, r"Invalid prior_precision=1e-300: must be between"),
    ({"hess_init": 10**400}, r"Invalid hess_init=1000.*: must be a finite number >= 0"),
    ({"hess_init": 1e300}, r"Invalid hess_init=1e\+300: must be between"),
    ({"clip_radius": 10**400}, r"Invalid clip_radius=1000.*: must be a number > 0"),
    ({"mc_samples": 10**400}, r"Invalid mc_samples=1000.*: must be an integer >= 0"),
    ({"mc_samples": 2**30}, r"Invalid mc_samples=1073741824: must be an integer >= 0 \(and below 2\*\*30\)"),
    ({"seed": 2**64}, r"Invalid seed=18446744073709551616: must be an integer in"),
    ({"seed": None}, r"Invalid seed=None: must be an integer in"),
    *(
        ({name: [tensor, torch.zeros(1)]}, rf"Invalid {name}\[0\]: {found}.*, must be a dense tensor of real .*\. {do}")
        for name in ("prior_mean", "prior_precision")
        for tensor, found, do in (
            (torch.zeros(2, device="meta"), "is on the meta device", "Move"),
            (torch.zeros(2).to_sparse(), r"has layout torch\.sparse_coo", "Make it dense"),
            (torch.zeros(2, dtype=torch.complex64), r"has dtype torch\.complex64", "Convert"),
            (torch.zeros(2, dtype=torch.int64), r"has dtype torch\.int64", "Convert"),
            (torch.zeros(2, dtype=torch.bool), r"has dtype torch\.bool", "Convert"),
        )
    ),
]

BAD_BASES: list[tuple[dict[str, Any], str]] = [
    ({"structure": "kronecker"}, r"Invalid structure='kronecker': must be \"diagonal\",? (or )?\"eigenbasis\""),
    ({"max_basis_dim": 0}, r"Invalid max_basis_dim=0: must be an integer >= 1"),
    ({"max_basis_dim": 2.5}, r"Invalid max_basis_dim=2\.5: must be an integer >= 1"),
    ({"basis_every": 0}, r"Invalid basis_every=0: must be an integer >= 1"),
    ({"basis_beta": 1.0}, r"Invalid basis_beta=1\.0: must be a number in \[0, 1\)"),
    (
        {"structure": "eigenbasis", "prior_precision": [torch.ones(2), torch.ones(1)]},
        r"Invalid prior_precision='one for each weight': must be one number .*Give such parameters a group with",
    ),
]
"""Of the methods that have an eigenbasis."""


@dataclass
class OptimizerInfo:
    """A row of the table."""

    constructor: Callable[..., vprop.VariationalOptimizer]
    configurations: dict[str, dict[str, Any]]
    bad_arguments: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    required: dict[str, Any] = field(default_factory=dict)
    """Arguments that have no default, beside ``num_data``."""
    has_hess: bool = True
    """Whether the state of a parameter holds a curvature for each of its weights: the natural-gradient diagonals."""

    @property
    def name(self) -> str:
        return self.constructor.__name__

    def build(self, params: Any, **arguments: Any) -> vprop.VariationalOptimizer:
        return self.constructor(params, **(self.required | arguments))


TABLE = [
    OptimizerInfo(
        vprop.Vprop,
        configurations={
            "0": {"mc_samples": 0},
            "1": {},
            "3": {"mc_samples": 3},
            "2-antithetic": {"mc_samples": 2, "antithetic": True},
            "3-antithetic": {"mc_samples": 3, "antithetic": True},
            "4-centered-pairs": {"mc_samples": 4, "antithetic": True, "centered": True},
            "3-centered": {"mc_samples": 3, "centered": True},
            "1-momentum": {"betas": (0.9, 0.99), "prior_precision": 3.0, "temperature": 0.5, "clip_radius": 0.2},
            "1-fisher": {"sampled_fisher": True},
            "1-mini-batch": {"batch_size": 12, "init_steps": 3, "hess_floor": 0.3, "betas": (0.9, 0.99)},
            "1-eigenbasis": {"structure": "eigenbasis", "basis_every": 3, "basis_beta": 0.9},
            "4-eigenbasis-pairs": {
                **{"structure": "eigenbasis", "mc_samples": 4, "antithetic": True, "centered": True, "basis_every": 1}
            },
            "3-eigenbasis-centered": {"structure": "eigenbasis", "mc_samples": 3, "centered": True, "max_basis_dim": 4},
            "1-full": {"structure": "full"},
        },
        bad_arguments=[
            *BAD_BASES,
            (
                {"structure": "eigenbasis", "sampled_fisher": True},
                r"Invalid sampled_fisher=True: must be False with structure=\"eigenbasis\"\. Its curvature",
            ),
            (
                {"structure": "full", "hess_floor": 0.5},
                r"Invalid hess_floor=0\.5: must be 0\.0 for a full covariance\. Steps of",
            ),
            (
                {"structure": "full", "noise_limit": 0.5},
                r"Invalid noise_limit=0\.5: must be float\(\"inf\"\) for a full covariance",
            ),
            ({"mc_samples": 1, "centered": True}, r"Invalid mc_samples=1: must be >= 2 when centered=True"),
            (
                {"mc_samples": 3, "centered": True, "antithetic": True},
                r"Invalid mc_samples=3: must be even when antithetic=True and centered=True\. Use mc_samples=4",
            ),
            ({"sampled_fisher": 1}, r"Invalid sampled_fisher=1: must be True or False"),
            ({"batch_size": 0}, r"Invalid batch_size=0: must be a number >= 1, \"objective\" or None\. Pass the rows"),
            ({"batch_size": "auto"}, r"Invalid batch_size='auto': must be a number >= 1, \"objective\" or None"),
            ({"init_steps": -1}, r"Invalid init_steps=-1: must be a finite number >= 0\. 0 forgets"),
            ({"hess_floor": -1.0}, r"Invalid hess_floor=-1\.0: must be a finite number >= 0"),
            ({"noise_limit": 0}, r"Invalid noise_limit=0: must be a number > 0\. Use float\(\"inf\"\)"),
            (
                {"preconditioner": "adam"},
                r"Invalid preconditioner='adam': must be \"precision\", \"root\" or \"identity\"",
            ),
            (
                {"preconditioner": "root"},
                r"Invalid batch_size=None: must be a number when preconditioner=\"root\"\. Pass the rows",
            ),
            (
                {"mc_samples": 2, "centered": True, "sampled_fisher": True},
                r"Invalid centered=True: must be False when sampled_fisher=True",
            ),
        ],
    ),
    OptimizerInfo(
        vprop.Vario,
        required={"batch_size": 12},
        configurations={
            "1": {"lr": 0.002},
            "2-antithetic": {
                **{"lr": 0.002, "mc_samples": 2, "antithetic": True, "noise_limit": 0.5, "hess_floor": 1.0}
            },
            "1-eigenbasis": {"lr": 0.002, "structure": "eigenbasis", "basis_every": 2},
            "1-identity": {"lr": 0.02, "preconditioner": "identity"},
        },
        bad_arguments=[
            *BAD_BASES,
            (
                {"structure": "full"},
                r"Invalid preconditioner='root': must be 'precision' for a full covariance\. Steps of Adam's",
            ),
            ({"lr": -1.0}, r"Invalid lr=-1\.0: must be .* 0\.003 is a good first try\."),
            ({"mc_samples": 2, "centered": True}, r"Invalid centered=True: must be False for Vario"),
        ],
    ),
    OptimizerInfo(
        vprop.CVI,
        configurations={"1": {}, "2-momentum": {"mc_samples": 2, "betas": (0.9, 0.99), "chunk_size": 5}},
        bad_arguments=[
            ({"mc_samples": 2, "centered": True}, r"Invalid centered=True: must be False for CVI\. .*Vprop and VONG"),
            ({"chunk_size": 0}, r"Invalid chunk_size=0: must be an integer >= 1"),
        ],
    ),
    OptimizerInfo(
        vprop.VOGN,
        configurations={"1": {}},
        bad_arguments=[({"mc_samples": 2, "centered": True}, r"Invalid centered=True: must be False for VOGN")],
    ),
    OptimizerInfo(
        vprop.VON,
        has_hess=False,
        configurations={"1": {}, "2-momentum": {"mc_samples": 2, "betas": (0.9, 0.99), "prior_precision": 3.0}},
        bad_arguments=[
            ({"mc_samples": 2, "centered": True}, r"Invalid centered=True: must be False for VON"),
            (
                {"max_parameters": 2},
                r"VON keeps one covariance .*: 3 parameters make a matrix of 3 × 3 .*max_parameters=2\. Pass "
                r"max_parameters=3 .*diagonal optimizer",
            ),
        ],
    ),
    OptimizerInfo(
        vprop.VONG,
        has_hess=False,
        configurations={
            "1": {},
            "2-centered-pairs": {"mc_samples": 2, "antithetic": True, "centered": True, "clip_radius": 0.2},
            "1-mini-batch": {"batch_size": 12, "init_steps": 5},
        },
        bad_arguments=[({"max_parameters": 0}, r"Invalid max_parameters=0: must be an integer >= 1")],
    ),
    OptimizerInfo(
        vprop.Vadam,
        configurations={
            "1": {},
            "2": {"mc_samples": 2, "prior_precision": 10.0, "hess_init": 0.1, "clip_radius": 0.5},
            "0-plain": {"mc_samples": 0, "betas": (0.0, 0.9)},
        },
        bad_arguments=[({"mc_samples": 2, "centered": True}, r"Invalid centered=True: must be False for Vadam")],
    ),
    OptimizerInfo(
        vprop.IVON,
        configurations={
            "1": {},
            "2-antithetic": {"mc_samples": 2, "antithetic": True, "betas": (0.9, 0.99), "clip_radius": 0.3},
            "3-rescaled": {"mc_samples": 3, "betas": (0.0, 0.9), "rescale_lr": True, "hess_init": 0.1},
            "1-root": {"preconditioner": "root", "batch_size": 12, "noise_limit": 0.3},
            "1-eigenbasis": {"structure": "eigenbasis", "basis_every": 2, "betas": (0.9, 0.99)},
            "2-eigenbasis-pairs": {
                **{"structure": "eigenbasis", "mc_samples": 2, "antithetic": True, "betas": (0.9, 0.99)}
            },
        },
        bad_arguments=[
            *BAD_BASES,
            ({"structure": "full"}, r"Invalid structure='full': must be \"diagonal\" or \"eigenbasis\""),
            (
                {"mc_samples": 0},
                r"Invalid mc_samples=0: must be >= 1 for IVON, whose curvature is Price\. Try",
            ),
            ({"mc_samples": 2, "centered": True}, r"Invalid centered=True: must be False for IVON"),
            ({"rescale_lr": "yes"}, r"Invalid rescale_lr='yes': must be True or False"),
            (
                {"init_steps": 0},
                r"Invalid init_steps=0: must be None with IVON's riemannian average\. Choose hess_init",
            ),
        ],
    ),
    OptimizerInfo(
        vprop.MeanField,
        required={"curvature": "price"},
        configurations={
            "price": {"curvature": "price"},
            "squared": {"curvature": "squared_gradient", "mc_samples": 0},
            "centered": {"curvature": "centered", "mc_samples": 3},
            "pairs": {"curvature": AntitheticSpread(), "mc_samples": 2, "antithetic": True},
            "gauss_newton": {"curvature": "gauss_newton", "chunk_size": 5},
            "hessian": {"curvature": "hessian", "riemannian": True},
            "fisher": {"curvature": "sampled_fisher"},
            "hutchinson": {"curvature": Hutchinson(probes=2), "mc_samples": 2, "riemannian": True},
        },
        bad_arguments=[
            ({"curvature": "newton"}, r"Invalid curvature='newton': must be one of \('squared_gradient', .*vprop.curv"),
            ({"curvature": "centered"}, r"Invalid mc_samples=1: must be >= 2 for MeanField, whose curvature is Sample"),
            (
                {"curvature": AntitheticSpread(), "mc_samples": 2},
                r"Invalid antithetic=False: must be True for AntitheticSpread",
            ),
            (
                {"curvature": "centered", "mc_samples": 3, "antithetic": True},
                r"Invalid mc_samples=3: must be even for AntitheticSpread\. .*mc_samples=4",
            ),
            ({"curvature": "price", "mc_samples": 0}, r"Invalid mc_samples=0: must be >= 1 for MeanField"),
            ({"riemannian": 1}, r"Invalid riemannian=1: must be True or False"),
            (
                {"riemannian": True, "init_steps": 5},
                r"Invalid init_steps=5: must be None with IVON's riemannian average",
            ),
        ],
    ),
    OptimizerInfo(
        BBVI,
        has_hess=False,
        configurations={"1-adam": {"method": "adam"}},
        bad_arguments=[
            ({"method": "newton"}, r"Invalid method='newton': must be one of \('sgd', 'rmsprop', 'adam'\)"),
            ({"mc_samples": 0}, r"Invalid mc_samples=0: must be >= 1 for BBVI, .* Try mc_samples=1"),
            ({"lr_std": -1.0}, r"Invalid lr_std=-1\.0: must be None or a finite number >= 0"),
        ],
    ),
]

LESS_THAN_SHARED = [
    OptimizerInfo(Newton, has_hess=False, configurations={"": {}, "averaged": {"betas": (0.9, 0.5)}}),
]
"""torch optimizers with a part of the shared arguments only: enrolled in the checks that need no others."""


@dataclass
class Case:
    """One optimizer in one configuration: what a behaviour test receives."""

    info: OptimizerInfo
    arguments: dict[str, Any]

    def __call__(self, params: Any, **overrides: Any) -> vprop.VariationalOptimizer:
        return self.info.build(params, **({"lr": 0.05, "num_data": 200} | self.arguments | overrides))

    @property
    def mc_samples(self) -> int:
        return self.arguments.get("mc_samples", 1)

    @property
    def needs_objective(self) -> bool:
        """Whether only ``step(objective)`` trains it: gradients are not enough."""
        return self([torch.zeros(1, requires_grad=True)]).needs_objective


def cases(
    at_most_samples: int | None = None,
    first_only: bool = False,
    any_loop: bool = False,
    has_hess: bool = False,
    less_than_shared: bool = False,
    first_of_each: bool = False,
) -> list[Any]:
    """All (optimizer, configuration) pairs as pytest parameters.

    ``any_loop``: only those that need no objective, for tests that call backward() themselves. ``has_hess``: only those
    with a curvature for each weight in the state, for tests that look at it. ``less_than_shared``: also those that have
    not all of the shared arguments. ``first_of_each``: the first configuration of each optimizer.
    """
    chosen = []
    for info in [*TABLE, *LESS_THAN_SHARED] if less_than_shared else TABLE:
        if has_hess and not info.has_hess:
            continue
        for label, arguments in info.configurations.items():
            if has_hess and arguments.get("structure", "diagonal") != "diagonal":
                continue
            if any_loop and Case(info, arguments).needs_objective:
                continue
            if at_most_samples is not None and arguments.get("mc_samples", 1) > at_most_samples:
                continue
            if first_only and arguments.get("mc_samples", 1) != 1:
                continue
            chosen.append(pytest.param(Case(info, arguments), id=f"{info.name}-{label}" if label else info.name))
            if first_only or first_of_each:
                break
    return chosen
