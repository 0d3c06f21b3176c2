"""Probabilities with the labels they were meant to predict: which task it is, and whether they fit together."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vprop.metrics._arguments import check_tensor, invalid, shape_of

Task = Literal["binary", "multiclass", "multilabel"]

SHAPES = {
    "binary": "(n,) or (n, 1) with labels (n,) or (n, 1)",
    "multiclass": "(n, C) with C >= 2 and labels (n,)",
    "multilabel": "(n, L) with labels (n, L)",
}
SHAPE_REMEDIES = {
    "binary": "Pass the probability of label 1, probs[..., 1] of a softmax over two classes.",
    "multiclass": "Classes are the last dimension: probs.movedim(1, -1) brings those of an image there.",
    "multilabel": "Pass one probability and one 0/1 label for each example and label.",
    None: "Reshape one of them; classes, or labels, are the last dimension.",
}


class Labelled(NamedTuple):
    """Probabilities and labels in one of two forms; leading dimensions have become one.

    For ``"multiclass"`` ``probs`` is (n, C) and ``labels`` holds class numbers (n,). Otherwise both are (n, L), the
    labels 0 or 1; a binary task is the case L = 1. Probabilities are float64, ``dtype`` is what they came in.
    """

    task: Task
    probs: Tensor
    labels: Tensor
    dtype: torch.dtype


def labelled(probs: Tensor, labels: Tensor, task: Task | None) -> Labelled:
    """Check both tensors, find the task where it is not given, and bring them into one form."""
    check_task(task)
    check_tensor("probs", probs)
    check_tensor("labels", labels)
    found = _infer(probs, labels) if task is None else task
    if found is None or not _fits(probs, labels, found):
        allowed = "; ".join(SHAPES.values()) if task is None else f"{SHAPES[task]} for task={task!r}"
        shapes = f"has shape {shape_of(probs)} with labels of shape {shape_of(labels)}"
        raise invalid("probs", shapes, allowed, SHAPE_REMEDIES[task])
    if task is None and found == "multilabel" and probs.dim() > 2:
        raise invalid(
            "probs",
            f"has shape {shape_of(probs)} as labels has",
            "of one or two dimensions where the task is to be inferred",
            "Pass task='multilabel' if the last dimension holds labels, task='binary' if each element is an example.",
        )
    wide = probabilities(probs, rows=found == "multiclass")
    labels = labels.detach().to(probs.device)
    if found == "multiclass":
        classes = probs.shape[-1]
        return Labelled(found, wide.reshape(-1, classes), _class_numbers(labels, classes).reshape(-1), probs.dtype)
    zeros_and_ones = _zeros_and_ones(labels)
    if task is None and found == "multilabel":
        _refuse_one_hot(probs, wide, zeros_and_ones)
    width = 1 if found == "binary" else probs.shape[-1]
    return Labelled(found, wide.reshape(-1, width), zeros_and_ones.reshape(-1, width), probs.dtype)


def check_task(task: str | None) -> None:
    """Refuse a task that is not one of ours."""
    if task is not None and task not in get_args(Task):
        names = ", ".join(repr(name) for name in get_args(Task))
        raise ValueError(f"Invalid task={task!r}: must be one of {names}. Leave it out to infer it from the shapes.")


def probabilities(probs: Tensor, *, rows: bool) -> Tensor:
    """``probs`` in float64 and inside [0, 1]; with ``rows``, those of the last dimension must sum to 1.

    What rounding does is forgiven: the mean of float32 softmaxes can be 1.0000001, and then counts as 1.
    """
    if not probs.is_floating_point():
        remedy = "Pass what softmax or sigmoid returns, not predicted classes."
        raise invalid("probs", f"has dtype {probs.dtype}", "floating-point probabilities", remedy)
    wide = probs.detach().to(torch.float64)
    tolerance = _tolerance(probs.dtype)
    low, high = (float(end) for end in wide.aminmax())
    if not (low >= -tolerance and high <= 1 + tolerance):  # written so that NaN is refused as well
        remedy = "Pass what softmax or sigmoid returns, not logits; NaN comes from a model that has diverged."
        raise invalid("probs", f"has values from {low:.6g} to {high:.6g}", "in [0, 1]", remedy)
    if rows:
        sums = wide.sum(-1).flatten()
        worst = float(sums[(sums - 1).abs().argmax()])
        if abs(worst - 1) > tolerance:
            remedy = "Pass a softmax over the last dimension, or task='multilabel' if the labels are independent."
            raise invalid("probs", f"has a row with the sum {worst:.6g}", "rows with the sum 1", remedy)
    return wide.clamp(0, 1)


def _tolerance(dtype: torch.dtype) -> float:
    """Probabilities computed in float32 may have been widened since, so float64 is trusted no further."""
    return max(1e-4, 8 * torch.finfo(dtype).eps)


def _infer(probs: Tensor, labels: Tensor) -> Task | None:
    """The task that the shapes leave possible, if it is one."""
    single_column = probs.dim() >= 2 and probs.shape[-1] == 1
    if (probs.dim() <= 1 or single_column) and _fits(probs, labels, "binary"):
        return "binary"
    for task in ("multiclass", "multilabel"):
        if _fits(probs, labels, task):
            return task
    return None


def _fits(probs: Tensor, labels: Tensor, task: Task) -> bool:
    if task == "binary":
        return _without_last_one(probs) == _without_last_one(labels)
    if task == "multiclass":
        return probs.dim() >= 1 and probs.shape[-1] >= 2 and probs.shape[:-1] == labels.shape
    return probs.dim() >= 2 and probs.shape == labels.shape


def _without_last_one(tensor: Tensor) -> torch.Size:
    """(n, 1) counts as (n,); no other broadcasting, (1, n) is not (n,)."""
    return tensor.shape[:-1] if tensor.dim() >= 2 and tensor.shape[-1] == 1 else tensor.shape


def _class_numbers(labels: Tensor, classes: int) -> Tensor:
    if labels.is_floating_point():
        raise invalid("labels", f"has dtype {labels.dtype}", "class numbers of an integer dtype", "Use labels.long().")
    numbers = labels.long()
    low, high = (int(end) for end in numbers.aminmax())
    if low < 0 or high >= classes:
        found = f"has values from {low} to {high}"
        remedy = "Leave out examples without a label; class numbers start at 0."
        raise invalid("labels", found, f"in 0..{classes - 1} for probs with {classes} classes", remedy)
    return numbers


def _zeros_and_ones(labels: Tensor) -> Tensor:
    wide = labels.to(torch.float64)
    if not bool(((wide == 0) | (wide == 1)).all()):
        low, high = (float(end) for end in wide.aminmax())
        remedy = "Use (labels > 0) if they are -1 and 1."
        raise invalid("labels", f"has values from {low:g} to {high:g}", "0 or 1", remedy)
    return wide


def _refuse_one_hot(probs: Tensor, wide: Tensor, labels: Tensor) -> None:
    """One 1 per row beside rows of probabilities that sum to 1 are more likely classes than independent labels."""
    normalised = bool(((wide.sum(-1) - 1).abs() <= _tolerance(probs.dtype)).all())
    if normalised and bool((labels.sum(-1) == 1).all()):
        raise invalid(
            "labels",
            f"has shape {shape_of(labels)} and looks like one-hot classes",
            "class numbers, or independent 0/1 labels",
            "Pass labels.argmax(-1) for classes, or task='multilabel' if the labels are independent.",
        )
