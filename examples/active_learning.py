"""Active learning: which digits to label next, chosen by what the posterior does not know.

    python examples/active_learning.py [--short] [--plot FILE]

Every round trains a network on the labels so far, and asks for ten more from a pool of 1,200 images.
"""

import argparse
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import vprop
from vprop import acquisition, metrics

parser = argparse.ArgumentParser(description="Active learning on digits.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
parser.add_argument("--plot", help="write a picture to this file")
arguments = parser.parse_args()
seeds, rounds = (range(3), 4) if arguments.short else (range(5), 8)
images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(known, seed, steps=100):
    """The posterior of a network trained on the examples that have labels."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = vprop.Vario(model.parameters(), lr=0.02, num_data=len(known), batch_size=len(known), seed=seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.step(vprop.Objective(model, F.cross_entropy, x[known], y[known]))
        schedule.step()
    return optimizer.posterior(model, likelihood="categorical")


def accuracies(choose, seed):
    """Test accuracy after every round; the same split and the same first 20 labels for every way to choose."""
    test, known, pool = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split([577, 20, 1200])
    for number in range(rounds + 1):
        posterior = train(known, seed)
        yield metrics.accuracy(posterior.predict(x[test]).probs, y[test])
        chosen = choose(posterior.predict(x[pool]), seed=100 * seed + number)
        known = torch.cat([known, pool[chosen]])
        pool = pool[~torch.isin(pool, known)]


ways = {
    "random": lambda p, seed: acquisition.power_sample(torch.ones(p.samples.shape[1]), 10, seed=seed),
    "mutual information": lambda p, seed: acquisition.top(p.mutual_information, 10, seed=seed),
    "the same, drawn": lambda p, seed: acquisition.power_sample(p.mutual_information, 10, power=4, seed=seed),
    "variation ratio": lambda p, seed: acquisition.top(acquisition.variation_ratio(p), 10, seed=seed),
}
print(f"accuracy with 20, 30, … labels, mean of {len(seeds)} seeds; at the end ± standard deviation over seeds")
curves = {}
for name, choose in ways.items():
    runs = [list(accuracies(choose, seed)) for seed in seeds]
    curves[name] = [mean(column) for column in zip(*runs, strict=True)]
    print(f"{name:19}", *(f"{value:.3f}" for value in curves[name]), f"± {stdev(run[-1] for run in runs):.3f}")

if arguments.plot:
    from vprop.plots import style

    with style.figure(arguments.plot, figsize=(7, 3.2)) as axes:
        for name, curve in curves.items():
            axes.plot(range(20, 21 + 10 * rounds, 10), curve, "o--" if name == "random" else "o-", label=name)
        axes.set(xlabel="labels", ylabel="test accuracy")
        style.name_lines(axes)
