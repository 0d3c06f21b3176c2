"""The figures of a task as Markdown tables, from a file of results alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vprop.lab import markdown
from vprop.lab.deep.results import machine

NOTHING = "–"
KINDS = (
    ("mean", "the mean"), ("averaged", "draws"), ("running", "draws, running statistics"),
    ("unmasked", "draws, no masks"),
)  # fmt: skip
"""Of predictions, in the order of the tables; the last two are of networks with BatchNorm, and with dropout."""
Row = dict[str, Any]


def caption(result: Row) -> str:
    """How the figures were made, in a few sentences."""
    settings, where = result["settings"], result["environment"]
    batch = settings.get("batch", 128)
    if "epochs" in settings:
        budget = f"{settings['epochs']} epochs of batches of {batch}"
    else:
        budget = f"{settings['steps']:,} steps of {batch} pieces of {settings.get('length', 256)} characters"
    draws, seeds = settings.get("samples", 64), _seeds_of(result["contenders"])
    text = f"{budget}, {draws} draws of the weights in a prediction, {seeds}. "
    text += f"Mean ± standard deviation over seeds. vprop {where['vprop']}, torch {where['torch']}"
    machines = result.get("machines", [machine(where)])  # older results name that of one run
    text += f", {' and '.join(machines)}."
    if settings.get("tuned_on"):
        text += f" Settings are those that were chosen on {settings['tuned_on']}."
    if len(result["code"]) > 1:
        text += f" The runs are of {len(result['code'])} states of the library."
    return text


def summary(results: Iterable[Row]) -> str:
    """A line for each task: what people use, the best of others and the best of ours, by NLL.

    Accuracy / NLL / ECE, each with its own way to predict; groups, which cost several trainings, are left out.
    """
    rows = []
    for result in results:
        others = [row for row in result["contenders"] if not row["ours"]]
        ours = [row for row in result["contenders"] if row["ours"]]
        plain = [row for row in others if row["kind"] == "point"]
        rows.append([result["title"], *(_best_of(some) for some in (plain, others, ours))])
    head = ["accuracy / NLL / ECE", "SGD or AdamW", "best of others", "**best of ours**"]
    return markdown.table(head, rows)


def own_scores(row: Row) -> Row:
    """The scores of a contender's own way to predict: averaged, if it averages, with the statistics that it chose."""
    return row["scores"].get(own_kind(row), row["scores"])


def own_kind(row: Row) -> str:
    """How a contender predicts; results of before there was a choice do not say it."""
    return row.get("predicts", "averaged" if "averaged" in row["scores"] else "mean")


def _best_of(rows: list[Row]) -> str:
    usable = [row for row in rows if own_scores(row)["nll"]["mean"] is not None]
    if not usable:
        return NOTHING
    best = min(usable, key=lambda row: own_scores(row)["nll"]["mean"])
    means = {name: value["mean"] for name, value in own_scores(best).items()}
    return f"{best['label']}: {100 * means['accuracy']:.2f} / {means['nll']:.4f} / {means['ece']:.4f}{_not_tuned(best)}"


def scores_table(result: Row) -> str:
    """Accuracy, log-loss, calibration and Brier score, at the mean and averaged over draws."""
    head = ["", "predicts with", "accuracy", "NLL", "ECE", "Brier", "setting"]
    rows = []
    for row in result["contenders"]:
        for kind, words in _kinds(row["scores"], row):
            name = f"**{row['label']}**" if row["ours"] else row["label"]
            rows.append([name, words, *_scores(row["scores"][kind]), _setting(row)])
    for row in result["groups"]:
        name = f"**{row['label']}**" if row["ours"] else row["label"]
        words = "draws of all" if row["averaged"] else "the means"
        words += ", running statistics" if row.get("predicts") == "running" else ""
        words += f" ({row['groups']} groups)" if row["groups"] > 1 else ""
        rows.append([name, words, *_scores(row["scores"]), NOTHING])
    return markdown.table(head, rows)


def outliers_table(result: Row, name: str) -> str:
    """How well two uncertainties tell a set of outliers."""
    head = ["", "predicts with", "AUROC, entropy", "FPR95, entropy", "AUROC, information", "FPR95, information"]
    rows = []
    for row in result["contenders"]:
        for kind, words in _kinds(row["outliers"], row):
            if name in row["outliers"][kind]:
                rows.append([row["label"], words, *_outliers(row["outliers"][kind][name])])
    for row in result["groups"]:
        if name in row["outliers"]:
            rows.append([row["label"], "all members", *_outliers(row["outliers"][name])])
    return markdown.table(head, rows)


def cost_table(result: Row) -> str:
    """Time and memory of training relative to AdamW's, and of predictions."""
    base = result.get("cost_of_adamw")
    head = ["", "step, ms", "training, of AdamW's", "memory, of AdamW's", "test set at the mean, ms", "a draw, ms"]
    has_statistics = any(row["cost"] and "statistics_ms" in row["cost"] for row in result["contenders"])
    head += ["its statistics, ms"] if has_statistics else []
    rows = []
    for row in result["contenders"]:
        if row["cost"] is None:
            continue
        cost = row["cost"]
        relative = NOTHING if base is None else f"{cost['gradient_ms'] / base['gradient_ms']:.2f}"
        has_memory = base is not None and cost["memory_mb"] is not None and base["memory_mb"]
        memory = f"{cost['memory_mb'] / base['memory_mb']:.2f}" if has_memory and base is not None else NOTHING
        draw = NOTHING if cost["draw_ms"] is None else f"{cost['draw_ms']:.1f}"
        rows.append([row["label"], f"{cost['step_ms']:.2f}", relative, memory, f"{cost['forward_ms']:.1f}", draw])
        if has_statistics:
            rows[-1].append(f"{cost['statistics_ms']:.1f}" if "statistics_ms" in cost else NOTHING)
    return markdown.table(head, rows) if rows else ""


def draws_table(result: Row) -> str:
    """The log-loss of predictions with 1, 2, 4, … draws."""
    rows = [row for row in result["contenders"] if row["nll_by_draws"]]
    if not rows:
        return ""
    counts = list(rows[0]["nll_by_draws"])
    return markdown.table(
        ["draws", *counts], [[row["label"], *(_value(row["nll_by_draws"][count]) for count in counts)] for row in rows]
    )


def section(result: Row) -> str:
    """Everything of one task."""
    parts = [caption(result), scores_table(result)]
    for name in result["settings"].get("outliers", ()):
        parts += [f"Outliers: {name}.", outliers_table(result, name)]
    if draws := draws_table(result):
        has_statistics = any("running" in row["scores"] for row in result["contenders"])
        own = ", with statistics of BatchNorm of their own" if has_statistics else ""
        parts += [f"NLL by the number of draws{own}.", draws]
    if cost := cost_table(result):
        parts += ["Cost, measured with nothing beside it; training at equal numbers of gradients.", cost]
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


def _kinds(found: Row, row: Row) -> list[tuple[str, str]]:
    """With their words. Draws that there are without masks as well have them; else it is not known, and not said.

    >>> _kinds({"averaged": {}, "unmasked": {}}, {"setting": {"lr": 0.1}})
    [('averaged', 'draws with masks'), ('unmasked', 'draws, no masks')]
    >>> _kinds({"mean": {}, "averaged": {}}, {"setting": {"cycles": 3}, "kind": "networks"})
    [('mean', 'the last mean'), ('averaged', 'all networks')]
    """
    others = {"averaged": "draws with masks"} if "unmasked" in found else {}
    if "cycles" in row["setting"]:
        others["mean"] = "the last mean"
        others |= {"averaged": "all networks"} if row["kind"] == "networks" else {}
    return [(kind, others.get(kind, words)) for kind, words in KINDS if kind in found]


def _scores(scores: Row) -> list[str]:
    return [
        _value(scores.get("accuracy"), 100, 2), _value(scores.get("nll")), _value(scores.get("ece")),
        _value(scores.get("brier")),
    ]  # fmt: skip


def _outliers(scores: Row) -> list[str]:
    names = ("auroc_entropy", "fpr95_entropy", "auroc_information", "fpr95_information")
    return [_value(scores.get(name)) for name in names]


def _value(value: Row | None, factor: float = 1.0, digits: int = 4) -> str:
    """«0.2301 ± 0.0012».

    >>> _value({"mean": 0.92514, "std": 0.001}, 100, 2), _value({"mean": None, "std": None}), _value(None)
    ('92.51 ± 0.10', 'diverged', '–')
    """
    if value is None:
        return NOTHING
    if value["mean"] is None:
        return "diverged"
    text = f"{factor * value['mean']:.{digits}f}"
    return text if value["std"] is None else f"{text} ± {factor * value['std']:.{digits}f}"


def _setting(row: Row) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in row["setting"].items()) + _not_tuned(row)


def _not_tuned(row: Row) -> str:
    """A word on a setting that was not chosen from all."""
    return "" if row["tuned"] or len(row["grid"]) < 2 else " (not tuned)"


def _seeds_of(rows: list[Row]) -> str:
    """Those that most rows have, and who has others."""
    labels: dict[tuple[int, ...], list[str]] = {}
    for row in rows:
        labels.setdefault(tuple(row["seeds"]), []).append(row["label"])
    usual = max(labels, key=lambda seeds: len(labels[seeds]), default=())
    others = [f"{', '.join(who)}: {_listed(list(seeds))}" for seeds, who in labels.items() if seeds != usual]
    return f"seeds {_listed(list(usual))}" + (f" ({'; '.join(others)})" if others else "")


def _listed(seeds: list[int]) -> str:
    """«0–2», or one by one where some are left out.

    >>> _listed([0, 1, 2]), _listed([0]), _listed([0, 2])
    ('0–2', '0', '0, 2')
    """
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))
