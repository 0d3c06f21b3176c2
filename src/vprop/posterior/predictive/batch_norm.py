"""Statistics of BatchNorm that belong to a draw of the weights.

The running statistics are an average over the weights that training went through, noise included. A network with one
draw of the weights has others: its noise shifts the means of its activations and changes their spread. So they are
estimated anew for each draw, as plain means over batches of training inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vprop.calling import copied, model_arguments
from vprop.checks import check_model
from vprop.posterior.predictive.dropout import DrawMasks, dropping
from vprop.posterior.predictive.functions import told_with_input
from vprop.posterior.predictive.inputs import batches_of, has_rows, is_loader, leaves, mapped
from vprop.posterior.predictive.masks import Masks
from vprop.replica import Replica, evaluating_replicas, switches_by_itself
from vprop.wrappers import unwrapped

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

WHERE = "batch_norm="
"""The argument, in messages."""


def set_batch_norm(model: nn.Module, data: Any) -> None:
    """Set the running statistics of ``model``'s BatchNorm layers to those under the weights that it has now.

    For predictions with the mean of the weights, which lies in the model between steps; ``predict`` and
    ``sampled_models`` do the same for each draw if they are given ``batch_norm=data``. Only the running statistics
    change. ``data`` are training inputs of any kind that ``predict`` takes; labels are ignored. Each batch counts as
    much as the others. Layers other than BatchNorm run in evaluation mode.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> set_batch_norm(model, iter(torch.arange(20.0).view(10, 2).split(5)))
    >>> bool(torch.allclose(model[1].running_mean, model[0](torch.tensor([[9.0, 10.0]]))))
    True
    """
    check_model(model, "set_batch_norm(model, data)")
    own = unwrapped(model)
    require_batch_norm(own)
    estimate(own, TrainingInputs(data).on(own))


def batch_norm_layers(model: nn.Module | Replica) -> list[_BatchNorm]:
    """Those that keep running statistics."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


def require_batch_norm(model: nn.Module) -> None:
    """Refuse a model that has no statistics to be estimated."""
    if not batch_norm_layers(model):
        raise ValueError(
            f"{WHERE}: {type(model).__name__} has no BatchNorm layer with running statistics, so there is nothing to "
            "estimate. Predict without."
        )


@torch.no_grad()
def estimate(model: nn.Module | Replica, batches: Iterable[Any], masks: Masks | None = None) -> None:
    """The running statistics under the weights that ``model`` has now: plain means over ``batches``, its inputs.

    With ``masks`` under those as well: dropout widens the activations that come after it.
    They are written into the buffers, in place; modes and all else are as before afterwards. Of layers that were not
    called, and if there is an error, they are as before as well.
    """
    averages: list[_PlainAverage] = []
    modes = [(module, module.training) for module in model.modules()]
    finished = False
    try:
        for module, _ in modes:
            module.training = False
        for layer in batch_norm_layers(model):
            averages.append(_PlainAverage(layer))
        with dropping(model, masks):
            _run(model, batches)
        finished = True
    finally:
        for average in averages:
            average.end(keep=finished)
        for module, mode in modes:
            module.training = mode


def _run(model: nn.Module | Replica, batches: Iterable[Any]) -> None:
    empty = True
    for batch in batches:
        if any(has_rows(value) and len(value) == 0 for value in leaves(batch)):
            continue  # it has no statistics, and torch leaves those before it as they are
        args, kwargs = model_arguments(copied(batch))
        with told_with_input(batch, model, WHERE):
            model(*args, **kwargs)
        empty = False
    if empty:
        raise ValueError(
            f"{WHERE}: got no batches. Pass training inputs: a tensor, or a DataLoader with data in it that can be "
            "read several times; one with drop_last=True has no batches if the data are fewer than its batch_size."
        )


class _PlainAverage:
    """Lets a layer average its statistics over forwards until the end, the k-th counting 1/k.

    With ``momentum=None`` torch does the same, but waits for the GPU in each forward.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        self._layer, self._momentum, self._count = layer, layer.momentum, 0
        self._before = [buffer.clone() for buffer in layer.buffers()]
        # One process may predict while the others do something else: nothing is gathered from them.
        self._alone = isinstance(layer, nn.SyncBatchNorm) and "forward" not in layer.__dict__
        if self._alone:
            layer.__dict__["forward"] = MethodType(_BatchNorm.forward, layer)
        layer.reset_running_stats()
        layer.training = True
        self._hook = layer.register_forward_pre_hook(self._count_forward)

    def _count_forward(self, layer: Any, args: Any) -> None:
        self._count += 1
        self._layer.momentum = 1 / self._count

    def end(self, *, keep: bool) -> None:
        """Leave all as it was, but what was averaged, if that is to be kept."""
        self._hook.remove()
        self._layer.momentum = self._momentum
        if self._alone:
            del self._layer.__dict__["forward"]
        if not keep or self._count == 0:
            for buffer, old in zip(self._layer.buffers(), self._before, strict=True):
                buffer.copy_(old)


class TrainingInputs:
    """What was given as ``batch_norm=``, to be read once for each draw. Batches of an iterator are kept for that."""

    def __init__(self, data: Any) -> None:
        self._data = list(data) if isinstance(data, Iterator) else data
        self._kept = isinstance(data, Iterator)

    def on(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterable[Any]:
        """The inputs of ``model``, where it is, as often as one asks; real numbers in ``dtype`` if one is given."""
        if is_loader(self._data):
            return _Reread(lambda: self._read(self._data, model, dtype))
        return list(self._read(iter(self._data) if self._kept else self._data, model, dtype))

    def _read(self, data: Any, model: nn.Module, dtype: torch.dtype | None) -> Iterator[Any]:
        inputs = batches_of(data, None, model, WHERE).inputs
        return inputs if dtype is None else (mapped(lambda value: _cast(value, dtype), x) for x in inputs)


class _Reread:
    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return self._read()


class DrawStatistics:
    """The buffers of BatchNorm under draws of a posterior's weights."""

    def __init__(
        self,
        posterior: Posterior,
        inputs: TrainingInputs,
        dtype: torch.dtype | None = None,
        masks: DrawMasks | None = None,
    ) -> None:
        require_batch_norm(posterior.model)
        if posterior.head is not None:
            raise ValueError(
                f"{WHERE}: the last layer's posterior draws no weights of the layers before, whose statistics are the "
                "same for all draws. Leave it out, or predict with the posterior of the whole model."
            )
        self._posterior = posterior
        self._batches = inputs.on(posterior.model, dtype)
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._names = _names_of_statistics(posterior.model)
        self._dtype, self._masks = dtype, masks
        self._anew = any(switches_by_itself(module) for module in posterior.model.modules())
        self._replica: Replica | None = None

    def under(self, sample: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers for draw number ``sample``, which are estimated once."""
        if sample not in self._kept:
            self._kept[sample] = self.estimated(self._with(weights), sample)
        return self._kept[sample]

    def _with(self, weights: Mapping[str, Tensor]) -> Replica:
        if self._replica is None or self._anew:
            q = self._posterior
            self._replica = next(evaluating_replicas(q.model, q._fixed(), [weights]))
        else:
            self._replica.load(weights)
        return self._replica

    def estimated(self, replica: Replica, sample: int) -> dict[str, Tensor]:
        """The buffers for the weights that ``replica`` has, those of draw number ``sample``; they are put into it."""
        kept = dict(self._posterior.model.named_buffers()) | self._posterior.buffers
        own = {name: _cast(kept[name].clone(), self._dtype) for name in self._names}
        replica.load(own)
        estimate(replica, self._batches, None if self._masks is None else self._masks.for_statistics(sample))
        return own


def training_inputs(batch_norm: Any) -> Any:
    """``batch_norm`` as something that can be given to several predictions, also if it is an iterator."""
    return batch_norm if batch_norm is None or isinstance(batch_norm, TrainingInputs) else TrainingInputs(batch_norm)


def statistics_of(
    posteriors: Sequence[Posterior],
    batch_norm: Any,
    dtype: torch.dtype | None = None,
    masks: DrawMasks | None = None,
) -> Sequence[DrawStatistics | None]:
    """For each of them, members of a mixture say; ``None`` if ``batch_norm``, the argument of ``predict``, is."""
    if batch_norm is None:
        return [None] * len(posteriors)
    inputs = training_inputs(batch_norm)
    return [DrawStatistics(posterior, inputs, dtype, masks) for posterior in posteriors]


def _names_of_statistics(model: nn.Module) -> list[str]:
    layers = set(batch_norm_layers(model))
    return [
        f"{name}.{own}" if name else own
        for name, layer in model.named_modules()
        if layer in layers
        for own in ("running_mean", "running_var", "num_batches_tracked")
        if layer._buffers.get(own) is not None
    ]


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    real = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if real and dtype is not None else value
