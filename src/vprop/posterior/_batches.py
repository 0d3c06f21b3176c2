"""What the ELBO is computed from: batches with their losses, and what each counts as among the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from vprop.checks import check_loss
from vprop.likelihood.terms import LossWatch
from vprop.objective import LossFunction, Objective, batch_size_of


class ElboEstimate(NamedTuple):
    """An ELBO with its parts and its Monte Carlo error."""

    value: float
    standard_error: float
    expected_log_likelihood: float
    kl: float


def batches_of(
    objective: Objective | Iterable[Any], loss_fn: LossFunction | None, where: str = "elbo"
) -> Iterator[tuple[Any, Any, LossFunction]]:
    """(x, y, loss function) of every batch of an objective or a loader. ``where`` names the method in messages."""
    if not isinstance(objective, Iterable | Objective):
        raise TypeError(
            f"{where}(objective): got {type(objective).__name__}, must be a vprop.Objective or a loader of batches. "
            "Pass vprop.Objective(model, loss_fn, x, y), or a DataLoader with loss_fn=..."
        )
    if loss_fn is not None:
        check_loss(loss_fn, f"{where}(loader, loss_fn=...)")
    for batch in [objective] if isinstance(objective, Objective) else objective:
        if isinstance(batch, Objective):
            yield batch.x, batch.y, batch.loss_fn
            continue
        if loss_fn is None:
            raise ValueError(
                f"{where}(loader) needs loss_fn: pass {where}(loader, loss_fn=...), where loss_fn(model(x), y) is the "
                "mean negative log-likelihood of a batch."
            )
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"{where}(loader): got a batch of type {type(batch).__name__}, must be a pair (x, y) with "
                "loss_fn(model(x), y) its loss. Several inputs go into one x, a tuple or a dict."
            )
        yield batch[0], batch[1], loss_fn


def size_of_batch(watch: LossWatch, loss: Tensor, y: Any) -> float:
    """What the loss of a batch counts as among others: what it was divided by, as far as that was seen."""
    if watch.is_sum(loss):
        raise ValueError(
            'elbo(): the loss is a sum over the batch (reduction="sum"), must be a mean, as PyTorch\'s losses are by '
            "default: ess says how many examples the mean stands for."
        )
    terms = watch.terms_of(loss)
    return float(batch_size_of(y) if terms is None else terms)
