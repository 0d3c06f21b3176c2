"""A scale for the noise of observations."""

from __future__ import annotations

import copy
import math
from typing import Any

from vprop.calibration._held_out import check_enough, check_kind, held_out_batches, held_out_predictions
from vprop.calibration._result import AnyPosterior, CalibrationFit
from vprop.calibration._search import minimum

RANGE = 1e-5, 1e5


def fit_noise_scale(
    posterior: AnyPosterior,
    data: Any,
    y: Any = None,
    *,
    num_samples: int = 32,
    seed: int = 0,
    batch_norm: Any = None,
    dropout: bool = False,
) -> CalibrationFit[AnyPosterior]:
    """The scale c of the observations' noise that makes held-out targets most likely, for a regression.

        Var[y] = Var_q[f] + c·E_q[v]             c minimizes mean of ½[log 2πVar[y] + (y − E_q[f])²/Var[y]]

    Where the weights are certain, Var_q[f] = 0, it is the mean of (y − f)²/v. A network fits the rows it was trained on
    more closely than others, so that noise which it learned from them is too small: this mends it. The posterior's
    ``noise_variance`` is c times the former one; of a "heteroscedastic" model, the log-variances get log c added.
    Outputs are computed once. The data are those of ``fit_temperature``: held out of training, and not the test data.
    ``batch_norm`` and ``dropout`` are those of ``posterior.predict``: give both the same.

    >>> import torch, vprop
    >>> model = torch.nn.Linear(1, 1)
    >>> posterior = vprop.Vprop(model.parameters(), num_data=10**9).posterior(
    ...     model, likelihood="gaussian", noise_variance=1.0)
    >>> x = torch.randn(50, 1)
    >>> y = model(x).detach() + torch.tensor([[-0.5], [0.5]]).repeat(25, 1)
    >>> fit = fit_noise_scale(posterior, x, y)
    >>> fit  # (log 2π + ¼)/2, and (log 2π + log ¼ + 1)/2
    noise scale 0.25: held-out log-loss 1.0439 → 0.7258 (50 examples)
    >>> round(fit.posterior.noise_variance, 4)
    0.25
    """
    where = "fit_noise_scale"
    batches = held_out_batches(posterior, data, y, where)
    check_kind(posterior, ("gaussian", "heteroscedastic"), where)
    how: Any = {"batch_norm": batch_norm, "dropout": dropout}
    prediction, targets = held_out_predictions(posterior, batches, num_samples, seed, where, **how)
    examples = check_enough(targets, where)
    weights, noise = prediction.epistemic_variance.double(), prediction.aleatoric_variance.double()
    if not bool((noise > 0).all()):
        raise ValueError(
            f"{where}(posterior, …): the noise variance has zeros, must be > 0: nothing can be multiplied. Make the "
            "posterior with noise_variance=..., any positive number."
        )
    squared_error = (targets.double() - prediction.mean.double()).square()

    def loss(scale: float) -> float:
        variance = weights + scale * noise
        return float(0.5 * ((2 * math.pi * variance).log() + squared_error / variance).mean())

    found = minimum(loss, *RANGE, step=1.0)
    if found.at_limit:
        lower = "the weights' uncertainty alone is more than the errors: see fit_variance_scale"
        upper = "errors are beyond all proportion: see whether targets and predictions have the same units"
        raise ValueError(
            f"{where}(posterior, …): the {examples} held-out targets do not determine the noise: their log-loss falls "
            f"to the end of the range, {found.value:g}. Then {lower if found.value < 1 else upper}."
        )
    calibrated = copy.copy(posterior)
    calibrated.scales = posterior.scales._replace(noise=posterior.scales.noise * found.value)
    if prediction.likelihood == "gaussian":
        calibrated.noise_variance = posterior.noise_variance * found.value
    return CalibrationFit("noise scale", found.value, found.loss_at_one, found.loss, examples, False, calibrated)
