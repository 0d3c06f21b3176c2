"""What a result must hold, and an error that names what is missing.

A spec is a type (or a tuple of types), ``[spec]`` for a list of such things, ``{key: spec}`` for a dictionary, or
``Maybe(spec)`` for something that may be null or absent.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from vprop.lab.errors import LabError


class ReportError(LabError, ValueError):
    """A result that cannot be shown; the message says which part of it and why."""


@dataclass(frozen=True)
class Maybe:
    """Null or absent is fine; anything else must fit the spec."""

    spec: Any


NUMBER = (int, float)
NUMBERS = [Maybe(NUMBER)]  # null where a run diverged
BAND = {"mean": NUMBERS, "std": NUMBERS, "standard_error": Maybe(NUMBERS)}

METHOD = {
    "name": str,
    "label": str,
    "group": str,
    "samples": Maybe(int),
    "grid": [{"score": Maybe(NUMBER)}],
    "chosen": Maybe(dict),
    "score_name": str,
    "seeds": list,
    "passes": NUMBERS,
    "paper_passes": NUMBERS,
    "elbo": Maybe(BAND),
    "log_loss": Maybe(BAND),
    "seconds": Maybe(NUMBER),
}
PANEL = {
    "id": str,
    "title": str,
    "data": str,
    "batch": (str, int),
    "num_data": int,
    "num_parameters": int,
    "prior_precision": NUMBER,
    "lines": [{"label": str, "metric": str, "value": NUMBER}],
    "methods": [METHOD],
}
COMMON = {"title": str, "description": str, "environment": dict, "settings": dict, "notes": [str]}
CLAIM = {"id": str, "sentence": str, "verdict": str, "measured": str, "rule": str}

KINDS: dict[str, dict[str, Any]] = {
    "curves": COMMON | {"panels": [PANEL]},
    "explore": COMMON
    | {
        "surface": {"x": [NUMBER], "y": [NUMBER], "value": [NUMBERS]},
        "minima": [{"x": NUMBER, "y": NUMBER, "value": NUMBER, "label": str}],
        "start": [NUMBER],
        "trajectories": [{"label": str, "points": [NUMBERS], "success": bool}],
        "success": [{"label": str, "rate": NUMBER, "low": NUMBER, "high": NUMBER, "seeds": int}],
    },
    "memory": COMMON | {"rows": [{"label": str, "bytes_per_parameter": NUMBER, "tensors": str, "group": str}]},
    "claims": {"claims": [CLAIM]},
}
NAMED = {
    "logreg": "curves",
    "long": "curves",
    "mlp": "curves",
    "explore": "explore",
    "filter": "curves",
    "memory": "memory",
    "claims": "claims",
}
TELLTALE = {"panels": "curves", "surface": "explore", "rows": "memory", "claims": "claims"}
GROUPS = ("paper", "ours", "extra")
METRICS = ("elbo", "log_loss")


def kind_of(name: str, result: dict[str, Any]) -> str:
    """Which kind of section a result becomes: by its name, else by its contents."""
    if name in NAMED:
        return NAMED[name]
    for key, kind in TELLTALE.items():
        if key in result:
            return kind
    raise ReportError(f"result '{name}' has none of {', '.join(TELLTALE)}: the report cannot tell what it is")


def checked(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A copy with infinities and NaN as null, every part the report needs being there.

    >>> checked({"claims": {"claims": [{"id": "1", "sentence": "s", "verdict": "holds", "measured": "m"}]}})
    Traceback (most recent call last):
    vprop.lab.report.schema.ReportError: result 'claims': claims[0] (1).rule is missing
    """
    if not results:
        raise ReportError("no results: there is nothing to report")
    results = {name: _without_infinities(result) for name, result in results.items()}
    seen: set[str] = set()
    for name, result in results.items():
        kind = kind_of(name, result)
        _check(result, KINDS[kind], f"result '{name}'", "")
        if kind == "curves":
            for panel in result["panels"]:
                _check_panel(panel, f"result '{name}', panel '{panel['id']}'", seen)
        if kind == "memory":
            for row in result["rows"]:
                _one_of(row["group"], GROUPS, f"result '{name}', row '{row['label']}', group")
        if kind == "explore":
            _check_explore(result, f"result '{name}'")
    return results


def _without_infinities(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check(value: Any, spec: Any, where: str, path: str) -> None:
    """Compare a value with its spec; ``path`` is the way to it inside the result."""
    if isinstance(spec, Maybe):
        if value is not None:
            _check(value, spec.spec, where, path)
    elif isinstance(spec, dict):
        _expect(value, dict, where, path)
        for key, inner in spec.items():
            here = f"{path}.{key}" if path else key
            if key not in value and not isinstance(inner, Maybe):
                raise ReportError(f"{where}: {here} is missing")
            _check(value.get(key), inner, where, here)
    elif isinstance(spec, list):
        _expect(value, list, where, path)
        for index, item in enumerate(value):
            _check(item, spec[0], where, f"{path}[{index}]{_tag(item)}")
    else:
        _expect(value, spec, where, path)


def _tag(item: Any) -> str:
    """What a person calls this item of a list, so that the message need not be counted out."""
    name = next((item[key] for key in ("id", "name", "label") if key in item), None) if isinstance(item, dict) else None
    return f" ({name})" if name else ""


def _expect(value: Any, types: Any, where: str, path: str) -> None:
    if not isinstance(value, types):
        names = " or ".join(kind.__name__ for kind in (types if isinstance(types, tuple) else (types,)))
        raise ReportError(f"{where}: {path or 'it'} must be {names}, not {type(value).__name__}")


def _one_of(value: str, allowed: tuple[str, ...], where: str) -> None:
    if value not in allowed:
        raise ReportError(f"{where} is '{value}'; allowed: {', '.join(allowed)}")


def _check_panel(panel: dict[str, Any], where: str, seen: set[str]) -> None:
    """The identifier serves as a file name, so it is plain and unique; curves are as long as their passes."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", panel["id"]):
        raise ReportError(f"{where}: id names a file and may hold letters, digits, '.', '_' and '-' only")
    if panel["id"] in seen or panel["id"] in NAMED:
        raise ReportError(f"{where}: id is used twice")
    seen.add(panel["id"])
    for line in panel["lines"]:
        _one_of(line["metric"], METRICS, f"{where}, line '{line['label']}', metric")
    for method in panel["methods"]:
        here = f"{where}, method '{method['name']}'"
        _one_of(method["group"], GROUPS, f"{here}, group")
        columns = {"paper_passes": method["paper_passes"]}
        for metric in METRICS:
            for key, values in (method.get(metric) or {}).items():
                columns[f"{metric}.{key}"] = values
        for key, values in columns.items():
            if values is not None and len(values) != len(method["passes"]):
                raise ReportError(f"{here}: {key} has {len(values)} values, passes has {len(method['passes'])}")


def _check_explore(result: dict[str, Any], where: str) -> None:
    surface = result["surface"]
    rows, columns = len(surface["y"]), len(surface["x"])
    if len(surface["value"]) != rows or any(len(row) != columns for row in surface["value"]):
        raise ReportError(f"{where}: surface.value must have len(y) = {rows} rows of len(x) = {columns} values")
    if len(result["start"]) != 2:
        raise ReportError(f"{where}: start must be [x, y], not {result['start']}")
    for path in result["trajectories"]:
        if not path["points"] or any(len(point) != 2 for point in path["points"]):
            raise ReportError(f"{where}: the points of trajectory '{path['label']}' must be one or more [x, y]")
