"""Who is compared, with the settings that each may choose from: the other part of the configuration.

A setting is a dictionary of numbers. ``dropout`` is for the network; ``swa_lr``, ``cycles`` and ``first``, the share of
the first cycle, are for the schedule; the others are arguments of the function that makes the optimizer, which also
gets the facts: N, the batch size, the seed. Every grid of a family has at most four settings; the first is what a
person would take without tuning, or what was chosen before there were others.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

import vprop
from vprop.lab.deep.tasks import DeepTask

Kind = Literal["point", "statistics", "networks", "dropout", "posterior", "swag", "peer", "laplace"]
"""How a prediction is averaged: not at all; not at all, with other statistics of BatchNorm; over the networks at the
ends of cycles, over dropout masks, over draws of a posterior of ours, of SWAG's Gaussian, of another package's
optimizer, of a Laplace approximation around a trained network."""
Setting = dict[str, float]
Grids = Mapping[str, tuple[Setting, ...]]
"""By family of tasks; by a task's name where it needs others."""
DECAY = 5e-4
"""Weight decay of ResNets as everybody has it; as a prior precision it is this times N."""

Groups = list[dict[str, Any]]


def all_alike(model: nn.Module) -> Groups:
    """What is trained of a model, as one group of parameters."""
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def layers_in_an_eigenbasis(model: nn.Module) -> Groups:
    """The weights of linear and convolutional layers in an eigenbasis; embeddings, norms and biases diagonal."""
    layers = (nn.Linear, nn.Conv2d)
    chosen = [m.weight for m in model.modules() if isinstance(m, layers) and m.weight.requires_grad]
    known = {id(p) for p in chosen}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups: Groups = [{"params": chosen, "structure": "eigenbasis"}, {"params": others}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class DeepContender:
    """A row of the table."""

    name: str
    label: str
    kind: Kind
    make: Callable[..., Optimizer] | None
    grids: Grids = field(default_factory=dict)
    """Where there is none, it does not take part."""
    gradients: int = 1
    """Of a batch, in a step: it makes so many times fewer steps."""
    needs: str = ""
    """A package, if it is one that does not come with the library."""
    of: str = ""
    """For what is made from the weights of another contender's run: whose."""
    ours: bool = False
    captured: bool = True
    """Whether its step may be recorded as a CUDA graph."""
    groups: Callable[[nn.Module], Groups] = all_alike
    """Of parameters, that the optimizer is made with."""

    def grid(self, task: DeepTask) -> tuple[Setting, ...]:
        """The settings to choose from: where a task takes what was chosen on another, those of the other."""
        return self.grids.get(task.tuned_on or task.name, self.grids.get(task.family, ()))

    def installed(self) -> bool:
        """Whether it can run here."""
        if not self.needs:
            return True
        try:
            importlib.import_module(self.needs)
        except ImportError:
            return False
        return True


@dataclass(frozen=True)
class Group:
    """Runs of one contender with different seeds, whose probabilities are averaged: nothing is trained for it."""

    name: str
    label: str
    of: str
    members: int
    averaged: bool
    """Whether the members' averaged predictions are taken (a mixture of posteriors, or masks) or those at the mean."""


# -- optimizers ------------------------------------------------------------------------------------------------------


def sgd(params: Any, facts: dict[str, Any], lr: float, weight_decay: float = DECAY) -> Optimizer:
    """With Nesterov's momentum; the fused one, for its step size may be a tensor in a recorded step."""
    fused = facts.get("capturable", False)
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay, fused=fused)


def adamw(params: Any, facts: dict[str, Any], lr: float, weight_decay: float, beta2: float = 0.999) -> Optimizer:
    """As torch has it."""
    capturable = facts.get("capturable", False)
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, capturable=capturable)


def vario(params: Any, facts: dict[str, Any], decay: float = 0.0, beta2: float = 0.999, **setting: float) -> Optimizer:
    """The recommended optimizer; ``decay`` is a prior said as a weight decay, λ = decay·N, else it is the default."""
    prior = {"prior_precision": decay * facts["num_data"]} if decay else {}
    return vprop.Vario(params, betas=(0.9, beta2), **facts, **prior, **setting)  # type: ignore[arg-type]


def vario_as_sgd(
    params: Any, facts: dict[str, Any], lr: float = 0.1, decay: float = DECAY, **setting: Any
) -> Optimizer:
    """The recommended optimizer with SGD's step; ``lr`` is that of SGD with the same momentum."""
    return vprop.Vario(
        params, lr=lr / (1 - 0.9), preconditioner="identity", prior_precision=decay * facts["num_data"], **facts,
        **setting,
    )  # fmt: skip


def curvature_of(sigma: float, facts: dict[str, Any]) -> float:
    """h for which σ = 1/√(N·h): noise said as the size that it has, which does not depend on how many data there are.

    >>> curvature_of(0.01, {"num_data": 50_000})
    0.2
    """
    return round(1 / (facts["num_data"] * sigma**2), 12)


def floored(params: Any, facts: dict[str, Any], sigma: float, speed: float = 1.0, decay: float = DECAY) -> Optimizer:
    """The natural-gradient step above a floor: where h is small, SGD with momentum and a step size of ``speed``/10.

    There the noise is ``sigma``.
    """
    floor = curvature_of(sigma, facts)
    return vprop.Vprop(
        params, lr=speed * floor, hess_floor=floor, betas=(0.9, 0.999), init_steps=0,
        prior_precision=decay * facts["num_data"], **facts,
    )  # fmt: skip


def centred(params: Any, facts: dict[str, Any], sigma: float, speed: float = 1.0, decay: float = DECAY) -> Optimizer:
    """As ``floored``, with the curvature from the difference of an antithetic pair's gradients: unbiased."""
    floor = curvature_of(sigma, facts)
    return vprop.Vprop(
        params, lr=speed * floor, hess_floor=floor, betas=(0.9, 0.999), init_steps=0, mc_samples=2, antithetic=True,
        centered=True, prior_precision=decay * facts["num_data"], **facts,
    )  # fmt: skip


def ivon(
    params: Any,
    facts: dict[str, Any],
    sigma: float,
    speed: float = 1.0,
    decay: float = DECAY,
    held: float = 0.0,
    **setting: float,
) -> Optimizer:
    """With a step size that is SGD's, ``speed``/10; its h stays near where it starts, and so its noise is ``sigma``.

    ``held`` is 1 for a floor that keeps h from falling in a long training.
    """
    known = {name: value for name, value in facts.items() if name != "batch_size"}
    options: Any = {"weight_decay": decay, "sigma": sigma, **known, **setting}
    if held:
        options["hess_floor"] = curvature_of(sigma, facts)
    return vprop.IVON.like_sgd(params, 0.1 * speed, **options)


def ivon_with_clipping(params: Any, facts: dict[str, Any], **setting: float) -> Optimizer:
    """As its authors train transformers: large steps, each element bounded."""
    known = {name: value for name, value in facts.items() if name != "batch_size"}
    return vprop.IVON(params, rescale_lr=True, **known, **setting)  # type: ignore[arg-type]


def ivon_opt(params: Any, facts: dict[str, Any], sigma: float, speed: float = 1.0, decay: float = DECAY) -> Optimizer:
    """The package of the method's authors, with the same arguments as ours."""
    make, hess_init = importlib.import_module("ivon").IVON, curvature_of(sigma, facts)
    return make(params, lr=speed, ess=facts["num_data"], weight_decay=decay, hess_init=hess_init, beta2=0.99999)


def vadam(params: Any, facts: dict[str, Any], **setting: float) -> Optimizer:
    """Its noise is the prior's, where h is small; a low temperature makes the curvature count."""
    known = {name: value for name, value in facts.items() if name != "batch_size"}
    return vprop.Vadam(params, **known, **setting)  # type: ignore[arg-type]


# -- the table -------------------------------------------------------------------------------------------------------

_ADAM_GPT = {"weight_decay": 0.1, "beta2": 0.99}
_ADAM_GRIDS: Grids = {
    "resnet": (
        {"lr": 3e-3, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.5}, {"lr": 1e-2, "weight_decay": 0.1},
    ),
    "gpt": tuple({"lr": lr, **_ADAM_GPT} for lr in (1e-3, 5e-4, 2e-3)),
    "gpt-books": tuple({"lr": lr, **_ADAM_GPT} for lr in (1e-3, 5e-4, 2e-3, 4e-3)),
    "lora": tuple({"lr": lr, "weight_decay": 0.01} for lr in (1e-3, 3e-3, 1e-2)),
}  # fmt: skip
_DROPOUT_GRIDS: Grids = {
    "resnet": (
        {"lr": 3e-3, "weight_decay": 0.1, "dropout": 0.1}, {"lr": 3e-3, "weight_decay": 0.1, "dropout": 0.05},
        {"lr": 3e-3, "weight_decay": 0.5, "dropout": 0.05},
    ),
    "gpt": tuple(
        {"lr": lr, "dropout": share, **_ADAM_GPT} for lr, share in ((1e-3, 0.2), (2e-3, 0.2), (2e-3, 0.3), (5e-4, 0.2))
    ),
    "gpt-books": tuple({"lr": 1e-3, "dropout": share, **_ADAM_GPT} for share in (0.2, 0.1, 0.3, 0.0)),
    "lora": tuple({"lr": lr, "weight_decay": 0.01, "dropout": 0.1} for lr in (1e-3, 3e-3, 1e-2)),
}  # fmt: skip
# Weights of such networks are of size 0.05; noise of a tenth to a fifth of that was best in sweeps. With more weight
# decay or longer training there is room for more.
_NOISES: tuple[Setting, ...] = (
    {"sigma": 0.008}, {"sigma": 0.008, "decay": 1e-3}, {"sigma": 0.011, "decay": 1e-3}, {"sigma": 0.015, "decay": 1e-3},
)  # fmt: skip
# With FilterResponseNorm the least noise of these was the best of them, and so it was on all images: there less is
# tried. SGD may have twice the step size, and so may IVON. In a hundred epochs its steps grow by half, unless held.
_NOISES_OF_LONG: tuple[Setting, ...] = (
    {"sigma": 0.008, "decay": 1e-3}, {"sigma": 0.008, "decay": 1e-3, "held": 1.0},
    {"sigma": 0.005, "decay": 1e-3, "held": 1.0}, {"sigma": 0.008, "speed": 2.0, "held": 1.0},
)  # fmt: skip
_NOISES_OF_SHORT: tuple[Setting, ...] = (
    {"sigma": 0.008}, {"sigma": 0.005}, {"sigma": 0.008, "speed": 2.0}, {"sigma": 0.005, "speed": 2.0},
)  # fmt: skip
_NOISE_GRIDS: dict[str, tuple[Setting, ...]] = {
    "resnet": _NOISES,
    "cifar10-5k": (
        {"sigma": 0.011, "decay": 1e-3}, {"sigma": 0.015, "decay": 1e-3},
        {"sigma": 0.011, "decay": 1e-3, "speed": 2.0}, {"sigma": 0.015, "decay": 1e-3, "speed": 2.0},
    ),
    "cifar10-frn": ({"sigma": 0.008}, {"sigma": 0.004}, {"sigma": 0.004, "speed": 2.0}, {"sigma": 0.002}),
}  # fmt: skip
# Beside the two of all ResNets, more weight decay and less noise, which short training may want.
_VARIO_SHORT: tuple[Setting, ...] = (
    {"lr": 3e-3}, {"lr": 1e-2, "decay": DECAY}, {"lr": 1e-2, "decay": 5e-3},
    {"lr": 1e-2, "decay": DECAY, "noise_limit": 0.1},
)  # fmt: skip
_VARIO_GRIDS: Grids = {
    "resnet": ({"lr": 3e-3}, {"lr": 1e-2, "decay": DECAY}),
    "cifar10-40": _VARIO_SHORT,
    "cifar10-5k-40": _VARIO_SHORT,
    "gpt": (
        {"lr": 1e-3}, {"lr": 2e-3, "beta2": 0.99, "noise_limit": 0.1, "dropout": 0.2},
        {"lr": 2e-3, "beta2": 0.99, "noise_limit": 0.2, "dropout": 0.2},
        {"lr": 2e-3, "beta2": 0.99, "noise_limit": 0.1},
    ),
    "gpt-books": (
        {"lr": 1e-3}, {"lr": 2e-3, "beta2": 0.99, "noise_limit": 0.1},
        {"lr": 2e-3, "beta2": 0.99, "noise_limit": 0.05}, {"lr": 4e-3, "beta2": 0.99, "noise_limit": 0.1},
    ),
}  # fmt: skip

# In an eigenbasis Adam's step size of 0.003 is near the best on ResNets, with more weight decay or less noise for some.
_EIGENBASIS_GRIDS: Grids = {
    "gpt": _VARIO_GRIDS["gpt"],
    "cifar10": ({"lr": 3e-3, "decay": 1e-3},),  # as chosen with 5,000 images: a run takes a quarter of an hour
    "cifar10-5k-40": _VARIO_SHORT,
    "resnet": (
        {"lr": 3e-3}, {"lr": 3e-3, "decay": 1e-3}, {"lr": 3e-3, "noise_limit": 0.1}, {"lr": 6e-3, "decay": 1e-3},
    ),
}  # fmt: skip


def _in_cycles(setting: Setting, cycles: int) -> Setting:
    """The first cycle takes two fifths of the training, for it starts from nothing."""
    return {**setting, "cycles": float(cycles), "first": 0.4}


# Five were better than three with 5,000 images, for both; with all images nothing else was tried.
_SGD_CYCLES: Grids = {
    "resnet": (_in_cycles({"lr": 0.2}, 5),),
    "cifar10-5k": tuple(
        _in_cycles({"lr": lr, "weight_decay": 1e-3}, cycles) for lr, cycles in ((0.2, 5), (0.2, 3), (0.1, 3))
    ),
}
_IVON_CYCLES: Grids = {
    "resnet": (_in_cycles({"sigma": 0.005, "speed": 2.0}, 5),),
    "cifar10-5k": tuple(
        _in_cycles({"sigma": sigma, "decay": 1e-3, "speed": 2.0}, cycles)
        for sigma, cycles in ((0.011, 5), (0.011, 3), (0.015, 5))
    ),
}

CONTENDERS = (
    DeepContender("sgd", "SGD", "point", sgd, {
        "resnet": (
            {"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1, "weight_decay": 1e-3}, {"lr": 0.2, "weight_decay": 1e-3},
        ),
    }),
    DeepContender("sgd-statistics", "SGD with new statistics", "statistics", None, {
        "resnet": ({"inputs": 10_000},), "cifar10-frn": (),
    }, of="sgd"),
    DeepContender("sgd-cycles", "SGD in cycles", "networks", sgd, _SGD_CYCLES),
    DeepContender("adamw", "AdamW", "point", adamw, _ADAM_GRIDS),
    DeepContender("adamw-dropout", "AdamW with dropout", "dropout", adamw, _DROPOUT_GRIDS),
    DeepContender("swag", "SWAG", "swag", sgd, {
        "resnet": (
            {"lr": 0.1, "swa_lr": 0.05}, {"lr": 0.2, "swa_lr": 0.05}, {"lr": 0.2, "swa_lr": 0.1},
            {"lr": 0.2, "swa_lr": 0.05, "weight_decay": 1e-3},
        ),
    }),
    DeepContender("laplace-last", "Laplace of the last layer", "laplace", None, {"resnet": ({"diagonal": 0},)},
                  needs="laplace", of="sgd"),
    DeepContender("laplace-diagonal", "Laplace, diagonal", "laplace", None, {"resnet": ({"diagonal": 1},)},
                  needs="laplace", of="sgd"),
    DeepContender("ivon-opt", "IVON, its authors' package", "peer", ivon_opt, _NOISE_GRIDS, needs="ivon",
                  captured=False),
    DeepContender("vario", "Vario", "posterior", vario, {
        **_VARIO_GRIDS, "lora": ({"lr": 1e-3}, {"lr": 3e-3}, {"lr": 1e-2}),
    }, ours=True),
    DeepContender("vario-eigenbasis", "Vario in an eigenbasis", "posterior", vario, _EIGENBASIS_GRIDS, ours=True,
                  groups=layers_in_an_eigenbasis),
    DeepContender("vario-sgd", "Vario with SGD's step", "posterior", vario_as_sgd, {
        "resnet": (
            {"noise_limit": 0.2}, {"noise_limit": 0.15, "lr": 0.2}, {"noise_limit": 0.2, "lr": 0.2},
            {"noise_limit": 0.2, "decay": 1e-3},
        ),
    }, ours=True),
    DeepContender("vprop-floor", "Vprop with a floor", "posterior", floored, _NOISE_GRIDS, ours=True),
    DeepContender("ivon", "IVON", "posterior", ivon, _NOISE_GRIDS | {
        "cifar10": _NOISES_OF_LONG, "cifar10-40": _NOISES_OF_SHORT,
    }, ours=True),
    DeepContender("ivon-cycles", "IVON in cycles", "posterior", ivon, _IVON_CYCLES, ours=True),
    DeepContender("ivon-clipped", "IVON with clipping", "posterior", ivon_with_clipping, {
        "gpt": tuple(
            {"lr": lr, "hess_init": 1e-3, "clip_radius": 1e-3, "temperature": 0.1} for lr in (300.0, 100.0, 600.0)
        ),
    }, ours=True),
    DeepContender("vadam", "Vadam", "posterior", vadam, {
        "resnet": tuple(
            {"lr": lr, "temperature": 1 / 128, "prior_precision": prior}
            for lr, prior in ((3e-3, 640.0), (3e-3, 6400.0), (1e-2, 6400.0))
        ),
        "gpt": tuple(
            {"lr": lr, "temperature": 1 / 1024, "prior_precision": prior}
            for lr, prior in ((1e-3, 2e4), (2e-3, 2e4), (1e-3, 1e4))
        ),
    }, ours=True),
    DeepContender("vprop-centred", "Vprop with a floor, centred", "posterior", centred, _NOISE_GRIDS,
                  gradients=2, ours=True),
)  # fmt: skip

GROUPS = (
    Group("ensemble-3", "Ensemble of 3 SGD", "sgd", 3, averaged=False),
    Group("ensemble-5", "Ensemble of 5 SGD", "sgd", 5, averaged=False),
    Group("ensemble-3-statistics", "Ensemble of 3 SGD with new statistics", "sgd-statistics", 3, averaged=False),
    Group("ensemble-5-statistics", "Ensemble of 5 SGD with new statistics", "sgd-statistics", 5, averaged=False),
    Group("ensemble-3-adamw", "Ensemble of 3 AdamW", "adamw", 3, averaged=False),
    Group("ensemble-3-dropout", "Ensemble of 3 AdamW with dropout", "adamw-dropout", 3, averaged=False),
    Group("ensemble-3-masks", "Ensemble of 3 AdamW over masks", "adamw-dropout", 3, averaged=True),
    Group("mixture-3-vario", "Mixture of 3 Vario", "vario", 3, averaged=True),
    Group("mixture-3-vario-eigenbasis", "Mixture of 3 Vario in an eigenbasis", "vario-eigenbasis", 3, averaged=True),
    Group("mixture-3-vario-sgd", "Mixture of 3 Vario with SGD's step", "vario-sgd", 3, averaged=True),
    Group("mixture-3-floor", "Mixture of 3 Vprop with a floor", "vprop-floor", 3, averaged=True),
    Group("mixture-3-ivon", "Mixture of 3 IVON", "ivon", 3, averaged=True),
    Group("mixture-5-ivon", "Mixture of 5 IVON", "ivon", 5, averaged=True),
    Group("mixture-5-floor", "Mixture of 5 Vprop with a floor", "vprop-floor", 5, averaged=True),
)

BY_NAME = {contender.name: contender for contender in CONTENDERS}


def taking_part(task: DeepTask) -> tuple[DeepContender, ...]:
    """Those that have settings for the task."""
    return tuple(contender for contender in CONTENDERS if contender.grid(task))
