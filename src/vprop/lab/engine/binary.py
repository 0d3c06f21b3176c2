"""The two problems of the paper, logistic regression and a small network, and how an answer to them is scored."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from vprop import Posterior, Prediction
from vprop.baselines import MCDropout
from vprop.functional import logistic
from vprop.lab.data import Dataset, load
from vprop.lab.engine.problem import Problem
from vprop.likelihood import Likelihood
from vprop.posterior import DiagonalPosterior, FullPosterior

PRIOR_PRECISION = {("logreg", "australian"): 1e-5, ("logreg", "a1a"): 2.8072}
"""λ as in the paper; 1 elsewhere."""

ELBO_SAMPLES, TEST_SAMPLES = 100, 32


@dataclass(frozen=True)
class Score:
    """How good an answer is. ``elbo`` is ``None`` where there is no posterior."""

    elbo: float | None
    elbo_error: float | None
    """Monte Carlo standard error; 0 where the expectation is exact."""
    log_loss: float | None
    """On the test data; ``None`` where nobody asked."""


class BinaryProblem(Problem):
    """Two classes: labels are 0 and 1, the loss is the mean Bernoulli negative log-likelihood."""

    dtype: ClassVar[torch.dtype]
    likelihood: ClassVar[Likelihood] = "bernoulli"
    loss_fn = staticmethod(F.binary_cross_entropy_with_logits)

    def __init__(self, data: Dataset) -> None:
        super().__init__(data)
        self.train_x, self.test_x = data.train_x.to(self.dtype), data.test_x.to(self.dtype)
        self.train_y, self.test_y = (y.to(self.dtype)[:, None] for y in (data.train_y, data.test_y))
        self.prior_precision = PRIOR_PRECISION.get((self.name, data.name), 1.0)

    @torch.no_grad()
    def log_joint(self, model: nn.Module) -> float:
        """log p(y, θ) up to a constant at the model's weights: what a point estimate maximizes."""
        model.eval()
        loss = F.binary_cross_entropy_with_logits(model(self.train_x), self.train_y, reduction="sum")
        model.train()
        penalty = sum(float(p.double().square().sum()) for p in model.parameters())
        return -float(loss) - 0.5 * self.prior_precision * penalty

    @torch.no_grad()
    def score_point(self, model: nn.Module) -> Score:
        """A point estimate: the log-loss of its plug-in predictions."""
        model.eval()
        loss = F.binary_cross_entropy_with_logits(model(self.test_x), self.test_y)
        model.train()
        return Score(None, None, float(loss))

    @abstractmethod
    def score_posterior(self, posterior: Posterior, *, test: bool = True) -> Score:
        """A Gaussian over the weights; ``test=False`` looks at the training data only."""

    @torch.no_grad()
    def score_dropout(self, model: nn.Module) -> Score:
        """Monte Carlo dropout."""
        prediction = MCDropout(model, likelihood="bernoulli").predict(self.test_x, TEST_SAMPLES)
        return Score(None, None, _log_loss(prediction, self.test_y))


class LogisticRegression(BinaryProblem):
    """Logistic regression, whose expectations are one-dimensional: everything is scored by quadrature."""

    name, dtype, hess_init = "logreg", torch.float64, 0.02

    def model(self, seed: int, dropout: float = 0.0) -> nn.Module:
        """Weights zero, whatever the seed: the loss is convex."""
        model = nn.Linear(self.train_x.shape[1], 1, bias=False).to(self.dtype)
        nn.init.zeros_(model.weight)
        return model

    @torch.no_grad()
    def score_posterior(self, posterior: Posterior, *, test: bool = True) -> Score:
        """Exact but for rounding."""
        mean = posterior.mean["weight"].flatten()
        spread = (
            posterior.covariance if isinstance(posterior, FullPosterior) else posterior.variance["weight"].flatten()
        )
        return self.score(mean, spread, test=test)

    def score(self, mean: Tensor, spread: Tensor, *, test: bool = True) -> Score:
        """The same for a mean with a vector of variances or a covariance."""
        elbo = logistic.elbo(self.train_x, self.data.train_y, mean, spread, self.prior_precision)
        if not test:
            return Score(float(elbo), 0.0, None)
        return Score(float(elbo), 0.0, float(logistic.predictive_log_loss(self.test_x, self.data.test_y, mean, spread)))


class SmallNetwork(BinaryProblem):
    """Two hidden layers of ten tanh units."""

    name, dtype, hess_init = "mlp", torch.float32, 0.1

    def model(self, seed: int, dropout: float = 0.0) -> nn.Module:
        """torch's initialisation under ``seed``; dropout, if any, after both hidden layers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for inputs in (self.train_x.shape[1], 10):
                layers += [nn.Linear(inputs, 10), nn.Tanh()] + ([nn.Dropout(dropout)] if dropout else [])
            return nn.Sequential(*layers, nn.Linear(10, 1))

    @torch.no_grad()
    def score_posterior(self, posterior: Posterior, *, test: bool = True) -> Score:
        """Monte Carlo over weights, all samples at once, the same noise for every method."""
        weights = _many_samples(posterior, ELBO_SAMPLES)

        def outputs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return vmap(lambda w: functional_call(posterior.model, w, x))(weights)

        logits = outputs(weights, self.train_x)
        labels = self.train_y.expand_as(logits)
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        log_likelihood = -losses.double().sum(dim=(1, 2))
        elbo = float(log_likelihood.mean() - posterior.kl())
        error = float(log_likelihood.std()) / math.sqrt(len(log_likelihood))
        if not test:
            return Score(elbo, error, None)
        few = {name: value[:TEST_SAMPLES] for name, value in weights.items()}
        return Score(elbo, error, _log_loss(Prediction(outputs(few, self.test_x), "bernoulli"), self.test_y))


def _many_samples(posterior: Posterior, count: int) -> dict[str, Tensor]:
    """Weight samples stacked along a first dimension."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, posterior.num_parameters, generator=generator, dtype=torch.float64)
    if isinstance(posterior, FullPosterior):
        factor = torch.linalg.cholesky(posterior.precision)
        noise = torch.linalg.solve_triangular(factor.T, noise.T, upper=True).T
    else:
        assert isinstance(posterior, DiagonalPosterior)
        noise = noise * torch.cat([v.double().flatten() for v in posterior.variance.values()]).sqrt()
    pieces = noise.split([mean.numel() for mean in posterior.mean.values()], dim=1)
    return {
        name: mean + piece.view(count, *mean.shape).to(mean.dtype)
        for (name, mean), piece in zip(posterior.mean.items(), pieces, strict=True)
    }


def _log_loss(prediction: Prediction, labels: Tensor) -> float:
    probs = prediction.probs.double()
    likelihood = torch.where(labels > 0.5, probs, 1 - probs)
    return float(-likelihood.clamp_min(1e-300).log().mean())


PROBLEMS: dict[str, type[BinaryProblem]] = {"logreg": LogisticRegression, "mlp": SmallNetwork}


@lru_cache(maxsize=4)
def problem(name: str, data: str, data_dir: Path | None) -> BinaryProblem:
    """A problem with its data, loaded once per process."""
    return PROBLEMS[name](load(data, data_dir))
