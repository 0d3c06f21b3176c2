"""What a fit found, before and after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vprop.posterior import Posterior

AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


@dataclass(frozen=True)
class CalibrationFit(Generic[AnyPosterior]):
    """A number that was fitted on held-out data, the log-loss of these data with and without it, and the posterior.

    ``posterior`` has the number in it: it predicts, is saved and loaded like any other. ``value`` is relative to the
    posterior that was given, which may have been calibrated before. ``at_limit`` says that the search ended at an end
    of its range, so that a value further out may be better still.

    >>> CalibrationFit("temperature", 1.5, before=0.5123, after=0.4321, examples=500, at_limit=False, posterior=None)
    temperature 1.5: held-out log-loss 0.5123 → 0.4321 (500 examples)
    """

    name: str
    value: float
    before: float
    after: float
    examples: int
    at_limit: bool
    posterior: AnyPosterior = field(repr=False)

    def __repr__(self) -> str:
        end = ", at the end of its range" if self.at_limit else ""
        loss = f"held-out log-loss {self.before:.4f} → {self.after:.4f}"
        return f"{self.name} {self.value:.4g}{end}: {loss} ({self.examples} examples)"
