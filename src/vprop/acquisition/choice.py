"""Several examples from scores of single ones: the best, or by chance with the best more likely."""

from __future__ import annotations

import torch
from torch import Tensor

from vprop.checks import check_seed, invalid, is_finite, is_number


def top(scores: Tensor, count: int, *, seed: int = 0) -> Tensor:
    """Indices of the ``count`` highest scores, the highest first; ties in an order of chance, by ``seed``.

    Without the chance a score with many ties, such as the variation ratio, would prefer whatever comes first in the
    pool.

    >>> top(torch.tensor([0.1, 0.9, 0.5]), 2).tolist()
    [1, 2]
    """
    check_count(count, check_scores(scores))
    generator = torch.Generator(device="cpu").manual_seed(check_seed(seed))
    shuffled = torch.randperm(len(scores), generator=generator, device="cpu").to(scores.device)
    order = scores[shuffled].sort(descending=True, stable=True).indices
    return shuffled[order[:count]]


def power_sample(scores: Tensor, count: int, *, power: float = 1.0, seed: int = 0) -> Tensor:
    """``count`` indices drawn without replacement, each time with probability ∝ score to the ``power``.

    The best scores of a pool are often of examples that are all alike, and would be labelled for the same thing. Chance
    spreads the choice, at no cost (Kirsch et al., 2023). Power 0 is random choice, a large power is :func:`top`. Drawn
    at once: the indices with the highest power·log(score) + G, where G are independent Gumbel variables, because the
    largest of the log(wᵢ) + Gᵢ is number i with probability wᵢ/Σw, and so for the rest of them.

    Scores are ≥ 0, such as mutual information; those that are 0 come last.

    >>> power_sample(torch.tensor([0.0, 1.0, 3.0]), 3)[-1]
    tensor(0)
    """
    check_count(count, check_scores(scores))
    if bool((scores < 0).any()):
        remedy = "Use mutual information, or shift them: scores - scores.min()."
        raise invalid("scores", float(scores.min()), ">= 0", remedy)
    if not is_finite(power) or power < 0:
        raise invalid("power", power, "a number >= 0", "1 is the default, 0 random choice.")
    generator = torch.Generator(device="cpu").manual_seed(check_seed(seed))
    exponential = torch.empty(len(scores), dtype=torch.float64, device="cpu").exponential_(generator=generator)
    gumbel = -exponential.log()
    weight = power * scores.detach().double().cpu().log() if power else torch.zeros_like(gumbel)
    # Among scores of 0, −∞ all of them, chance decides as well.
    order = gumbel.sort(descending=True).indices
    best = (weight + gumbel)[order].sort(descending=True, stable=True).indices
    return order[best[:count]].to(scores.device)


def check_scores(scores: Tensor) -> int:
    """How many scores there are, if they are a vector of numbers."""
    if not isinstance(scores, Tensor) or scores.dim() != 1 or not len(scores):
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise invalid("scores", found, "a tensor of shape (n,), n >= 1", "Pass one score for each example of the pool.")
    if bool(scores.isnan().any()):
        raise invalid("scores", "NaN", "numbers, which can be put in order", "The model has diverged.")
    return len(scores)


def check_count(count: int, pool: int) -> None:
    """Refuse to choose none, or more than there are."""
    if not is_number(count, whole=True) or not 1 <= count <= pool:
        raise invalid("count", count, f"an integer from 1 to the size of the pool, {pool}", "Choose fewer examples.")
