"""A closure that knows its model, its loss and its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vprop.calling import Untouched, call_with_weights, model_arguments
from vprop.checks import check_loss, check_model
from vprop.likelihood import Likelihood, LikelihoodLike, likelihood_of, snapshot_likelihood
from vprop.likelihood.kinds import likelihood_module_of
from vprop.likelihood.terms import LossWatch
from vprop.wrappers import data_parallel_group, has_fsdp, unwrapped

LossFunction = Callable[[Any, Any], Tensor]


class Objective:
    """``loss_fn(model(x), y)``, a mean over the batch, as a closure for every optimizer.

    Called, it clears the gradients, runs forward and backward and returns the loss. Estimators that need more than
    a gradient, and ``posterior.elbo``, read its parts. A tuple ``x`` becomes the positional arguments of the
    model, a dict its keyword arguments.

    ``likelihood`` (and ``noise_variance``, for "gaussian") says which distribution the loss is the negative
    log-likelihood of, for estimators that draw labels from it. It is known for torch's ``cross_entropy``,
    ``binary_cross_entropy_with_logits`` and ``mse_loss``, and for :mod:`vprop.likelihood`'s losses, whose noise is read
    anew each time because it learns. Of a loss with parameters of its own the gradients are left to their optimizer:
    a call adds to them.

    >>> import torch
    >>> model = torch.nn.Linear(3, 1)
    >>> objective = Objective(model, torch.nn.functional.mse_loss, torch.ones(8, 3), torch.zeros(8, 1))
    >>> loss = objective()
    >>> model.weight.grad.shape, objective.batch_size
    (torch.Size([1, 3]), 8)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        x: Any,
        y: Any,
        *,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> None:
        check_model(model, "Objective(model, …)")
        check_loss(loss_fn, "Objective(model, loss_fn, …)")
        self.model = unwrapped(model)
        """Without wrappers, for those who look inside; a call goes through them."""
        self.process_group = data_parallel_group(model)
        """Over whose ranks the examples are spread, if the model is in DistributedDataParallel."""
        self._outermost, self._call = model, Untouched()
        self.loss_fn = loss_fn
        self.x = x
        self.y = y
        self.last_loss: Tensor | None = None
        """What the last call returned, without its graph."""
        self.likelihood: Likelihood | None
        self._noise_module = likelihood_module_of(loss_fn, likelihood, noise_variance)
        if self._noise_module is not None:
            self.likelihood = self._noise_module.likelihood
            return
        known = likelihood_of(loss_fn)
        if known is not None and likelihood in (None, known[0]):
            likelihood = known[0]
            noise_variance = known[1] if noise_variance is None else noise_variance
        self.likelihood, self._noise_variance = snapshot_likelihood(likelihood, noise_variance)

    @property
    def noise_variance(self) -> float | Tensor:
        """Variance of an observation around its mean, as it is now; 1.0 where the likelihood has none."""
        return self._noise_variance if self._noise_module is None else self._noise_module.current_noise()

    @property
    def loss_is_sum(self) -> bool:
        """Whether the loss says that it is a sum over the batch: one of torch's, or a partial, with reduction="sum"."""
        if isinstance(self.loss_fn, partial):
            return self.loss_fn.keywords.get("reduction") == "sum"
        return isinstance(self.loss_fn, nn.modules.loss._Loss) and self.loss_fn.reduction == "sum"

    def __call__(self) -> Tensor:
        """Clear the gradients, compute the loss and its gradients at the current weights."""
        self._outermost.zero_grad(set_to_none=True)
        loss = self.loss_fn(self._call(self._outermost, *model_arguments(self.x)), self.y)
        _require_mean(loss)
        loss.backward()
        self.last_loss = loss.detach()
        return loss

    def loss_at(self, weights: dict[str, Tensor], x: Any = None, y: Any = None) -> Tensor:
        """The loss at other weights (and on other data), without a trace: copies of the buffers are used up."""
        return self.loss_fn(self.output_at(weights, x), self.y if y is None else y)

    def output_at(self, weights: dict[str, Tensor], x: Any = None) -> Any:
        """The model's output at other weights (and on other inputs), without a trace."""
        return call_with_weights(self.model, weights, self.x if x is None else x)

    @torch.no_grad()
    def has_targets(self) -> bool:
        """Whether anything counts in the batch: a mean over ignored labels alone is NaN. Costs a forward.

        Of a loss that is none of torch's this is not seen; then the answer is yes.
        """
        with LossWatch() as watch:
            loss = self.loss_at({name: p.detach() for name, p in self.model.named_parameters()})
        terms = watch.terms_of(loss)
        return terms is None or bool(terms != 0)

    @property
    def batch_size(self) -> int:
        """How many examples the batch has, whatever the loss counts of them."""
        return batch_size_of(self.y)

    def examples_on_all_ranks(self) -> int | None:
        """The same over all ranks that a wrapped model's gradients are averaged over; ``None`` if it cannot be told."""
        try:
            examples = self.batch_size
        except TypeError:
            return None
        group = self.process_group
        if group is None and has_fsdp(self.model):  # which does not say over how many ranks it averages
            return None
        return examples if group is None else examples * torch.distributed.get_world_size(group)


def _require_mean(loss: Any) -> None:
    """Refuse a loss that has no gradient, or one for each example."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"Objective: loss_fn returned {type(loss).__name__}, must return a tensor. Compute the loss with torch's "
            "functions, and do not call .item() or float() on it."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"Objective: loss_fn returned a tensor of shape {tuple(loss.shape)}, must return one number, the mean over "
            "the batch. Use reduction='mean', or .mean()."
        )


def batch_size_of(y: Any) -> int:
    """Length of the first dimension of the targets, looking into tuples, lists and dicts."""
    if isinstance(y, Tensor):
        return y.shape[0] if y.dim() else 1
    if isinstance(y, Mapping) and y:
        return batch_size_of(next(iter(y.values())))
    if isinstance(y, tuple | list) and y:
        return batch_size_of(y[0])
    empty = "empty " if isinstance(y, Mapping | tuple | list) else ""
    raise TypeError(f"Cannot tell the batch size from {empty}targets of type {type(y).__name__}: pass a tensor.")
