"""Ask a posterior: from a loader, without samples, from the last layer alone, and with intervals.

python examples/predictions.py [--short] [--plot FILE]
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import vprop
from vprop import metrics

parser = argparse.ArgumentParser(description="Ways to predict from one posterior.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
parser.add_argument("--plot", help="write a picture to this file")
arguments = parser.parse_args()
epochs = 8 if arguments.short else 40


def trained(model, loss_fn, data, **arguments):
    """Train with mini-batches; what comes out is a snapshot of the posterior."""
    optimizer = vprop.Vario(model.parameters(), num_data=len(data), batch_size=32)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.step(vprop.Objective(model, loss_fn, x, y))
        scheduler.step()
    return optimizer.posterior(model, **arguments)


torch.manual_seed(0)
images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
train_set, test_set = random_split(TensorDataset(images.float() / 16, labels), [900, 897])
network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
posterior = trained(network, F.cross_entropy, train_set, likelihood="categorical")

test_loader, y_test = DataLoader(test_set, batch_size=256), torch.stack([y for _, y in test_set])
for name, asked, how in [
    ("32 draws of the weights", posterior, {}),
    ("the same, summary kept", posterior, {"keep": "summary"}),
    ("linearized, no draws", posterior, {"method": "linearized"}),
    ("last layer, 32 draws", posterior.last_layer(), {}),
    ("last layer, linearized", posterior.last_layer(), {"method": "linearized"}),
]:
    started = time.perf_counter()
    prediction = asked.predict(test_loader, **how)  # labels are ignored
    seconds, log_loss = time.perf_counter() - started, metrics.nll(prediction.probs, y_test)
    print(f"{name:24} log-loss {log_loss:.3f}  mean confidence {prediction.confidence.mean():.3f}  {seconds:.2f} s")

x, y = load_diabetes(scaled=False, return_X_y=True)
x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
rows = TensorDataset(torch.tensor(x[:300]).float(), torch.tensor(y[:300, None]).float())
noise = vprop.GaussianLikelihood(0.5, learnable=False)
regression = trained(nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)), noise, rows, likelihood=noise)
low, high = regression.predict(x[300:]).interval(0.9)  # NumPy in, tensors out
inside = (low[:, 0].numpy() <= y[300:]) & (y[300:] <= high[:, 0].numpy())
print(f"intervals for 90 % hold {inside.mean():.2f} of the rows that nobody trained on")

if arguments.plot:
    from vprop.plots import style

    order = ((low + high)[:, 0]).argsort().numpy()
    with style.figure(arguments.plot, figsize=(8, 3.2)) as axes:
        axes.vlines(range(len(order)), low[order, 0], high[order, 0], color=style.SKY, linewidth=2)
        colors = [style.BLACK if held else style.ORANGE for held in inside[order]]
        axes.scatter(range(len(order)), y[300:][order], s=9, color=colors, zorder=2)
        axes.set(xlabel="patients, by their prediction", ylabel="progress, in standard deviations")
        axes.set_title(f"90 % intervals and what came; orange: outside ({1 - inside.mean():.0%})")
