"""Statistics of BatchNorm that belong to a draw of the weights.

The running statistics are an average over the weights that training went through, noise included. A network with one
draw of the weights has others: its noise shifts the means of its activations and changes their spread. So they are
estimated anew for each draw, as plain means over batches of training inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vprop.objective import model_arguments
from vprop.posterior.predictive.functions import told_with_input
from vprop.posterior.predictive.inputs import batches_of, is_loader, mapped
from vprop.replica import Replica, evaluating_replicas

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
    require_batch_norm(model)
    estimate(model, TrainingInputs(data).on(model))


def batch_norm_layers(model: nn.Module | Replica) -> list[_BatchNorm]:
    """Those that keep running statistics."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.running_mean is not None]


def require_batch_norm(model: nn.Module) -> None:
    """Refuse a model that has no statistics to be estimated."""
    if not batch_norm_layers(model):
        raise ValueError(
            f"{WHERE}: {type(model).__name__} has no BatchNorm layer with running statistics, so there is nothing to "
            "estimate. Leave it out."
        )


@torch.no_grad()
def estimate(model: nn.Module | Replica, batches: Iterable[Any]) -> None:
    """The running statistics under the weights that ``model`` has now: plain means over ``batches``, its inputs.

    They are written into the buffers, in place; modes and all else are as before afterwards.
    """
    layers = batch_norm_layers(model)
    for layer in layers:
        layer.reset_running_stats()
    empty = True
    with _only_training(model, layers):
        for batch in batches:
            args, kwargs = model_arguments(batch)
            with told_with_input(batch, model, WHERE):
                model(*args, **kwargs)
            empty = False
    if empty:
        raise ValueError(
            f"{WHERE}: got no batches. Pass training inputs: a tensor, or a DataLoader with data in it that can be "
            "read several times; one with drop_last=True has no batches if the data are fewer than its batch_size."
        )


@contextmanager
def _only_training(model: nn.Module | Replica, layers: list[_BatchNorm]) -> Iterator[None]:
    """These layers alone in training mode, the k-th forward of each counting 1/k."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    hooks = [layer.register_forward_pre_hook(_counting()) for layer in layers]
    alone = [layer for layer in layers if isinstance(layer, nn.SyncBatchNorm) and "forward" not in layer.__dict__]
    try:
        for module, _ in modes:
            module.training = False
        for layer in layers:
            layer.training = True
        for layer in alone:  # one process may predict while the others do something else
            layer.__dict__["forward"] = MethodType(_BatchNorm.forward, layer)
        yield
    finally:
        for layer in alone:
            del layer.__dict__["forward"]
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _counting() -> Callable[[Any, Any], None]:
    """A hook that makes a layer's average plain. With ``momentum=None`` torch does, but waits for the GPU each time."""
    count = 0

    def before(layer: Any, args: Any) -> None:
        nonlocal count
        count += 1
        layer.momentum = 1 / count

    return before


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

    def __init__(self, posterior: Posterior, inputs: TrainingInputs, dtype: torch.dtype | None = None) -> None:
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
        self._dtype = dtype

    def under(self, sample: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The buffers for draw number ``sample``, which are estimated once."""
        if sample not in self._kept:
            q = self._posterior
            self._kept[sample] = self.estimated(next(evaluating_replicas(q.model, q._fixed(), [weights])))
        return self._kept[sample]

    def estimated(self, replica: Replica) -> dict[str, Tensor]:
        """The buffers for the weights that ``replica`` has, which are put into it."""
        kept = dict(self._posterior.model.named_buffers()) | self._posterior.buffers
        own = {name: _cast(torch.empty_like(kept[name]), self._dtype) for name in self._names}
        replica.load(own)
        estimate(replica, self._batches)
        return own

    def into(self, replicas: Iterable[Replica]) -> Iterator[Replica]:
        """Each replica with the statistics of the weights that it has."""
        for replica in replicas:
            self.estimated(replica)
            yield replica


def statistics_of(
    posteriors: Sequence[Posterior], batch_norm: Any, dtype: torch.dtype | None = None
) -> Sequence[DrawStatistics | None]:
    """For each of them, members of a mixture say; ``None`` if ``batch_norm``, the argument of ``predict``, is."""
    if batch_norm is None:
        return [None] * len(posteriors)
    inputs = TrainingInputs(batch_norm)
    return [DrawStatistics(posterior, inputs, dtype) for posterior in posteriors]


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
