"""torch.set_default_device is the user's: calibration and acquisition answer the same whatever it is."""

from __future__ import annotations

import torch

import vprop
from tests.harness import make_batch, make_model
from vprop import acquisition, calibration, metrics


def test_answers_are_the_same_with_another_default_device():
    model = make_model()
    posterior = vprop.Vprop(model.parameters(), num_data=1000).posterior(model, likelihood="categorical")
    x, _ = make_batch(60)
    y = (model(x).argmax(-1) + (torch.arange(60) % 6 == 0)) % 3

    def answers():
        temperature = calibration.fit_temperature(posterior, x, y, num_samples=4)
        prediction = temperature.posterior.predict(x, 4)
        information = acquisition.mutual_information(prediction)
        sets = calibration.conformal_sets(posterior, x, y, num_samples=4, randomized=True)
        return [
            temperature.value,
            calibration.fit_variance_scale(posterior, x, y, num_samples=2).value,
            sets.predict(x).tolist(),
            calibration.ConformalIntervals.fit(
                prediction.entropy, prediction.entropy + 1, y.float()
            ).threshold.tolist(),
            acquisition.batch_bald(prediction, 4, configurations=5).indices.tolist(),
            acquisition.power_sample(information, 3).tolist(),
            acquisition.top(acquisition.variation_ratio(prediction), 3).tolist(),
            metrics.aupr(information[:30], information[30:]),
            metrics.fpr_at_tpr(information[:30], information[30:]),
            metrics.aurc(information, y),
            metrics.calibration_curve(prediction.probs, y),
        ]

    here = answers()
    with torch.device("meta"):
        assert answers() == here
