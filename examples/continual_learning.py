"""Continual learning: three tasks one after the other, with the posterior of each as the prior of the next.

    python examples/continual_learning.py [--short] [--plot FILE]

The tasks are digits with their pixels shuffled, in another order for each; one network with one output layer learns
them all, and never sees the data of an earlier task again. With an ordinary prior it forgets what it knew. With
`posterior.as_prior()` the weights that earlier tasks are sure of stay where they are, and the others are free to learn.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from vprop import metrics

parser = argparse.ArgumentParser(description="Permuted digits, with and without the prior carried over.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
parser.add_argument("--plot", help="write a picture to this file")
arguments = parser.parse_args()
epochs = 8 if arguments.short else 40

images, labels = load_digits(return_X_y=True)
parts = train_test_split(images.astype("float32") / 16, labels, test_size=0.3, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(torch.tensor, parts)
orders = [torch.randperm(64, generator=torch.Generator().manual_seed(task)) for task in range(3)]


def train(model: nn.Module, order: torch.Tensor, prior: dict) -> vprop.posterior.Posterior:
    """Learn one task; returns the posterior."""
    loader = DataLoader(TensorDataset(x_train[:, order], y_train), batch_size=32, shuffle=True)
    # num_data is of this task alone: the earlier ones speak through the prior. The variances matter: beta 0.99 is an
    # average that has forgotten where it began.
    steps = {"lr": 0.1, "betas": (0.9, 0.99), "hess_init": 0.01, "clip_radius": 1.0}
    optimizer = vprop.Vprop(model.parameters(), num_data=len(x_train), **steps, **prior)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.step(vprop.Objective(model, F.cross_entropy, x, y))
            scheduler.step()
    return optimizer.posterior(model, likelihood="categorical")


def learn_all(carry_over: bool) -> list[list[float]]:
    """Learn the tasks in turn; prints and returns, after each, the accuracies on all so far."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))
    prior, history = {}, []
    for task, order in enumerate(orders):
        posterior = train(model, order, prior)
        if carry_over:
            prior = posterior.as_prior()  # prior_mean and prior_precision
        predictions = [posterior.predict(x_test[:, seen]).probs for seen in orders[: task + 1]]
        history.append([metrics.accuracy(probs, y_test) for probs in predictions])
        print(f"  after task {task + 1}: " + "  ".join(f"{accuracy:.3f}" for accuracy in history[-1]))
    return history


print("Test accuracy on tasks 1, 2, 3\n\nwith the prior N(0, 1) for every task:")
forgetful = learn_all(carry_over=False)
print("with the posterior of each task as the prior of the next:")
lasting = learn_all(carry_over=True)
without, with_prior = sum(forgetful[-1][:-1]) / 2, sum(lasting[-1][:-1]) / 2
print(f"\nmean accuracy on the old tasks: {without:.3f} without, {with_prior:.3f} with")

if arguments.plot:
    from vprop.plots import style

    with style.figure(arguments.plot, columns=2, figsize=(8, 3), sharey=True) as panels:
        kinds = {"ordinary prior": forgetful, "posterior of each task as the next prior": lasting}
        for axes, (title, history) in zip(panels, kinds.items(), strict=True):
            for task in range(3):
                axes.plot(range(task + 1, 4), [row[task] for row in history[task:]], "o-", label=f"task {task + 1}")
            axes.set(xlabel="tasks learned", ylabel="test accuracy", xticks=[1, 2, 3], title=title)
        style.name_lines(*panels)
