"""Uncertainty of a label, and how well it tells unknown inputs from known ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.metrics._arguments import check_tensor, has_nan, invalid, real, shape_of
from vprop.metrics._labelled import Task, check_task, probabilities


def predictive_entropy(probs: Tensor, *, task: Task | None = None) -> Tensor:
    """Entropy of each predicted label, in nats: a float64 tensor with one value per label.

    −Σ_c p(c) log p(c) over the last dimension for classes; −p log p − (1−p) log(1−p) element by element for binary and
    multilabel tasks. Without ``task``, (n,) and (n, 1) are binary and everything else holds classes. Of a
    ``Prediction`` it is the ``entropy``.

    >>> predictive_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000], dtype=torch.float64)
    >>> predictive_entropy(torch.tensor([0.5, 1.0]))
    tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    check_task(task)
    check_tensor("probs", probs)
    if task is None:
        task = "binary" if probs.dim() <= 1 or probs.shape[-1] == 1 else "multiclass"
    if task == "multiclass" and (probs.dim() == 0 or probs.shape[-1] < 2):
        remedy = "One probability per example is task='binary'."
        raise invalid("probs", f"has shape {shape_of(probs)}", "(n, C) with C >= 2 for task='multiclass'", remedy)
    wide = probabilities(probs, rows=task == "multiclass")
    terms = torch.special.entr(wide)
    return terms.sum(-1) if task == "multiclass" else terms + torch.special.entr(1 - wide)


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Area under the ROC curve: the probability that an unknown input scores higher than a known one, ties ½.

    (#{sₒ > sᵢ} + ½ #{sₒ = sᵢ}) / (n_out · n_in) over all pairs, from ranks. Scores are uncertainties of any scale, of
    inputs like the training data (``scores_in``) and of others (``scores_out``): ``prediction.entropy``, the total, or
    ``prediction.mutual_information``, the part that is due to the weights. 1 tells them apart perfectly, ½ is chance,
    below ½ the unknown inputs look *more* certain. NaN among the scores gives NaN.

    >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))  # five of six pairs, and a tie
    0.9166666666666666
    """
    known, unknown = real("scores_in", scores_in).flatten(), real("scores_out", scores_out).flatten()
    if has_nan(known, unknown):
        return math.nan
    known, unknown = known.sort().values, unknown.to(known.device)
    below = torch.searchsorted(known, unknown, side="left").sum()
    not_above = torch.searchsorted(known, unknown, side="right").sum()
    return int(below + not_above) / (2 * len(known) * len(unknown))
