"""How good predictions are: scores, calibration, out-of-distribution detection, selective prediction, error bars.

Functions of tensors, computed in float64 and without gradients; a score is a Python float, a mean over examples. The
tensors may come from a ``Prediction`` (``probs``, ``entropy``, ``mean``, ``variance``) or from anywhere else.
"""

from vprop.metrics.calibration import Reliability, expected_calibration_error, reliability
from vprop.metrics.classification import accuracy, brier, nll
from vprop.metrics.frequencies import CalibrationCurve, calibration_curve, wilson_interval
from vprop.metrics.outliers import OutlierCurve, aupr, fpr_at_tpr, outlier_curve
from vprop.metrics.regression import coverage, crps_gaussian, gaussian_nll, rmse
from vprop.metrics.samples import crps_samples, sample_coverage
from vprop.metrics.selective import RiskCoverage, aurc, risk_coverage
from vprop.metrics.uncertainty import auroc, predictive_entropy

__all__ = [
    "CalibrationCurve",
    "OutlierCurve",
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "calibration_curve",
    "coverage",
    "crps_gaussian",
    "crps_samples",
    "expected_calibration_error",
    "fpr_at_tpr",
    "gaussian_nll",
    "nll",
    "outlier_curve",
    "predictive_entropy",
    "reliability",
    "risk_coverage",
    "rmse",
    "sample_coverage",
    "wilson_interval",
]
