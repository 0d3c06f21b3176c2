"""Weights that may as well be zero, by |μ|/σ, and the posterior of the others given that they are.

By how much does log q fall when weight j becomes zero and the others follow as they like? By μⱼ²/2σⱼ², σⱼ² the marginal
variance, so the weights with the smallest |μ|/σ are the cheapest to lose. The posterior given that those are zero is
the Gaussian's own conditional: for a diagonal one the others stay as they are, for a full one they move to make up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vprop.checks import invalid, is_finite
from vprop.posterior import io
from vprop.posterior._base import Posterior
from vprop.posterior._columns import columns_of
from vprop.posterior._kept import KEPT, rest_of
from vprop.posterior.prior import GaussianPrior
from vprop.precision import compute_dtype


class PrunedPosterior(Posterior):
    """A posterior in which some weights are zero for certain.

    ``masks`` is True where a weight is kept. ``mean`` and ``variance`` are zero elsewhere; density, entropy and KL are
    those of the kept weights (the KL to their prior, given the zeros).

    >>> import torch, vprop
    >>> model = torch.nn.Linear(4, 1)
    >>> pruned = vprop.Vprop(model.parameters(), num_data=100).posterior(model).prune(0.5)
    >>> pruned.sparsity, int((pruned.sample()["weight"] == 0).sum())
    (0.5, 2)
    """

    structure = "pruned"
    _instead = "Ask the posterior before it is pruned: posterior.{question}(...), then prune(...)."
    sections_by_parameter = ("mask",)

    def __init__(
        self,
        model: nn.Module,
        masks: dict[str, Tensor],
        kept: Posterior,
        prior: GaussianPrior,
        among: Collection[str] | None = None,
    ) -> None:
        self.masks = masks
        self._kept = kept
        dtypes = {name: compute_dtype(p) for name, p in model.named_parameters() if name in masks}
        super().__init__(model, self._spread(kept.mean[KEPT], dtypes), prior, **rest_of(kept))
        self._pruned_parameters = [name for name, mask in masks.items() if not bool(mask.all())]
        self._among = self._pruned_parameters if among is None else list(among)
        """The parameters that weights were chosen from; one of them may have lost none."""

    def __repr__(self) -> str:
        among = sum(self.masks[name].numel() for name in self._among)
        return f"PrunedPosterior({self.sparsity:.1%} of {among} weights are zero, ess={self.ess})"

    @property
    def sparsity(self) -> float:
        """The share of zeros among the weights that ``prune`` chose from: its ``fraction``, to a whole number."""
        masks = [self.masks[name] for name in self._among]
        return sum(int((~mask).sum()) for mask in masks) / max(1, sum(mask.numel() for mask in masks))

    def mask_model(self, model: nn.Module | None = None) -> nn.Module:
        """Write the mean into ``model`` (by default a copy of the posterior's own) and hold its pruned weights at zero.

        Buffers become those of the snapshot, and of a last layer's posterior so do the weights of the other layers. The
        model is changed and returned; its pruned parameters get another name (``weight_orig``). That is done by
        ``torch.nn.utils.prune``, so that training goes on with the others alone; ``torch.nn.utils.prune.remove(module,
        name)`` makes it permanent.
        """
        from torch.nn.utils import prune as torch_prune

        model = copy.deepcopy(self.model) if model is None else model
        parameters = dict(model.named_parameters())
        if any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError(
                "mask_model(): the model is on the meta device, which holds no numbers. Pass one that does: "
                "posterior.mask_model(model)."
            )
        with torch.no_grad():
            for name, value in (self.constants | self.mean).items():
                parameters[name].copy_(value)
            for name, buffer in model.named_buffers():
                saved = self.buffers.get(name)
                if saved is not None and saved.shape == buffer.shape:  # a cache may have grown since
                    buffer.copy_(saved)
        masks = {parameters[name]: self.masks[name] for name in self._pruned_parameters}
        for module in list(model.modules()):  # each that has a tied weight masks it for itself
            for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter in masks:
                    torch_prune.custom_from_mask(module, name, masks[parameter].to(parameter.device))
        return model

    # -- the Gaussian ----------------------------------------------------------------------------------------

    @property
    def variance(self) -> dict[str, Tensor]:
        """Marginal variances, zero where a weight is pruned."""
        return self._spread(self._kept.variance[KEPT], {name: mean.dtype for name, mean in self.mean.items()})

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        dtypes = {name: mean.dtype for name, mean in self.mean.items()}
        return self._spread(self._kept._draw(seed, sample, snapshot)[KEPT], dtypes)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log q of the kept weights; −∞ where a pruned one is not zero."""
        self._check_names(weights)
        flat, kept = self._flat(weights), self._flat_mask()
        if bool((flat[~kept] != 0).any()):
            return torch.tensor(-math.inf, dtype=torch.float64, device="cpu")
        return self._kept.log_prob({KEPT: flat[kept]})

    def entropy(self) -> Tensor:
        """Of the kept weights."""
        return self._kept.entropy()

    def kl(self) -> Tensor:
        """Of the kept weights, to their prior given that the others are zero."""
        return self._kept.kl()

    def as_prior(self) -> dict[str, Any]:
        """Not there: a weight that is zero for certain has an infinite precision, which no optimizer takes."""
        raise ValueError(
            "as_prior(): pruned weights have an infinite precision, which no optimizer takes. Hold them at zero with "
            "posterior.mask_model(), and use as_prior() of the posterior before pruning."
        )

    def _covariance_times(self, rows: Tensor) -> Tensor:
        kept = self._flat_mask().to(rows.device)
        products = torch.zeros_like(rows)
        products[:, kept] = self._kept._covariance_times(rows[:, kept]).to(rows)
        return products

    @property
    def correlated(self) -> bool:  # type: ignore[override]
        """As the Gaussian of the kept weights."""
        return self._kept.correlated

    def _times_root(self, jacobian: dict[str, Tensor]) -> Iterable[Tensor]:
        """That of the kept weights: the others have no variance."""
        rows = [columns_of(jacobian[name], mask)[..., mask.flatten()] for name, mask in self.masks.items()]
        return self._kept._times_root({KEPT: torch.cat([own.to(rows[0].device) for own in rows], -1)})

    def _restricted(self, names: list[str]) -> Posterior:
        raise ValueError(
            "last_layer(): this posterior is pruned, and its weights are kept as one. Prune the posterior of the last "
            "layer: posterior.last_layer().prune(...)."
        )

    def _with_variance_times(self, scale: float) -> PrunedPosterior:
        other = copy.copy(self)
        other._kept = self._kept._with_variance_times(scale)
        return other

    # -- parts -----------------------------------------------------------------------------------------------

    def _flat_mask(self) -> Tensor:
        device = self._kept.mean[KEPT].device
        return torch.cat([mask.flatten().to(device) for mask in self.masks.values()])

    def _spread(self, kept: Tensor, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """The values of the kept weights as tensors like the parameters, with zeros between."""
        flat = torch.zeros(self._flat_mask().shape, dtype=kept.dtype, device=kept.device)
        flat[self._flat_mask()] = kept
        pieces = flat.split([mask.numel() for mask in self.masks.values()])
        return {
            name: piece.reshape(mask.shape).to(mask.device, dtypes[name])
            for (name, mask), piece in zip(self.masks.items(), pieces, strict=True)
        }

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        tensors, _ = io.parts_of(self._kept)
        own = {key: tensor for key, tensor in tensors.items() if not key.startswith("buffer/")}
        return {"mask": self.masks, "inner": own}

    def _settings(self) -> dict[str, Any]:
        return {"inner": io.parts_of(self._kept)[1], "among": self._among}

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> PrunedPosterior:
        kept = io.made_of(io.sections_of(sections["inner"]), rest["inner"], model)
        kept.buffers = rest["buffers"]
        pruned = cls(model, {name: sections["mask"][name] for name in mean}, kept, prior, rest.get("among"))
        # A calibration changes the whole alone, not the posterior of the kept weights inside.
        for name in ("ess", "temperature", "seed", "likelihood", "noise_variance", "scales"):
            setattr(pruned, name, rest.get(name, getattr(pruned, name)))
        return pruned

    def _in_order(self, names: list[str]) -> Posterior:
        if list(self.mean) == names:
            return self
        raise ValueError(
            f"A pruned posterior has its parameters in the order of {list(self.mean)}, not of {names}. Build the model "
            "with its layers in that order."
        )


def prune(
    posterior: Posterior,
    fraction: float | None,
    threshold: float | None,
    *,
    scope: str,
    by: str,
    parameters: Collection[str] | None,
) -> PrunedPosterior:
    """See :meth:`vprop.Posterior.prune`."""
    _check_arguments(fraction, threshold, scope, by)
    if isinstance(posterior, PrunedPosterior):
        raise TypeError("prune(): this posterior is pruned already. Prune the one that it was made from, further.")
    names = _pruned_names(posterior, parameters)
    variances = posterior.variance if by == "signal_to_noise" else {}
    scores = {name: posterior.mean[name].abs() for name in names}
    if by == "signal_to_noise":
        scores = {name: score / variances[name].sqrt() for name, score in scores.items()}
    for name, score in scores.items():
        if not bool(torch.isfinite(score).all()):
            raise ValueError(f"prune(): |μ|/σ of {name!r} is NaN or infinite. Training may have diverged; lower lr.")
    masks = {name: torch.ones_like(mean, dtype=torch.bool) for name, mean in posterior.mean.items()}
    if threshold is not None:
        masks |= {name: score >= threshold for name, score in scores.items()}
    elif scope == "parameter":
        masks |= {name: _largest(score, fraction) for name, score in scores.items()}
    else:
        device = next(iter(scores.values())).device
        together = _largest(torch.cat([score.flatten().to(device).float() for score in scores.values()]), fraction)
        pieces = together.split([score.numel() for score in scores.values()])
        for (name, score), piece in zip(scores.items(), pieces, strict=True):
            masks[name] = piece.view(score.shape).to(score.device)
    kept = torch.cat([mask.flatten().to(next(iter(masks.values())).device) for mask in masks.values()])
    if not bool(kept.any()):
        compared = "|μ|/σ" if by == "signal_to_noise" else "|μ|"
        if threshold is not None:
            raise invalid("threshold", threshold, f"at most the largest {compared}", "Nothing would be kept.")
        raise invalid("fraction", fraction, "small enough to keep one weight", f"All {kept.numel()} would be zero.")
    pruned = PrunedPosterior(posterior.model, masks, posterior._given_zeros(kept), posterior.prior, list(scores))
    pruned.head, pruned.constants = posterior.head, posterior.constants
    return pruned


def _largest(scores: Tensor, fraction: float | None) -> Tensor:
    """Where the scores are that are kept when ``fraction`` of them goes, to the nearest whole number."""
    assert fraction is not None
    kept = torch.ones(scores.numel(), dtype=torch.bool, device=scores.device)
    kept[scores.flatten().argsort(stable=True)[: round(fraction * scores.numel())]] = False
    return kept.view(scores.shape)


def _pruned_names(posterior: Posterior, parameters: Collection[str] | None) -> list[str]:
    if parameters is None:
        return [name for name, mean in posterior.mean.items() if mean.dim() >= 2] or list(posterior.mean)
    names = [parameters] if isinstance(parameters, str) else list(parameters)
    unknown = [name for name in names if name not in posterior.mean]
    if unknown or not names:
        raise invalid("parameters", parameters, "names of parameters with a posterior", "See list(posterior.mean).")
    return names


def _check_arguments(fraction: Any, threshold: Any, scope: str, by: str) -> None:
    if (fraction is None) == (threshold is None):
        raise ValueError("prune() needs either fraction or threshold. Pass e.g. fraction=0.9, or threshold=0.5.")
    if fraction is not None and not (is_finite(fraction) and 0 <= fraction < 1):
        raise invalid("fraction", fraction, "a number >= 0 and < 1", "0.9 sets nine of ten weights to zero.")
    if threshold is not None and not (is_finite(threshold) and threshold >= 0):
        raise invalid("threshold", threshold, "a number >= 0", "Weights with a smaller |μ|/σ become zero.")
    if scope not in ("global", "parameter"):
        raise invalid("scope", scope, "'global' or 'parameter'", "'global' compares the weights of all parameters.")
    if by not in ("signal_to_noise", "magnitude"):
        raise invalid("by", by, "'signal_to_noise' or 'magnitude'", "'signal_to_noise' is |μ|/σ.")
