"""What a closure returned for each sample of a step, as one result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def mean_result(results: list[Any]) -> Any:
    """The mean over the samples, part by part in tuples, lists and dicts; what has no mean is that of the last sample.

    >>> mean_result([(1.0, "train", {"hits": 3}), (2.0, "train", {"hits": 5})])
    (1.5, 'train', {'hits': 4.0})
    """
    last = results[-1]
    if any(type(result) is not type(last) for result in results):
        return last
    if isinstance(last, Tensor):
        same_shape = all(result.shape == last.shape for result in results)
        return sum(result.detach() for result in results) / len(results) if same_shape else last.detach()
    if isinstance(last, Mapping):
        return {key: _mean_of_parts([r.get(key, value) for r in results]) for key, value in last.items()}
    if isinstance(last, tuple | list):
        if any(len(result) != len(last) for result in results):
            return last
        parts = [_mean_of_parts(list(part)) for part in zip(*results, strict=True)]
        return type(last)(*parts) if hasattr(last, "_fields") else type(last)(parts)
    try:
        return sum(results[1:], start=results[0]) / len(results)
    except TypeError:
        return last


def _mean_of_parts(parts: list[Any]) -> Any:
    return None if parts[-1] is None else mean_result(parts)
