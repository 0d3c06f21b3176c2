r"""Examples that tell most about the weights together: greedy BatchBALD.

The labels of a batch B tell I(y_B; θ) = H[y_B] − Σ_{i∈B} E_q H[yᵢ|θ] about the weights (given these, labels are
independent). By the chain rule example i adds

    gain(i | B) = H[yᵢ | y_B] − E_q H[yᵢ|θ]

to that. With K samples of the weights and labels y_B = m of the batch so far, sample k is left with the weight

    ωₘₖ ∝ Π_{j∈B} pₖ(mⱼ),  Σₖ ωₘₖ = 1,   so that   H[yᵢ | y_B] = Σₘ p(m) H[Σₖ ωₘₖ pₖ(yᵢ)]

which is what is computed: for each m, what the samples that would survive these labels still disagree on. Taking the
best i again and again is within 1 − 1/e of the best batch, because the information is submodular (Kirsch, van
Amersfoort and Gal, 2019). There are C^|B| m; all of them are taken as long as they are no more than ``configurations``,
and then as many that are drawn from p(m), one label after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vprop.acquisition.choice import check_count
from vprop.acquisition.scores import class_probabilities
from vprop.checks import check_seed, invalid, is_number
from vprop.posterior import LinearizedPrediction, Prediction

BLOCK = 1 << 22
"""Numbers that are computed at once: a pool of any size takes memory for these."""


class Batch(NamedTuple):
    """Examples in the order in which they were chosen, and what each adds to what is known about the weights (nats)."""

    indices: Tensor
    gains: Tensor

    @property
    def mutual_information(self) -> float:
        """I(y_B; θ): what all labels together tell. At most log K for K samples."""
        return float(self.gains.sum())


@torch.no_grad()
def batch_bald(prediction: Prediction, count: int, *, configurations: int = 1000, seed: int = 0) -> Batch:
    """Choose ``count`` examples whose labels together tell most about the weights.

    Two examples that are alike tell little more than one: the second is not chosen, as :func:`top` of the mutual
    information would. K samples can be told apart by log K nats, so that a batch whose ``mutual_information`` is near
    log K needs more of them: use ``num_samples`` well above ``count`` in ``predict``. Cost: count · K · C · n ·
    ``configurations`` products. ``seed`` is for drawing labels, where there are too many of them.

    >>> alike, other = [[5.0, -5.0], [-5.0, 5.0], [5.0, -5.0]], [[3.0, -3.0], [3.0, -3.0], [-3.0, 3.0]]
    >>> logits = torch.tensor([alike, alike, other]).transpose(0, 1)  # three samples, three examples
    >>> prediction = Prediction(logits, "categorical")
    >>> from vprop.acquisition import mutual_information
    >>> [round(value, 3) for value in mutual_information(prediction).tolist()]  # each by itself: the first two
    [0.636, 0.636, 0.62]
    >>> sorted(batch_bald(prediction, 2).indices.tolist())[1]  # together: one of these, and the third
    2
    """
    if isinstance(prediction, LinearizedPrediction):
        raise TypeError(
            "batch_bald(prediction): got a LinearizedPrediction, whose examples are drawn independently, so that it "
            "does not show which ones tell the same. Use predict(..., method='monte_carlo'), the default."
        )
    probs = class_probabilities(prediction)
    check_count(count, probs.shape[1])
    if not is_number(configurations, whole=True) or configurations < 1:
        raise invalid("configurations", configurations, "an integer >= 1", "1000 is the default.")
    generator = torch.Generator(device="cpu").manual_seed(check_seed(seed))
    expected = torch.special.entr(probs).sum(-1).mean(0)  # E_q H[yᵢ|θ]
    labels = _Labels.none(len(probs), probs)
    free = torch.ones(probs.shape[1], dtype=torch.bool, device=probs.device)
    indices, gains = [], []
    for _ in range(count):
        gain = (labels.conditional_entropy(probs) - expected).masked_fill(~free, -torch.inf)
        best = int(gain.argmax())
        free[best] = False
        indices.append(best)
        gains.append(float(gain[best].clamp_min(0)))
        labels = labels.extended(probs[:, best], configurations, generator)
    return Batch(
        torch.tensor(indices, device=prediction.samples.device),
        torch.tensor(gains, dtype=torch.float64, device=prediction.samples.device),
    )


class _Labels(NamedTuple):
    """Labels m that the batch may have: their probabilities p(m), and the samples' weights ω (m, k) after them."""

    probability: Tensor
    weights: Tensor
    drawn: bool

    @classmethod
    def none(cls, samples: int, like: Tensor) -> _Labels:
        """An empty batch: one way to label it, and all samples alike."""
        return cls(like.new_ones(1), like.new_full((1, samples), 1 / samples), drawn=False)

    def conditional_entropy(self, probs: Tensor) -> Tensor:
        """H[yᵢ | y_B] of every example, in blocks of as many as fit."""
        step = max(1, BLOCK // (len(self.weights) * probs.shape[-1]))
        return torch.cat([self._of_block(block) for block in probs.split(step, dim=1)])

    def _of_block(self, probs: Tensor) -> Tensor:
        samples, examples, classes = probs.shape
        mixed = (self.weights @ probs.reshape(samples, -1)).reshape(-1, examples, classes)
        return self.probability @ torch.special.entr(mixed).sum(-1)

    def extended(self, probs: Tensor, limit: int, generator: torch.Generator) -> _Labels:
        """With the labels of one more example, of which ``probs`` are the samples' probabilities (k, c)."""
        classes = probs.shape[-1]
        if not self.drawn and len(self.weights) * classes <= limit:
            after = self.weights[:, None] * probs.T  # (m, c, k)
            share = after.sum(-1)
            probability = (self.probability[:, None] * share).flatten()
            possible = probability > 0
            weights = (after / share.unsqueeze(-1)).flatten(0, 1)
            return _Labels(probability[possible], weights[possible], drawn=False)
        labels = self if self.drawn else self._drawn(limit, generator)
        classes_drawn = _draw(labels.weights @ probs, 1, generator)[:, 0]
        after = labels.weights * probs.T[classes_drawn]
        return _Labels(labels.probability, after / after.sum(-1, keepdim=True), drawn=True)

    def _drawn(self, limit: int, generator: torch.Generator) -> _Labels:
        """As many labellings, drawn from their probabilities; each then counts the same."""
        rows = _draw(self.probability[None], limit, generator)[0]
        return _Labels(self.probability.new_full((limit,), 1 / limit), self.weights[rows], drawn=True)


def _draw(probs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices drawn from each row: on the CPU, where the generator is."""
    return torch.multinomial(probs.cpu(), count, replacement=True, generator=generator).to(probs.device)
