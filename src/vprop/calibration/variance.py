"""A scale for the variance of the weights."""

from __future__ import annotations

from typing import Any, cast

from vprop.calibration._held_out import check_enough, check_kind, held_out_batches, held_out_predictions, log_loss
from vprop.calibration._result import AnyPosterior, CalibrationFit
from vprop.calibration._search import minimum
from vprop.posterior.predictive.batch_norm import training_inputs

RANGE = 1e-3, 1e3


def fit_variance_scale(
    posterior: AnyPosterior,
    data: Any,
    y: Any = None,
    *,
    num_samples: int = 32,
    seed: int = 0,
    batch_norm: Any = None,
    dropout: bool = False,
) -> CalibrationFit[AnyPosterior]:
    """The scale s of the posterior's covariance that makes held-out data most likely.

        q(θ) = N(μ, s·Σ)                 s minimizes −mean log of the predictive probability, or density, of y

    The mean stays. s > 1 says that the posterior was too sure of its weights, s < 1 that it was not sure enough;
    unlike a temperature it does nothing where the data determine the prediction, and much where they do not. All scales
    are tried with the same noise, so that they differ by the scale alone; each costs a prediction of all held-out data,
    some 25 in all, and 1 % is as close as the scale is looked for. For every likelihood; in a regression the density
    is that of a Gaussian with the prediction's mean and variance.

    A scale at the end of its range (``at_limit``) means that the mean alone, or a much wider posterior, would predict
    better: the posterior, or the fit, is wrong in more than its scale. ``batch_norm`` and ``dropout`` are those of
    ``posterior.predict``: give both the same.

    >>> import torch, vprop
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> posterior = vprop.Vprop(model.parameters(), num_data=1).posterior(
    ...     model, likelihood="gaussian", noise_variance=1e-4)
    >>> sigma = float(posterior.variance["weight"].sqrt())
    >>> x = torch.ones(200, 1)
    >>> y = model(x).detach() + 3 * sigma * torch.tensor([[-1.0], [1.0]]).repeat(100, 1)  # three sigmas away
    >>> fit = fit_variance_scale(posterior, x, y, num_samples=64)
    >>> bool(5 < fit.value < 15), bool(fit.after < fit.before)
    (True, True)
    """
    where = "fit_variance_scale"
    batches = held_out_batches(posterior, data, y, where)
    check_kind(posterior, ("categorical", "bernoulli", "gaussian", "heteroscedastic"), where)
    how: Any = {"batch_norm": training_inputs(batch_norm), "dropout": dropout}
    _, targets = held_out_predictions(posterior, batches, num_samples, seed, where, **how)
    examples = check_enough(targets, where)

    def loss(scale: float) -> float:
        scaled = posterior._with_variance_times(scale)  # far too wide, it may overflow: then its loss is NaN
        return log_loss(*held_out_predictions(scaled, batches, num_samples, seed, where, **how, check=False))

    found = minimum(loss, *RANGE, step=1.15, tolerance=0.01)
    scaled = cast(AnyPosterior, posterior._with_variance_scale(found.value))
    return CalibrationFit(
        "variance scale", found.value, found.loss_at_one, found.loss, examples, found.at_limit, scaled
    )
