"""What the members of a mixture must share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vprop.checks import shown
from vprop.posterior._base import Posterior
from vprop.posterior.calibrated import Scales
from vprop.precision import in_precision_of


def check_members(posteriors: Any) -> list[Posterior]:
    """The posteriors as a list, if they are of one architecture."""
    if isinstance(posteriors, Posterior | str) or not isinstance(posteriors, Iterable):
        raise TypeError(
            f"Mixture(posteriors): got {shown(posteriors)}, must be a list of posteriors. Make each with "
            "optimizer.posterior(model), and pass Mixture([...])."
        )
    members = list(posteriors)
    if not members:
        raise ValueError("Mixture(posteriors): there are none, must be at least one. Pass a list of posteriors.")
    for number, member in enumerate(members):
        if not isinstance(member, Posterior):
            raise TypeError(
                f"Mixture(posteriors): number {number} is a {type(member).__name__}, must be a posterior. Use "
                "optimizer.posterior(model) or vprop.load_posterior(path, model)."
            )
        _check_same_model(members[0], member, number)
    return members


def _check_same_model(first: Posterior, other: Posterior, number: int) -> None:
    mine, others = ({name: tuple(mean.shape) for name, mean in p.mean.items()} for p in (first, other))
    for name in [*mine, *others]:
        if mine.get(name) != others.get(name):
            raise ValueError(
                f"Mixture(posteriors): {name!r} has shape {mine.get(name)} in number 0 and {others.get(name)} in "
                f"number {number} (None: not there); must agree. The members are posteriors of one architecture."
            )
    if first.model is other.model:
        return
    kinds = [[(name, type(module)) for name, module in p.model.named_modules()] for p in (first, other)]
    if kinds[0] != kinds[1]:
        differing = next((a for a, b in zip(*kinds, strict=False) if a != b), ("", type(first.model)))
        raise ValueError(
            f"Mixture(posteriors): the models of numbers 0 and {number} differ at {differing[0]!r}, a "
            f"{differing[1].__name__} in number 0. The members are posteriors of one architecture: build their models "
            "with the same function."
        )


def check_zeros(members: Sequence[Posterior], question: str) -> None:
    """Refuse densities over different weights: one over fewer weights has other units, and cannot be added."""
    if not any(hasattr(member, "masks") for member in members):
        return
    first = _kept(members[0])
    for number, member in enumerate(members[1:], start=1):
        own = _kept(member)
        if any(not torch.equal(mask, own[name].to(mask.device)) for name, mask in first.items()):
            raise ValueError(
                f"{question}(): members 0 and {number} have other weights at zero for certain (pruned), so that their "
                "densities are over different weights and do not add up. Ask the members one by one, or prune all of "
                "them alike; predictions of such a mixture are right."
            )


def _kept(posterior: Posterior) -> dict[str, Tensor]:
    """Where weights are that have a density, as masks by name."""
    masks = getattr(posterior, "masks", None)
    return masks or {name: torch.ones_like(mean, dtype=torch.bool) for name, mean in posterior.mean.items()}


def check_priors(members: Sequence[Posterior]) -> None:
    """Refuse a KL to several priors at once."""
    first = members[0].prior
    for number, member in enumerate(members[1:], start=1):
        for kind in ("mean", "precision"):
            for name, value in getattr(first, kind).items():
                other = getattr(member.prior, kind)[name].to(value)
                mine, other = torch.broadcast_tensors(value, other)
                if not torch.allclose(mine, other, rtol=1e-6, atol=0.0):
                    raise _other_prior(number, f"{kind} of {name!r}")
        if first.precision_matrix is not None or member.prior.precision_matrix is not None:
            mine, other = (_prior_matrix(posterior) for posterior in (members[0], member))
            if not torch.allclose(mine, other.to(mine), rtol=1e-6, atol=1e-6 * float(mine.abs().max())):
                raise _other_prior(number, "precision matrix")


def _prior_matrix(posterior: Posterior) -> Tensor:
    """Λ over all weights, also of a prior without correlations."""
    matrix = posterior.prior.precision_matrix
    return posterior._flat(posterior.prior.precision).diag() if matrix is None else matrix.double()


def _other_prior(number: int, what: str) -> ValueError:
    return ValueError(
        f"kl(): members 0 and {number} have another prior {what}, so there is no one prior to measure from. Use kl() "
        "and elbo() of the members."
    )


def check_frozen(members: Sequence[Posterior]) -> None:
    """Refuse to save members whose weights without a posterior differ: a file is loaded over one model."""
    first = members[0]
    for number, member in enumerate(members[1:], start=1):
        others = dict(member.model.named_parameters())
        for name, p in first.model.named_parameters():
            if name in first.mean or first.model is member.model:
                continue
            if name not in others or not torch.equal(p.detach(), others[name].detach().to(p)):
                raise ValueError(
                    f"save(path): {name!r} has no posterior and is not the same in the models of members 0 and "
                    f"{number}, and a mixture is loaded over one model. Save each of mixture.members with the "
                    "state_dict of its model, load each over a model of its own, and make the Mixture of these again."
                )


def agreed(values: Sequence[float | None]) -> float | None:
    """What all have, or nothing."""
    return values[0] if all(value == values[0] for value in values) else None


def agreed_scales(members: Sequence[Posterior]) -> Scales:
    """What calibration has found for all: outputs of a mixture are scaled alike, whichever member they come from."""
    for number, member in enumerate(members):
        if member.scales != members[0].scales:
            raise ValueError(
                f"Mixture(posteriors): number 0 is calibrated with {members[0].scales} and number {number} with "
                f"{member.scales}, must agree. Calibrate the mixture, made of members as they were trained."
            )
    return members[0].scales


def agreed_likelihood(members: Sequence[Posterior], weights: Sequence[float]) -> dict[str, Any]:
    """The likelihood of all, with the mean of their noise variances: that of the mixture's observations."""
    kinds = {member.likelihood for member in members}
    if len(kinds) > 1:
        raise ValueError(
            f"Mixture(posteriors): their likelihoods differ ({', '.join(sorted(map(repr, kinds)))}), must agree. Pass "
            "the same likelihood to optimizer.posterior(model, likelihood=...) of every member."
        )
    return {
        "likelihood": kinds.pop(),
        "noise_variance": mean_noise([member.noise_variance for member in members], weights),
    }


def mean_noise(noises: Sequence[float | Tensor], weights: Sequence[float]) -> float | Tensor:
    """Σₖ πₖvₖ, by which a new observation varies around a draw's output, on average."""
    if all(not isinstance(noise, Tensor) and noise == noises[0] for noise in noises):
        return noises[0]
    device = next((noise.device for noise in noises if isinstance(noise, Tensor)), "cpu")
    wide = torch.zeros((), dtype=torch.float64, device=device)
    mean = sum(weight * in_precision_of(noise, wide) for weight, noise in zip(weights, noises, strict=True))
    assert isinstance(mean, Tensor)
    return float(mean) if mean.dim() == 0 else mean
