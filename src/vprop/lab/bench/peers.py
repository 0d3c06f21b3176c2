"""Other libraries that do variational inference on weights, where they are installed. Nothing of theirs is copied.

ivon-opt is an optimizer like ours. In Pyro the weights are drawn inside of the forward, so a step of it cannot be had
without one: it takes part where memory is measured, not where time is.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module, metadata
from typing import Any

import torch

from vprop.lab.bench.clock import Call
from vprop.lab.bench.errors import Unavailable
from vprop.lab.bench.tensors import Tensors

STEP_SIZE = 1e-6
NUM_DATA = 1e5


def require(module: str, package: str) -> Any:
    """A module of a peer, if it is there."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = "" if error.name in (module, None) else f" ({error.name} is missing)"
        raise Unavailable(f"not installed{missing}: pip install {package}") from error


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ivon(params: Iterable[torch.nn.Parameter]) -> Any:
    """The optimizer of ivon-opt."""
    return require("ivon", "ivon-opt").IVON(params, lr=STEP_SIZE, ess=NUM_DATA)


def pyro_step(tensors: Tensors) -> Call:
    """``SVI.step`` with AutoDiagonalNormal, Trace_ELBO and Adam, validation off.

    The model is a standard normal prior for each tensor, and as likelihood its dot product with the gradients.
    """
    pyro = require("pyro", "pyro-ppl")
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

    guide = guides.AutoDiagonalNormal(model, init_scale=0.01)
    return infer.SVI(model, guide, pyro.optim.Adam({"lr": STEP_SIZE}), loss=infer.Trace_ELBO()).step
