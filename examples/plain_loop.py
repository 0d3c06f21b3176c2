"""A plain training loop: digits, a small network, and predictions that know how sure they are.

    python examples/plain_loop.py [--short] [--plot FILE]

What differs from training with Adam is marked with `# Adam:` (the line it replaces) or `# new`.
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

parser = argparse.ArgumentParser(description="Digits with Vprop, in a plain training loop.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
parser.add_argument("--plot", help="write a picture to this file")
arguments = parser.parse_args()
epochs = 8 if arguments.short else 40

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images.astype("float32") / 16, labels, test_size=0.5, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(torch.tensor, parts)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = vprop.Vprop(model.parameters(), lr=0.3, num_data=len(x_train))  # Adam: torch.optim.Adam(...)
optimizer.attach(model)  # new: forwards in training mode see weights that are drawn from the posterior
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))

for epoch in range(epochs):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    if (epoch + 1) % (epochs // 4) == 0:
        model.eval()  # forwards in evaluation mode see the mean
        with torch.no_grad():
            accuracy = metrics.accuracy(model(x_test).softmax(-1), y_test)
        print(f"epoch {epoch + 1:3}  loss {loss.item():.3f}  test accuracy at the mean {accuracy:.3f}")

posterior = optimizer.posterior(model, likelihood="categorical")  # new: a snapshot, from here on
prediction = posterior.predict(x_test, num_samples=64)  # Adam: model(x_test).softmax(-1)
elbo = posterior.elbo_estimate(loader, loss_fn=F.cross_entropy)  # posterior.elbo(...) is its value alone
noise = posterior.predict(torch.rand(500, 64), num_samples=64)  # images of nothing

print(f"\naccuracy          {metrics.accuracy(prediction.probs, y_test):.3f}")
print(f"log-loss          {metrics.nll(prediction.probs, y_test):.3f}")
print(f"calibration error {metrics.expected_calibration_error(prediction.probs, y_test):.3f}")
# Ten weights for each image: most of the ELBO is what they cost. It compares priors and methods for one model.
print(f"ELBO              {elbo.value:.0f} nats: fit {elbo.expected_log_likelihood:.0f}, minus KL {elbo.kl:.0f}")

print("\nHow uncertain is it (entropy in nats; of ten equally likely classes it is 2.303)?")
wrong = prediction.probs.argmax(-1) != y_test
entropies = {
    "digits it gets right": prediction.entropy[~wrong],
    "digits it gets wrong": prediction.entropy[wrong],
    "images of pure noise": noise.entropy,
}
print(*(f"  {what}  {entropy.mean():.3f}" for what, entropy in entropies.items()), sep="\n")
auroc = metrics.auroc(prediction.entropy, noise.entropy)
print(f"noise is told from digits by entropy with an AUROC of {auroc:.3f} (0.5 is chance)")

if arguments.plot:
    from vprop.plots import style

    with style.figure(arguments.plot, figsize=(7, 3.2)) as axes:
        for what, entropy in entropies.items():
            axes.plot(entropy.sort().values, torch.linspace(0, 1, len(entropy)), label=what)
        axes.set(xlabel="entropy of the prediction, nats", ylabel="share with less")
        axes.legend(loc="lower right")
