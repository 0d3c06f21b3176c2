r"""What the online methods share: a flat float64 state over a model's parameters, and one observation linearised there.

A model's output η is the natural parameter of the likelihood (up to a known scale), so that with ŷ = E[y|η]

    ∂log p(y|η)/∂η = (y − ŷ)/φ,    V = −E[∂²log p/∂η²] = Cov[y|η]/φ²

    gaussian:     ŷ = η,           φ = noise variance,  V = I/φ
    bernoulli:    ŷ = σ(η),        φ = 1,               V = ŷ(1−ŷ)
    categorical:  ŷ = softmax(η),  φ = 1,               V = diag(ŷ) − ŷŷᵀ

and with J = ∂η/∂θ the gradient of −log p is −Jᵀ(y−ŷ)/φ and the Fisher information, labels averaged out, JᵀVJ.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.functional import one_hot

from vprop.calling import call_with_weights
from vprop.checks import check_model, invalid, is_finite
from vprop.likelihood import Likelihood, check_likelihood
from vprop.precision import as_tensor


class Observation(NamedTuple):
    """One observation, or a batch of them taken jointly, linearised at a state of P weights; n outputs in all."""

    residual: Tensor
    """(n,): ∂log p/∂η."""
    output_fisher: Tensor
    """(n, n): V."""
    jacobian: Tensor
    """(n, P): J."""
    examples: int

    def gradient(self) -> Tensor:
        """Gradient of −log p, summed over the examples."""
        return -self.jacobian.T @ self.residual

    def fisher(self) -> Tensor:
        """JᵀVJ, summed over the examples."""
        return self.jacobian.T @ self.output_fisher @ self.jacobian


class OnlineMethod:
    """A Gaussian over all trainable weights of ``model``, updated by one observation at a time.

    The state (``mean``, flat, in the order of ``named_parameters()``) is float64 whatever the model's dtype; after
    each update it is written into the model. The model is evaluated through a float64 copy in evaluation mode, so
    that dropout and BatchNorm are deterministic.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        prior_precision: float,
        likelihood: Likelihood,
        noise_variance: float = 1.0,
        max_parameters: int = 5000,
    ) -> None:
        check_model(model, f"{type(self).__name__}(model)")
        check_likelihood(likelihood, None)
        if likelihood not in ("gaussian", "bernoulli", "categorical"):  # natural parameter = output
            raise invalid("likelihood", likelihood, "'gaussian', 'bernoulli' or 'categorical'", "It says what y is.")
        check_positive("prior_precision", prior_precision, "1 is a good first try.")
        check_positive("noise_variance", noise_variance, "It is the variance of an observation around its mean.")
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        size = sum(p.numel() for p in trainable.values())
        if not 0 < size <= max_parameters:
            raise ValueError(
                f"Invalid model: has {size} trainable weights, must have 1 to max_parameters={max_parameters}. The "
                "method keeps a matrix of that size squared: use a smaller model, or raise max_parameters."
            )
        self.prior_precision, self.likelihood, self.noise_variance = float(prior_precision), likelihood, noise_variance
        self.observations = 0
        """How many updates there have been; a batch is one joint observation."""
        self._trainable = trainable
        self._model = copy.deepcopy(model).to(torch.float64).eval().requires_grad_(False)
        self.mean = torch.cat([p.detach().to(torch.float64).flatten() for p in trainable.values()])

    @property
    def covariance(self) -> Tensor:
        """Covariance of the weights, (P, P)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.mean)} weights, {self.likelihood}, observations={self.observations})"

    def _observe(self, x: Any, y: Tensor) -> Observation:
        """Linearise the model at the current state and compare with ``y``."""

        def flat_outputs(state: Tensor) -> tuple[Tensor, Tensor]:
            output = call_with_weights(self._model, self._split(state), _float64(x))
            return output.flatten(), output

        jacobian, output = jacrev(flat_outputs, has_aux=True)(self.mean)
        y = as_tensor(y).detach().to(output.device)
        if self.likelihood == "categorical":
            residual, fisher = _categorical(output, y)
        elif self.likelihood == "bernoulli":
            residual, fisher = _bernoulli(output, _matching(y, output))
        else:
            residual = (_matching(y, output) - output) / self.noise_variance
            fisher = torch.full_like(output, 1 / self.noise_variance).flatten().diag()
        return Observation(residual.flatten(), fisher, jacobian, len(output) if output.dim() else 1)

    def _move(self, mean: Tensor) -> None:
        """Count an observation, and make ``mean`` the state and the weights of the model."""
        self.observations += 1
        self.mean = mean
        weights = self._split(mean)
        with torch.no_grad():
            for name, p in self._trainable.items():
                p.copy_(weights[name])

    def _split(self, state: Tensor) -> dict[str, Tensor]:
        parts = state.split([p.numel() for p in self._trainable.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(self._trainable.items(), parts, strict=True)}


def identity(like: Tensor) -> Tensor:
    """A square matrix with as many rows as ``like``."""
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def check_finite(mean: Tensor) -> None:
    """Stop before a state is ruined."""
    if not bool(torch.isfinite(mean).all()):
        raise RuntimeError(
            "The update would make the weights NaN or infinite, and was not made. Check x and y for such values; if "
            "they are finite, the model is too far from linear here: use a larger prior_precision or smaller steps."
        )


def check_positive(name: str, value: Any, remedy: str) -> None:
    """Refuse what is not a finite number > 0."""
    if not is_finite(value) or value <= 0:
        raise invalid(name, value, "a finite number > 0", remedy)


def _categorical(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and V over all classes. V is singular, which nothing here minds."""
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"likelihood='categorical' needs a model with outputs of shape (batch, classes), at least 2 classes; this "
            f"one's have shape {tuple(logits.shape)}. Use 'bernoulli' for a single logit."
        )
    classes = logits.shape[1]
    if y.is_floating_point() or y.shape != logits.shape[:1] or bool(((y < 0) | (y >= classes)).any()):
        raise ValueError(
            f"Invalid y: is {y.dtype} of shape {tuple(y.shape)}, must be class numbers from 0 to {classes - 1} of "
            f"shape {tuple(logits.shape[:1])}. Pass integers, not one-hot vectors."
        )
    probs = logits.softmax(1)
    residual = one_hot(y.long(), classes) - probs
    blocks = probs.diag_embed() - probs[:, :, None] * probs[:, None, :]
    return residual, torch.block_diag(blocks.new_zeros(0, 0), *blocks)  # which would be float32 of no blocks


def _bernoulli(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if not bool(((y >= 0) & (y <= 1)).all()):
        raise ValueError(
            f"Invalid y: has values {y.unique().tolist()[:4]}, must be 0 or 1. Turn labels -1 and +1 into 0 and 1 with "
            "(y + 1) / 2."
        )
    probs = logits.sigmoid()
    return y - probs, (probs * (-logits).sigmoid()).flatten().diag()


def _matching(y: Tensor, output: Tensor) -> Tensor:
    """``y`` in the shape and precision of the output; a last dimension of 1 may be left out."""
    matched = y
    if y.dim() + 1 == output.dim() and output.shape[-1] == 1:
        matched = y.unsqueeze(-1)
    elif y.dim() == output.dim() + 1 and y.shape[-1] == 1:
        matched = y.squeeze(-1)
    if matched.shape != output.shape:
        raise ValueError(
            f"Invalid y: has shape {tuple(y.shape)}, must be that of the model's output, {tuple(output.shape)}. Pass "
            "one target for each output, the batch first."
        )
    return matched.to(output.dtype)


def _float64(x: Any) -> Any:
    """Inputs in the precision of the state; class numbers and other integers as they are."""
    if isinstance(x, Tensor):
        return x.detach().to(torch.float64) if x.is_floating_point() else x
    if isinstance(x, Mapping):
        return {name: _float64(value) for name, value in x.items()}
    return type(x)(_float64(value) for value in x) if isinstance(x, tuple | list) else x
