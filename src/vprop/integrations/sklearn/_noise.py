"""Noise of the targets around the networks' outputs: densities, distribution functions, and which one fits best.

A predictive density is a mixture: the mean, over weight samples and members, of the noise's density around each output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, ndtr, ndtri, stdtr

FAMILIES: dict[str, tuple[float, ...]] = {
    "normal": (math.inf,),
    "student_t": (3.0, 4.0, 6.0, 10.0, 30.0, math.inf),
}
"""Degrees of freedom that are tried: three are the fewest with a variance, infinitely many are the normal."""

LEAST_SCALE = 1e-4
"""In units of the target's standard deviation: data without any noise would make the density unbounded."""

MOST_ITERATIONS = 60
"""Towards a quantile: enough for bisection alone."""

TOLERANCE = 1e-6
"""Of a quantile, in units of the noise's scale."""


@dataclass(frozen=True)
class Noise:
    """One column's noise: ``scale`` times Student's t with ``dof`` degrees of freedom, the normal if they are inf."""

    scale: float
    dof: float = math.inf

    @property
    def variance(self) -> float:
        """Of the noise: scale² for the normal, more for heavier tails."""
        return self.scale**2 * (1.0 if math.isinf(self.dof) else self.dof / (self.dof - 2))

    def log_density(self, residuals: np.ndarray) -> np.ndarray:
        """Of each residual."""
        z = residuals / self.scale
        if math.isinf(self.dof):
            return -0.5 * np.square(z) - math.log(self.scale * math.sqrt(2 * math.pi))
        constant = (
            gammaln((self.dof + 1) / 2) - gammaln(self.dof / 2) - math.log(self.scale * math.sqrt(self.dof * math.pi))
        )
        return constant - (self.dof + 1) / 2 * np.log1p(np.square(z) / self.dof)

    def below(self, residuals: np.ndarray) -> np.ndarray:
        """The probability of less than each residual."""
        z = residuals / self.scale
        return ndtr(z) if math.isinf(self.dof) else stdtr(self.dof, z)


def log_mean_exp(logs: np.ndarray) -> np.ndarray:
    """log of the mean of exp over the first axis."""
    top = logs.max(0)
    return top + np.log(np.exp(logs - top).mean(0))


def fitted_noise(outputs: np.ndarray, y: np.ndarray, weights: np.ndarray, family: str) -> tuple[Noise, float]:
    """The noise under which the rows are most probable, and their mean log-density then.

    ``outputs`` are (samples, rows), of networks that have not seen the rows if the noise is to be that of new ones.
    """
    candidates = [_best_scale(outputs, y, weights, dof) for dof in FAMILIES[family]]
    return max(candidates, key=lambda candidate: candidate[1])


def _best_scale(outputs: np.ndarray, y: np.ndarray, weights: np.ndarray, dof: float) -> tuple[Noise, float]:
    """A coarse grid of scales, then a golden section around the best: the density has one peak in practice."""
    residuals = y - outputs

    def score(log_scale: float) -> float:
        logs = log_mean_exp(Noise(math.exp(log_scale), dof).log_density(residuals))
        return float(np.average(logs, weights=weights))

    spread = float(np.sqrt(np.average(np.square(residuals).mean(0), weights=weights)))
    top = math.log(max(2 * spread, 2 * LEAST_SCALE))
    bottom = max(math.log(LEAST_SCALE), top - 7)
    grid = np.linspace(bottom, top, 12)
    best = int(np.argmax([score(point) for point in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(12):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if score(left) > score(right) else (left, high)
    peak = (low + high) / 2
    return Noise(math.exp(peak), dof), score(peak)


def mixture_log_density(outputs: np.ndarray, y: np.ndarray, noises: list[Noise]) -> np.ndarray:
    """Of rows of ``y`` (rows, columns), from outputs (samples, rows, columns): the columns together."""
    logs = sum(noise.log_density(y[:, c] - outputs[:, :, c]) for c, noise in enumerate(noises))
    return log_mean_exp(np.asarray(logs))


def mixture_quantile(outputs: np.ndarray, noise: Noise, probability: float) -> np.ndarray:
    """Of each row, from outputs (samples, rows): where the mixture's distribution function is ``probability``.

    Newton's steps, and bisection wherever one of them would leave the bracket.
    """
    # The quantile of a mixture lies between the smallest and the largest of its parts' quantiles.
    wide = 1.0
    while noise.below(np.array(wide * noise.scale)) < max(probability, 1 - probability):
        wide *= 2
    lower, upper = outputs.min(0) - wide * noise.scale, outputs.max(0) + wide * noise.scale
    spread = math.sqrt(noise.variance) + outputs.std(0)
    point = np.clip(outputs.mean(0) + ndtri(probability) * spread, lower, upper)
    for _ in range(MOST_ITERATIONS):
        residuals = point - outputs
        excess = noise.below(residuals).mean(0) - probability
        lower, upper = np.where(excess < 0, point, lower), np.where(excess < 0, upper, point)
        newton = point - excess / np.maximum(np.exp(noise.log_density(residuals)).mean(0), 1e-300)
        inside = (lower < newton) & (newton < upper)
        moved = np.where(inside, newton, (lower + upper) / 2)
        done = np.abs(moved - point).max(initial=0.0) < TOLERANCE * noise.scale
        point = moved
        if done:
            break
    return point
