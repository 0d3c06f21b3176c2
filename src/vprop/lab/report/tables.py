"""The numbers behind the figures, as tables."""

from __future__ import annotations

from typing import Any

from vprop.lab.report.markup import number, plus_minus, setting, swatch, table, text
from vprop.lab.report.style import Styles, legend_label

SYMBOLS = {"lr": "lr", "beta1": "β₁", "beta2": "β₂"}


def claims_table(claims: list[dict[str, Any]]) -> str:
    """Each claim with the share of comparisons in which it holds, what was found, and the rule that decided."""
    rows = []
    for claim in claims:
        sentence = f'<span class="sentence">{text(claim["sentence"])}</span>'
        measured = f"{text(claim['measured'])}{_checks(claim)}<small>How it was decided: {text(claim['rule'])}</small>"
        rows.append((sentence, _share(claim), measured))
    return table(["Claim", "Holds in", "What was found"], rows, css="claims")


def _share(claim: dict[str, Any]) -> str:
    """In words, and as the filled part of a bar."""
    checks = claim.get("checks", [])
    words = f'<span class="share">{text(claim["share"])}</span>'
    if not checks:
        return words
    part = sum(check["holds"] for check in checks) / len(checks)
    return f'{words}<span class="bar" aria-hidden="true"><i style="width:{100 * part:.0f}%"></i></span>'


def _checks(claim: dict[str, Any]) -> str:
    """What was seen in each place, folded away where there are several places."""
    checks = claim.get("checks", [])
    if len(checks) < 2:
        return ""
    items = "".join(f'<li class="{"yes" if check["holds"] else "no"}">{text(check["text"])}</li>' for check in checks)
    return f'<details class="checks"><summary>the comparisons, one by one</summary><ul>{items}</ul></details>'


def method_table(panel: dict[str, Any], styles: Styles) -> str:
    """A row for each method of a panel."""
    rows = []
    for method in styles.sort(panel["methods"]):
        style = styles.of(method["name"])
        rows.append(
            (
                f'<span class="method">{swatch(style.color, style.dash)}{text(legend_label(method))}</span>',
                number(method.get("samples")),
                text(_chosen(method)),
                _grid(method),
                _final(method.get("elbo")),
                _final(method.get("log_loss")),
                number(method.get("seconds"), 3),
            )
        )
    head = ["Method", "Gradients per step", "Step sizes chosen", "Grid", "Final ELBO", "Final test log-loss", "Seconds"]
    seeds = {len(method["seeds"]) for method in panel["methods"]}
    count = " or ".join(str(number) for number in sorted(seeds))
    return table(head, rows, css="numbers", numeric=(1, 4, 5, 6)) + (
        f'<p class="hint">Mean ± one standard deviation over {count} {"seed" if count == "1" else "seeds"}; '
        "“MC” is the standard error of the Monte Carlo estimate of the ELBO."
        "</p>"
    )


def success_table(success: list[dict[str, Any]], styles: Styles) -> str:
    """How often each method found the global minimum."""
    rows = [
        (
            f'<span class="method">{swatch(styles.of(row["label"]).color)}{text(row["label"])}</span>',
            f"{100 * row['rate']:.0f}%",
            f"{100 * row['low']:.0f}–{100 * row['high']:.0f}%",
            number(row["seeds"]),
        )
        for row in success
    ]
    return table(["Method", "Success", "Interval", "Runs"], rows, css="numbers", numeric=(1, 2, 3))


def memory_table(rows: list[dict[str, Any]]) -> str:
    """What each optimizer keeps beside the weights."""
    cells = [(text(legend_label(row)), setting(row["bytes_per_parameter"]), text(row["tensors"])) for row in rows]
    return table(["Optimizer", "Bytes per parameter", "What is kept"], cells, css="numbers", numeric=(1,))


def facts_table(facts: dict[str, Any]) -> str:
    """Settings or environment, one row each."""
    rows = [(text(key.replace("_", " ")), text(setting(value))) for key, value in facts.items()]
    return table(["Setting", "Value"], rows, css="facts-table") if rows else '<p class="hint">None recorded.</p>'


def _chosen(method: dict[str, Any]) -> str:
    chosen = method.get("chosen") or {}
    settings = ", ".join(f"{SYMBOLS.get(key, key)} = {setting(value)}" for key, value in chosen.items()) or "–"
    return settings + (" (edge of the grid)" if method.get("at_edge") else "")


def _final(curve: dict[str, Any] | None) -> str:
    """The last mean ± standard deviation, with its Monte Carlo error where known."""
    if not curve or not curve["mean"]:
        return "–"
    final = plus_minus(curve["mean"][-1], curve["std"][-1])
    error = (curve.get("standard_error") or [None])[-1]
    return final if error is None or curve["mean"][-1] is None else f"{final}<small>MC {number(error, 2)}</small>"


def _grid(method: dict[str, Any]) -> str:
    """The settings that were tried, with their scores."""
    grid = method["grid"]
    if not grid:
        return "–"
    keys = [key for key in grid[0] if key != "score"]
    body = "".join(
        "<tr><th>"
        + text(", ".join(f"{SYMBOLS.get(key, key)} = {setting(entry.get(key))}" for key in keys))
        + f"</th>{_score(entry, method)}</tr>"
        for entry in grid
    )
    return (
        f'<details class="grid"><summary>{len(grid)} tried</summary>'
        f'<p class="hint">{text(method["score_name"])}; the chosen one is marked</p><table>{body}</table></details>'
    )


def _score(entry: dict[str, Any], method: dict[str, Any]) -> str:
    setting_tried = {key: value for key, value in entry.items() if key != "score"}
    mark = ' class="chosen"' if setting_tried == method.get("chosen") else ""
    score = entry.get("score")
    return f"<td{mark}>{'diverged' if score is None else number(score, 5)}</td>"
