"""Split conformal prediction for classes: sets that hold the label as often as was asked for."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vprop.calibration._conformal import ROUNDING, conformal_quantile
from vprop.calibration._held_out import check_kind, held_out_batches, held_out_predictions
from vprop.checks import check_flag, check_seed
from vprop.metrics._arguments import check_level, check_tensor
from vprop.metrics._labelled import labelled, probabilities
from vprop.posterior import Posterior
from vprop.posterior.predictive.batch_norm import training_inputs


@dataclass(frozen=True)
class ConformalSets:
    """Adaptive prediction sets: classes from the most probable on, until their mass has passed a threshold.

    The score of class c is the probability of all classes that are more probable than it,

        s(x, c) = Σ over c' with π(c'|x) > π(c|x) of π(c'|x)              and the set is {c : s(x, c) ≤ threshold}

    with the threshold that split conformal prediction takes from held-out labels (Romano, Sesia and Candès, 2020). A
    set holds the label with probability ``level`` or more, over new data like these, whatever the model; it is large
    where the model is unsure. It is never empty, the most probable class having the score 0; the price is that a model
    which is right more often than ``level`` has sets of one class and a coverage of its accuracy.

    With ``randomized`` the class counts itself by a random share u, s + u·π(c|x) with u uniform in [0, 1], one for each
    input. Scores then have no ties, the coverage is less than ``level`` + 1/(n+1), and sets may be empty. u is a hash
    of the input's own probabilities and the seed: sets do not depend on which inputs come together, all at once or one
    by one, and inputs with the same probabilities, to the last bit, have the same set.

    >>> probs = torch.tensor([[0.75, 0.125, 0.125], [0.5, 0.375, 0.125], [0.5, 0.25, 0.25]])
    >>> sets = ConformalSets.fit(probs, torch.tensor([0, 1, 0]), level=0.75)  # scores 0, 0.5 and 0
    >>> sets.threshold
    0.5
    >>> sets.of(probs)  # classes before which there is 0.5 or less
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """

    level: float
    threshold: float
    examples: int
    randomized: bool = False
    seed: int = 0
    posterior: Posterior | None = field(default=None, repr=False)
    num_samples: int = field(default=32, repr=False)
    batch_norm: Any = field(default=None, repr=False, compare=False)
    dropout: bool = field(default=False, repr=False)

    @classmethod
    def fit(
        cls, probs: Tensor, labels: Tensor, level: float = 0.9, *, randomized: bool = False, seed: int = 0
    ) -> ConformalSets:
        """From probabilities (n, C), of any model, and the labels (n,) of data that it was not trained on."""
        check_level(level)
        check_flag("randomized", randomized)
        data = labelled(probs, labels, "multiclass")
        scores = _scores(data.probs, _shares(data.probs, randomized, check_seed(seed)))
        own = scores.gather(-1, data.labels[:, None])[:, 0]
        threshold = float(conformal_quantile(own, level, "conformal_sets"))
        return cls(level, threshold, len(own), randomized, seed)

    def of(self, probs: Tensor, *, seed: int | None = None) -> Tensor:
        """Which classes are in the sets: true or false, in the shape of ``probs``, classes last.

        ``seed`` is that of the random shares, if there are any; by default that of the calibration.
        """
        if isinstance(probs, Tensor) and probs.numel() == 0:
            return torch.zeros_like(probs, dtype=torch.bool)
        wide = probabilities(check_tensor("probs", probs), rows=True)
        flat = wide.reshape(-1, wide.shape[-1])
        shares = _shares(flat, self.randomized, self.seed if seed is None else check_seed(seed))
        return (_scores(flat, shares) <= _with_rounding(self.threshold)).reshape(wide.shape)

    def predict(self, x: Any, *, seed: int | None = None) -> Tensor:
        """The sets for ``x``, with the posterior and as many samples as in the calibration."""
        if self.posterior is None:
            raise ValueError(
                "These sets were made of probabilities, and know no posterior. Use sets.of(probs), or make them with "
                "conformal_sets(posterior, x, y)."
            )
        how: Any = {"batch_norm": self.batch_norm, "dropout": self.dropout}
        prediction = self.posterior.predict(x, self.num_samples, self.seed, **how)
        return self.of(_classes(prediction.probs, self.posterior), seed=seed)


def conformal_sets(
    posterior: Posterior,
    data: Any,
    y: Any = None,
    *,
    level: float = 0.9,
    randomized: bool = False,
    num_samples: int = 32,
    seed: int = 0,
    batch_norm: Any = None,
    dropout: bool = False,
) -> ConformalSets:
    """Sets of classes that hold the label with probability ``level``, calibrated on held-out data.

    ``data`` are inputs with labels ``y``, or a loader of pairs; neither the training data nor the test data. At least
    level/(1−level) of them, 9 for 90 %; some hundred for a coverage that is close to it in *this* calibration set and
    not only on average: over calibration sets, the coverage is spread by about √(level·(1−level)/n). A "bernoulli"
    posterior has the classes 0 and 1. See :class:`ConformalSets` for what is in a set, and ``randomized``.
    ``batch_norm`` and ``dropout`` are those of ``posterior.predict``, here and in predictions.

    >>> import vprop
    >>> model, x, y = torch.nn.Linear(2, 3), torch.randn(50, 2), torch.arange(50) % 3
    >>> posterior = vprop.Vprop(model.parameters(), num_data=50).posterior(model, likelihood="categorical")
    >>> sets = conformal_sets(posterior, x, y, level=0.8)
    >>> sets.predict(x[:4]).shape, bool((sets.predict(x).gather(1, y[:, None])).float().mean() >= 0.8)
    (torch.Size([4, 3]), True)
    """
    where = "conformal_sets"
    check_level(level)
    how: Any = {"batch_norm": training_inputs(batch_norm), "dropout": dropout}
    batches = held_out_batches(posterior, data, y, where)
    check_kind(posterior, ("categorical", "bernoulli"), where)
    prediction, labels = held_out_predictions(posterior, batches, num_samples, seed, where, **how)
    probs = _classes(prediction.probs, posterior)
    labels = labels.reshape(probs.shape[:-1]).long()
    fitted = ConformalSets.fit(probs, labels, level, randomized=randomized, seed=seed)
    return ConformalSets(level, fitted.threshold, fitted.examples, randomized, seed, posterior, num_samples, **how)


def _classes(probs: Tensor, posterior: Posterior) -> Tensor:
    """Probabilities with classes last; of a binary label, those of 0 and of 1."""
    if posterior.likelihood == "categorical":
        return probs
    if probs.dim() > 1 and probs.shape[-1] == 1:
        probs = probs[..., 0]
    if probs.dim() != 1:
        raise ValueError(
            f"conformal_sets(posterior, …): the posterior predicts several labels, of shape {tuple(probs.shape)}, must "
            "be one. Make sets for each by itself: ConformalSets.fit(torch.stack([1 - p, p], -1), y) for label p, y."
        )
    return torch.stack([1 - probs, probs], dim=-1)


def _scores(probs: Tensor, shares: Tensor | None) -> Tensor:
    """For each class of (n, C) the mass of those that are more probable, and the share u of its own."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    # Classes of one probability come before none of each other: they have the score of the first of them.
    first = torch.searchsorted(-ordered, -ordered, side="left")
    before = before.gather(-1, first)
    if shares is not None:
        before = before + shares[:, None] * ordered
    return torch.empty_like(before).scatter_(-1, order, before)


def _with_rounding(threshold: float) -> float:
    """The threshold and what roundings of a logit, and of a number below 1, do to a sum of probabilities there.

    By a change d of logits a sum S of some probabilities changes by S(1−S)·d at most: near 1 that is little, where the
    scores of a model which is very sure are close together.
    """
    return threshold + ROUNDING * max(0.0, threshold * (1 - threshold)) + 2 * torch.finfo(torch.float32).eps


def _shares(probs: Tensor, randomized: bool, seed: int) -> Tensor | None:
    """A number in [0, 1) for each row of (n, C), a hash of its probabilities with the seed.

    It depends on nothing else, not on the place of the row among others. Of inputs one by one none has the share of
    another, and the score of an example is a function of the example: exchangeable scores are all that coverage needs.
    """
    if not randomized:
        return None
    form, key = struct.Struct(f"<{probs.shape[-1]}d"), seed.to_bytes(8, "little")
    rows = (probs.double() + 0.0).tolist()  # −0 becomes 0
    hashes = [hashlib.blake2b(form.pack(*row), digest_size=8, key=key).digest() for row in rows]
    shares = [(int.from_bytes(digest, "little") >> 11) / 2**53 for digest in hashes]
    return torch.tensor(shares, dtype=torch.float64, device="cpu").to(probs.device)
