"""Lightning's Trainer: an ordinary module, an optimizer of vprop's, and validation that averages over the posterior.

    python examples/lightning_trainer.py [--short]

Only `configure_optimizers` and the callback, which logs the scores of averaged predictions, know of vprop.
"""

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from vprop.integrations.lightning import PosteriorCallback

parser = argparse.ArgumentParser(description="Digits with Vprop and Lightning.")
parser.add_argument("--short", action="store_true", help="a few seconds, for a first look")
epochs = 8 if parser.parse_args().short else 40
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Digits(pl.LightningModule):
    """A module like any other, but for `configure_optimizers`."""

    def __init__(self, num_data: int, steps: int) -> None:
        super().__init__()
        self.num_data, self.steps = num_data, steps
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss at a sample of the weights; Lightning passes it to the optimizer as a closure."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Scores at the mean of the weights."""
        logits, y = self(batch[0]), batch[1]
        self.log("val/log_loss", F.cross_entropy(logits, y))
        self.log("val/accuracy", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> dict:
        """Adam would be torch.optim.Adam(self.parameters())."""
        optimizer = vprop.Vprop(self.parameters(), lr=0.3, num_data=self.num_data)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


pl.seed_everything(0, verbose=False)
images, labels = load_digits(return_X_y=True)
parts = train_test_split(images.astype("float32") / 16, labels, test_size=0.5, random_state=0, stratify=labels)
x_train, x_test, y_train, y_test = map(torch.tensor, parts)
loader = DataLoader(TensorDataset(x_train, y_train), batch_size=16, shuffle=True)
module = Digits(len(x_train), steps=epochs * len(loader) // 2)  # half as many steps as batches, see below
trainer = pl.Trainer(
    max_epochs=epochs,
    accumulate_grad_batches=2,  # two batches see the same sample of the weights, and make one step
    callbacks=[PosteriorCallback("categorical", num_samples=32, every_n_steps=10)],
    **dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False),
)
trainer.fit(module, loader, DataLoader(TensorDataset(x_test, y_test), batch_size=300))

scores, noise = trainer.callback_metrics, torch.rand(500, 64)
posterior = trainer.optimizers[0].posterior(module, likelihood="categorical")
at_mean, averaged = module(noise).softmax(-1), posterior.predict(noise, num_samples=32).probs
print(f"{'':24}{'at the mean':>12}{'averaged':>12}")
for row, name in (("accuracy", "accuracy"), ("log-loss", "log_loss")):
    print(f"{row:24}{scores['val/' + name]:12.3f}{scores['val_posterior/' + name]:12.3f}")
print(f"{'confidence on pure noise':24}{at_mean.amax(-1).mean():12.3f}{averaged.amax(-1).mean():12.3f}")
print(*(f"{name:28}{float(value):8.3g}" for name, value in scores.items() if name.startswith("posterior/")), sep="\n")
