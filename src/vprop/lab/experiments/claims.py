"""The paper's sentences that can be checked, each with the rule that decides it and what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Results = dict[str, dict[str, Any]]
Panel = dict[str, Any]

CLOSE_ELBO = 0.01
"""Nats per training example: two ELBOs nearer than this are close."""
CLOSE_LOG_LOSS = 0.005
"""Nats per test example."""
OVERFIT = 0.01
"""A log-loss that ends this much above its lowest point has overfitted."""

VARIATIONAL = ("cvi-10", "vprop-2", "vprop-1", "vprop-0")


def claims(results: Results) -> dict[str, Any]:
    """All claims, decided by the results that are there."""
    return {"experiment": "claims", "claims": [_decide(claim, results) for claim in CLAIMS]}


class NotMeasured(Exception):
    """The results that a claim needs are not there."""


Check = tuple[str, bool]
"""What was seen in one place, and whether the claim holds there."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how it is decided."""

    id: str
    sentence: str
    measure: Callable[[Results], list[Check]]
    rule: str


def _decide(claim: Claim, results: Results) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": claim.id, "sentence": claim.sentence, "rule": claim.rule}
    try:
        checks = claim.measure(results)
    except NotMeasured as missing:
        return entry | {"verdict": "not measured", "measured": str(missing)}
    holding = sum(good for _, good in checks)
    verdict = "holds" if holding == len(checks) else "holds in part" if holding else "does not hold"
    measured = checks[0][0] if len(checks) == 1 else f"It is so in {holding} of {len(checks)} comparisons."
    listed = [{"text": text, "holds": good} for text, good in checks]
    return entry | {"verdict": verdict, "measured": measured, "checks": listed}


def _panels(results: Results, *experiments: str, methods: tuple[str, ...]) -> list[tuple[Panel, dict[str, Any]]]:
    """Figures that have all of ``methods``, with those by name."""
    found = []
    for experiment in experiments:
        for panel in results.get(experiment, {}).get("panels", []):
            present = {method["name"]: method for method in panel["methods"] if method["passes"]}
            if all(name in present for name in methods):
                found.append((panel, present))
    if not found:
        names = " or ".join(f"«{name}»" for name in experiments)
        raise NotMeasured(f"Needs {names} with {', '.join(methods)}.")
    return found


def _last(method: dict[str, Any], metric: str) -> tuple[float, float]:
    """Final mean and spread; a diverged run is infinitely bad."""
    curve = method[metric]
    mean, std = curve["mean"][-1], curve["std"][-1]
    if mean is None:
        return (-float("inf") if metric == "elbo" else float("inf")), 0.0
    return mean, std


def _close_to_cvi(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", "mlp", methods=("vprop-2", "cvi-10")):
        elbos = [_last(methods[name], "elbo")[0] for name in ("vprop-2", "cvi-10")]
        losses = [_last(methods[name], "log_loss")[0] for name in ("vprop-2", "cvi-10")]
        close = (
            abs(elbos[0] - elbos[1]) <= CLOSE_ELBO * panel["num_data"] and abs(losses[0] - losses[1]) <= CLOSE_LOG_LOSS
        )
        text = f"ELBO {elbos[0]:.1f} against {elbos[1]:.1f}, log-loss {losses[0]:.4f} against {losses[1]:.4f}"
        checks.append((f"{panel['title']}: {text}", close))
    return checks


def _passes_to(method: dict[str, Any], level: float) -> float:
    """Passes from which on the mean ELBO stays at or above ``level``; infinite if it never does."""
    reached = float("inf")
    for passes, value in zip(method["passes"], method["elbo"]["mean"], strict=True):
        if value is None or value < level:
            reached = float("inf")
        elif reached == float("inf"):
            reached = passes
    return reached


def _fast_as_bbvi(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", "mlp", methods=("bbvi", *VARIATIONAL)):
        level = _last(methods["bbvi"], "elbo")[0] - 0.02 * panel["num_data"]
        bbvi = _passes_to(methods["bbvi"], level)
        for name in VARIATIONAL:
            needed = _passes_to(methods[name], level)
            early = [_value_at(methods[one], methods["bbvi"]["passes"][-1] / 10) for one in (name, "bbvi")]
            text = f"{methods[name]['label']} {_after(needed)}, BBVI {_after(bbvi)}; ELBO after a tenth of the run"
            checks.append((f"{panel['title']}: {text} {early[0]:.0f} against {early[1]:.0f}", needed <= bbvi))
    return checks


def _after(passes: float) -> str:
    return "never" if passes == float("inf") else f"after {passes:.3g} passes"


def _value_at(method: dict[str, Any], passes: float) -> float:
    """The mean ELBO at a number of passes, on a straight line between the points of the figure."""
    points = [(math.log(x), y) for x, y in zip(method["passes"], method["elbo"]["mean"], strict=True) if y is not None]
    target = math.log(passes)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= target <= x1:
            return y0 + (y1 - y0) * (target - x0) / (x1 - x0)
    return points[0][1] if points and target < points[0][0] else -float("inf")


def _zero_worse_than_one(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", "mlp", methods=("vprop-0", "vprop-1")):
        (zero, zero_std), (one, one_std) = (_last(methods[name], "elbo") for name in ("vprop-0", "vprop-1"))
        text = f"{panel['title']}: ELBO {zero:.1f} ± {zero_std:.1f} against {one:.1f} ± {one_std:.1f}"
        checks.append((text, zero < one - max(zero_std, one_std)))
    return checks


def _zero_beats_rmsprop(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", "mlp", methods=("vprop-0", "rmsprop")):
        (zero, zero_std), (rms, rms_std) = (_last(methods[name], "log_loss") for name in ("vprop-0", "rmsprop"))
        text = f"{panel['title']}: log-loss {zero:.4f} ± {zero_std:.4f} against {rms:.4f} ± {rms_std:.4f}"
        checks.append((text, zero < rms - max(zero_std, rms_std)))
    return checks


def _rise(method: dict[str, Any]) -> float:
    """How far the final log-loss is above the lowest point of the curve."""
    values = [value for value in method["log_loss"]["mean"] if value is not None]
    last = method["log_loss"]["mean"][-1]
    return float("inf") if last is None else last - min(values)


def _overfitting(results: Results) -> list[Check]:
    checks = []
    should = {"rmsprop": True, "vprop-0": True, "vprop-1": False, "vprop-2": False, "cvi-10": False, "bbvi": False}
    for panel, methods in _panels(results, "mlp", methods=tuple(should)):
        for name, overfits in should.items():
            rise = _rise(methods[name])
            text = f"{panel['title']}: {methods[name]['label']} ends {rise:.3f} above its lowest log-loss"
            checks.append((text, (rise > OVERFIT) == overfits))
    return checks


def _rmsprop_well(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", methods=("rmsprop",)):
        exact = min(line["value"] for line in panel["lines"] if line["metric"] == "log_loss")
        loss, _ = _last(methods["rmsprop"], "log_loss")
        checks.append((f"{panel['title']}: {loss:.4f} against {exact:.4f} of exact VI", loss <= exact + CLOSE_LOG_LOSS))
    return checks


def _half_the_memory(results: Results) -> list[Check]:
    if "memory" not in results:
        raise NotMeasured("Needs «memory».")
    sizes = {row["label"]: row["bytes_per_parameter"] for row in results["memory"]["rows"]}
    vprop, rmsprop = sizes["Vprop"], sizes["BBVI with RMSprop"]
    text = (
        f"Vprop {vprop:.1f} bytes, BBVI with RMSprop {rmsprop:.1f} (quotient {vprop / rmsprop:.2f}), with Adam "
        f"{sizes['BBVI with Adam']:.1f}; BBVI with constant steps {sizes['BBVI']:.1f}, RMSprop {sizes['RMSprop']:.1f}"
    )
    return [(text, abs(vprop / rmsprop - 0.5) <= 0.005)]


def _escapes(results: Results) -> list[Check]:
    if "explore" not in results:
        raise NotMeasured("Needs «explore».")
    rows = {row["label"]: row for row in results["explore"]["success"]}
    still = {label: rows[label]["rate"] for label in ("Newton", "Gradient descent")}
    checks = []
    for label, row in rows.items():
        if label.startswith("VON-1"):
            text = f"{label} {row['rate']:.0%} (95% interval {row['low']:.0%} to {row['high']:.0%})"
            others = ", ".join(f"{name} {rate:.0%}" for name, rate in still.items())
            checks.append((f"{text} against {others}", row["low"] > max(still.values())))
    return checks


def _close_to_ekf(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "filter", methods=("filter-ekf", "filter-vong", "filter-vong-fisher")):
        reference = _last(methods["filter-ekf"], "log_loss")[0]
        for name, method in methods.items():
            if not name.startswith("filter-vong"):
                continue
            distance, loss = statistics.fmean(method["distance_to_ekf"]), _last(method, "log_loss")[0]
            text = f"{distance:.2f} standard deviations, log-loss {loss:.4f} against {reference:.4f}"
            checks.append(
                (
                    f"{panel['data']}, {method['label']}: {text}",
                    distance <= 0.5 and abs(loss - reference) <= CLOSE_LOG_LOSS,
                )
            )
    return checks


CLAIMS = [
    Claim(
        "close-to-cvi",
        "Vprop-2 ends close to CVI in ELBO and log-loss.",
        _close_to_cvi,
        f"Final ELBOs at most {CLOSE_ELBO} nats per training example and final log-losses at most {CLOSE_LOG_LOSS} "
        "apart, in every figure.",
    ),
    Claim(
        "fast-as-bbvi",
        "All variational methods converge at least as fast as BBVI.",
        _fast_as_bbvi,
        "Passes (counted fairly) until the mean ELBO is, and stays, within 0.02 nats per training example of BBVI's "
        "last: for CVI, Vprop-2, Vprop-1 and Vprop-0 no more than for BBVI, each in every figure.",
    ),
    Claim(
        "zero-worse-than-one",
        "Vprop-0 is worse than Vprop-1.",
        _zero_worse_than_one,
        "Vprop-0's final ELBO is lower, by more than the spread over seeds, in every figure.",
    ),
    Claim(
        "zero-better-than-rmsprop",
        "Vprop-0 is slightly better than RMSprop.",
        _zero_beats_rmsprop,
        "Vprop-0's final log-loss is lower, by more than the spread over seeds, in every figure.",
    ),
    Claim(
        "overfitting",
        "On the network RMSprop and Vprop-0 overfit, the sampling methods do not.",
        _overfitting,
        f"Overfitting: the final log-loss is more than {OVERFIT} above the curve's lowest point. It must be so for "
        "RMSprop and Vprop-0, and must not for Vprop-1, Vprop-2, CVI and BBVI, each in every figure.",
    ),
    Claim(
        "rmsprop-does-well",
        "RMSprop does well in log-loss on logistic regression.",
        _rmsprop_well,
        f"Its final log-loss is at most {CLOSE_LOG_LOSS} above that of exact VI, in every figure.",
    ),
    Claim(
        "half-the-memory",
        "Vprop needs half of BBVI's memory.",
        _half_the_memory,
        "Measured bytes per weight of Vprop against BBVI with RMSprop steps (the paper's comparison): a quotient of "
        "0.5, to 1%.",
    ),
    Claim(
        "escapes",
        "VON escapes local minima that Newton's method stops in.",
        _escapes,
        "The success rate of VON is above those of Newton's method and gradient descent, its whole 95% interval; for "
        "the wider and for the narrower posterior.",
    ),
    Claim(
        "close-to-ekf",
        "VONG is close to the extended Kalman filter.",
        _close_to_ekf,
        "Used as filters, the mean of each form of VONG ends at most half a posterior standard deviation (root mean "
        f"square) from the filter's, and the log-losses at most {CLOSE_LOG_LOSS} apart.",
    ),
]
