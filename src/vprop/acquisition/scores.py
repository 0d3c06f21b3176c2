"""How much the label of one example is worth, from a prediction for many of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vprop.posterior import LinearizedPrediction, Prediction, PredictionSummary


def entropy(prediction: Prediction) -> Tensor:
    """Total uncertainty of each example's label, H[y] in nats: high for what is unknown, and for what is noise.

    Classes: the entropy of the mean of the samples' probabilities. Regression: that of a Gaussian with the
    prediction's variance, ½ log 2πe·Var[y], summed over outputs.

    >>> logits = torch.tensor([[[0.0, 0.0], [9.0, -9.0]], [[0.0, 0.0], [9.0, -9.0]]])
    >>> [round(value, 3) for value in entropy(Prediction(logits, "categorical")).tolist()]
    [0.693, 0.0]
    """
    if _is_regression(prediction):
        return _over_outputs(0.5 * (2 * math.pi * math.e * prediction.variance.double()).log())
    return torch.special.entr(_label_probabilities(prediction)).sum(-1)


def mutual_information(prediction: Prediction) -> Tensor:
    """What each example's label would tell about the weights (BALD), in nats; noise that no weights explain is not in
    it.

        I(y; θ) = H[y] − E_q H[y|θ]

    Classes: from the samples. Regression: of Gaussians, ½ log(Var[y]/E_q[v]), where v is the noise, summed over
    outputs.

    >>> agree, differ = [[4.0, -4.0], [4.0, -4.0]], [[4.0, -4.0], [-4.0, 4.0]]
    >>> logits = torch.tensor([agree, differ]).transpose(0, 1)  # two samples, two examples
    >>> [round(value, 3) for value in mutual_information(Prediction(logits, "categorical")).tolist()]
    [0.0, 0.69]
    """
    if _is_regression(prediction):
        return _over_outputs(0.5 * (prediction.variance.double() / prediction.aleatoric_variance.double()).log())
    if _knows_itself(prediction):
        _label_probabilities(prediction)  # one label for each example, and finite
        own = prediction.mutual_information.double()
        return own[..., 0] if own.dim() == 2 else own
    probs = class_probabilities(prediction)
    expected = torch.special.entr(probs).sum(-1).mean(0)
    return (torch.special.entr(probs.mean(0)).sum(-1) - expected).clamp_min(0)


def variation_ratio(prediction: Prediction) -> Tensor:
    """Share of the samples that do not vote, with their most probable class, for the class with most votes.

    Between 0 and 1 − 1/C; with S samples it has few values, and so many ties.

    >>> logits = torch.tensor([[[2.0, 0.0]], [[1.0, 0.0]], [[0.0, 5.0]]])
    >>> [round(value, 3) for value in variation_ratio(Prediction(logits, "categorical")).tolist()]
    [0.333]
    """
    probs = class_probabilities(prediction)
    votes = torch.nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).sum(0)
    return 1 - votes.max(-1).values.double() / len(probs)


def least_confidence(prediction: Prediction) -> Tensor:
    """1 − probability of the most probable class, by the mean of the samples.

    >>> least_confidence(Prediction(torch.zeros(1, 2, 4), "categorical")).tolist()
    [0.75, 0.75]
    """
    return 1 - _label_probabilities(prediction).max(-1).values


def class_probabilities(prediction: Prediction) -> Tensor:
    """Probabilities (samples, examples, classes) in float64; a binary label has the classes 0 and 1."""
    if not isinstance(prediction, Prediction) or prediction.likelihood not in ("categorical", "bernoulli"):
        found = f"likelihood={prediction.likelihood!r}" if isinstance(prediction, Prediction) else "no prediction"
        raise ValueError(
            f"acquisition: got {found}, must be a Prediction with likelihood='categorical' or 'bernoulli'. Use "
            "posterior.predict(x), of a posterior made with likelihood=...; entropy and mutual_information also take a "
            "regression."
        )
    logits = prediction.samples.double()
    if prediction.likelihood == "bernoulli":
        logits = logits[..., 0] if logits.dim() == 3 and logits.shape[-1] == 1 else logits
        logits = torch.stack([torch.zeros_like(logits), logits], dim=-1)
    if logits.dim() != 3:
        raise ValueError(
            f"acquisition: the prediction has samples of shape {tuple(prediction.samples.shape)}, must be one label "
            "for each example: (samples, examples, classes), or (samples, examples) for a binary one."
        )
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("acquisition: the prediction has NaN or infinite logits. The model has diverged.")
    return logits.softmax(-1)


def _knows_itself(prediction: Prediction) -> bool:
    """Whether probabilities and mutual information come from elsewhere than samples: they were kept, or are exact."""
    own = isinstance(prediction, PredictionSummary | LinearizedPrediction)
    return own and prediction.likelihood in ("categorical", "bernoulli")


def _label_probabilities(prediction: Prediction) -> Tensor:
    """Predictive probabilities (examples, classes) in float64; a binary label has the classes 0 and 1."""
    if not _knows_itself(prediction):
        return class_probabilities(prediction).mean(0)
    probs = prediction.probs.double()
    if prediction.likelihood == "bernoulli":
        probs = probs[..., 0] if probs.dim() == 2 and probs.shape[-1] == 1 else probs
        probs = torch.stack([1 - probs, probs], dim=-1)
    if probs.dim() != 2:
        raise ValueError(
            f"acquisition: the prediction has probabilities of shape {tuple(prediction.probs.shape)}, must be one "
            "label for each example: (examples, classes), or (examples,) for a binary one."
        )
    if not bool(torch.isfinite(probs).all()):
        raise ValueError("acquisition: the prediction has NaN among its probabilities. The model has diverged.")
    return probs


def _is_regression(prediction: Prediction) -> bool:
    return isinstance(prediction, Prediction) and prediction.likelihood in ("gaussian", "heteroscedastic")


def _over_outputs(values: Tensor) -> Tensor:
    return values.flatten(1).sum(-1) if values.dim() > 1 else values
