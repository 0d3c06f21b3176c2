"""Numbers in the documentation are those of the committed results, and links lead somewhere."""

from __future__ import annotations

import json
import re
from itertools import chain

import pytest

from tests.figures import measured_on_networks, shown_of_networks
from tests.pages import PAGES, ROOT
from vprop.lab.deep.table import NOTHING, _value, own_scores
from vprop.lab.experiments.claims import claims

PAPER = (ROOT / "docs" / "paper.md").read_text()


def result(name):
    return json.loads((ROOT / "docs" / "paper" / "results" / f"{name}.json").read_text())


def rows(text, columns):
    """Table rows with that many columns, without head and rule."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [cells for cells in lines if len(cells) == columns and not cells[0].startswith("-")]


def test_the_claims():
    table = {sentence: (share, measured) for sentence, share, measured in rows(PAPER, 3)[1:]}
    expected = {claim["sentence"]: (claim["share"], claim["measured"]) for claim in result("claims")["claims"]}
    assert table == expected
    names = ("logreg", "mlp", "long", "filter", "explore", "memory")
    assert claims({name: result(name) for name in names}) == result("claims")  # as the present rules decide


def test_the_ground_truth():
    (panel,) = result("long")["panels"]
    exact = {line["structure"]: line["value"] for line in panel["lines"] if line["metric"] == "elbo"}
    assert f"ELBO {exact['diagonal']:.3f} (diagonal), {exact['full']:.3f} (full covariance)" in PAPER
    ends = {method["label"]: method["elbo"]["mean"][-1] for method in panel["methods"]}
    for label, structure, elbo, below in rows(PAPER, 4)[1:]:
        assert elbo == f"{ends.pop(label):.2f}"
        assert float(below) == pytest.approx(exact[structure] - float(elbo), abs=0.006)
    assert not ends


def test_australian():
    lines = next(panel["lines"] for panel in result("logreg")["panels"] if panel["data"] == "australian")
    exact = [f"{line['value']:.3f}".replace("-", "−") for line in lines if line["metric"] == "elbo"]
    assert f"exact {exact[0]} and {exact[1]}" in PAPER.replace("-", "−")


def test_the_comparison_with_scikit_learns_defaults():
    results = json.loads((ROOT / "benchmarks" / "results" / "sklearn-defaults.json").read_text())["results"]
    expected = []
    for row in results:
        ours, theirs = (name for name in row if name not in ("data", "features", "wins"))
        means = {name: sum(row[name]["log_loss"]) / len(row[name]["log_loss"]) for name in (ours, theirs)}
        expected.append([row["data"], row["features"], f"{means[ours]:.4f}", f"{means[theirs]:.4f} ({theirs})"])
    assert rows((ROOT / "docs" / "training.md").read_text(), 4)[1:] == expected
    networks = [row for row in results if "BayesianLogisticRegression" not in row]
    assert all(row["wins"] == 5 for row in networks)  # as the page says


def test_the_figures_of_calibration_and_decisions_are_those_of_the_committed_run():
    result = json.loads((ROOT / "benchmarks" / "results" / "decisions.json").read_text())
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("calibration", "decisions")}
    for name, table in (("classification", _calibration_rows), ("regression", _regression_rows)):
        for row in table(result[name]):
            assert row in pages["calibration"], row
    for name, way in result["active_learning"]["ways"].items():
        ends = f"{way['mean'][0]:.3f}", f"{way['mean'][4]:.3f}", f"{way['mean'][-1]:.3f} ± {way['spread'][-1]:.3f}"
        wins = "" if name == "random" else f"{way['wins_against_random']} of {result['active_learning']['seeds']}"
        assert f"| {name} | {' | '.join(ends)} | {wins} |" in pages["decisions"]
    scores = result["classification"]
    for name in ("entropy", "1 − confidence", "mutual information", "variation ratio"):
        cells = [scores[f"{name}_{kind}"] for kind in ("auroc", "aupr", "fpr95", "aurc")]
        numbers = " | ".join(f"{m:.3f} ± {s:.3f}" for m, s in cells[:3])
        assert f"| {name} | {numbers} | {cells[3][0]:.4f} ± {cells[3][1]:.4f} |" in pages["decisions"]


def _calibration_rows(result):
    for label, name in (("as trained", "trained"), ("temperature", "temperature"), ("variance scale", "variance")):
        found = "" if name == "trained" else result[{"variance": "variance_scale"}.get(name, name)]
        value = f"{found[0]:.2f} ± {found[1]:.2f}" if found else ""
        numbers = [f"{m:.3f} ± {s:.3f}" for m, s in (result[f"{name}_{kind}"] for kind in ("nll", "ece", "accuracy"))]
        yield f"| {label} | {value} | {' | '.join(numbers)} |"
    for level in ("0.8", "0.9", "0.95"):
        coverage, size = result[f"sets_{level}_coverage"], result[f"sets_{level}_size"]
        yield f"| {level} | {coverage[0]:.3f} ± {coverage[1]:.3f} | {size[0]:.2f} ± {size[1]:.2f} |"


def _regression_rows(result):
    for label, name in (("as trained", "trained"), ("noise scale", "noise")):
        found = result["noise_scale"]
        value = "" if name == "trained" else f"{found[0]:.2f} ± {found[1]:.2f}"
        nll, coverage = result[f"{name}_nll"], result[f"{name}_coverage"]
        yield f"| {label} | {value} | {nll[0]:.3f} ± {nll[1]:.3f} | {coverage[0]:.3f} ± {coverage[1]:.3f} |"
    coverage = result["conformal_coverage"]
    yield f"| conformal intervals |  |  | {coverage[0]:.3f} ± {coverage[1]:.3f} |"


def results_of(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"eigenbasis-{name}.json").read_text())["rows"]


def test_the_page_on_the_eigenbasis_says_what_was_measured():
    text = (ROOT / "docs" / "eigenbasis.md").read_text()
    memory = {(row["limit"], row["layer"]): row["ratio"] for row in results_of("memory")}
    for layer, title in (
        ("self_attn.in_proj_weight", "attention, in"),
        ("out_proj.weight", "attention, out"),
        ("linear1.weight", "up, down"),
        ("all", "all"),
    ):
        line = next(line for line in text.splitlines() if line.startswith(f"| {title} |"))
        assert line.endswith(" | ".join(["", *(f"{memory[limit, layer]:.2f}" for limit in (0, 1024, 3072))]) + " |")
    for row in [*results_of("a1a"), *results_of("usps")]:
        assert f"{row['elbo']:.1f} ± {row['elbo_std']:.1f}" in text, row["method"]
    for row in [*results_of("concrete"), *results_of("energy")]:
        assert f"{row['log_likelihood']:.3f} ± {row['std']:.3f}" in text, row["structure"]
        gain = f"{row['gain']:+.3f} ± {row['gain_error']:.3f} | {row['splits_won']} of {len(row['values'])} |"
        assert gain in text, row["noise_limit"]
    for row in results_of("step"):
        assert f"{1000 * row['seconds']:.1f} ms" in text, row["name"]
    losses = [("mean", "nll"), ("averaged", "nll")]
    of_draws = [("averaged", name) for name in ("accuracy", "nll", "ece")]
    texts = [*rows_of_networks(losses, "gpt", "gpt-longer"), *rows_of_networks(losses, "gpt-books", "gpt-books-longer")]
    images = [rows_of_networks(of_draws, task) for task in ("cifar10-40", "cifar10-40-cpu", "cifar10-5k-40")]
    for row in chain(texts, *images):
        assert row in text, row


def rows_of_networks(scores, *tasks):
    """Structure, steps, milliseconds of a step if they were measured, and these scores; none without an eigenbasis."""
    files = [ROOT / "docs" / "deep" / "results" / f"{task}.json" for task in tasks]
    results = [row for file in files if file.exists() for row in json.loads(file.read_text())["contenders"]]
    structures = {"vario": "diagonal", "vario-eigenbasis": "eigenbasis"}
    if "vario-eigenbasis" not in {row["name"] for row in results}:
        return
    for row in results:
        if row["name"] in structures:
            time = f"{row['cost']['step_ms']:.2f}" if row["cost"] else NOTHING
            cells = [f"{row['steps']:,}", time, *(_value(row["scores"][kind][name]) for kind, name in scores)]
            yield f"| {structures[row['name']]} | {' | '.join(cells)} |"


def test_the_words_on_deep_networks_are_those_of_the_results():
    """Those that a reader cannot see to be wrong at a glance at the tables."""
    whole = " ".join((ROOT / "docs" / "deep.md").read_text().split())
    said = whole.partition("## How it was done")[0]
    at = {task: contenders_of(task) for task in ("cifar10", "cifar10-5k", "gpt")}
    loss = {name: own_scores(row)["nll"]["mean"] for name, row in at["cifar10"].items()}
    assert f"IVON's posterior have {loss['ivon'] / loss['sgd']:.2f} times the log-loss of a tuned SGD" in said
    assert f"ends 100 epochs with {at['cifar10']['ivon']['sigma']:.4f} where 0.008 was chosen" in whole
    unmasked = at["gpt"]["vario"]["scores"]["unmasked"]["nll"]["mean"]
    assert f"without them Vario's log-loss is {unmasked:.3f}" in said
    few = at["cifar10-5k"]
    calibrated = sorted(few, key=lambda name: own_scores(few[name])["ece"]["mean"])[:4]
    assert set(calibrated) == {"vprop-centred", "ivon", "ivon-cycles", "laplace-last"}
    assert "IVON, in cycles or not, Vprop and Laplace are the best calibrated" in said
    loss = {name: own_scores(row)["nll"]["mean"] for name, row in few.items()}
    order = sorted(loss, key=lambda name: loss[name])
    assert order[:6] == ["ivon-cycles", "ivon", "sgd-cycles", "vadam", "ivon-opt", "vprop-centred"]
    assert set(order[6:9]) == {"laplace-last", "swag", "vario"}
    wide = max(own_scores(few[name])["nll"]["std"] for name in order[5:9])
    assert loss[order[8]] - loss[order[5]] < wide
    assert f"{loss['ivon-cycles'] / loss['sgd']:.2f} times the log-loss of a tuned SGD" in said
    assert f"IVON trained once ({loss['ivon'] / loss['sgd']:.2f} times, at SGD's accuracy)" in said
    grids = [row for row in few.values() if len(row["grid"]) > 1]
    last = [
        row["label"].partition(" with a floor")[0] for row in grids if row["setting"].items() <= row["grid"][-1].items()
    ]
    assert f"{', '.join(last[:-1])} and {last[-1]} chose the last settings of their grids" in said


def test_what_cycles_gain_and_lose_is_said_as_measured():
    said = " ".join((ROOT / "docs" / "sensitivity.md").read_text().split())
    few, many = (
        {name: own_scores(row)["nll"]["mean"] for name, row in contenders_of(task).items()}
        for task in ("cifar10-5k", "cifar10")
    )
    ensemble = next(row for row in deep_results("cifar10-5k")["groups"] if row["name"] == "ensemble-3")["scores"]
    more = ensemble["accuracy"]["mean"] - own_scores(contenders_of("cifar10-5k")["ivon-cycles"])["accuracy"]["mean"]
    assert few["ivon-cycles"] < few["ivon"]
    assert f"cycles of IVON have a log-loss of {few['ivon-cycles']:.3f}, one long training of the same length" in said
    assert f"has {few['ivon']:.3f}, and three plain networks" in said
    assert f"have {ensemble['nll']['mean']:.3f} (and {100 * more:.1f} percent more accuracy)" in said
    assert many["ivon-cycles"] > many["ivon"]
    assert f"worse* than one training, {many['ivon-cycles']:.3f} against {many['ivon']:.3f}" in said
    assert many["sgd-cycles"] < many["sgd"]
    assert f"the lower log-loss there, too, {many['sgd-cycles']:.3f} against {many['sgd']:.3f}" in said


def deep_results(task):
    return json.loads((ROOT / "docs" / "deep" / "results" / f"{task}.json").read_text())


def contenders_of(task):
    return {row["name"]: row for row in deep_results(task)["contenders"]}


def test_the_ways_to_predict():
    """The table is that of the file: log-loss and calibration error of the first optimizer, then of the second."""
    digits = json.loads((ROOT / "benchmarks" / "results" / "predictions.json").read_text())["digits"]
    expected = [
        [rows_of_way[0]["way"]]
        + [f"{row[score]:.{digits_shown}f}" for row in rows_of_way for score, digits_shown in SCORES.items()]
        for rows_of_way in zip(*digits.values(), strict=True)
    ]
    assert rows((ROOT / "docs" / "predictions.md").read_text(), 7)[1:] == expected


SCORES = {"log_loss": 4, "calibration_error": 4, "distance": 4}


def test_the_demo():
    methods = json.loads((ROOT / "docs" / "demo" / "demo.json").read_text())["digits"]["methods"]
    names = {
        "accuracy": "accuracy",
        "log-loss": "log_loss",
        "calibration error": "expected_calibration_error",
        "confidence on pure noise": "mean_confidence_on_noise",
    }
    shown = {cells[0]: cells[1:] for cells in rows((ROOT / "docs" / "start.md").read_text(), 3)}
    for row, key in names.items():
        assert shown[row] == [f"{methods[name][key]:.3f}" for name in ("Adam", "Vario")], row


def test_the_figures_of_networks():
    shown = shown_of_networks((ROOT / "docs" / "choose.md").read_text())
    assert len(shown) == 14
    assert set(shown) <= measured_on_networks()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_ours_is_installed_from_where_there_is_no_package(path):
    """Until there is one on PyPI: from a checkout or the repository."""
    assert not re.findall(r'pip install "?vprop(?! @ git).*', path.read_text())


@pytest.mark.parametrize(
    "path",
    [
        *PAGES,
        *(ROOT / name for name in ("examples/README.md", "benchmarks/README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_lead_somewhere(path):
    """To files, and to headings of pages."""
    for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_code(path.read_text())):
        file = (path.parent / target) if target else path
        if target.startswith(("http:", "https:")):
            continue
        assert file.exists(), target
        if heading:
            assert heading in headings(file.read_text()), f"{target}#{heading}"


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


def headings(text):
    """Anchors as GitHub and the site make them: small letters, spaces as hyphens, no other signs."""
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
