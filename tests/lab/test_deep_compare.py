"""`vprop compare deep`: equal budgets, choices without test data, runs that are kept, and a page made of results."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from vprop.lab.cli import app
from vprop.lab.deep import contenders, page, results
from vprop.lab.deep.compare import numbers, tasks_named
from vprop.lab.deep.contenders import CONTENDERS, GROUPS, DeepContender, taking_part
from vprop.lab.deep.pool import TimedPool
from vprop.lab.deep.protocol import Bench
from vprop.lab.deep.run import DeepRun
from vprop.lab.deep.tasks import BY_NAME, SHORT, TASKS
from vprop.lab.deep.workloads import How
from vprop.lab.engine.job import Job
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


def bench(out):
    return Bench(How(out))


# -- the configuration -----------------------------------------------------------------------------------------------


def test_names_are_unique_and_known():
    assert len({task.name for task in (*TASKS, *SHORT)}) == len(BY_NAME)
    assert len({one.name for one in (*CONTENDERS, *GROUPS)}) == len(CONTENDERS) + len(GROUPS)
    assert all(task.tuned_on is None or task.tuned_on in BY_NAME for task in TASKS)
    assert all(group.of in contenders.BY_NAME for group in GROUPS)
    assert all(one.of in contenders.BY_NAME for one in CONTENDERS if one.of)


@pytest.mark.parametrize("task", [*TASKS, *SHORT], ids=lambda task: task.name)
def test_grids_are_small_and_without_repeats(task):
    for one in taking_part(task):
        grid = one.grid(task)
        assert 1 <= len(grid) <= 4
        assert len({tuple(sorted(setting.items())) for setting in grid}) == len(grid)
    assert {"adamw", "vario"} <= {one.name for one in taking_part(task)}
    if task.tuned_on is not None:
        other = BY_NAME[task.tuned_on]
        assert other.family == task.family
        assert other.tuned_on is None


@pytest.mark.parametrize("name", [one.name for one in taking_part(IMAGES) if one.make is not None])
def test_every_contender_evaluates_the_gradients_it_may(name, tmp_path, monkeypatch):
    one = contenders.BY_NAME[name]
    if not one.installed():
        pytest.skip(f"{one.needs} is not installed")
    calls = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda t, *a, **k: calls.append(1) or backward(t, *a, **k))
    result = bench(tmp_path).run(IMAGES, one, one.grid(IMAGES)[0], 0, "final").execute()
    assert len(calls) == 2 * (200 // 16) == result["steps"] * one.gradients
    assert result["scores"]["mean"]["nll"] is not None
    assert ("averaged" in result["scores"]) == (one.kind != "point")
    json.dumps(result, allow_nan=False)


def test_a_tuning_run_is_shorter_and_on_held_out_data(tmp_path):
    task, one = replace(IMAGES, epochs=4, tuning_share=0.5), contenders.BY_NAME["sgd"]
    result = bench(tmp_path).run(task, one, {"lr": 0.1}, 100, "tuning").execute()
    assert result["steps"] == 2 * (150 // 16)
    assert not result["outliers"]["mean"]
    assert not (tmp_path / "predictions").exists()


# -- keys and choices ------------------------------------------------------------------------------------------------


def test_a_run_is_known_by_what_was_asked_for_and_not_by_how():
    def key(task=IMAGES, how=None, seed=0, **setting):
        one = contenders.BY_NAME["sgd"]
        return Bench(how or How()).run(task, one, {"lr": 0.1, **setting}, seed, "final").key

    assert key() == key(how=How(Path("elsewhere"), "cuda", ("compile",), 5.0))
    assert key() == key(replace(IMAGES, title="another"))
    others = [key(seed=1), key(weight_decay=0.1), key(replace(IMAGES, epochs=3)), key(replace(IMAGES, norm="frn"))]
    assert len({key(), *others}) == 5


def stored(place, task, name, losses):
    one = contenders.BY_NAME[name]
    for job, loss in zip(place.tuning(task, one), losses, strict=True):
        if loss != "not run":
            scores = {"mean": {"nll": 9.0}, "averaged": {"nll": loss}}
            write_json(place.how.out / "runs" / f"{job.key}.json", {"scores": scores})
    return place.choice(task, one)


def test_the_setting_with_the_smallest_loss_is_taken(tmp_path):
    grid = contenders.BY_NAME["vario"].grid(IMAGES)
    choice = stored(bench(tmp_path), IMAGES, "vario", (0.5, None, 0.3, 0.4))
    assert choice.setting == grid[2]
    assert choice.complete
    assert choice.losses == (0.5, None, 0.3, 0.4)


def test_without_tuning_the_first_setting_is_taken_and_said_to_be_untuned(tmp_path):
    grid = contenders.BY_NAME["vario"].grid(IMAGES)
    choice = bench(tmp_path).choice(IMAGES, contenders.BY_NAME["vario"])
    assert (choice.setting, choice.complete) == (grid[0], False)
    choice = stored(bench(tmp_path), IMAGES, "vario", (0.5, 0.4, "not run", "not run"))
    assert (choice.setting, choice.complete) == (grid[1], False)


def test_a_task_can_take_the_settings_of_another(tmp_path):
    place, one = bench(tmp_path), contenders.BY_NAME["sgd"]
    runs = place.tuning(BY_NAME["cifar10"], one)
    assert {run.task.name for run in runs} == {"cifar10-40"}
    assert [run.key for run in runs] == [run.key for run in place.tuning(BY_NAME["cifar10-40"], one)]
    assert {(run.part, run.seed) for run in runs} == {("tuning", 100)}


# -- the pool --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small(Job):
    number: int
    fails: bool = False

    def compute(self):
        if self.fails:
            raise RuntimeError("this one\nfails")
        return {"number": self.number}

    @property
    def key(self):
        return f"small-{self.number}"


def pool(folder, workers=1, stop_at=None):
    return TimedPool(Store(folder), Console(file=StringIO(), width=200), workers, stop_at)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_fails_stops_no_other(tmp_path, workers):
    ours = pool(tmp_path, workers)
    done = ours.run_all("small", [Small(0), Small(1, fails=True), Small(2)])
    ours.close()
    assert {result["number"] for result in done.values()} == {0, 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small-0.json", "small-2.json"]
    assert "RuntimeError: this one" in ours.failures["small-1"]
    assert "small-1 failed: RuntimeError: this one" in ours.console.file.getvalue()


def test_what_was_kept_is_not_run_again(tmp_path):
    pool(tmp_path).run_all("small", [Small(0)])
    again = pool(tmp_path).run_all("small", [Small(0, fails=True)])
    assert again["small-0"]["number"] == 0


def test_no_run_is_begun_that_has_no_time(tmp_path):
    ours = pool(tmp_path, stop_at=time.time() - 1)
    assert ours.run_all("small", [Small(0)]) == {}
    assert ours.unfinished == ["small-0"]


@pytest.mark.parametrize("name", ["sgd", "adamw-dropout", "swag", "vario", "ivon", "vprop-centred"])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(name, tmp_path, monkeypatch):
    task, one = replace(IMAGES, epochs=4), contenders.BY_NAME[name]
    setting = one.grid(task)[0]
    whole = bench(tmp_path / "whole").run(task, one, setting, 0, "final").execute()
    place = Bench(How(tmp_path / "parts", stop_at=100.0))
    job = place.run(task, one, setting, 0, "final")
    left = tmp_path / "parts" / "unfinished" / f"{job.key}.pt"
    for _ in range(2 if one.gradients == 1 else 1):  # of four epochs, or of two
        monkeypatch.setattr("vprop.lab.deep.run.now", lambda: 101.0)
        ours = pool(tmp_path / "parts" / "runs")
        assert ours.run_all("one", [job]) == {}
        assert (ours.unfinished, ours.failures) == ([job.key], {})
        assert left.is_file()
    monkeypatch.setattr("vprop.lab.deep.run.now", lambda: 99.0)
    parts = job.execute()
    assert parts["scores"] == whole["scores"]
    assert parts["steps"] == whole["steps"]
    assert not left.exists()


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


def test_a_page_is_made_of_results_alone(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(DeepRun, "compute", lambda self: pytest.fail("trained"))
    place = tmp_path / "deep.md"
    options = ("compare", "deep", "table", "--results", finished / "results", "--page", place)
    assert vprop(*options).exit_code == 0
    text = place.read_text(encoding="utf-8")
    row = next(row for row in result_of(finished, IMAGES)["contenders"] if row["name"] == "vario")
    assert f"{row['scores']['averaged']['nll']['mean']:.4f} ± {row['scores']['averaged']['nll']['std']:.4f}" in text
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
    ],
)
def test_bad_arguments(arguments, words):
    fails(vprop("compare", "deep", *arguments), *words)


def test_data_that_are_missing_are_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("VPROP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(DeepRun, "compute", lambda self: pytest.fail("ran"))
    fails(vprop("compare", "deep", "cifar10", "--out", tmp_path / "out"), "'cifar10' not found", "--data-dir")


def test_names():
    assert tasks_named("all", False) == TASKS
    assert tasks_named("gpt", False) == (BY_NAME["gpt"],)
    assert tasks_named("text", True) == (TEXT,)
    assert tasks_named("cifar10", True) == SHORT
    assert numbers("3,4") == (3, 4)
    with pytest.raises(UsageError):
        numbers("")


def test_groups_have_no_member_twice(finished, monkeypatch):
    paths = []
    scored = {"scores": {"nll": 1.0}, "outliers": {}, "diagram": None}
    monkeypatch.setattr(results.groups, "of_images", lambda own, averaged: paths.append(own) or scored)
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


def test_a_contender_says_whether_it_can_run():
    assert DeepContender("x", "X", "point", None).installed()
    assert not DeepContender("x", "X", "point", None, needs="no_such_package").installed()
