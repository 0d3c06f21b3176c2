"""A posterior of parts with different structures, independent of each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from vprop.posterior import _registry
from vprop.posterior._base import Posterior
from vprop.posterior.calibrated import Scales
from vprop.posterior.diagonal import DiagonalPosterior, nearest_diagonal
from vprop.posterior.prior import GaussianPrior

_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of the parts: each numbers its parameters from 0, and no two may draw the same noise."""


class ComposedPosterior(Posterior):
    """q(θ) = Π q(θₚ) over ``parts``, posteriors by the name of their structure, each over parameters of its own.

    Entropies, KL divergences and log-probabilities add up. Draw from the whole: parts that are asked one by one for
    draws of one seed make them of the same noise.
    """

    structure = "composed"
    _instead = (
        "Ask its parts, which are independent of each other: posterior.parts[name].{question}(...); or "
        "posterior.as_diagonal().{question}(...), which leaves correlations out."
    )

    def __init__(
        self,
        model: nn.Module,
        mean: dict[str, Tensor],
        parts: dict[str, Posterior],
        prior: GaussianPrior,
        **rest: Any,
    ) -> None:
        super().__init__(model, mean, prior, **rest)
        self.parts = parts

    @classmethod
    def of(cls, parts: dict[str, Posterior], **rest: Any) -> ComposedPosterior:
        """From posteriors over parameters of one model."""
        model = next(iter(parts.values())).model
        found = {name: part for part in parts.values() for name in part.mean}
        order = [name for name, _ in model.named_parameters() if name in found]
        prior = GaussianPrior(
            {name: found[name].prior.mean[name] for name in order},
            {name: found[name].prior.precision[name] for name in order},
        )
        return cls(model, {name: found[name].mean[name] for name in order}, parts, prior, **rest)

    def __repr__(self) -> str:
        return f"ComposedPosterior({', '.join(map(repr, self.parts.values()))})"

    @property
    def variance(self) -> dict[str, Tensor]:
        """Marginal variances by parameter name."""
        found = {name: value for part in self.parts.values() for name, value in part.variance.items()}
        return {name: found[name] for name in self.mean}

    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        drawn: dict[str, Tensor] = {}
        for number, name in enumerate(sorted(self.parts)):
            drawn.update(self.parts[name]._draw((seed + number * _STRIDE) % 2**64, sample, snapshot))
        return {name: drawn[name] for name in self.mean}

    @torch.no_grad()
    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum of those of the parts."""
        self._check_names(weights)
        return self._sum(part.log_prob(cast(dict[str, Tensor], weights)) for part in self.parts.values())

    def entropy(self) -> Tensor:
        """The sum of those of the parts."""
        return self._sum(part.entropy() for part in self.parts.values())

    def kl(self) -> Tensor:
        """The sum of those of the parts."""
        return self._sum(part.kl() for part in self.parts.values())

    def _sum(self, terms: Any) -> Tensor:
        return torch.stack([term.cpu().double() for term in terms]).sum()

    def as_diagonal(self) -> DiagonalPosterior:
        """The diagonal posterior of the least KL divergence from this one: that of each part."""
        without = [part for part in self.parts.values() if not hasattr(part, "as_diagonal")]
        if without:
            raise TypeError(
                f"as_diagonal(): the part {type(without[0]).__name__} has no as_diagonal(). Write one, or ask the "
                "parts that have one: posterior.parts[...].as_diagonal()."
            )
        diagonals = [cast(Any, part).as_diagonal() for part in self.parts.values()]
        return nearest_diagonal(self, {name: value for part in diagonals for name, value in part.variance.items()})

    def as_prior(self) -> dict[str, Any]:
        """Not possible in one: each part has its own."""
        raise TypeError(
            f"as_prior(): a ComposedPosterior has parts of different structures, {sorted(self.parts)}, with priors of "
            "different forms. Use posterior.parts[...].as_prior() of one part for the group of its parameters; or "
            "posterior.as_diagonal().as_prior(), which leaves correlations out, for a diagonal optimizer."
        )

    # -- linearised, last layers, calibrated -------------------------------------------------------------------

    def _times_root(self, jacobian: dict[str, Tensor]) -> Iterator[Tensor]:
        for part in self.parts.values():
            yield from part._times_root({name: jacobian[name] for name in part.mean})

    def _restricted(self, names: list[str]) -> ComposedPosterior:
        other = cast(ComposedPosterior, super()._restricted(names))
        kept = {structure: [name for name in part.mean if name in names] for structure, part in self.parts.items()}
        other.parts = {
            structure: part if kept[structure] == list(part.mean) else part._restricted(kept[structure])
            for structure, part in self.parts.items()
            if kept[structure]
        }
        return other

    def _with_variance_times(self, scale: float) -> ComposedPosterior:
        other = copy.copy(self)
        other.parts = {structure: part._with_variance_scale(scale) for structure, part in self.parts.items()}
        return other

    def _covariance_times(self, rows: Tensor) -> Tensor:
        sizes = [mean.numel() for mean in self.mean.values()]
        columns = dict(zip(self.mean, rows.split(sizes, -1), strict=True))
        for part in self.parts.values():
            products = part._covariance_times(torch.cat([columns[name] for name in part.mean], -1))
            pieces = products.split([mean.numel() for mean in part.mean.values()], -1)
            columns.update(zip(part.mean, pieces, strict=True))
        return torch.cat([columns[name].to(rows) for name in self.mean], -1)

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        sections: dict[str, dict[str, Tensor]] = {}
        for structure, part in self.parts.items():
            for section, tensors in part._sections().items():
                sections[f"{structure}.{section}"] = tensors
        # Which parameter is of which part, in the order that its matrices have.
        for structure, part in self.parts.items():
            places = {name: torch.tensor(i, dtype=torch.int64, device="cpu") for i, name in enumerate(part.mean)}
            sections[f"{structure}.place"] = places
        return sections

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> ComposedPosterior:
        parts: dict[str, Posterior] = {}
        for structure in dict.fromkeys(key.partition(".")[0] for key in sections if "." in key):
            own = {
                key.partition(".")[2]: tensors
                for key, tensors in sections.items()
                if key.partition(".")[0] == structure and "." in key
            }
            place = own.pop("place")
            names = sorted(place, key=lambda name: int(place[name]))
            part = _registry.find(structure)
            assert part is not None
            for section in part.sections_by_parameter:
                own[section] = {name: own[section][name].to(mean[name].device) for name in names}
            part_prior = GaussianPrior({n: prior.mean[n] for n in names}, {n: prior.precision[n] for n in names})
            plain = {name: value for name, value in rest.items() if name in ("ess", "temperature", "seed", "buffers")}
            plain["scales"] = Scales(variance=rest.get("scales", Scales()).variance)  # logits are those of the whole
            parts[structure] = part._from_sections(model, {n: mean[n] for n in names}, part_prior, own, **plain)
        return cls(model, mean, parts, prior, **rest)

    def _in_order(self, names: list[str]) -> ComposedPosterior:
        """With the parameters of each part in that order."""
        other = cast(ComposedPosterior, super()._in_order(names))
        other.parts = {
            structure: part._in_order([name for name in names if name in part.mean])
            for structure, part in self.parts.items()
        }
        return other
