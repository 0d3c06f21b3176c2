"""Several directions through one graph at once: the step from gradients to rows of a Hessian."""

from __future__ import annotations

import torch
from torch import Tensor


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
