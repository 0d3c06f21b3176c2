"""What a Hugging Face model returns, and which of its labels the loss is a mean over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from vprop.checks import check_model
from vprop.integrations._scores import UNLABELLED
from vprop.likelihood import Likelihood
from vprop.precision import as_tensor


def num_targets(examples: Iterable[Any], model: nn.Module, *, label_name: str = "labels") -> int:
    """How many labels the mean loss of ``model`` stands for: the ``num_data`` of its optimizer.

    ``examples`` is the training set, or a loader over it where only the collator makes the labels. A classifier of
    sequences has one label per example. The loss of a language model is a mean over tokens, so N is the number of
    tokens with a label (not −100), without the first of each sequence if the model predicts the next token.

    >>> import torch
    >>> num_targets([{"labels": 1}, {"labels": 0}], torch.nn.Linear(1, 2))
    2
    >>> num_targets([{"labels": [5, 7, -100]}], torch.nn.Linear(1, 2))
    2
    """
    check_model(model, "num_targets(examples, model)")
    if not isinstance(examples, Iterable):
        raise TypeError(
            f"num_targets(examples, model): got {type(examples).__name__}, must be the training set or a loader over "
            "it. Pass the train_dataset of the Trainer."
        )
    shift, total = shifts_labels(model), 0
    for example in examples:
        if not isinstance(example, Mapping) or label_name not in example:
            found = sorted(example) if isinstance(example, Mapping) else type(example).__name__
            raise ValueError(
                f"num_targets(examples): must be dicts with {label_name!r}, found {found}. Where a collator makes the "
                "labels, pass a loader that uses it: DataLoader(train_set, batch_size=..., collate_fn=collator)."
            )
        labels = as_tensor(example[label_name])
        if shift and labels.dim():
            labels = labels[..., 1:]
        total += int((labels != UNLABELLED).sum())
    return total


def base_model_of(model: nn.Module) -> nn.Module:
    """The transformer inside a peft model; any other model itself."""
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def shifts_labels(model: nn.Module) -> bool:
    """Whether position i of the model's output predicts label i+1."""
    base = base_model_of(model)
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(getattr(base, "loss_function", None), "__name__", "") == "ForCausalLMLoss"


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """The logits in what a model returned for a batch with labels."""
    if isinstance(output, tuple | list):  # (loss, logits, …), as the Trainer reads it
        logits = output[1] if len(output) > 1 else None
    elif isinstance(output, Mapping):
        logits = output.get("logits")
    else:
        logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"{type(base_model_of(model)).__name__} returned no logits to score. Let its forward return a dict with "
            "'loss' and 'logits', or use PosteriorCallback(num_samples=0), which does not score predictions."
        )
    return logits


def kind_of(model: nn.Module, logits: Tensor, labels: Tensor) -> Likelihood:
    """Which likelihood the model's loss belongs to, by the rule of Hugging Face's heads."""
    problem = getattr(getattr(base_model_of(model), "config", None), "problem_type", None)
    if problem == "single_label_classification" or (problem is None and not labels.is_floating_point()):
        return "categorical"
    if problem == "regression" or (problem is None and logits.shape[-1] == 1):
        return "gaussian"
    return "bernoulli"


def aligned(logits: Tensor, labels: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logits (…, classes) with the labels (…) that they predict, some of which may be −100."""
    if logits.dim() == 3 and shifts_labels(model):
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    if labels.numel() == logits.shape[:-1].numel():
        labels = labels.reshape(logits.shape[:-1])
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}: there must be a "
            "label for each row of logits. Pass PosteriorCallback(likelihood=...) if these are no class numbers, or "
            "num_samples=0 to leave predictions unscored."
        )
    return logits, labels
