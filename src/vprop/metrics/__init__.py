"""How good predictions are: scores, calibration, out-of-distribution detection, error bars.

Functions of tensors, computed in float64 and without gradients; a score is a Python float, a mean over examples. The
tensors may come from a ``Prediction`` (``probs``, ``entropy``, ``mean``, ``variance``) or from anywhere else.
"""

from vprop.metrics.calibration import Reliability, expected_calibration_error, reliability
from vprop.metrics.classification import accuracy, brier, nll
from vprop.metrics.regression import coverage, crps_gaussian, gaussian_nll, rmse
from vprop.metrics.samples import crps_samples, sample_coverage
from vprop.metrics.uncertainty import auroc, predictive_entropy

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "brier",
    "coverage",
    "crps_gaussian",
    "crps_samples",
    "expected_calibration_error",
    "gaussian_nll",
    "nll",
    "predictive_entropy",
    "reliability",
    "rmse",
    "sample_coverage",
]
