"""A temperature for logits."""

from __future__ import annotations

import copy
from typing import Any

from vprop.calibration._held_out import check_enough, check_kind, held_out_batches, held_out_predictions, log_loss
from vprop.calibration._result import AnyPosterior, CalibrationFit
from vprop.calibration._search import minimum
from vprop.posterior import Prediction

RANGE = 1 / 32, 32.0


def fit_temperature(
    posterior: AnyPosterior,
    data: Any,
    y: Any = None,
    *,
    num_samples: int = 32,
    seed: int = 0,
    batch_norm: Any = None,
    dropout: bool = False,
) -> CalibrationFit[AnyPosterior]:
    """The temperature T of logits that makes held-out labels most likely.

        p(y|x) = mean over samples k of softmax(fₖ(x)/T)_y          T minimizes −mean log p(y|x)

    T > 1 softens probabilities, T < 1 sharpens them. The most probable class of one sample stays the same; that of
    their mean may change, though rarely. ``data`` are inputs with labels ``y``, or a loader of pairs, that were held
    out of training; judge the result on others. For "categorical" and "bernoulli" posteriors. Outputs are computed
    once, and kept for all samples. ``batch_norm`` and ``dropout`` are those of ``posterior.predict``: give both the
    same.

    >>> import torch, vprop
    >>> model = torch.nn.Linear(1, 2, bias=False)
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[0.0], [3.0]]))
    >>> optimizer = vprop.Vprop(model.parameters(), num_data=10**9)  # a narrow posterior
    >>> posterior = optimizer.posterior(model, likelihood="categorical")
    >>> x, y = torch.ones(100, 1), (torch.arange(100) < 75).long()  # 75 %, for logits that say 95 %
    >>> fit = fit_temperature(posterior, x, y)
    >>> fit
    temperature 2.731: held-out log-loss 0.7986 → 0.5623 (100 examples)
    >>> round(float(fit.posterior.predict(x[:1]).probs[0, 1]), 2)
    0.75
    """
    where = "fit_temperature"
    batches = held_out_batches(posterior, data, y, where)
    check_kind(posterior, ("categorical", "bernoulli"), where)
    how: Any = {"batch_norm": batch_norm, "dropout": dropout}
    prediction, targets = held_out_predictions(posterior, batches, num_samples, seed, where, **how)
    examples = check_enough(targets, where)
    logits = prediction.samples.double()

    def loss(temperature: float) -> float:
        return log_loss(Prediction(logits / temperature, prediction.likelihood), targets)

    found = minimum(loss, *RANGE)
    if found.at_limit:
        why = "the labels are no more likely than by chance. See whether they belong to the inputs."
        if found.value < 1:
            why = (
                "all labels are the most probable ones, or samples of the weights differ so much that they need not be "
                "unsure themselves. Hold out more data; or narrow the posterior first, fit_variance_scale."
            )
        raise ValueError(
            f"{where}(posterior, …): the {examples} held-out labels do not determine a temperature: their log-loss "
            f"falls to the end of the range, {found.value:g}, because {why}"
        )
    calibrated = copy.copy(posterior)
    calibrated.scales = posterior.scales._replace(temperature=posterior.scales.temperature * found.value)
    return CalibrationFit("temperature", found.value, found.loss_at_one, found.loss, examples, False, calibrated)
