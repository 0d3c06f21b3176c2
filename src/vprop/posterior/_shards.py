"""What posteriors of shards must share to be merged, and what of them is added up or averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from vprop.checks import shown
from vprop.likelihood import LikelihoodLike
from vprop.posterior import _registry
from vprop.posterior._base import Posterior
from vprop.posterior.calibrated import Scales
from vprop.precision import as_tensor, widest_dtype


def wide(value: Tensor, like: Tensor) -> Tensor:
    """On the device of ``like``, in its widest precision: what is merged is a difference of large numbers."""
    return value.detach().to(like.device, widest_dtype(like.device))


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum; shapes may be broadcast."""
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result + tensor
    return result


def checked(posteriors: Iterable[Posterior]) -> list[Posterior]:
    """The posteriors, if they can be merged, with the rows of all matrices in the order of the first."""
    if isinstance(posteriors, Posterior):
        raise TypeError("merge(posteriors): is one posterior, must be a list of them. Pass merge([...]).")
    if isinstance(posteriors, str) or not isinstance(posteriors, Iterable):
        raise TypeError(
            f"merge(posteriors): got {shown(posteriors)}, must be a list of posteriors. Make each with "
            "optimizer.posterior(model) or vprop.load_posterior(path, model)."
        )
    shards = list(posteriors)
    if not shards:
        raise ValueError("merge(posteriors): there are none, must be at least one. Pass a list of posteriors.")
    for i, shard in enumerate(shards):
        _check_shard(shards[0], shard, i)
    names = list(shards[0].mean)
    return [shard if list(shard.mean) == names else shard._in_order(names) for shard in shards]


def _check_shard(first: Posterior, shard: Posterior, number: int) -> None:
    if not isinstance(shard, Posterior):
        allowed = [cls.__name__ for cls in _registry.registered() if cls._merged is not Posterior._merged]
        raise TypeError(
            f"merge(posteriors): number {number} is a {type(shard).__name__}, must be a {' or '.join(allowed)}. Use "
            "optimizer.posterior(model) or vprop.load_posterior(path, model)."
        )
    if type(shard) is not type(first):
        raise ValueError(
            f"merge(posteriors): number 0 is a {type(first).__name__}, number {number} a {type(shard).__name__}; must "
            "be of one structure. Train all shards with optimizers of the same structure."
        )
    shapes, others = ({name: tuple(mean.shape) for name, mean in p.mean.items()} for p in (first, shard))
    for name in [*shapes, *others]:
        if shapes.get(name) != others.get(name):
            raise ValueError(
                f"merge(posteriors): {name!r} has shape {shapes.get(name)} in number 0 and {others.get(name)} in "
                f"number {number} (None: not there); must agree. Train all shards on the same model."
            )
    if type(shard)._merged is Posterior._merged:
        shard._merged([], shard.prior, {})  # which says so, before something else is found wrong with its numbers
    _check_numbers(shard, number)
    if shard.scales != Scales():
        raise ValueError(
            f"merge(posteriors): number {number} is calibrated ({shard.scales}), must be as it was trained: what was "
            "found for one shard does not hold for the whole. Merge the posteriors first, and calibrate the result."
        )
    _check_constants(first, shard, number)


def _check_numbers(shard: Posterior, number: int) -> None:
    """Refuse a shard that diverged, or is certain: its NaN or infinity would become that of the whole."""
    checks = [("mean", shard.mean, False), ("variance", shard.variance, True), ("prior mean", shard.prior.mean, False)]
    for what, tensors, positive in checks:
        for name, tensor in tensors.items():
            if not bool((torch.isfinite(tensor) & ((tensor > 0) if positive else True)).all()):
                raise ValueError(
                    f"merge(posteriors): the {what} of {name!r} in number {number} has entries that are NaN or infinite"
                    f"{' or not positive' if positive else ''}, must be finite{' and > 0' if positive else ''}. Leave "
                    "that posterior out, or train it again with a lower lr."
                )
    check_prior_precision(shard.prior.precision, f"merge(posteriors): the prior of number {number}")


def check_prior_precision(precision: dict[str, Tensor], where: str) -> None:
    """Refuse precisions that no prior can have."""
    for name, tensor in precision.items():
        if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
            raise ValueError(
                f"{where}: its precision of {name!r} has entries that are NaN, infinite or negative, must be finite "
                "and >= 0. 0 is a flat prior."
            )


def _check_constants(first: Posterior, shard: Posterior, number: int) -> None:
    """Parameters without a posterior are those of the first, of its model or snapshot: others must have the same."""
    mine, others = (dict(p.model.named_parameters()) | p.constants for p in (first, shard))
    for name, p in mine.items():
        other = others.get(name)
        if name in first.mean or other is p:
            continue
        if other is None or not torch.equal(p.detach(), other.detach().to(p)):
            remedy = "Load the same frozen weights into the models of all shards."
            if name in first.constants or name in shard.constants:
                remedy = "Merge the posteriors of all weights, and call last_layer() of the result."
            raise ValueError(
                f"merge(posteriors): {name!r} has no posterior and is not the same in the models of numbers 0 and "
                f"{number}. {remedy}"
            )


def total_ess(shards: Sequence[Posterior]) -> float | None:
    """The sum, if all are known."""
    known = [shard.ess for shard in shards if shard.ess is not None]
    return sum(known) if len(known) == len(shards) else None


def agreed_temperature(shards: Sequence[Posterior]) -> float | None:
    """That of all, if it is one."""
    temperatures = {shard.temperature for shard in shards}
    return temperatures.pop() if len(temperatures) == 1 else None


def agreed_likelihood(
    shards: Sequence[Posterior], likelihood: LikelihoodLike | None, noise_variance: float | Tensor | None
) -> dict[str, Any]:
    """``likelihood`` and ``noise_variance`` as given, or that of all shards."""
    if likelihood is None:
        kinds = {shard.likelihood for shard in shards}
        if len(kinds) > 1:
            raise ValueError(
                f"merge(posteriors): their likelihoods differ ({', '.join(sorted(map(repr, kinds)))}), must agree. "
                "Pass merge(..., likelihood=...)."
            )
        likelihood = shards[0].likelihood
    if noise_variance is None and (likelihood is None or likelihood == "gaussian"):
        noises = [as_tensor(shard.noise_variance).detach().cpu().double() for shard in shards]
        if not all(noise.shape == noises[0].shape and torch.equal(noise, noises[0]) for noise in noises):
            raise ValueError(
                f"merge(posteriors): their noise variances differ ({', '.join(str(n.tolist()) for n in noises)}), must "
                "agree. Pass merge(..., noise_variance=...) with that of the whole, or train all shards with one."
            )
        noise_variance = shards[0].noise_variance
    return {"likelihood": likelihood, "noise_variance": noise_variance}


@torch.no_grad()
def merged_buffers(shards: Sequence[Posterior]) -> dict[str, Tensor]:
    """Floating-point buffers averaged with weights ess (if all are known), counts added up, other integers the same."""
    sizes = [shard.ess for shard in shards]
    weights = [1.0 if None in sizes else cast(float, size) for size in sizes]
    merged = {}
    for name, own in shards[0].buffers.items():
        others = [shard.buffers.get(name) for shard in shards]
        if any(other is None or other.shape != own.shape for other in others):
            raise ValueError(
                f"merge(posteriors): the buffer {name!r} is not in all of them with shape {tuple(own.shape)}. Train "
                "all shards on the same model."
            )
        values = [cast(Tensor, other).to(own.device) for other in others]
        if own.is_floating_point():
            parts = [wide(value, own) * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True)]
            merged[name] = total(parts).to(own.dtype)
        elif name.rpartition(".")[2] == "num_batches_tracked":
            merged[name] = total(values)
        elif all(torch.equal(value, own) for value in values):
            merged[name] = own.clone()
        else:
            raise ValueError(
                f"merge(posteriors): the buffer {name!r} of dtype {own.dtype} differs between them; integers are not "
                "averaged. Train all shards with the same values in it."
            )
    return merged


# -- what a structure says of shards that have no whole -------------------------------------------------------------


def not_positive(name: str, precision: Tensor, gained: Sequence[Tensor]) -> ValueError:
    """The error for the merged precision of a parameter; ``gained`` is what each shard's data add to it."""
    worst, count = precision.argmin(), int((~(precision > 0)).sum())
    less = [i for i, gain in enumerate(gained) if float(gain.flatten()[worst]) < 0]
    return ValueError(
        f"The merged precision of {name!r} is not positive: {count} of {gained[0].numel()} elements, the lowest "
        f"{float(precision.min()):.3g}. {why(less)}"
    )


def why(less_certain: list[int]) -> str:
    """The cause and the remedy, given the numbers of the shards that are less certain than their priors."""
    if not less_certain:
        return (
            "The shards' data say nothing there, and the prior of the whole does not either. Pass a prior with a "
            "precision > 0."
        )
    return (
        f"A shard is less certain there than its prior (number {', '.join(map(str, less_certain))}, counted from 0). "
        "Leave that shard out or train it longer, or, if each shard had only its share of the prior, pass "
        "prior='product'."
    )
