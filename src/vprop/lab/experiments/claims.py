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


@dataclass(frozen=True)
class Check:
    """One comparison: what was seen, whether the claim holds there, where that was, and how far apart the two were."""

    text: str
    holds: bool
    where: str
    gap: float = 0.0


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and how it is decided."""

    id: str
    sentence: str
    measure: Callable[[Results], list[Check]]
    rule: str
    differs: Callable[[list[Check]], str]
    """What the comparisons in which it does not hold have in common, in words."""


def _decide(claim: Claim, results: Results) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": claim.id, "sentence": claim.sentence, "rule": claim.rule}
    try:
        checks = claim.measure(results)
    except NotMeasured as missing:
        return entry | {"verdict": "not measured", "share": "not measured", "measured": str(missing)}
    failing = [check for check in checks if not check.holds]
    holding = len(checks) - len(failing)
    verdict = "holds" if not failing else "holds in part" if holding else "does not hold"
    if len(checks) == 1:  # which says it all
        measured = f"{checks[0].text}."
    else:
        differs = claim.differs(failing) if failing else ""
        if not holding:
            differs = differs.replace("Elsewhere", "Everywhere", 1).replace("Otherwise", "Everywhere", 1)
        measured = f"{_where(checks)} {differs}".strip()
    listed = [{"text": check.text, "holds": check.holds} for check in checks]
    return entry | {"verdict": verdict, "share": _share(holding, len(checks)), "measured": measured, "checks": listed}


def _share(holding: int, total: int) -> str:
    """In how many comparisons it holds.

    >>> _share(2, 8), _share(4, 4), _share(0, 3), _share(1, 1)
    ('2 of 8 comparisons', 'all 4 comparisons', 'none of 3 comparisons', 'the one comparison')
    """
    if total == 1:
        return "the one comparison" if holding else "0 of 1 comparison"
    count = "all" if holding == total else "none of" if not holding else f"{holding} of"
    return f"{count} {total} comparisons"


def _where(checks: list[Check]) -> str:
    """Where it holds: in which figures, or how often for each method where figures have several comparisons."""
    places = list(dict.fromkeys(check.where for check in checks))
    good = {place: [check.holds for check in checks if check.where == place] for place in places}
    if len(places) < len(checks):
        return "It holds for " + ", ".join(f"{place} in {sum(g)} of {len(g)}" for place, g in good.items()) + "."
    holding = [place for place in places if all(good[place])]
    if not holding or len(holding) == len(places):
        return "It holds everywhere." if holding else ""
    failing = [place for place in places if place not in holding]
    if len(holding) <= len(failing):
        return f"It holds for: {'; '.join(holding)}."
    return f"It holds for all but: {'; '.join(failing)}."


def _span(checks: list[Check], digits: int) -> str:
    """The smallest and the largest gap; those of curves that diverged are left out."""
    gaps = sorted(abs(check.gap) for check in checks if math.isfinite(check.gap))
    ends = list(dict.fromkeys(f"{gap:,.{digits}f}" for gap in (gaps[0], gaps[-1]))) if gaps else ["nothing finite"]
    return " to ".join(ends)


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


def _gap(one: Final, other: Final) -> float:
    return math.inf if one.mean is None or other.mean is None else one.mean - other.mean


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
        checks.append(Check(f"{panel['title']}: {text}", close, panel["title"], _gap(elbo, other_elbo)))
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
            fast = math.isfinite(needed) and needed <= bbvi
            checks.append(Check(f"{panel['title']}: {text}", fast, methods[name]["label"], needed))
    if not checks:
        raise NotMeasured("BBVI diverged.")
    return checks


def _slower(failing: list[Check]) -> str:
    never = sum(math.isinf(check.gap) for check in failing)
    return f"Of the others {len(failing) - never} get there later, and {never} not within the run."


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
            text = f"{panel['title']}: {shown} {ends[low]} against {ends[high]}"
            checks.append(Check(text, holds, panel["title"], _gap(ends[low], ends[high])))
        return checks

    return measure


def _overfitting(results: Results) -> list[Check]:
    checks = []
    should = {"rmsprop": True, "vprop-0": True, "vprop-1": False, "vprop-2": False, "cvi-10": False, "bbvi": False}
    for panel, methods in _panels(results, "mlp", methods=tuple(should)):
        for name, overfits in should.items():
            curve = methods[name]["log_loss"]["mean"]
            if curve[-1] is None:
                text = f"{panel['title']}: {methods[name]['label']} diverged"
                checks.append(Check(text, False, methods[name]["label"], math.inf))
                continue
            rise = curve[-1] - min(value for value in curve if value is not None)
            text = f"{panel['title']}: {methods[name]['label']} ends {rise:.3f} above its lowest log-loss"
            checks.append(Check(text, (rise > OVERFIT) == overfits, methods[name]["label"], rise))
    return checks


def _rmsprop_well(results: Results) -> list[Check]:
    checks = []
    for panel, methods in _panels(results, "logreg", methods=("rmsprop",)):
        exact = min(line["value"] for line in panel["lines"] if line["metric"] == "log_loss")
        loss = _final(methods["rmsprop"], "log_loss")
        well = loss.mean is not None and loss.mean <= exact + CLOSE_LOG_LOSS
        gap = math.inf if loss.mean is None else loss.mean - exact
        checks.append(Check(f"{panel['title']}: {loss} against {exact:.4f} of exact VI", well, panel["title"], gap))
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
    return [Check(text, abs(vprop / rmsprop - 0.5) <= 0.005, "memory", vprop / rmsprop)]


def _escapes(results: Results) -> list[Check]:
    rows = _rows(results, "explore", "success", ("VON-1", "Newton", "Gradient descent"))
    checks = []
    for label, row in rows.items():
        if label.startswith("VON-1"):
            suffix = label.removeprefix("VON-1")  # another N: compared with what that N makes of the others
            still = {name: rows[f"{name}{suffix}"]["rate"] for name in ("Newton", "Gradient descent")}
            text = f"{label}: {row['rate']:.0%} (95% interval {row['low']:.0%} to {row['high']:.0%})"
            others = ", ".join(f"{name} {rate:.0%}" for name, rate in still.items())
            checks.append(Check(f"{text} against {others}", row["low"] > max(still.values()), label, row["rate"]))
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
                checks.append(Check(f"{panel['data']}, {method['label']}: {text}", near, method["label"], distance))
    return checks


CLAIMS = [
    Claim(
        "close-to-cvi",
        "Vprop-2 ends close to CVI in ELBO and log-loss.",
        _close_to_cvi,
        f"Final ELBOs at most {CLOSE_ELBO} nats per training example and final log-losses at most {CLOSE_LOG_LOSS} "
        "apart, in every figure.",
        lambda failing: f"Elsewhere their ELBOs end {_span(failing, 0)} nats apart.",
    ),
    Claim(
        "fast-as-bbvi",
        "All variational methods converge at least as fast as BBVI.",
        _fast_as_bbvi,
        "Passes (counted fairly) until the mean ELBO is, and stays, within 0.02 nats per training example of BBVI's "
        "last: for CVI, Vprop-2, Vprop-1 and Vprop-0 no more than for BBVI, each in every figure.",
        _slower,
    ),
    Claim(
        "zero-worse-than-one",
        "Vprop-0 is worse than Vprop-1.",
        _clearly_lower("vprop-0", "vprop-1", "elbo", "ELBO", diverged="vprop-0"),
        "Vprop-0's final ELBO is lower, by more than the spread over seeds, in every figure.",
        lambda failing: (
            f"Elsewhere the two ELBOs are {_span(failing, 1)} nats apart, which is less than the spread over seeds or "
            "the other way round."
        ),
    ),
    Claim(
        "zero-better-than-rmsprop",
        "Vprop-0 is slightly better than RMSprop.",
        _clearly_lower("vprop-0", "rmsprop", "log_loss", "log-loss", diverged="rmsprop"),
        "Vprop-0's final log-loss is lower, by more than the spread over seeds, in every figure.",
        lambda failing: (
            f"Elsewhere the two log-losses are {_span(failing, 3)} apart, which is less than the spread over seeds or "
            "the other way round."
        ),
    ),
    Claim(
        "overfitting",
        "On the network RMSprop and Vprop-0 overfit, the sampling methods do not.",
        _overfitting,
        f"Overfitting: the final log-loss is more than {OVERFIT} above the curve's lowest point. It must be so for "
        "RMSprop and Vprop-0, and must not for Vprop-1, Vprop-2, CVI and BBVI, each in every figure.",
        lambda failing: f"Where it does not, log-losses end {_span(failing, 3)} above their lowest point.",
    ),
    Claim(
        "rmsprop-does-well",
        "RMSprop does well in log-loss on logistic regression.",
        _rmsprop_well,
        f"Its final log-loss is at most {CLOSE_LOG_LOSS} above that of exact VI, in every figure.",
        lambda failing: f"Elsewhere it ends {_span(failing, 3)} above exact inference.",
    ),
    Claim(
        "half-the-memory",
        "Vprop needs half of BBVI's memory.",
        _half_the_memory,
        "Measured bytes per weight of Vprop against BBVI with RMSprop steps (the paper's comparison): a quotient of "
        "0.5, to 1%.",
        lambda failing: "",
    ),
    Claim(
        "escapes",
        "VON escapes local minima that Newton's method stops in.",
        _escapes,
        "The success rate of VON is above those of Newton's method and gradient descent, its whole 95% interval; for "
        "the wider and for the narrower posterior.",
        lambda failing: "Otherwise: " + "; ".join(check.text for check in failing) + ".",
    ),
    Claim(
        "close-to-ekf",
        "VONG is close to the extended Kalman filter.",
        _close_to_ekf,
        "Used as filters, the mean of each form of VONG ends at most half a posterior standard deviation (root mean "
        f"square) from the filter's, and the log-losses at most {CLOSE_LOG_LOSS} apart.",
        lambda failing: f"Otherwise the means end {_span(failing, 2)} posterior standard deviations apart.",
    ),
]
