"""The ELBO: batches with their losses, what each counts as among the others, and the estimate from samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vprop.calling import Untouched, model_arguments
from vprop.checks import check_loss, check_num_samples, check_seed
from vprop.likelihood.terms import LossWatch
from vprop.objective import LossFunction, Objective, batch_size_of
from vprop.posterior.predictive.models import drawn_models
from vprop.wrappers import refuse_sharded

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


class ElboEstimate(NamedTuple):
    """An ELBO with its parts and its Monte Carlo error."""

    value: float
    standard_error: float
    expected_log_likelihood: float
    kl: float


def check_objective(objective: Any, where: str) -> None:
    """Refuse what has no batches; inputs by themselves, over whose rows one could go, have none either."""
    inputs = isinstance(objective, str | Mapping) or hasattr(objective, "__array__")
    if inputs or not isinstance(objective, Iterable | Objective):
        raise TypeError(
            f"{where}(objective): got {type(objective).__name__}, must be a vprop.Objective or a loader of batches. "
            "Pass vprop.Objective(model, loss_fn, x, y), or a DataLoader with loss_fn=..."
        )


def batches_of(
    objective: Objective | Iterable[Any], loss_fn: LossFunction | None, where: str = "elbo"
) -> Iterator[tuple[Any, Any, LossFunction]]:
    """(x, y, loss function) of every batch of an objective or a loader. ``where`` names the method in messages."""
    check_objective(objective, where)
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


def _require_one_number(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(
            f"elbo(): the loss has shape {tuple(loss.shape)}, must be one number, the mean over the batch. Use "
            "reduction='mean', or .mean()."
        )


@torch.no_grad()
def elbo_estimate(
    posterior: Posterior,
    objective: Objective | Iterable[Any],
    num_samples: int,
    loss_fn: LossFunction | None,
    seed: int,
) -> ElboEstimate:
    """See :meth:`vprop.Posterior.elbo_estimate`."""
    check_objective(objective, "elbo")
    num_samples, seed = check_num_samples(num_samples), check_seed(seed)
    if posterior.ess is None:
        raise ValueError(
            "The ELBO needs one effective sample size, but the optimizer's groups, or a mixture's members, have "
            "different num_data or temperature. Use the same in all of them."
        )
    # Batches outside, samples inside: a loader is read once, and need not be repeatable (it may shuffle).
    losses, examples = [0.0] * num_samples, 0.0
    refuse_sharded(posterior.model, "elbo()")
    for x, y, batch_loss in batches_of(objective, loss_fn):
        size, watch, call = 0.0, LossWatch(), Untouched()  # it may write into some batches and not into others
        for k, model in enumerate(drawn_models(posterior, num_samples, seed)):
            with watch if k == 0 else nullcontext():
                loss = batch_loss(call(model, *model_arguments(x)), y)
            if k == 0:
                _require_one_number(loss)
                size = size_of_batch(watch, loss, y)
                examples += size
            if size == 0:
                break  # 0/0 with any weights
            losses[k] += size * float(loss)
    if examples == 0:
        raise ValueError(
            "elbo(objective): the objective has no examples, or none of its targets counts. Pass an Objective or a "
            "non-empty loader, with labels that are not all ignored."
        )
    per_sample = torch.tensor(losses, dtype=torch.float64, device="cpu") * (-posterior.ess / examples)
    spread = float(per_sample.std()) / math.sqrt(num_samples) if num_samples > 1 else math.nan
    expected, kl = float(per_sample.mean()), float(posterior.kl())
    return ElboEstimate(expected - kl, spread, expected, kl)
