"""What Vprop is compared with: the paper's baselines, and its ground truth."""

from vprop.baselines.bbvi import BBVI
from vprop.baselines.dropout import MCDropout
from vprop.baselines.exact import ExactVI, exact_vi_logistic
from vprop.baselines.kalman import ExtendedKalmanFilter
from vprop.baselines.natural_gradient import OnlineNaturalGradient, RegularizedNaturalGradient
from vprop.baselines.newton import Newton

__all__ = [
    "BBVI",
    "ExactVI",
    "ExtendedKalmanFilter",
    "MCDropout",
    "Newton",
    "OnlineNaturalGradient",
    "RegularizedNaturalGradient",
    "exact_vi_logistic",
]
