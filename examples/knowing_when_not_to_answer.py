"""Refusals: a classifier that leaves hard digits to a person, and notices inputs that are no digits at all.

python examples/knowing_when_not_to_answer.py [--short] [--plot FILE]
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import vprop
from vprop import acquisition, metrics

parser = argparse.ArgumentParser(description="Selective prediction and outliers on digits.")
parser.add_argument("--short", action="store_true", help="fewer steps, for a first look")
parser.add_argument("--plot", help="write a picture to this file")
arguments = parser.parse_args()
steps = 200 if arguments.short else 1000

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
fit, test = torch.randperm(len(x)).split([300, 1497])
strange = x[test].flip(-1).roll(27, -1)  # the same pixels in other places

model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
optimizer = vprop.Vario(model.parameters(), lr=0.01, num_data=len(fit), batch_size=50)
for _ in range(steps):
    rows = fit[torch.randperm(len(fit))[:50]]
    optimizer.step(vprop.Objective(model, F.cross_entropy, x[rows], y[rows]))
posterior = optimizer.posterior(model, likelihood="categorical")

digits, others = posterior.predict(x[test], num_samples=64), posterior.predict(strange, num_samples=64)
wrong = digits.probs.argmax(-1) != y[test]
curves, pairs = {}, {}
print("score               errors if all / 90 % / 70 % are answered    AURC     AUROC   AUPR   FPR at 95 %")
for name, score in {
    "entropy": acquisition.entropy,
    "1 - confidence": acquisition.least_confidence,
    "mutual information": acquisition.mutual_information,
    "variation ratio": acquisition.variation_ratio,
}.items():
    known, unknown = score(digits), score(others)
    pairs[name], curve = (known, unknown), metrics.risk_coverage(known, wrong)
    curves[name] = curve
    risks = " / ".join(f"{curve.risk_at(coverage):.3f}" for coverage in (1, 0.9, 0.7))
    found = metrics.auroc(known, unknown), metrics.aupr(known, unknown), metrics.fpr_at_tpr(known, unknown)
    print(f"{name:30} {risks} {curve.area:17.4f}", *(f"{value:8.3f}" for value in found))

if arguments.plot:
    from vprop import plots

    with plots.style.figure(arguments.plot, columns=2, figsize=(10, 4)) as (left, right):
        plots.risk_coverage(curves, axes=left).set_title("errors, if the least certain are not answered")
        plots.outliers(pairs, axes=right).set_title("inputs that are no digits, told from digits")
