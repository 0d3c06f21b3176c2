"""Derivatives of single examples, kept apart: a row for each output (or loss) of each example.

:mod:`vprop.curvature._single_examples` adds up squares as it goes; questions about one example need its own row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_leaves, tree_map

from vprop.precision import compute_dtype

OfOne = Callable[..., Tensor]
"""From weights by name, and the inputs of one example, to a vector."""


def example_rows(of_one: OfOne, weights: dict[str, Tensor], *inputs: Any) -> tuple[Tensor, Tensor]:
    """Values (examples, outputs) and their Jacobians (examples, outputs, weights), weights in one flat row.

    Tensors in ``inputs`` have the examples first. ``vmap`` runs all examples at once; a model that it cannot run
    (recurrent layers on a CPU) is differentiated one example after the other.

    >>> w = {"w": torch.tensor([2.0, 3.0])}
    >>> values, rows = example_rows(lambda weights, x: (weights["w"] * x).sum()[None], w, torch.eye(2))
    >>> values.tolist(), rows.tolist()
    ([[2.0], [3.0]], [[[1.0, 0.0]], [[0.0, 1.0]]])
    """
    try:
        with torch.no_grad():  # what else requires a gradient needs no graph
            return _by_transforms(of_one, weights, inputs)
    except torch.OutOfMemoryError:
        raise  # a slower way would only hide that
    except RuntimeError:
        pass  # and out of this block, so that an error of the model's own is raised as it is
    return _one_by_one(of_one, weights, inputs)


def _by_transforms(of_one: OfOne, weights: dict[str, Tensor], inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    def twice(weights: dict[str, Tensor], *inputs: Any) -> tuple[Tensor, Tensor]:
        value = of_one(weights, *inputs)
        return value, value

    dims = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, inputs)
    jacobians, values = vmap(jacrev(twice, has_aux=True), in_dims=(None, *dims), randomness="different")(
        weights, *inputs
    )
    return values, _flat([jacobians[name] for name in weights])


def _one_by_one(of_one: OfOne, weights: dict[str, Tensor], inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    examples = next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    copies = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    values, rows = [], []
    for i in range(examples):
        one = tree_map(lambda leaf, i=i: leaf[i] if isinstance(leaf, Tensor) else leaf, inputs)
        with torch.enable_grad():
            value = of_one(copies, *one)
            grads = [
                torch.autograd.grad(entry, list(copies.values()), retain_graph=True, materialize_grads=True)
                for entry in value.unbind()
            ]
        values.append(value.detach())
        rows.append(torch.stack([_flat([grad[None, None] for grad in of_output])[0, 0] for of_output in grads]))
    return torch.stack(values), torch.stack(rows)


def _flat(jacobians: list[Tensor]) -> Tensor:
    """(examples, outputs, *shape) of every parameter as (examples, outputs, weights)."""
    return torch.cat([part.reshape(*part.shape[:2], -1).to(compute_dtype(part)) for part in jacobians], dim=2)
