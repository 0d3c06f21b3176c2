"""A look at the first training loss: is it the mean that the Trainer takes it for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vprop.integrations._scores import UNLABELLED
from vprop.integrations.huggingface._targets import aligned, base_model_of, kind_of, logits_of
from vprop.optim import VariationalOptimizer


class LossScaleCheck:
    """Refuses a model that does not divide its loss by the ``num_items_in_batch`` which the Trainer gives it.

    The Trainer counts the labels of all micro-batches of a step, lets the model divide by that number, and then does
    not divide by the number of micro-batches itself. Models that take the argument and ignore it (many classifiers)
    return the mean of each micro-batch, and the gradient of a step is their sum: too large by the number of
    micro-batches, and the curvature by its square. Nothing else would say so.
    """

    def __init__(self, optimizer: VariationalOptimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._handle: RemovableHandle = model.register_forward_hook(self, with_kwargs=True)

    def remove(self) -> None:
        """Look no more."""
        self._handle.remove()

    @torch.compiler.disable
    @torch.no_grad()
    def __call__(self, model: nn.Module, args: Any, inputs: Mapping[str, Any], output: Any) -> None:
        """Compare the loss with the mean over the micro-batch, once, in the first training forward."""
        if not model.training:
            return
        self._handle.remove()
        labels, items = inputs.get("labels"), inputs.get("num_items_in_batch")
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if not isinstance(labels, Tensor) or items is None or not isinstance(loss, Tensor):
            return
        known = _mean_loss(model, logits_of(output, model), labels)
        if known is None:
            return
        mean, count = known
        items = float(items)
        if count == items or not torch.isclose(loss.float().cpu(), mean, rtol=1e-2, atol=1e-6):
            return
        if torch.isclose(mean * count / items, mean, rtol=2e-2, atol=1e-6):
            return  # too alike to tell
        self._optimizer.discard_samples()  # the sample of this forward gets no step
        name = type(base_model_of(model)).__name__
        raise ValueError(
            f"The loss of {name} is a mean over each micro-batch ({count} labels). The Trainer takes it for a share of "
            f"the mean over all labels of a step ({items:g}) and adds the shares up: gradients would be about "
            f"{items / count:.3g} times too large. Set model.accepts_loss_kwargs = False (of the model inside a peft "
            "model) before making the Trainer, which then divides by the number of micro-batches; or pass it a "
            "compute_loss_func that divides by num_items_in_batch."
        )


def _mean_loss(model: nn.Module, logits: Tensor, labels: Tensor) -> tuple[Tensor, int] | None:
    """The usual loss of the model's kind as a mean over this batch, and over how many labels."""
    kind = kind_of(model, logits, labels)
    if kind == "categorical":
        logits, labels = aligned(logits, labels, model)
        count = int((labels != UNLABELLED).sum())
        loss = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten().long(), ignore_index=UNLABELLED)
        return (loss.cpu(), count) if count else None
    if labels.numel() != logits.numel():
        return None
    mean_loss = F.mse_loss if kind == "gaussian" else F.binary_cross_entropy_with_logits
    return mean_loss(logits.float(), labels.reshape(logits.shape).float()).cpu(), labels.numel()
