"""Gradients that can be differentiated again, and several directions through one graph at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vprop.objective import Objective


def detached_copies(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the parameters that a graph of their own can be built on."""
    return {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}


def differentiable_gradients(objective: Objective, weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The gradients, with a graph to differentiate once more (which torch's fast attention kernels do not have)."""
    with sdpa_kernel(SDPBackend.MATH):
        loss = objective.loss_at(weights)
        return torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)


def backward_directions(output: Tensor, inputs: list[Tensor], directions: Tensor) -> list[Tensor]:
    """For each of ``directions`` (first dimension) its vector–Jacobian product with ``output``, for every input.

    The graph is kept. Zeros where ``output`` does not depend on an input.
    """
    blocks: tuple[Tensor | None, ...] = (None,) * len(inputs)
    if output.requires_grad and output.dtype in (torch.bfloat16, torch.float16):
        # torch's batched products of half-precision matrices fail on some CPUs: one direction at a time.
        each = [torch.autograd.grad(output, inputs, d, retain_graph=True, materialize_grads=True) for d in directions]
        blocks = tuple(torch.stack(pieces) for pieces in zip(*each, strict=True))
    elif output.requires_grad:
        blocks = torch.autograd.grad(
            output, inputs, directions, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
    return [
        x.new_zeros(len(directions), *x.shape) if block is None else block.detach()
        for x, block in zip(inputs, blocks, strict=True)
    ]
