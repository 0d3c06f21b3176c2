"""Probabilities and error bars that hold, fitted on data that neither trained the model nor will judge it.

Three numbers of a posterior, each found by the log-likelihood of held-out data: a temperature of the logits, a scale of
the weights' variance, a scale of the observations' noise. And split conformal prediction, which turns the outputs of
any model into sets of classes, or intervals, that hold the truth as often as was asked for.
"""

from vprop.calibration._result import CalibrationFit
from vprop.calibration.intervals import ConformalIntervals, conformal_intervals
from vprop.calibration.noise import fit_noise_scale
from vprop.calibration.sets import ConformalSets, conformal_sets
from vprop.calibration.temperature import fit_temperature
from vprop.calibration.variance import fit_variance_scale

__all__ = [
    "CalibrationFit",
    "ConformalIntervals",
    "ConformalSets",
    "conformal_intervals",
    "conformal_sets",
    "fit_noise_scale",
    "fit_temperature",
    "fit_variance_scale",
]
