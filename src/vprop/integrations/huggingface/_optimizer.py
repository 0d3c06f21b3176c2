"""The optimizer inside Accelerate's wrapper, and the checks before a Trainer trains with it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vprop.optim import VariationalOptimizer


def variational_optimizer(optimizer: Any) -> VariationalOptimizer:
    """The optimizer of this library inside what ``accelerator.prepare`` or ``trainer.optimizer`` gives.

    ``variational_optimizer(trainer.optimizer).posterior(trainer.model)`` after training.
    """
    inner = optimizer
    while not isinstance(inner, VariationalOptimizer):
        if not isinstance(getattr(inner, "optimizer", None), Optimizer):
            raise TypeError(
                f"Invalid optimizer: {type(inner).__name__} is not one of vprop's. Pass one to the Trainer, "
                "Trainer(optimizers=(vprop.Vprop(params, num_data=...), None)), or to accelerator.prepare."
            )
        inner = inner.optimizer
    return inner


def check_for_trainer(optimizer: VariationalOptimizer, model: nn.Module) -> None:
    """Refuse what would fail at the first step, or silently do something else than it says."""
    if optimizer.mc_samples > 1:
        raise ValueError(
            f"Invalid mc_samples={optimizer.mc_samples}: must be 0 or 1 in a Trainer, which runs one forward and "
            "backward for each batch. Use mc_samples=1 with more steps, or a loop of your own with a closure."
        )
    if optimizer.needs_objective:
        raise TypeError(
            f"{type(optimizer).__name__} takes its curvature from more than a gradient, and a Trainer has only "
            "gradients. Use Vprop, IVON or Vadam, or a loop of your own with optimizer.step(vprop.Objective(...))."
        )
    _check_coverage(optimizer, model)


def _check_coverage(optimizer: VariationalOptimizer, model: nn.Module) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if not missing:
        return
    if len(missing) == len(trainable):
        raise ValueError(
            f"The optimizer holds none of the model's {len(trainable)} trainable parameters. Build it from the model "
            "that is trained, after get_peft_model: Vprop([p for p in model.parameters() if p.requires_grad], ...)."
        )
    warnings.warn(
        f"{len(missing)} of the model's {len(trainable)} trainable parameters are not in the optimizer and will stay "
        f"as they are ({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}). Add them, or freeze them with "
        "requires_grad=False.",
        stacklevel=2,
    )
