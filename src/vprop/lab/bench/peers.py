"""Other libraries that do variational inference on weights, where they are installed. Nothing of theirs is copied.

ivon-opt is an optimizer like ours. In Pyro and bayesian-torch the weights are drawn inside of the forward, so their
sampling cannot be had without one: they get the least forward and backward there is, which is measured by itself and
not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import nn

from vprop.lab.bench.clock import Call
from vprop.lab.bench.errors import Unavailable
from vprop.lab.bench.tensors import ROW, Tensors

STEP_SIZE = 1e-6
NUM_DATA = 1e5


@dataclass(frozen=True)
class Peer:
    """A library, and how to make a step with it."""

    name: str
    module: str
    package: str
    build: Callable[[Tensors], tuple[Call, Call | None]]
    """A step, and what of it is not counted."""
    note: str
    own_copies: int
    """How many of the weights and gradients it has for itself, beside those it was given."""
    does_ivon: bool = False
    """Whether it moves what IVON with a context must move."""


def require(peer: Peer) -> None:
    """Refuse one that is not there."""
    try:
        import_module(peer.module)
    except ImportError as error:
        missing = "" if error.name in (peer.module, None) else f" ({error.name} is missing)"
        raise Unavailable(f"not installed{missing}: pip install {peer.package}") from error


def versions() -> dict[str, str | None]:
    """Of the installed ones."""
    return {peer.package: version(peer.package) for peer in PEERS}


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ivon(tensors: Tensors) -> tuple[Call, None]:
    params = tensors.parameters()
    optimizer = import_module("ivon").IVON(params, lr=STEP_SIZE, ess=NUM_DATA)

    def call() -> None:
        with optimizer.sampled_params(train=True):
            pass
        optimizer.step()

    return call, None


def _pyro(tensors: Tensors) -> tuple[Call, Call]:
    pyro: Any = import_module("pyro")
    infer: Any = import_module("pyro.infer")
    guides: Any = import_module("pyro.infer.autoguide")
    pyro.clear_param_store()
    pyro.enable_validation(False)
    zero, one = torch.zeros((), device=tensors.device), torch.ones((), device=tensors.device)

    def model() -> None:
        prior = pyro.distributions.Normal(zero, one).expand([tensors.size]).to_event(1)
        for number, grad in enumerate(tensors.grads):
            weight = pyro.sample(f"weight{number}", prior)
            pyro.factor(f"loss{number}", -torch.dot(weight, grad))

    svi = infer.SVI(
        model,
        guides.AutoDiagonalNormal(model, init_scale=0.01),
        pyro.optim.Adam({"lr": STEP_SIZE}),
        loss=infer.Trace_ELBO(),
    )
    weights = tensors.parameters()
    gradient_of = dict(zip(weights, tensors.grads, strict=True))
    return svi.step, _plain(weights, lambda weight: torch.dot(weight, gradient_of[weight]))


def _bayesian_torch(tensors: Tensors) -> tuple[Call, Call]:
    layer: Any = import_module("bayesian_torch.layers").LinearReparameterization
    inputs = math.gcd(tensors.size, ROW)
    outputs = tensors.size // inputs
    with tensors.device:
        bayesian = [layer(inputs, outputs, bias=False) for _ in range(tensors.count)]
    one = torch.ones(1, inputs, device=tensors.device)
    optimizer = torch.optim.Adam([p for each in bayesian for p in each.parameters()], lr=STEP_SIZE)

    def call() -> None:
        optimizer.zero_grad()
        loss = torch.zeros((), device=tensors.device)
        for each in bayesian:
            output, kl = each(one)
            loss = loss + output.sum() + kl / NUM_DATA
        loss.backward()
        optimizer.step()

    weights = [nn.Parameter(weight.view(outputs, inputs)) for weight in tensors.weights]
    return call, _plain(weights, lambda weight: nn.functional.linear(one, weight).sum())


def _plain(weights: list[nn.Parameter], loss_of: Callable[[nn.Parameter], torch.Tensor]) -> Call:
    """Forward and backward of plain weights, which is not counted."""

    def call() -> None:
        loss = torch.zeros((), device=weights[0].device)
        for weight in weights:
            weight.grad = None
            loss = loss + loss_of(weight)
        loss.backward()

    return call


PEERS = (
    Peer(
        "ivon-opt",
        "ivon",
        "ivon-opt",
        _ivon,
        "with sampled_params(train=True): pass, then step(), its gradients being there already",
        own_copies=1,  # it moves the weights into a tensor of its own
        does_ivon=True,
    ),
    Peer(
        "Pyro BBVI",
        "pyro",
        "pyro-ppl",
        _pyro,
        "SVI.step with AutoDiagonalNormal, Trace_ELBO, Adam and validation off: guide, model (a standard normal prior "
        "for each tensor, and as likelihood its dot product with the gradients), backward and Adam on 2 numbers per "
        "weight; forward and backward of the dot products of plain weights are not counted",
        own_copies=2,
    ),
    Peer(
        "bayesian-torch BBVI",
        "bayesian_torch",
        "bayesian-torch",
        _bayesian_torch,
        "a LinearReparameterization layer for each tensor on one input row, its KL, backward and Adam on 2 numbers per "
        "weight; forward and backward of plain linear layers of that shape are not counted",
        own_copies=2,
    ),
)
