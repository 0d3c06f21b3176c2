"""What a prediction may be asked for: tensors, arrays, or a loader of batches; labels are left aside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from vprop.checks import invalid, is_number, shown
from vprop.objective import Objective
from vprop.precision import as_tensor

LABELS = ("labels", "label", "label_ids")
"""What dictionaries call the targets: left out where the model's forward does not take them."""


class Place(NamedTuple):
    """Where inputs go before the model sees them."""

    device: torch.device | None
    """``None`` if the model lies on several devices, and moves its inputs itself, or on the meta device."""
    dtype: torch.dtype
    """Of arrays of real numbers: NumPy makes float64 of everything, and no model of float32 takes it."""

    @classmethod
    def of(cls, model: nn.Module) -> Place:
        """Where the model is, and its precision."""
        tensors = list(chain(model.parameters(), model.buffers()))
        devices = {tensor.device for tensor in tensors if not tensor.is_meta}  # weights are then the posterior's alone
        kinds = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        dtype = kinds[0] if kinds else torch.get_default_dtype()
        return cls(devices.pop() if len(devices) == 1 else None, dtype)

    def put(self, value: Any) -> Any:
        """Tensors on the device, arrays as tensors there; also inside of tuples, lists and dicts."""
        if isinstance(value, Tensor):
            return value if self.device is None else value.to(self.device)
        if isinstance(value, PackedSequence):
            return value if self.device is None else cast(Any, value).to(self.device)
        if isinstance(value, Mapping):
            return {key: self.put(entry) for key, entry in value.items()}
        if isinstance(value, tuple | list):
            return _tuple_like(value, [self.put(entry) for entry in value])
        if is_array(value):
            tensor = _tensor_from(value)
            return tensor.to(device=self.device, dtype=self.dtype if tensor.is_floating_point() else None)
        return value


@dataclass
class Batches:
    """The inputs of the model, one batch after the other."""

    inputs: Iterator[Any]
    count: int | None
    """How many there are, if that is known."""
    whole: bool
    """Whether all the data are one batch, as they were given."""


def batches_of(x: Any, batch_size: Any, model: nn.Module, where: str = "predict(x)") -> Batches:
    """What the model is to be called with. A loader is read once, and only as far as it has been asked.

    ``where`` is who asks, for errors.
    """
    _refuse(x, where)
    place = Place.of(model)
    if is_loader(x):
        if batch_size is not None:
            remedy = "Leave it out, or make the loader with another batch size."
            raise invalid("batch_size", batch_size, "None for a loader, which has its own", remedy)
        taken = _keywords_of(model)
        return Batches((place.put(_without_labels(batch, taken, where)) for batch in x), _length(x), whole=False)
    if batch_size is None:
        return Batches(iter([place.put(x)]), 1, whole=True)
    if not is_number(batch_size, whole=True) or batch_size < 1:
        raise invalid("batch_size", batch_size, "an integer >= 1", "None takes all the data at once.")
    rows = rows_of(x)
    starts = range(0, max(rows, 1), int(batch_size))
    parts = (place.put(_rows(x, start, start + int(batch_size))) for start in starts)
    return Batches(parts, len(starts), whole=len(starts) == 1)


def is_array(value: Any) -> bool:
    """Whether it is NumPy's, or can be made so: a data frame."""
    return hasattr(value, "__array__") and not isinstance(value, Tensor) and not is_number(value)


def is_loader(x: Any) -> bool:
    """Whether it gives batches: a DataLoader, an iterator, or something like them.

    A list is not: it stands for the arguments of one call, like a tuple. ``iter(batches)`` makes a loader of it.
    """
    if isinstance(x, DataLoader | Iterator):
        return True
    return isinstance(x, Iterable) and not (isinstance(x, Tensor) or is_array(x) or hasattr(x, "__getitem__"))


def rows_of(x: Any) -> int:
    """How many examples an input has: the first dimension of its tensors, which must agree."""
    sizes = {len(value) for value in leaves(x) if has_rows(value)}
    if len(sizes) == 1:
        return sizes.pop()
    found = f"tensors of lengths {sorted(sizes)}" if sizes else described(x)
    raise ValueError(
        f"predict(x): cannot tell the examples of x apart: got {found}, must be tensors whose first dimension is the "
        "examples. Leave batch_size out, or pass a loader that makes the batches."
    )


def has_rows(value: Any) -> bool:
    """Whether it is a tensor or an array with a first dimension."""
    return (isinstance(value, Tensor) or is_array(value)) and len(value.shape) > 0


def leaves(x: Any) -> Iterator[Any]:
    """What is inside of tuples, lists and dicts."""
    if isinstance(x, Mapping):
        x = tuple(x.values())
    if isinstance(x, tuple | list) and not isinstance(x, PackedSequence):
        for value in x:
            yield from leaves(value)
    else:
        yield x


def mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """The same tuples and dicts with other things inside."""
    if isinstance(x, Mapping):
        return {key: mapped(function, value) for key, value in x.items()}
    if isinstance(x, tuple | list) and not isinstance(x, PackedSequence):
        return _tuple_like(x, [mapped(function, value) for value in x])
    return function(x)


def _tuple_like(x: Any, values: list[Any]) -> tuple:
    """A tuple of the values; a named one stays what it is, because models ask it by its names."""
    return x._make(values) if isinstance(x, tuple) and hasattr(x, "_make") else tuple(values)


def described(x: Any) -> str:
    """An input in a few words: types, shapes and precisions rather than numbers."""
    if isinstance(x, Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)} on {x.device}"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{key!r}: {described(value)}" for key, value in x.items()) + "}"
    if isinstance(x, PackedSequence):
        return f"a PackedSequence of {described(x.data)}"
    if isinstance(x, tuple | list):
        shown_of_many = [described(value) for value in x[:4]] + [f"… {len(x)} in all"] * (len(x) > 4)
        return "(" + ", ".join(shown_of_many) + ")"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"a {x.dtype} array of shape {tuple(x.shape)}"
    return f"{type(x).__name__} ({shown(x)})"


def _rows(x: Any, start: int, stop: int) -> Any:
    def cut(value: Any) -> Any:
        if not has_rows(value):
            return value
        return value[start:stop] if not hasattr(value, "iloc") else value.iloc[start:stop]

    return mapped(cut, x)


def _refuse(x: Any, where: str) -> None:
    """Refuse what no model takes, in words, before torch does in its own."""
    if isinstance(x, Dataset):
        found, remedy = type(x).__name__, "Make batches of it: torch.utils.data.DataLoader(dataset, batch_size=256)."
    elif isinstance(x, nn.Module):
        found, remedy = f"the module {type(x).__name__}", "The posterior knows its model; pass the data."
    elif x is None or isinstance(x, str | bytes | set | frozenset | type) or is_number(x) or isinstance(x, bool):
        found, remedy = described(x), "Text is made into tensors by the model's tokenizer, numbers by torch.tensor."
    elif isinstance(x, tuple | list | Mapping) and len(x) == 0:
        found, remedy = f"an empty {type(x).__name__}", "A tuple or list has the positional arguments of the model."
    elif isinstance(x, tuple | list) and all(is_number(value) for value in leaves(x)):
        found, remedy = f"a {type(x).__name__} of numbers", "Make a tensor of it: torch.tensor(x)."
    else:
        return
    raise TypeError(
        f"{where}: got {found}, must be a tensor, a NumPy array, a DataLoader (or an iterator over batches), or a "
        f"tuple or dict of tensors as the model takes them. {remedy}"
    )


def _without_labels(batch: Any, taken: set[str] | None, where: str) -> Any:
    """The inputs in a batch of a loader: all of it, or what comes before the labels."""
    if isinstance(batch, Objective):
        return batch.x
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key not in LABELS or taken is None or key in taken}
    if not isinstance(batch, tuple | list) or isinstance(batch, PackedSequence):
        _refuse(batch, where)
        return batch
    if len(batch) not in (1, 2):
        raise TypeError(
            f"{where.replace('(x)', '(loader)')}: got a batch of {len(batch)} things, must be x, (x,), a pair (x, y), "
            "or a dict. Several inputs go into one x, a tuple or a dict: ((x1, x2), y)."
        )
    _refuse(batch[0], where)
    return batch[0]


def _keywords_of(model: nn.Module) -> set[str] | None:
    """The names that the model's forward takes; ``None`` if it takes any."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _tensor_from(array: Any) -> Tensor:
    values = array.__array__()
    try:
        return as_tensor(values)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"predict(x): got {described(values)}, must be an array of numbers. Encode what is text or a category, and "
            "use one dtype for all columns, as x.astype('float32') does."
        ) from error
