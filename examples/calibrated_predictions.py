"""Calibration: a network that is too sure of itself, mended on held-out digits, and sets that hold the label.

    python examples/calibrated_predictions.py [--short] [--plot FILE]

Three parts of the data: one trains, one is held out and calibrates, one judges.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import vprop
from vprop import calibration, metrics

parser = argparse.ArgumentParser(description="Calibration on digits.")
parser.add_argument("--short", action="store_true", help="fewer steps, for a first look")
parser.add_argument("--plot", help="write a picture to this file")
arguments = parser.parse_args()
steps = 200 if arguments.short else 1000

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32) / 16
x, y = x + 0.3 * torch.randn_like(x), torch.tensor(labels)  # noise, so that there is something to be unsure about
fit, held_out, test = torch.randperm(len(x)).split([400, 400, 997])

model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = vprop.Vario(model.parameters(), lr=0.01, num_data=len(fit), batch_size=50)
for _ in range(steps):
    rows = fit[torch.randperm(len(fit))[:50]]
    optimizer.step(vprop.Objective(model, F.cross_entropy, x[rows], y[rows]))
posterior = optimizer.posterior(model, likelihood="categorical")

# One line each; they say what they found, and the held-out log-loss before and after.
by_temperature = calibration.fit_temperature(posterior, x[held_out], y[held_out])
by_variance = calibration.fit_variance_scale(posterior, x[held_out], y[held_out], num_samples=16)
print(by_temperature, by_variance, sep="\n")

print("\non the test images         accuracy  log-loss  calibration error")
posteriors = {"as trained": posterior, "with the temperature": by_temperature.posterior}
posteriors["with the variance scaled"] = by_variance.posterior
predicted = {name: q.predict(x[test], num_samples=64).probs for name, q in posteriors.items()}
for name, probs in predicted.items():
    error = metrics.expected_calibration_error(probs, y[test])
    print(f"{name:26} {metrics.accuracy(probs, y[test]):8.3f} {metrics.nll(probs, y[test]):9.3f} {error:18.3f}")

print("\nsets of digits that hold the right one, from the same held-out images")
for level in (0.8, 0.9, 0.95):
    sets = calibration.conformal_sets(posterior, x[held_out], y[held_out], level=level)
    members = sets.predict(x[test])
    covered, size = members.gather(1, y[test][:, None]).double().mean(), members.sum(-1).double().mean()
    print(f"asked for {level:.2f}: {covered:.3f} of the test images, {size:.2f} digits in a set")

if arguments.plot:
    from vprop import plots

    with plots.style.figure(arguments.plot, columns=3, figsize=(9, 3.2), sharey=True) as panels:
        for axes, (name, probs) in zip(panels, predicted.items(), strict=True):
            plots.reliability(metrics.calibration_curve(probs, y[test]), axes=axes).set_title(name)
