"""The prediction loop: what a model returns under weights drawn from its posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vprop.calling import call_model


def sampled_outputs(models: Iterable[Callable[..., Any]], x: Any) -> Iterator[Any]:
    """For each of ``posterior.sampled_models(…)`` what it returns for ``x``, without gradients.

    None is kept, because the logits of a language model under many draws would not fit into memory.
    """
    for model in models:
        with torch.no_grad():
            output = call_model(model, x)
        yield output
