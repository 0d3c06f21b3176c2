"""Scores of predicted probabilities: accuracy, log-loss, Brier score.

All take ``probs`` and ``labels`` of one of three tasks, which is inferred from the shapes where they leave no doubt:

============  =======================  ========================================
task          probs                    labels
============  =======================  ========================================
binary        (n,) or (n, 1), of y=1   0 or 1 (integer, bool, float), (n,) or (n, 1)
multiclass    (n, C), rows sum to 1    class numbers (n,)
multilabel    (n, L), independent      0 or 1, (n, L)
============  =======================  ========================================

n stands for any number of leading dimensions (of binary and multilabel tasks only one is inferred: pass ``task``).
Whatever is no probability, NaN included, is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vprop.metrics._labelled import Task, labelled


def accuracy(probs: Tensor, labels: Tensor, *, task: Task | None = None) -> float:
    """Share of labels that are the most probable ones; a tie goes to the lower class.

    For binary and multilabel tasks the prediction is 1 where p > ½, and the share is over all labels of all examples.

    >>> accuracy(torch.tensor([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.1, 0.9]]), torch.tensor([0, 1, 1, 1]))
    0.75
    """
    data = labelled(probs, labels, task)
    predicted = data.probs.argmax(-1) if data.task == "multiclass" else data.probs > 0.5
    return float((predicted == data.labels).double().mean())


def nll(probs: Tensor, labels: Tensor, *, task: Task | None = None) -> float:
    """Mean negative log-probability of the labels (log-loss), in nats.

    −1/n Σᵢ log pᵢ(yᵢ); for binary and multilabel tasks p(y) = p where y = 1 and 1−p where y = 0, and the mean is over
    all labels of all examples. A label that was given probability 0 makes it infinite, however many others were right:
    clipping would put a number that nobody chose in its place.

    >>> round(nll(torch.tensor([0.8, 0.4]), torch.tensor([1, 0])), 4)  # -(log 0.8 + log 0.6) / 2
    0.367
    >>> nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    inf
    """
    data = labelled(probs, labels, task)
    if data.task == "multiclass":
        log_probs = data.probs.gather(-1, data.labels[:, None]).log()
    else:
        log_probs = torch.where(data.labels == 1, data.probs.log(), torch.log1p(-data.probs))
    return float((-log_probs).mean())


def brier(probs: Tensor, labels: Tensor, *, task: Task | None = None) -> float:
    """Brier score, the mean squared distance of probabilities and labels.

    Multiclass, as in Brier (1950): 1/n Σᵢ Σ_c (pᵢ(c) − 1{yᵢ=c})², a sum over classes, from 0 to 2. Binary, as is
    customary: 1/n Σᵢ (pᵢ − yᵢ)², from 0 to 1, half of what two classes give. Multilabel: the mean of the binary scores.

    >>> round(brier(torch.tensor([[0.75, 0.25]]), torch.tensor([0])), 4)
    0.125
    >>> round(brier(torch.tensor([0.25]), torch.tensor([0])), 4)
    0.0625
    """
    data = labelled(probs, labels, task)
    if data.task == "multiclass":
        one_hot = torch.nn.functional.one_hot(data.labels, data.probs.shape[-1])
        return float((data.probs - one_hot).square().sum(-1).mean())
    return float((data.probs - data.labels).square().mean())
