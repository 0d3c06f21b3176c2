"""What can be wrong with examples that a posterior is asked about, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vprop.likelihood.terms import LossWatch
from vprop.objective import Objective

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

_IGNORED = -100
"""torch's default ``ignore_index``."""


def no_examples(where: str) -> ValueError:
    """The error for a loader that gives nothing."""
    return ValueError(f"{where}(data): there are no examples. Pass a loader that is not empty, or used up.")


def check_objective(posterior: Posterior, objective: Objective, where: str) -> None:
    """Refuse an objective whose model is another one than the posterior's."""
    if objective.model is posterior.model:
        return
    others = {name: tuple(p.shape) for name, p in objective.model.named_parameters()}
    for name, p in posterior.model.named_parameters():
        if others.pop(name, None) != tuple(p.shape):
            break
    else:
        if not others:
            return
        name = next(iter(others))
    raise ValueError(
        f"{where}(objective): the objective's model is not the posterior's: {name!r} is not in both with one shape. "
        "Make the objective with posterior.model."
    )


def check_output(output: Any, where: str) -> None:
    """Refuse a model that returns no tensor."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{where}() needs a model that returns a tensor, or an output with .logits; this one returns "
            f"{type(output).__name__}. Wrap it in a module whose forward picks the tensor out."
        )


def check_outputs(outputs: Tensor, first: int, where: str) -> None:
    """Refuse outputs (or losses) that are NaN or infinite; ``first`` is the number of the first example."""
    bad = (~torch.isfinite(outputs)).flatten(1).any(1)
    if bool(bad.any()):
        raise ValueError(
            f"{where}(): the model's outputs are NaN or infinite for example {first + int(bad.int().argmax())} (and "
            f"{int(bad.sum()) - 1} more of {len(bad)}). Look for NaN in the inputs and in posterior.mean: training may "
            "have diverged."
        )


def refuse_sum(watch: LossWatch, loss: Tensor) -> None:
    """Refuse a loss that is a sum: what an example counts would depend on the batch that it was trained in."""
    if watch.is_sum(loss):
        raise ValueError(
            'Invalid loss_fn: it is a sum over the batch (reduction="sum"), must be a mean, as PyTorch\'s losses are '
            "by default: ess says how many examples the mean stands for."
        )


def check_labels(labels: Any, output: Any, where: str, dim: int) -> None:
    """Refuse class numbers that no output stands for; on a GPU they would end the process. Classes are ``dim``."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return
    if not isinstance(output, Tensor) or output.dim() < 2:
        return
    classes = output.shape[dim]
    wrong = labels[((labels < 0) & (labels != _IGNORED)) | (labels >= classes)]
    if wrong.numel():
        raise ValueError(
            f"{where}(): there is a label {int(wrong.flatten()[0])}, must be from 0 to {classes - 1}: the model has "
            f"{classes} outputs. Number the classes from 0; {_IGNORED} marks a label that is ignored."
        )
