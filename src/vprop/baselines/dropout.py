"""Monte Carlo dropout: a network trained with dropout, asked many times with dropout left on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vprop.calling import call_model
from vprop.checks import check_model, check_num_samples, check_seed
from vprop.likelihood import Likelihood
from vprop.posterior import Prediction
from vprop.posterior.predictive.dropout import dropout_layers, dropping
from vprop.posterior.predictive.masks import Masks


class MCDropout:
    """Predictions of ``model``, trained by whatever optimizer, averaged over dropout masks (Gal and Ghahramani, 2016).

    Only the dropout layers are in training mode while it predicts; BatchNorm uses its running statistics. The masks
    come from a generator of their own under ``seed``: no other random state is touched.
    """

    def __init__(self, model: nn.Module, *, likelihood: Likelihood | None = None, noise_variance: float = 1.0) -> None:
        check_model(model, "MCDropout(model)")
        if not dropout_layers(model):
            raise ValueError(
                "MCDropout needs a model with dropout layers (nn.Dropout, …): without them nothing varies."
            )
        self.model = model
        self.likelihood: Likelihood | None = likelihood
        self.noise_variance = noise_variance

    @torch.no_grad()
    def predict(self, x: Any, num_samples: int = 32, seed: int = 0) -> Prediction:
        """Outputs under ``num_samples`` dropout masks."""
        num_samples, seed = check_num_samples(num_samples), check_seed(seed)
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            self.model.eval()
            outputs = []
            for sample in range(num_samples):
                # Torch's fast path through a transformer's layers, which drops nothing, is not taken under Masks.
                with dropping(self.model, Masks(seed, sample)):
                    outputs.append(call_model(self.model, x))
        finally:
            for module, training in modes:
                module.training = training
        return Prediction(torch.stack(outputs), self.likelihood, self.noise_variance)
