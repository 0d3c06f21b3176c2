"""How good an answer is: predictions on held-out data, and variances beside those they should be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vprop import VariationalOptimizer
from vprop.baselines import MCDropout
from vprop.lab.engine.problem import Problem
from vprop.lab.engine.run import Training
from vprop.lab.engine.store import finite_or_none
from vprop.metrics import accuracy, expected_calibration_error, nll

METRICS = ("accuracy", "nll", "ece")
QUANTILES = {"low": 0.1, "median": 0.5, "high": 0.9}


def score(training: Training, samples: int) -> dict[str, float | None]:
    """The scores on the test data of what was trained; ``None`` where it left the finite numbers.

    Predictions are averaged over ``samples`` weights, with the same noise for every posterior.
    """
    task, model, kind = training.problem, training.model, training.method.kind
    model.eval()
    try:
        with torch.no_grad():
            if kind == "posterior":
                assert isinstance(training.optimizer, VariationalOptimizer)
                posterior = training.optimizer.posterior(model)
                return score_outputs(task, posterior.predict(task.test_x, samples, seed=0).samples)
            if kind == "dropout":
                prediction = MCDropout(model, likelihood=task.likelihood).predict(task.test_x, samples)
                return score_outputs(task, prediction.samples)
            return score_outputs(task, model(task.test_x)[None])
    except (FloatingPointError, torch.linalg.LinAlgError):
        return dict.fromkeys(METRICS)
    finally:
        model.train()


def score_outputs(task: Problem, outputs: Tensor) -> dict[str, float | None]:
    """The scores of the mean probabilities under several samples of the model's output, the first dimension."""
    # float64, because a float32 probability of a sure but wrong prediction would be 0, and the log-loss infinite
    outputs = outputs.double()
    if task.likelihood == "bernoulli":
        return score_probs(task, torch.cat([(-outputs).sigmoid().mean(0), outputs.sigmoid().mean(0)], dim=-1))
    return score_probs(task, outputs.softmax(-1).mean(0))


def score_probs(task: Problem, probs: Tensor) -> dict[str, float | None]:
    """The scores of probabilities, one column per class, of two classes too; ``None`` for what is not finite."""
    if not bool(torch.isfinite(probs).all()):
        return dict.fromkeys(METRICS)
    labels = task.test_y.long().reshape(-1)
    # Of two classes the calibration is that of label 1; its log-loss takes both columns, because 1 − p is rounded.
    of_label = probs[:, 1] if task.likelihood == "bernoulli" else probs
    values = {
        "accuracy": accuracy(probs, labels),
        "nll": nll(probs, labels),
        "ece": expected_calibration_error(of_label, labels),
    }
    return {name: finite_or_none(value) for name, value in values.items()}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """All elements as one float64 vector."""
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])


def ratio_quantiles(variance: Tensor, reference: Tensor) -> dict[str, Any]:
    """Quantiles over the weights of variance divided by reference."""
    ratios = variance.double() / reference.double()
    return {name: float(ratios.quantile(share)) for name, share in QUANTILES.items()}
