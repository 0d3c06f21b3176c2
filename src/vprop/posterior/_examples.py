"""What single examples say of the weights: the parts that leaving out and forgetting are made of.

Training minimizes ess·ℓ(θ) + prior, ℓ the mean loss of N examples, so example i has a part cᵢℓᵢ(θ) in that sum, with

    cᵢ = (ess/N)·wᵢ/w̄ = wᵢ/(τw̄)        1/τ for a plain mean; wᵢ as in ``elbo``: weights of classes, 0 for ignored

With J the Jacobian of its outputs f at the posterior mean, e = ∂ℓᵢ/∂f and Λ = ∂²ℓᵢ/∂f², its gradient is Jᵀe and its
Gauss–Newton curvature JᵀΛJ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jacrev, vmap
from torch.utils._pytree import tree_leaves, tree_map

from vprop.calling import call_model
from vprop.checks import check_loss, invalid, is_finite
from vprop.curvature.example_rows import example_rows
from vprop.curvature.per_example import NUMBERS_AT_A_TIME, refuse_batchnorm_without_statistics, weight_of_one
from vprop.likelihood import GaussianLikelihood, HeteroscedasticGaussianLikelihood
from vprop.likelihood.terms import LossWatch
from vprop.objective import LossFunction, Objective
from vprop.posterior._elbo import batches_of
from vprop.posterior._example_checks import (
    check_labels,
    check_objective,
    check_output,
    check_outputs,
    no_examples,
    refuse_sum,
)
from vprop.precision import as_labels, as_tensor, widest_dtype
from vprop.replica import evaluating_replicas
from vprop.wrappers import refuse_sharded

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

_Result = TypeVar("_Result")

MOST_OUTPUTS = 64
"""Outputs of an example up to which each gets a row of its own."""
EXAMPLES_AT_ONCE = 1024
"""That run through the model together, each by itself, where nothing is kept of them but a number."""


class Slopes(NamedTuple):
    """Of some examples: e (examples, outputs), Λ (examples, outputs, outputs), losses, and weights w in the mean."""

    gradient: Tensor
    curvature: Tensor
    losses: Tensor
    weights: Tensor


class Examples(NamedTuple):
    """Some examples: rows (examples, outputs, weights) and, in float64, all that their outputs say."""

    rows: Tensor
    """J; of the ``"gradient"`` method the one row ∇ℓ, whose e is 1."""
    gradient: Tensor
    curvature: Tensor
    """Λ without negative eigenvalues; of the ``"gradient"`` method 1, so that JᵀΛJ is the empirical Fisher."""
    losses: Tensor
    factors: Tensor
    """cᵢ, as the posterior's precision holds them."""
    outputs: Tensor | None
    """f, (examples, outputs); none with ``"gradient"``."""
    targets: Any
    loss_fn: LossFunction
    output_shape: tuple[int, ...]


class _OtherWeightsError(Exception):
    """A batch has examples whose weight in the loss is not that of the examples before."""


class ExampleReader:
    """Reads the examples of ``data`` in chunks, at the mean of a posterior, in evaluation mode."""

    def __init__(
        self,
        posterior: Posterior,
        data: Any,
        loss_fn: LossFunction | None,
        *,
        num_data: float | None,
        method: str,
        where: str,
        chunk_size: int | None = None,
    ) -> None:
        if method not in ("auto", "outputs", "gradient"):
            raise invalid("method", method, "'auto', 'outputs' or 'gradient'", "'auto' decides by the outputs' size.")
        if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
            raise invalid("chunk_size", chunk_size, "None or an integer >= 1", "None bounds memory by itself.")
        refuse_sharded(posterior.model, f"{where}()")
        refuse_batchnorm_without_statistics(posterior.model, in_training_mode=False)
        self._posterior, self._data, self._where, self._chunk_size = posterior, data, where, chunk_size
        self._method = method
        self._loss_fn = self._default_loss() if loss_fn is None else loss_fn
        if loss_fn is not None:
            check_loss(loss_fn, f"{where}(..., loss_fn=...)")
        self._weight_of_a_count = _weight_of_a_count(posterior, num_data, where)
        self._mean = posterior._in_model_dtypes(posterior.mean)
        self._mean_weight: float | None = None
        self._all_weigh_alike = False

    # -- chunks ----------------------------------------------------------------------------------------------

    def over(self, work: Callable[[Iterator[Examples]], _Result]) -> _Result:
        """What ``work`` makes of all examples, some at a time: memory is bounded by their rows.

        It begins in the belief that all examples weigh what those of the first batch do, and once more, with the mean
        over all batches, where that turns out wrong.
        """
        try:
            return work(self._chunks())
        except _OtherWeightsError:
            self._mean_weight, self._all_weigh_alike = self._mean_weight_of_all(), False
            return work(self._chunks())

    def _chunks(self) -> Iterator[Examples]:
        seen = 0
        for x, y, loss_fn in self._batches():
            if self._mean_weight is None:
                self._mean_weight = self._mean_weight_of_data(x, y, loss_fn)
            output, examples = self._output(x), _length(x, y)
            by_outputs = self._by_outputs(output)
            size = self._chunk_size or self._examples_at_a_time(output[0].numel() if by_outputs else 1)
            for first in range(0, examples, size):
                part_x, part_y = tree_map(lambda t, first=first, size=size: _slice(t, first, size), (x, y))
                if by_outputs:
                    yield self._of_outputs(part_x, part_y, loss_fn, seen + first, tuple(output.shape[1:]))
                else:
                    yield self._of_losses(part_x, part_y, loss_fn, seen + first)
            seen += examples
        if seen == 0:
            raise no_examples(self._where)

    def jacobians(self, x: Any) -> Tensor:
        """J of the outputs for other inputs, (inputs, outputs, weights), with nothing said of labels."""
        x = self._moved(x)
        check_output(self._output(x), self._where)
        return example_rows(self._outputs_of_one, self._mean, x)[1]

    def _outputs_of_one(self, weights: dict[str, Tensor], x: Any) -> Tensor:
        return self._output(_batch_of_one(x), weights)[0].flatten()

    def _of_outputs(self, x: Any, y: Any, loss_fn: LossFunction, first: int, shape: tuple[int, ...]) -> Examples:
        outputs, rows = example_rows(self._outputs_of_one, self._mean, x)
        check_outputs(outputs, first, self._where)
        slopes = _slopes(loss_fn, outputs, y, shape)
        gradient, curvature, losses = (_counted(t, slopes.weights).double() for t in slopes[:3])
        factors = self._factors(slopes.weights)
        return Examples(rows, gradient, _positive_part(curvature), losses, factors, outputs, y, loss_fn, shape)

    def _of_losses(self, x: Any, y: Any, loss_fn: LossFunction, first: int) -> Examples:
        def loss_of_one(weights: dict[str, Tensor], x: Any, y: Any) -> Tensor:
            with LossWatch() as watch:
                loss = loss_fn(self._raw_output(_batch_of_one(x), weights), _batch_of_one(y))
            # A loss of 0/0 has no gradient: the weight, which says so, is kept beside it.
            return torch.stack([loss.reshape(()), weight_of_one(watch, loss).reshape(()).to(loss.dtype)])

        values, rows = example_rows(loss_of_one, self._mean, x, y)
        losses, weights = values.detach().unbind(1)
        check_outputs(_counted(losses, weights)[:, None], first, self._where)
        rows, losses = _counted(rows[:, :1], weights), _counted(losses, weights).double()
        ones = torch.ones_like(losses)[:, None]
        return Examples(rows, ones, ones[:, :, None], losses, self._factors(weights), None, y, loss_fn, ())

    def _factors(self, weights: Tensor) -> Tensor:
        """cᵢ; of a posterior whose variance was scaled by s cᵢ/s, because P/s holds that much of an example."""
        assert self._mean_weight is not None
        if self._all_weigh_alike:
            apart = (weights.double() - self._mean_weight).abs() > 1e-2 * self._mean_weight  # more than bfloat16 rounds
            if bool(((weights > 0) & apart).any()):
                self._refuse_one_reading()
                raise _OtherWeightsError
        count = self._weight_of_a_count / self._posterior.scales.variance
        return weights.double() * (count / self._mean_weight)

    # -- the model -------------------------------------------------------------------------------------------

    def _raw_output(self, x: Any, weights: dict[str, Tensor] | None = None) -> Any:
        own = self._mean if weights is None else weights
        (replica,) = evaluating_replicas(self._posterior.model, self._posterior._fixed(), [own])
        return call_model(replica, x)

    def _output(self, x: Any, weights: dict[str, Tensor] | None = None) -> Any:
        with torch.no_grad() if weights is None else torch.enable_grad():
            output = self._raw_output(x, weights)
        return getattr(output, "logits", output)

    def _by_outputs(self, output: Any) -> bool:
        """Whether an example's outputs get rows of their own."""
        if self._method == "gradient":
            return False
        if self._method == "outputs":
            check_output(output, self._where)
            return True
        return isinstance(output, Tensor) and output.dim() >= 1 and output[0].numel() <= MOST_OUTPUTS

    def _examples_at_a_time(self, outputs: int) -> int:
        return max(1, NUMBERS_AT_A_TIME // max(1, outputs * self._posterior.num_parameters))

    # -- the data --------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[Any, Any, LossFunction]]:
        data, posterior = self._data, self._posterior
        if isinstance(data, tuple) and len(data) == 2 and (_is_array(data[1])):
            data = [data]
        for batch in [data] if isinstance(data, Objective) else _iterated(data, self._where):
            if isinstance(batch, Objective):
                check_objective(posterior, batch, self._where)
            for x, y, loss_fn in batches_of([batch], self._loss_fn, self._where):
                x, y = self._moved(x), tree_map(as_labels, self._moved(y))
                if _length(x, y) == 0:
                    continue
                if loss_fn is _classes_last:
                    check_labels(y, self._output(x), self._where, -1)
                elif loss_fn is F.cross_entropy or isinstance(loss_fn, nn.CrossEntropyLoss):
                    check_labels(y, self._output(x), self._where, 1)
                yield x, y, loss_fn

    def _moved(self, values: Any) -> Any:
        """Arrays as tensors in the precision of the weights; everything where the weights are."""
        like = next(iter(self._mean.values()))

        def move(leaf: Any) -> Any:
            if _is_array(leaf) and not isinstance(leaf, Tensor):
                leaf = as_tensor(leaf)
                leaf = leaf.to(like.dtype) if leaf.is_floating_point() else leaf
            return leaf.to(like.device) if isinstance(leaf, Tensor) else leaf

        return tree_map(move, values)

    def _default_loss(self) -> LossFunction | None:
        """What the posterior's likelihood is the negative logarithm of, as it was trained: without calibration."""
        posterior = self._posterior
        if posterior.likelihood == "gaussian":
            device = next(iter(posterior.mean.values())).device
            noise = torch.as_tensor(posterior.noise_variance, dtype=widest_dtype(device), device=device)
            noise = noise / posterior.scales.noise
            return GaussianLikelihood(noise, shape=tuple(noise.shape), learnable=False)
        known: dict[Any, LossFunction] = {
            "categorical": _classes_last,
            "bernoulli": F.binary_cross_entropy_with_logits,
            "heteroscedastic": HeteroscedasticGaussianLikelihood(),
        }
        return known.get(posterior.likelihood)

    def _mean_weight_of_data(self, x: Any, y: Any, loss_fn: LossFunction) -> float:
        """w̄ over the examples that count: that of the first batch if they have the same there, else that of all."""
        weights = self._loss_weights(x, y, loss_fn)
        weights = weights[weights > 0]
        if len(weights) and bool((weights == weights[0]).all()):
            self._all_weigh_alike = True  # until another batch says otherwise
            return float(weights[0])
        self._refuse_one_reading()
        return self._mean_weight_of_all()

    def _refuse_one_reading(self) -> None:
        if isinstance(self._data, Iterator):
            raise ValueError(
                f"{self._where}(loader): the examples have different weights in the loss (weights of classes, targets "
                "that are ignored), so the loader is read twice, but this one can be read only once. Pass a DataLoader "
                "or a list of batches."
            )

    def _mean_weight_of_all(self) -> float:
        total, count = 0.0, 0
        for batch in self._batches():
            weights = self._loss_weights(*batch)
            total, count = total + float(weights.sum()), count + int((weights > 0).sum())
        return total / count if count else 1.0

    def _loss_weights(self, x: Any, y: Any, loss_fn: LossFunction) -> Tensor:
        output = self._output(x)
        if not isinstance(output, Tensor):
            return self._loss_weights_of_each(x, y, loss_fn)
        slopes = _slopes(loss_fn, output.reshape(len(output), -1), y, tuple(output.shape[1:]), curvature=False)
        return slopes.weights.double()

    @torch.no_grad()
    def _loss_weights_of_each(self, x: Any, y: Any, loss_fn: LossFunction) -> Tensor:
        """Of examples whose outputs are no tensor that could be taken apart: each runs through the model by itself."""

        def weight(x: Any, y: Any) -> Tensor:
            with LossWatch() as watch:
                loss = loss_fn(self._raw_output(_batch_of_one(x)), _batch_of_one(y))
            return weight_of_one(watch, loss).reshape(())

        return _of_each(weight, x, y, chunk_size=EXAMPLES_AT_ONCE).double()


def _classes_last(output: Tensor, y: Tensor) -> Tensor:
    """The log-loss of labels whose classes are the last dimension, as predictions have them."""
    return F.cross_entropy(output.movedim(-1, 1) if output.dim() > 2 else output, y)


def _weight_of_a_count(posterior: Posterior, num_data: float | None, where: str) -> float:
    """ess/N: what an example counts in the sum that training minimized."""
    if posterior.ess is None or (num_data is None and posterior.temperature is None):
        raise ValueError(
            f"{where}() needs one effective sample size, but the optimizer's groups have different num_data or "
            "temperature. Use the same in all groups."
        )
    if num_data is None:
        assert posterior.temperature is not None
        return 1 / posterior.temperature
    if not is_finite(num_data) or num_data <= 0:
        raise invalid("num_data", num_data, "a number > 0", "It is how many examples the posterior was trained on.")
    return posterior.ess / float(num_data)


def _slopes(
    loss_fn: LossFunction, outputs: Tensor, y: Any, shape: tuple[int, ...], *, curvature: bool = True
) -> Slopes:
    """First and second derivatives of each example's loss in its outputs (examples, outputs)."""
    outputs = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32))

    def loss_of_one(output: Tensor, y: Any) -> tuple[Tensor, Tensor]:
        with LossWatch() as watch:
            loss = loss_fn(output.reshape(1, *shape), _batch_of_one(y))
        refuse_sum(watch, loss)
        return loss.reshape(()), weight_of_one(watch, loss)

    slope_of_one = grad(loss_of_one, has_aux=True)

    def parts(output: Tensor, y: Any) -> Slopes:
        gradient, (loss, weight) = grad_and_value(loss_of_one, has_aux=True)(output, y)
        matrix = jacrev(slope_of_one, has_aux=True)(output, y)[0] if curvature else gradient[:, None]
        return Slopes(gradient, matrix, loss, weight)

    return _of_each(parts, outputs, y)


def _of_each(function: Callable[[Any, Any], _Result], x: Any, y: Any, chunk_size: int | None = None) -> _Result:
    """What ``function`` makes of each example, in the first dimension: of many at once, where vmap can run it."""
    dims = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, (x, y))
    try:
        return vmap(function, dims, chunk_size=chunk_size, randomness="different")(x, y)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass  # a loss or a model that vmap cannot run
    rows = (
        tree_map(lambda leaf, i=i: leaf[i] if isinstance(leaf, Tensor) else leaf, (x, y)) for i in range(_length(x, y))
    )
    return tree_map(lambda *values: torch.stack(values), *[function(*row) for row in rows])


def losses_of(loss_fn: LossFunction, outputs: Tensor, y: Any, shape: tuple[int, ...]) -> Tensor:
    """The loss of each example at these outputs, in float64; 0 for one that does not count."""
    slopes = _slopes(loss_fn, outputs, y, shape, curvature=False)
    return _counted(slopes.losses, slopes.weights).double()


def _positive_part(matrices: Tensor) -> Tensor:
    """Without negative eigenvalues, which losses that are not convex in the outputs have."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    if bool((values >= 0).all()):
        return matrices
    return vectors @ (values.clamp_min(0)[..., None] * vectors.mT)


def _counted(values: Tensor, weights: Tensor) -> Tensor:
    """Zeros for examples that do not count, whose loss is 0/0."""
    counts = (weights > 0).reshape(-1, *[1] * (values.dim() - 1))
    return torch.where(counts, values, torch.zeros_like(values))


def _batch_of_one(values: Any) -> Any:
    return tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, values)


def _slice(leaf: Any, first: int, size: int) -> Any:
    return leaf[first : first + size] if isinstance(leaf, Tensor) else leaf


def _length(x: Any, y: Any) -> int:
    return next((len(leaf) for leaf in tree_leaves((y, x)) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def _iterated(data: Any, where: str) -> Iterable[Any]:
    if isinstance(data, Iterable) and not isinstance(data, str | dict) and not _is_array(data):
        return data
    raise TypeError(
        f"{where}(data): got {type(data).__name__}, must be a pair (x, y) of tensors, a loader of such pairs, or a "
        "vprop.Objective. Labels are needed beside the inputs."
    )
