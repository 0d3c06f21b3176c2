"""What the user gained in the demo, in words, from the numbers that it measured; also where it gained nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

AS_GOOD = 0.02
"""A score that changes by less than this share of its value counts as equal."""


class Gain(NamedTuple):
    """One thing that was compared: ``mark`` is ``+`` for better, ``=`` for as good and ``−`` for worse."""

    mark: str
    words: str


def gains(demo: dict[str, Any]) -> tuple[list[Gain], str]:
    """Each comparison of the demo, and a last sentence that counts them.

    >>> scores = {"accuracy": 0.97, "log_loss": 0.1, "expected_calibration_error": 0.01}
    >>> scores["mean_confidence_on_noise"] = 0.6
    >>> same = {"digits": {"methods": {"Adam": scores, "Vario": scores}}}
    >>> gains(same)[1]
    'In this run the posterior gained nothing on the digits over Adam.'
    >>> better = {"digits": {"methods": {"Adam": scores | {"log_loss": 0.2}, "Vario": scores}}}
    >>> gains(better)[0][1].words
    'Better probabilities: log-loss 0.100 instead of 0.200 with Adam.'
    """
    adam, vario = (demo["digits"]["methods"][name] for name in ("Adam", "Vario"))
    compared = [_accuracy(adam, vario), _log_loss(adam, vario), _calibration(adam, vario), _noise(adam, vario)]
    better, worse = (sum(gain.mark == mark for gain in compared) for mark in "+−")
    if better:
        last = f"Of {len(compared)} scores on the digits {better} {_are(better)} better than with Adam, {worse} worse."
    elif worse:
        last = f"In this run the posterior gained nothing on the digits over Adam, and {worse} {_are(worse)} worse."
    else:
        last = "In this run the posterior gained nothing on the digits over Adam."
    return compared + ([_error_bars(demo["regression"])] if "regression" in demo else []), last


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _mark(adam: float, vario: float, *, tolerance: float, higher_is_better: bool = False) -> str:
    change = vario - adam if higher_is_better else adam - vario
    return "=" if abs(change) <= tolerance else "+" if change > 0 else "−"


def _accuracy(adam: dict[str, float], vario: dict[str, float]) -> Gain:
    one, other = vario["accuracy"], adam["accuracy"]
    mark = _mark(other, one, tolerance=0.002, higher_is_better=True)
    words = {"+": "More digits are right", "=": "As many digits are right", "−": "Fewer digits are right"}[mark]
    return Gain(mark, f"{words}: {one:.1%} with the posterior, {other:.1%} with Adam.")


def _log_loss(adam: dict[str, float], vario: dict[str, float]) -> Gain:
    one, other = vario["log_loss"], adam["log_loss"]
    mark = _mark(other, one, tolerance=AS_GOOD * other)
    words = {"+": "Better probabilities", "=": "Probabilities as good", "−": "Worse probabilities"}[mark]
    return Gain(mark, f"{words}: log-loss {one:.3f} instead of {other:.3f} with Adam.")


def _calibration(adam: dict[str, float], vario: dict[str, float]) -> Gain:
    one, other = vario["expected_calibration_error"], adam["expected_calibration_error"]
    mark = _mark(other, one, tolerance=AS_GOOD * other)
    nearer = {"+": "nearer to", "=": "as near to", "−": "farther from"}[mark]
    words = f"Its confidence is {nearer} how often it is right"
    return Gain(mark, f"{words}: off by {100 * one:.1f} points on average, by {100 * other:.1f} with Adam.")


def _noise(adam: dict[str, float], vario: dict[str, float]) -> Gain:
    one, other = vario["mean_confidence_on_noise"], adam["mean_confidence_on_noise"]
    mark = _mark(other, one, tolerance=AS_GOOD * other)
    words = {"+": "Less sure of", "=": "As sure of", "−": "More sure of"}[mark]
    return Gain(mark, f"{words} images that show nothing: {one:.0%} on average, {other:.0%} with Adam.")


def _error_bars(regression: dict[str, Any]) -> Gain:
    """How wide the function's bars are at the data and away from them, and how often they hold the truth there."""
    columns = ("grid", "mean", "truth", "epistemic_std")
    near: list[tuple[float, bool]] = []
    far: list[tuple[float, bool]] = []
    for x, mean, truth, std in zip(*(regression[name] for name in columns), strict=True):
        at_data = min(abs(x - place) for place in regression["x"]) < 0.1
        (near if at_data else far).append((std, abs(truth - mean) <= 2 * std))
    (near_std, near_held), (far_std, far_held) = (
        (sum(std for std, _ in part) / len(part), sum(held for _, held in part) / len(part)) for part in (near, far)
    )
    mark = "+" if far_std > near_std * (1 + AS_GOOD) else "="
    words = (
        "Error bars that are wider where there are no data" if mark == "+" else "Error bars that do not see the gaps"
    )
    return Gain(
        mark,
        f"{words}: σ is {near_std:.2f} at the data and {far_std:.2f} away from them. ±2σ hold the true function at "
        f"{near_held:.0%} of the places at the data, and at {far_held:.0%} away from them. Adam has no error bars.",
    )
