"""Several posteriors over the weights of one model as one: an ensemble whose members have error bars.

q(θ) = Σₖ πₖqₖ(θ). Members usually come from trainings with other initial weights: each Gaussian has one mode, the
mixture has several. What is linear in q is exact (predictions, moments, densities). Entropy and KL are not in closed
form; with I the mutual information of a draw and the member that it came from, 0 ≤ I ≤ H(π) ≤ log K,

    H(q) = Σₖ πₖH(qₖ) + I,        KL(q‖p) = Σₖ πₖKL(qₖ‖p) − I

so the sums are bounds on the safe side: the ELBO from them is below the mixture's by I at most, and a bound on the
evidence like any ELBO. Members far from each other (a deep ensemble) have I = H(π) to all digits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.checks import is_finite, shown
from vprop.posterior import io
from vprop.posterior._base import Posterior
from vprop.posterior._mixture_checks import (
    agreed,
    agreed_likelihood,
    agreed_scales,
    check_frozen,
    check_members,
    check_priors,
    check_zeros,
    mean_noise,
)
from vprop.posterior.prior import GaussianPrior
from vprop.precision import as_tensor, in_precision_of

_CHOICE = 2**32 - 1
"""The parameter number whose noise chooses members: no parameter has it."""


class Mixture(Posterior):
    """The mixture of ``posteriors``, with ``weights`` that are equal by default.

    It answers what a posterior answers. Samples of a prediction are shared out among the members in proportion to the
    weights, to the nearest whole number; each member's run in its own model, with its own buffers. Members may have
    different structures; the models must be of one architecture. A mixture among the members counts as its members.
    Members that were pruned differently predict together, but have no common density, entropy or KL.

    ``mean`` and ``variance`` are those of the mixture. The mean of several modes is nothing to predict with.

    >>> import torch, vprop
    >>> def member(seed):
    ...     torch.manual_seed(seed)
    ...     model = torch.nn.Linear(3, 2)
    ...     return vprop.Vprop(model.parameters(), num_data=100).posterior(model, likelihood="categorical")
    >>> with torch.random.fork_rng():
    ...     ensemble = Mixture([member(0), member(1)])
    >>> ensemble.predict(torch.ones(5, 3), num_samples=8).probs.shape
    torch.Size([5, 2])
    """

    structure = "mixture"
    _instead = "Ask the members of a mixture one by one: mixture.members[k].{question}(...)."

    def __init__(self, posteriors: Iterable[Posterior], weights: Sequence[float] | None = None) -> None:
        given = check_members(posteriors)
        shares = _checked_weights(weights, len(given))
        self.members, self.weights = _flattened(given, shares)
        first = self.members[0]
        names = list(first.mean)
        self.members = [m if list(m.mean) == names else m._in_order(names) for m in self.members]
        super().__init__(
            first.model,
            _moment([member.mean for member in self.members], self.weights),
            first.prior,
            ess=agreed([member.ess for member in self.members]),
            temperature=agreed([member.temperature for member in self.members]),
            seed=first.seed,
            snapshot=first.snapshot,
            buffers=first.buffers,
            scales=agreed_scales(given),
            **agreed_likelihood(given, shares),  # a mixture among them may have a noise of its own, from a calibration
        )

    def __repr__(self) -> str:
        return f"Mixture({len(self.members)} members, {self.num_parameters} weights in each, ess={self.ess})"

    def __len__(self) -> int:
        return len(self.members)

    # -- moments and densities -------------------------------------------------------------------------------

    @property
    def variance(self) -> dict[str, Tensor]:
        """Σₖ πₖ(σₖ² + (μₖ − μ)²): that of a draw from the mixture."""
        spreads = []
        for member in self.members:
            own = member.variance
            spreads.append(
                {n: own[n] + (member.mean[n] - mean.to(own[n].device)).square() for n, mean in self.mean.items()}
            )
        return _moment(spreads, self.weights)

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log Σₖ πₖqₖ(weights)."""
        self._check_names(weights)
        check_zeros(self.members, "log_prob")
        logs = torch.stack([member.log_prob(dict(weights)).double().cpu() for member in self.members])
        return torch.logsumexp(logs + self._shares().log(), 0)

    def entropy(self) -> Tensor:
        """Σₖ πₖH(qₖ), a lower bound that is too low by H(π) ≤ log K at most; see :meth:`entropy_bounds`."""
        check_zeros(self.members, "entropy")
        return self._weighted([member.entropy() for member in self.members])

    def entropy_bounds(self) -> tuple[Tensor, Tensor]:
        """Σₖ πₖH(qₖ) and that plus H(π), between which the entropy is: near the second where members are apart."""
        lower = self.entropy()
        return lower, lower + torch.special.entr(self._shares()).sum()

    def kl(self) -> Tensor:
        """Σₖ πₖKL(qₖ‖prior), an upper bound that is too high by H(π) ≤ log K at most. So ``elbo`` is a lower bound."""
        check_zeros(self.members, "kl")
        check_priors(self.members)
        return self._weighted([member.kl() for member in self.members])

    def as_prior(self) -> dict[str, Any]:
        """Not there: a mixture is no Gaussian."""
        raise ValueError(
            "as_prior(): a mixture is no Gaussian, which the prior of an optimizer is. Continue with each member by "
            "itself: mixture.members[k].as_prior()."
        )

    def _weighted(self, values: Sequence[Tensor]) -> Tensor:
        return (torch.stack([value.double().cpu() for value in values]) * self._shares()).sum()

    # -- linearised, last layers, calibrated -------------------------------------------------------------------

    def _times_root(self, jacobian: dict[str, Tensor]) -> Iterable[Tensor]:
        raise ValueError(
            "predict(method='linearized'): outputs of a mixture are no normal distribution. Linearise each of "
            "mixture.members, or use the default, method='monte_carlo'."
        )

    def last_layer(self, head: str | None = None) -> Mixture:
        """The mixture of the members' last layers, each with the rest of its own model."""
        return self._of_members([member.last_layer(head) for member in self.members])

    def _with_variance_times(self, scale: float) -> Mixture:
        return self._of_members([member._with_variance_scale(scale) for member in self.members])

    def _of_members(self, members: Sequence[Posterior]) -> Mixture:
        """The same mixture of others."""
        other = Mixture(members, self.weights)
        other.scales = self.scales
        other.likelihood, other.noise_variance = self.likelihood, self.noise_variance
        return other

    def _shares(self) -> Tensor:
        return torch.tensor(self.weights, dtype=torch.float64, device="cpu")

    # -- draws -----------------------------------------------------------------------------------------------

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        uniform = _uniform(seed, sample, snapshot)
        return self.members[self._member_at(uniform)]._draw(seed, sample, snapshot)

    def _shared_out(self, num_samples: int, seed: int) -> list[tuple[Posterior, range]]:
        """Sample i of n is of the member at quantile (i + u)/n of the weights: in proportion, whatever n is."""
        offset = _uniform(seed, 0, 0)
        chosen = [self._member_at((i + offset) / num_samples) for i in range(num_samples)]  # ascends
        starts = [sum(own < k for own in chosen) for k in range(len(self.members) + 1)]
        return [(member, range(starts[k], starts[k + 1])) for k, member in enumerate(self.members)]

    def _noise_variances(self, members: Sequence[Posterior]) -> list[float | Tensor]:
        """Their own, as calibration of the whole has scaled them; that of the whole where somebody gave it another."""
        noises = [_wide(own.noise_variance) * (self.scales.noise / own.scales.noise) for own in self.members]
        mean = mean_noise(noises, self.weights)
        device = mean.device if isinstance(mean, Tensor) else "cpu"
        wide = torch.zeros((), dtype=torch.float64, device=device)
        mine, of_members = (in_precision_of(value, wide) for value in (self.noise_variance, mean))
        if mine.shape != of_members.shape or not torch.allclose(mine, of_members, rtol=1e-6, atol=0.0):
            return super()._noise_variances(members)
        by_member = {id(own): own_noise for own, own_noise in zip(self.members, noises, strict=True)}
        return [by_member[id(member)] for member in members]

    def _member_at(self, quantile: float) -> int:
        """The member whose part of [0, 1], cut by the weights, holds ``quantile``."""
        end = 0.0
        for k, weight in enumerate(self.weights):
            end += weight
            if quantile < end:
                return k
        return max(k for k, weight in enumerate(self.weights) if weight > 0)

    # -- files -----------------------------------------------------------------------------------------------

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        parts = [io.parts_of(member)[0] for member in self.members]  # refuses what a member alone would be refused for
        check_frozen(self.members)
        return {"member": {f"{k}/{key}": tensor for k, part in enumerate(parts) for key, tensor in part.items()}}

    def _settings(self) -> dict[str, Any]:
        return {"members": [io.parts_of(member)[1] for member in self.members], "weights": self.weights}

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> Mixture:
        members = []
        for k, settings in enumerate(rest["members"]):
            own = {
                name.partition("/")[2]: tensor
                for name, tensor in sections["member"].items()
                if name.partition("/")[0] == str(k)
            }
            members.append(io.made_of(io.sections_of(own), settings, model))
        mixture = cls(members, rest["weights"])
        for name in ("scales", "likelihood", "noise_variance"):  # a calibration changes them of the whole alone
            setattr(mixture, name, rest.get(name, getattr(mixture, name)))
        return mixture

    def _in_order(self, names: list[str]) -> Mixture:
        return self._of_members([member._in_order(names) for member in self.members])


def _checked_weights(weights: Any, count: int) -> list[float]:
    """Weights that add up to one."""
    if weights is None:
        return [1 / count] * count
    values = weights.tolist() if isinstance(weights, Tensor) else weights
    in_order = isinstance(values, Iterable) and not isinstance(values, Mapping | Set)
    values = list(values) if in_order else []
    right = len(values) == count and all(is_finite(value) and value >= 0 for value in values)
    values = [float(value) for value in values] if right else []
    if not 0 < sum(values) < math.inf:
        raise ValueError(
            f"Invalid weights={shown(weights)}: must be {count} numbers >= 0, one for each posterior, not all zero. "
            "They are divided by their sum; leave them out for equal ones."
        )
    return [value / sum(values) for value in values]


def _flattened(posteriors: Sequence[Posterior], weights: Sequence[float]) -> tuple[list[Posterior], list[float]]:
    """Members that are no mixtures themselves, with their weights in the whole."""
    members: list[Posterior] = []
    shares: list[float] = []
    for posterior, weight in zip(posteriors, weights, strict=True):
        if isinstance(posterior, Mixture):
            members += _with_noises_of(posterior)
            shares += [weight * own for own in posterior.weights]
        else:
            members.append(posterior)
            shares.append(weight)
    return members, shares


def _with_noises_of(mixture: Mixture) -> list[Posterior]:
    """The members as the mixture predicts with them, where a calibration or somebody gave the whole another noise."""
    members: list[Posterior] = []
    for member, wanted in zip(mixture.members, mixture._noise_variances(mixture.members), strict=True):
        if not torch.equal(as_tensor(wanted).double().cpu(), as_tensor(member.noise_variance).double().cpu()):
            member = copy.copy(member)
            member.noise_variance, member.scales = wanted, member.scales._replace(noise=mixture.scales.noise)
        members.append(member)
    return members


def _wide(noise: float | Tensor) -> float | Tensor:
    """In float64, where 16 bits would round what is multiplied."""
    return noise.double() if isinstance(noise, Tensor) else noise


def _moment(values: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Σₖ πₖ·values, by name, where the first ones are."""
    result = {}
    for name, first in values[0].items():
        parts = [weight * own[name].detach().to(first) for own, weight in zip(values, weights, strict=True)]
        result[name] = torch.stack(parts).sum(0)
    return result


def _uniform(seed: int, sample: int, snapshot: int) -> float:
    draw = noise.Draw(seed, _CHOICE, step=snapshot, sample=sample, stream=noise.Stream.POSTERIOR)
    return float(torch.special.ndtr(noise.portable_normal(0, 1, draw, dtype=torch.float64)))
