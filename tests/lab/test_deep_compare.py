"""`vprop compare deep` as a user runs it: runs that are kept, and a page made of results alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.lab.deep import bench
from vprop.lab.cli import app
from vprop.lab.deep import compare, contenders, page, predictions, results, table
from vprop.lab.deep.compare import numbers, tasks_named
from vprop.lab.deep.contenders import GROUPS, DeepContender
from vprop.lab.deep.protocol import Bench, Chosen
from vprop.lab.deep.run import DeepRun, Pretraining, predictions_path
from vprop.lab.deep.tasks import BY_NAME, SHORT, TASKS
from vprop.lab.deep.workloads import How
from vprop.lab.engine.store import Store, write_json
from vprop.lab.errors import UsageError

IMAGES, TEXT, LORA = SHORT
ROOT = Path(__file__).parents[2]


def vprop(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fails(result, *words):
    assert result.exit_code == 1, result.output
    message = " ".join(result.output.split())
    assert "Error: " in message
    for word in words:
        assert word in message


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A few contenders on all short tasks, as a user runs them."""
    out = tmp_path_factory.mktemp("deep")
    for task, seeds in ((IMAGES, "0,1,2"), (TEXT, "0"), (LORA, "0")):
        options = ("--short", "--only", "sgd,adamw,vario", "--usual", "--seeds", seeds, "--out", out)
        runs = vprop("compare", "deep", task.name, *options)
        assert runs.exit_code == 0, runs.output
    cost = vprop("compare", "deep", "images", "--short", "--only", "adamw,vario", "--cost", "--out", out)
    assert cost.exit_code == 0, cost.output
    return out


def result_of(out, task):
    return json.loads((out / "results" / f"{task.name}.json").read_text())


def test_results_hold_what_the_runs_found(finished):
    result = result_of(finished, IMAGES)
    assert [row["name"] for row in result["contenders"]] == ["sgd", "adamw", "vario"]
    row = next(row for row in result["contenders"] if row["name"] == "vario")
    assert row["seeds"] == [0, 1, 2]
    assert not row["tuned"]
    place, one = bench(finished), contenders.BY_NAME["vario"]
    runs = [
        Store(finished / "runs").load(place.run(IMAGES, one, one.grid(IMAGES)[0], s, "final").key) for s in (0, 1, 2)
    ]
    losses = torch.tensor([run["scores"]["averaged"]["nll"] for run in runs], dtype=torch.float64)
    assert row["scores"]["averaged"]["nll"]["mean"] == pytest.approx(float(losses.mean()), abs=1e-6)
    assert row["scores"]["averaged"]["nll"]["std"] == pytest.approx(float(losses.std()), abs=1e-6)
    assert list(row["nll_by_draws"]) == ["1", "2", "4"]
    assert row["nll_by_draws"]["4"] == row["scores"]["averaged"]["nll"]
    assert row["cost"]["step_ms"] > 0
    assert row["cost"]["statistics_ms"] > 0
    assert {group["name"] for group in result["groups"]} == {"ensemble-3", "ensemble-3-adamw", "mixture-3-vario"}
    assert all(group["groups"] == 1 for group in result["groups"])
    assert len(json.dumps(result)) < 60_000


def test_texts_and_adapters_have_results_too(finished):
    for task in (TEXT, LORA):
        names = [row["name"] for row in result_of(finished, task)["contenders"]]
        assert names == ["adamw", "vario"]
    assert (finished / "pretrained" / f"{LORA.name}.pt").is_file()


def test_only_adapters_are_trained(finished):
    job = bench(finished).run(LORA, contenders.BY_NAME["vario"], {"lr": 0.003}, 0, "final")
    from vprop.lab.deep.run import make_optimizer
    from vprop.lab.deep.workloads import workload

    work = workload(LORA, "final", None, job.how)
    optimizer = make_optimizer(contenders.BY_NAME["vario"], {"lr": 0.003}, work.model(0.0), work, 0, job.how)
    assert len(optimizer.param_groups[0]["params"]) == 2 * 4 * LORA.layers


def test_the_same_command_runs_nothing_again(finished, monkeypatch):
    monkeypatch.setattr(DeepRun, "compute", lambda self: pytest.fail("ran again"))
    arguments = ("compare", "deep", "images", "--short", "--only", "sgd,vario", "--usual", "--out", finished)
    again = vprop(*arguments)
    assert again.exit_code == 0, again.output
    assert "6 of 6 runs were done before" in again.output


def test_results_can_be_collected_without_running(finished, tmp_path):
    figures = tmp_path / "figures"
    # --short, because the tasks of the real comparison have no runs here
    collected = vprop("compare", "deep", "collect", "--short", "--out", finished, "--results", figures)
    assert collected.exit_code == 0, collected.output
    assert json.loads((figures / "short-images.json").read_text()) == result_of(finished, IMAGES)
    fails(vprop("compare", "deep", "collect", "--out", tmp_path / "nothing"), "no runs", "--out")


def test_the_caption_names_all_machines(finished):
    result = result_of(finished, IMAGES)
    assert result["machines"] == ["a CPU"]
    assert "torch " + result["environment"]["torch"] + ", a CPU." in table.caption(result)
    both = result | {"machines": ["NVIDIA H200", "a CPU"]}
    assert ", NVIDIA H200 and a CPU." in table.caption(both)
    older = {name: value for name, value in both.items() if name != "machines"}
    older["environment"] = older["environment"] | {"cuda": "NVIDIA H200"}
    assert ", NVIDIA H200." in table.caption(older)


def test_the_caption_says_who_has_other_seeds(finished):
    result = result_of(finished, IMAGES)
    assert "seeds 0–2. " in table.caption(result)
    first, *others = result["contenders"]
    mixed = result | {"contenders": [first | {"seeds": [0, 1, 2, 3, 4]}, *others]}
    assert f"seeds 0–2 ({first['label']}: 0–4). " in table.caption(mixed)


def test_the_summary_says_what_was_not_tuned(finished):
    result = result_of(finished, IMAGES)
    tuned = result | {"contenders": [row | {"tuned": True} for row in result["contenders"]]}
    assert table.summary([result]).count("(not tuned)") == 3
    assert "(not tuned)" not in table.summary([tuned])


def test_a_page_is_made_of_results_alone(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(DeepRun, "compute", lambda self: pytest.fail("trained"))
    place = tmp_path / "deep.md"
    options = ("compare", "deep", "table", "--results", finished / "results", "--page", place)
    assert vprop(*options).exit_code == 0
    text = place.read_text(encoding="utf-8")
    row = next(row for row in result_of(finished, IMAGES)["contenders"] if row["name"] == "vario")
    assert f"{row['scores']['averaged']['nll']['mean']:.4f} ± {row['scores']['averaged']['nll']['std']:.4f}" in text
    running = f"{row['scores']['running']['nll']['mean']:.4f} ± {row['scores']['running']['nll']['std']:.4f}"
    assert any("draws, running statistics" in line and running in line for line in text.splitlines())
    assert f" {row['cost']['statistics_ms']:.1f} |" in text
    assert "(not tuned)" in text
    assert f"Vario: {100 * row['scores']['averaged']['accuracy']['mean']:.2f} / " in text.split("## How it was done")[0]
    images = [line.split("(")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert {Path(name).stem for name in images} >= {
        f"short-images-{kind}" for kind in page.plots_of(result_of(finished, IMAGES))
    }
    assert all((tmp_path / name).is_file() for name in images)
    # Sentences that somebody wrote stay, and the tables are drawn anew.
    place.write_text(text.replace("## Digits\n", "## Digits\n\nWhat we think of it.\n").replace("± ", "+- "))
    assert vprop(*options).exit_code == 0
    assert place.read_text(encoding="utf-8") == text.replace("## Digits\n", "## Digits\n\nWhat we think of it.\n")


def test_a_page_without_results_is_refused(tmp_path):
    fails(vprop("compare", "deep", "table", "--results", tmp_path), "no results", "--results")
    write_json(tmp_path / "cifar10.json", {"task": "cifar10"})
    fails(vprop("compare", "deep", "table", "--results", tmp_path), "no result of this version", "again")


def test_the_page_claims_no_figures_by_itself():
    assert not any(line.startswith("|") for line in page.OPENING.splitlines())


def test_the_committed_page_is_what_the_committed_results_give():
    """While there are no results there is no page."""
    place, folder = ROOT / "docs" / "deep.md", ROOT / "docs" / "deep" / "results"
    assert place.is_file() == any(folder.glob("*.json"))
    if place.is_file():
        text = place.read_text(encoding="utf-8")
        assert page.filled(text, page.load_results(folder), Path("deep")) == text


@pytest.mark.parametrize("task", ["cifar10-40", "cifar10-5k"])
def test_numbers_in_a_plot_do_not_lie_on_each_other(task, tmp_path, monkeypatch):
    """As they are drawn, of tasks with twenty rows, some nearly the same."""
    from vprop.lab.deep import plots

    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure) or path)
    plots._scores(json.loads((ROOT / "docs" / "deep" / "results" / f"{task}.json").read_text()), tmp_path / "one.png")
    (figure,) = figures
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) >= 20
    inner = [one.shrunk(0.9, 0.8) for one in boxes]  # letters do not fill their boxes
    assert not [(i, k) for i, one in enumerate(inner) for k in range(i) if one.overlaps(inner[k])]


def test_a_bad_contender_does_not_spoil_the_plots(finished, tmp_path):
    from vprop.lab.deep import plots

    result = result_of(finished, IMAGES)
    gone, far = result["contenders"][0], result["contenders"][-1]
    gone["scores"]["mean"] = {name: {"mean": None, "std": None} for name in gone["scores"]["mean"]}
    far["scores"]["averaged"]["nll"]["mean"] = 100.0
    far["nll_by_draws"] = {count: {"mean": 100.0, "std": 1.0} for count in far["nll_by_draws"]}
    assert all(path.stat().st_size > 1000 for path in plots.draw(result, tmp_path).values())


def test_a_result_that_diverged_is_said_to_have(finished):
    result = result_of(finished, IMAGES)
    row = result["contenders"][0]
    row["scores"]["mean"] = {name: {"mean": None, "std": None} for name in row["scores"]["mean"]}
    assert "| SGD | the mean | diverged | diverged" in page.section(result)


def test_several_states_of_the_library_are_said_to_be_several(finished):
    result = result_of(finished, IMAGES)
    assert "states of the library" not in page.section(result)
    result["code"].append("another")
    assert "The runs are of 2 states of the library." in page.section(result)


def test_a_contender_whose_package_is_missing_is_left_out_with_a_line(finished, monkeypatch):
    other = replace(contenders.BY_NAME["ivon-opt"], needs="no_such_package")
    monkeypatch.setitem(contenders.BY_NAME, "ivon-opt", other)
    found = vprop("compare", "deep", "images", "--short", "--only", "ivon-opt", "--usual", "--out", finished)
    assert found.exit_code == 0, found.output
    assert "needs the package 'no_such_package': it is not installed here" in " ".join(found.output.split())


def test_failures_are_told_at_the_end(tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(DeepRun, "compute", broken)
    arguments = ("compare", "deep", "images", "--short", "--only", "sgd", "--usual", "--seeds", "0", "--out", tmp_path)
    fails(vprop(*arguments), "1 runs failed", "errors.txt", "kept")
    assert "RuntimeError: no such kernel" in (tmp_path / "errors.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("imagenet",), ("Unknown task 'imagenet'", "cifar10-40")),
        (("cifar10", "--only", "sgd,adam"), ("Unknown contender 'adam'", "adamw")),
        (("cifar10", "--seeds", "0,x"), ("Invalid --seeds '0,x'", "0,1,2")),
        (("cifar10", "--seeds", "100"), ("Invalid --seeds '100'",)),
        (("cifar10", "--jobs", 0), ("Invalid --jobs 0", "at least 1")),
        (("cifar10", "--fast", "everything"), ("Invalid --fast 'everything'", "compile")),
        (("imagenet", "--short"), ("Unknown task 'imagenet'", "short-images")),
        (("cifar10", "--minutes", -1), ("Invalid --minutes -1", "at least 0")),
        (("cifar10", "--minutes", "nan"), ("Invalid --minutes nan",)),
        (("text", "--short", "--usual", "--cost"), ("--usual and --cost do not go together",)),
        (("text", "--short", "--device", "gpu"), ("Invalid --device 'gpu'", "cpu or cuda")),
        (("text", "--short", "--only", "sgd,ivon"), ("nobody of these takes part in short-text", "adamw-dropout")),
    ],
)
def test_bad_arguments(arguments, words, tmp_path):
    fails(vprop("compare", "deep", *arguments, "--out", tmp_path), *words)


def test_a_device_that_is_not_here_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(DeepRun, "compute", lambda self: pytest.fail("ran"))
    found = vprop("compare", "deep", "images", "--short", "--device", "cuda", "--out", tmp_path)
    fails(found, "--device cuda: torch finds no CUDA device here")


def test_nothing_is_trained_for_adapters_that_nobody_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(DeepRun, "compute", lambda self: {"scores": {}, "seconds": 0.0})
    monkeypatch.setattr(compare, "write_results", lambda *arguments: None)
    monkeypatch.setattr(Pretraining, "compute", lambda self: pytest.fail("ran"))
    found = vprop("compare", "deep", "all", "--short", "--only", "sgd", "--usual", "--out", tmp_path)
    assert found.exit_code == 0, found.output
    assert "short-images: seeds: 3 to run" in found.output


def test_data_that_are_missing_are_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("VPROP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(DeepRun, "compute", lambda self: pytest.fail("ran"))
    fails(vprop("compare", "deep", "cifar10", "--out", tmp_path / "out"), "'cifar10' not found", "--data-dir")


def test_names():
    assert tasks_named("all", False) == TASKS
    assert tasks_named("gpt", False) == (BY_NAME["gpt"],)
    assert tasks_named("text", True) == (TEXT,)
    assert tasks_named("gpt,cifar10,gpt", False) == (BY_NAME["gpt"], BY_NAME["cifar10"])
    assert tasks_named("lora,short-text", True) == (LORA, TEXT)
    assert tasks_named("gpt,all", False) == TASKS
    assert tasks_named("cifar10", True) == SHORT
    assert numbers("3,4") == (3, 4)
    with pytest.raises(UsageError):
        numbers("")


def test_groups_have_no_member_twice(finished, monkeypatch):
    paths = []
    scored = {"scores": {"nll": 1.0}, "outliers": {}, "diagram": None}
    monkeypatch.setattr(results.predictions, "holds", lambda path, kind: True)
    monkeypatch.setattr(results.groups, "of_images", lambda own, kind: paths.append(own) or scored)
    runs = [(DeepRun(IMAGES, "sgd", (("lr", 0.1),), seed, "final", how=How(finished)), {}) for seed in range(7)]
    for run, _ in runs:
        target = results.predictions_path(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    monkeypatch.setattr(results, "shown_setting", lambda *_: ({"lr": 0.1}, runs))
    row = results._group_row(IMAGES, GROUPS[0], bench(finished), Store(finished / "runs"))
    assert row["groups"] == 2
    assert [len(own) for own in paths] == [3, 3]
    assert len({path for own in paths for path in own}) == 6


@pytest.mark.parametrize("kind", ["averaged", "running"])
def test_a_mixture_predicts_in_the_way_that_was_chosen_for_its_members(finished, monkeypatch, kind):
    one = contenders.BY_NAME["vario"]
    place, setting = bench(finished), one.grid(IMAGES)[0]
    monkeypatch.setattr(Bench, "choice", lambda *_: Chosen(setting, (None, None), (None, None), (True, True), kind))
    group = next(group for group in GROUPS if group.name == "mixture-3-vario")
    row = results._group_row(IMAGES, group, place, Store(finished / "runs"))
    runs = [place.run(IMAGES, one, setting, seed, "final") for seed in (0, 1, 2)]
    members = [predictions.load(results.predictions_path(run), kind) for run in runs]
    probs = torch.stack([sets["test"].probs for sets, _ in members]).mean(0)
    loss = predictions.log_loss(probs, members[0][1])
    assert row["scores"]["nll"]["mean"] == pytest.approx(loss, abs=1e-5)
    assert row["predicts"] == kind
    shown = table.scores_table({"contenders": [], "groups": [row]})
    assert ("draws of all, running statistics" in shown) == (kind == "running")


def test_predictions_of_before_still_make_groups(finished, monkeypatch, tmp_path):
    """They hold draws with statistics of their own alone, under the name of then, whatever was chosen for members."""
    one, group = contenders.BY_NAME["vario"], next(group for group in GROUPS if group.name == "mixture-3-vario")
    place, setting = bench(finished), one.grid(IMAGES)[0]
    paths = [results.predictions_path(place.run(IMAGES, one, setting, seed, "final")) for seed in (0, 1, 2)]
    for path in paths:
        with np.load(path) as file:
            assert any(key.startswith("running.") for key in file.files)
            older = {key: file[key] for key in file.files if key.startswith(("mean.", "draws.", "labels"))}
        target = tmp_path / path.relative_to(finished)
        target.parent.mkdir(parents=True, exist_ok=True)
        np.savez(target, **older)
    monkeypatch.setattr(results, "predictions_path", lambda run: tmp_path / predictions_path(run).relative_to(finished))
    monkeypatch.setattr(
        Bench, "choice", lambda *_: Chosen(setting, (None, None), (None, None), (True, True), "running")
    )
    row = results._group_row(IMAGES, group, place, Store(finished / "runs"))
    assert row["predicts"] == "averaged"
    probs = torch.stack([predictions.load(path, "averaged")[0]["test"].probs for path in paths]).mean(0)
    loss = predictions.log_loss(probs, predictions.load(paths[0], "averaged")[1])
    assert row["scores"]["nll"]["mean"] == pytest.approx(loss, abs=1e-5)


def test_a_contender_says_whether_it_can_run():
    assert DeepContender("x", "X", "point", None).installed()
    assert not DeepContender("x", "X", "point", None, needs="no_such_package").installed()
