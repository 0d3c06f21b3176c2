"""The paper's sentences that can be checked, each with the rule that decides it and what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vprop.lab.experiments.filter import mean_distance

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


@dataclass(frozen=True)
class Final:
    """Where a curve ends, and its spread over seeds; ``None`` where it diverged, or where one seed has no spread."""

    mean: float | None
    std: float | None
    digits: int

    def __str__(self) -> str:
        if self.mean is None:
            return "diverged"
        spread = "" if self.std is None else f" ± {self.std:.{self.digits}f}"
        return f"{self.mean:.{self.digits}f}{spread}"


def _final(method: dict[str, Any], metric: str) -> Final:
    curve = method[metric]
    return Final(curve["mean"][-1], curve["std"][-1], 1 if metric == "elbo" else 4)


def _near(one: Final, other: Final, tolerance: float) -> bool:
    return one.mean is not None and other.mean is not None and abs(one.mean - other.mean) <= tolerance


def _clearly_below(low: Final, high: Final) -> bool:
    """By more than the spread over seeds, which takes two seeds; what diverged is on the bad side of everything."""
    if low.mean is None or high.mean is None:
        return False
    if low.std is None or high.std is None:
        raise NotMeasured("Needs at least two seeds: the spread over seeds decides.")
    return low.mean < high.mean - max(low.std, high.std)


def _close_to_cvi(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", "mlp", methods=("vprop-2", "cvi-10")):
        elbo, other_elbo = (_final(methods[name], "elbo") for name in ("vprop-2", "cvi-10"))
        loss, other_loss = (_final(methods[name], "log_loss") for name in ("vprop-2", "cvi-10"))
        close = _near(elbo, other_elbo, CLOSE_ELBO * panel["num_data"]) and _near(loss, other_loss, CLOSE_LOG_LOSS)
        text = f"ELBO {elbo} against {other_elbo}, log-loss {loss} against {other_loss}"
        checks.append((f"{panel['title']}: {text}", close))
    return checks


def _points(method: dict[str, Any]) -> list[tuple[float, float]]:
    """(log passes, mean ELBO) along the curve, as long as it did not diverge."""
    pairs = zip(method["passes"], method["elbo"]["mean"], strict=True)
    return [(math.log(passes), -math.inf if value is None else value) for passes, value in pairs]


def _passes_to(method: dict[str, Any], level: float) -> float:
    """Passes from which on the mean ELBO stays at or above ``level``, between the points of the figure; or infinite."""
    points = _points(method)
    below = [i for i, (_, value) in enumerate(points) if value < level]
    if not below:
        return math.exp(points[0][0])
    last = below[-1]
    if last + 1 == len(points):
        return math.inf
    (x0, y0), (x1, y1) = points[last], points[last + 1]
    return math.exp(x1 if math.isinf(y0) else x0 + (x1 - x0) * (level - y0) / (y1 - y0))


def _value_at(method: dict[str, Any], passes: float) -> str:
    """The mean ELBO at a number of passes, on a straight line between the points of the figure."""
    target = math.log(passes)
    for (x0, y0), (x1, y1) in pairwise(_points(method)):
        if x0 <= target <= x1 and not math.isinf(y0 + y1):
            return f"{y0 + (y1 - y0) * (target - x0) / (x1 - x0):.0f}"
    return "not reached"


def _fast_as_bbvi(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", "mlp", methods=("bbvi", *VARIATIONAL)):
        end = _final(methods["bbvi"], "elbo").mean
        if end is None:
            continue
        level = end - 0.02 * panel["num_data"]
        bbvi, tenth = _passes_to(methods["bbvi"], level), methods["bbvi"]["passes"][-1] / 10
        for name in VARIATIONAL:
            needed = _passes_to(methods[name], level)
            early = f"{_value_at(methods[name], tenth)} against {_value_at(methods['bbvi'], tenth)}"
            text = (
                f"{methods[name]['label']} {_after(needed)}, BBVI {_after(bbvi)}; ELBO after a tenth of the run {early}"
            )
            checks.append((f"{panel['title']}: {text}", math.isfinite(needed) and needed <= bbvi))
    if not checks:
        raise NotMeasured("BBVI diverged.")
    return checks


def _after(passes: float) -> str:
    return "never" if math.isinf(passes) else f"after {passes:.3g} passes"


def _clearly_lower(low: str, high: str, metric: str, shown: str, diverged: str) -> Callable[[Results], list[Check]]:
    """Whether one method ends clearly below another; where ``diverged`` alone did, it does as well."""

    def measure(results: Results) -> list[Check]:
        checks = []
        for panel, methods in _panels(results, "logreg", "mlp", methods=(low, high)):
            ends = {name: _final(methods[name], metric) for name in (low, high)}
            gone = [name for name, end in ends.items() if end.mean is None]
            holds = _clearly_below(ends[low], ends[high]) or gone == [diverged]
            checks.append((f"{panel['title']}: {shown} {ends[low]} against {ends[high]}", holds))
        return checks

    return measure


def _overfitting(results: Results) -> list[Check]:
    checks = []
    should = {"rmsprop": True, "vprop-0": True, "vprop-1": False, "vprop-2": False, "cvi-10": False, "bbvi": False}
    for panel, methods in _panels(results, "mlp", methods=tuple(should)):
        for name, overfits in should.items():
            curve = methods[name]["log_loss"]["mean"]
            if curve[-1] is None:
                checks.append((f"{panel['title']}: {methods[name]['label']} diverged", False))
                continue
            rise = curve[-1] - min(value for value in curve if value is not None)
            text = f"{panel['title']}: {methods[name]['label']} ends {rise:.3f} above its lowest log-loss"
            checks.append((text, (rise > OVERFIT) == overfits))
    return checks


def _rmsprop_well(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", methods=("rmsprop",)):
        exact = min(line["value"] for line in panel["lines"] if line["metric"] == "log_loss")
        loss = _final(methods["rmsprop"], "log_loss")
        well = loss.mean is not None and loss.mean <= exact + CLOSE_LOG_LOSS
        checks.append((f"{panel['title']}: {loss} against {exact:.4f} of exact VI", well))
    return checks


def _rows(results: Results, experiment: str, key: str, needed: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Rows by label, if those that are needed are there."""
    rows = {row["label"]: row for row in results.get(experiment, {}).get(key, [])}
    if any(label not in rows for label in needed):
        raise NotMeasured(f"Needs «{experiment}» with {', '.join(needed)}.")
    return rows


def _half_the_memory(results: Results) -> list[Check]:
    needed = ("Vprop", "BBVI", "BBVI with RMSprop", "BBVI with Adam", "RMSprop")
    sizes = {label: row["bytes_per_parameter"] for label, row in _rows(results, "memory", "rows", needed).items()}
    vprop, rmsprop = sizes["Vprop"], sizes["BBVI with RMSprop"]
    text = (
        f"Vprop {vprop:.1f} bytes, BBVI with RMSprop {rmsprop:.1f} (quotient {vprop / rmsprop:.2f}), with Adam "
        f"{sizes['BBVI with Adam']:.1f}; BBVI with constant steps {sizes['BBVI']:.1f}, RMSprop {sizes['RMSprop']:.1f}"
    )
    return [(text, abs(vprop / rmsprop - 0.5) <= 0.005)]


def _escapes(results: Results) -> list[Check]:
    rows = _rows(results, "explore", "success", ("VON-1", "Newton", "Gradient descent"))
    checks = []
    for label, row in rows.items():
        if label.startswith("VON-1"):
            suffix = label.removeprefix("VON-1")  # another N: compared with what that N makes of the others
            still = {name: rows[f"{name}{suffix}"]["rate"] for name in ("Newton", "Gradient descent")}
            text = f"{label} {row['rate']:.0%} (95% interval {row['low']:.0%} to {row['high']:.0%})"
            others = ", ".join(f"{name} {rate:.0%}" for name, rate in still.items())
            checks.append((f"{text} against {others}", row["low"] > max(still.values())))
    return checks


def _close_to_ekf(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "filter", methods=("filter-ekf", "filter-vong", "filter-vong-fisher")):
        reference = _final(methods["filter-ekf"], "log_loss")
        for name, method in methods.items():
            if name.startswith("filter-vong"):
                distance, loss = mean_distance(method), _final(method, "log_loss")
                text = f"{distance:.2f} standard deviations, log-loss {loss} against {reference}"
                near = distance <= 0.5 and _near(loss, reference, CLOSE_LOG_LOSS)
                checks.append((f"{panel['data']}, {method['label']}: {text}", near))
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
        _clearly_lower("vprop-0", "vprop-1", "elbo", "ELBO", diverged="vprop-0"),
        "Vprop-0's final ELBO is lower, by more than the spread over seeds, in every figure.",
    ),
    Claim(
        "zero-better-than-rmsprop",
        "Vprop-0 is slightly better than RMSprop.",
        _clearly_lower("vprop-0", "rmsprop", "log_loss", "log-loss", diverged="rmsprop"),
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
