"""Find wrong labels: which training examples would the model unlearn most if they were left out?

    python examples/flipped_labels.py [--short] [--plot FILE]

One in twenty labels of the digits is replaced by a wrong one, and a network is trained on what is there. An example
that only its own label speaks for has a large `loss_change`: without it the model would say something else. Nothing is
trained again for that. The list that `sensitivity` gives is what a person should look through first.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from vprop import metrics

parser = argparse.ArgumentParser(description="Wrong labels among the digits, found by sensitivity.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
parser.add_argument("--plot", help="write the images that are found to this file")
arguments = parser.parse_args()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x, truth = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
flipped = torch.rand(len(x)) < 0.05
y = torch.where(flipped, (truth + torch.randint(1, 10, truth.shape)) % 10, truth)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
epochs = 10 if arguments.short else 30
optimizer = vprop.Vario(model.parameters(), lr=3e-3, num_data=len(x), batch_size=64)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
for _ in range(epochs):
    for batch_x, batch_y in loader:
        optimizer.step(vprop.Objective(model, F.cross_entropy, batch_x, batch_y))
        scheduler.step()

posterior = optimizer.posterior(model, likelihood="categorical")
result = posterior.sensitivity((x, y))  # or a loader that does not shuffle
suspects = result.top(int(flipped.sum()), by="loss_change")
print(f"wrong labels: {int(flipped.sum())} of {len(x)}")
print(f"wrong among as many suspects: {float(flipped[suspects].double().mean()):.3f}")
for name in ("loss_change", "weight_change", "loss"):
    scores = getattr(result, name)
    print(f"AUROC of {name:13} {metrics.auroc(scores[~flipped], scores[flipped]):.4f}")

if arguments.plot:
    from vprop.plots import style

    with style.figure(arguments.plot, rows=2, columns=8, figsize=(9, 2.8)) as panels:
        for axes, i in zip(panels.flat, suspects.tolist(), strict=False):
            axes.imshow(1 - x[i].view(8, 8), cmap="gray")
            color = style.ORANGE if flipped[i] else style.INK
            axes.set_title(f"labelled {int(y[i])}, is {int(truth[i])}", fontsize=7, color=color)
            axes.axis("off")
