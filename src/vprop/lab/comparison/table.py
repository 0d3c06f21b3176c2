"""The tables as Markdown, from stored results alone."""

from __future__ import annotations

from typing import Any

from vprop.lab import markdown

NOTHING = "–"

RATIOS = {
    "exact": "variance / exact",
    "nuts": "variance / NUTS",
    "laplace": "variance / Laplace",
}


def table(result: dict[str, Any]) -> str:
    """The table of one task, with a line that says what it is a table of."""
    references = [name for name in RATIOS if any(name in (row["ratios"] or {}) for row in result["methods"])]
    head = [
        "method",
        "gradients per step",
        "accuracy",
        "NLL",
        "ECE",
        *(RATIOS[name] for name in references),
        "cost of a step",
        "lr, β₂",
    ]
    rows = [_method_row(row, references) for row in result["methods"]]
    rows += [_reference_row(row, references) for row in result["references"]]
    return f"{caption(result)}\n\n{markdown.table(head, rows)}"


def caption(result: dict[str, Any]) -> str:
    """Sizes and budgets, in a sentence or two."""
    settings, where = result["settings"], result["environment"]
    text = (
        f"{result['num_data']:,} training and {result['num_test']:,} test examples, {result['num_parameters']:,} "
        f"weights, λ = {settings['prior_precision']:g}, mini-batches of {settings['batch']}, {settings['gradients']:,} "
        f"gradients per run, {settings['samples']} weight samples per prediction, mean ± standard error over "
        f"{settings['seeds']} seeds. vprop {where['vprop']}, torch {where['torch']}, {where['machine']}, one thread."
    )
    for row in result["references"]:
        if row["name"] == "nuts":
            text += (
                f" NUTS: {row['settings']['chains']} chains of {row['settings']['draws']:,} draws, r-hat up to "
                f"{row['r_hat_max']:.4f}, effective sample size from {row['ess_min']:,.0f}."
            )
    return text


def _method_row(row: dict[str, Any], references: list[str]) -> list[str]:
    if row["chosen"] is None or row["scores"]["accuracy"]["mean"] is None:
        scores = ["diverged", NOTHING, NOTHING]
    else:
        scores = [_with_error(row["scores"][name]) for name in ("accuracy", "nll", "ece")]
    ratios = [_ratio(_means(row["ratios"].get(reference, {}))) for reference in references]
    return [row["label"], str(row["gradients"]), *scores, *ratios, f"{row['cost']:.1f}", _setting(row)]


def _reference_row(row: dict[str, Any], references: list[str]) -> list[str]:
    scores = [_number(row["scores"][name]) for name in ("accuracy", "nll", "ece")]
    ratios = [_ratio((row["ratios"] or {}).get(name, {})) for name in references]
    return [f"*{row['label']}*", NOTHING, *scores, *ratios, NOTHING, NOTHING]


def _means(quantiles: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    """Over seeds, of each quantile."""
    return {name: value["mean"] for name, value in quantiles.items()}


def _with_error(value: dict[str, float | None]) -> str:
    """«0.123 ± 0.004»; a mean that is missing beside others that are there was infinite."""
    if value["mean"] is None:
        return "∞"
    text = _number(value["mean"])
    return text if value["standard_error"] is None else f"{text} ± {_number(value['standard_error'])}"


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4f}"


def _ratio(quantiles: dict[str, float | None]) -> str:
    """«0.98 (0.9–1.1)»: the median over weights, and the range of the middle four fifths."""
    if not quantiles or None in quantiles.values():
        return NOTHING
    low, median, high = (_two_digits(quantiles[name]) for name in ("low", "median", "high"))  # type: ignore[arg-type]
    return f"{median} ({low}–{high})"


def _two_digits(value: float) -> str:
    """Two significant digits, without an exponent for what people read without one.

    >>> [_two_digits(value) for value in (0.0123, 0.98, 12.3, 12345.0)]
    ['0.012', '0.98', '12', '12,000']
    """
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def _setting(row: dict[str, Any]) -> str:
    if row["chosen"] is None:
        return NOTHING
    values = [f"{row['chosen'][name]:g}" for name in ("lr", "beta2") if name in row["chosen"]]
    return ", ".join(values) + (" *" if row["at_edge"] else "")
