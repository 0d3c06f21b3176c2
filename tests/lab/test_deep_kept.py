"""Results that were made in several places: what a file has stays, and settings that were chosen before are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vprop.lab.cli import app
from vprop.lab.deep import contenders, table
from vprop.lab.deep.joined import with_kept_rows
from vprop.lab.deep.kept import kept_in, key_of, tried_before
from vprop.lab.deep.protocol import Bench
from vprop.lab.deep.results import choices
from vprop.lab.deep.tasks import BY_NAME, SHORT
from vprop.lab.deep.workloads import How
from vprop.lab.engine.store import write_json

IMAGES = SHORT[0]
COMMITTED = Path(__file__).parents[2] / "docs" / "deep" / "results"


def command(out, results, *options, tasks="images"):
    arguments = ("compare", "deep", tasks, "--short", *options, "--out", out, "--results", results)
    return CliRunner().invoke(app, [str(one) for one in arguments])


def deep(out, results, *options):
    run = command(out, results, *options)
    assert run.exit_code == 0, run.output
    return json.loads((results / "short-images.json").read_text())


def row(name, cost=None, setting=None, **more):
    return {"name": name, "setting": setting or {"lr": 0.1}, "cost": cost, "seeds": [0], **more}


def result(*rows, groups=(), machines=("a CPU",), code=("1",), cost=None):
    return {
        "settings": {"name": "short-images"}, "environment": {"cuda": None}, "machines": list(machines),
        "code": list(code), "cost_of_adamw": cost, "contenders": list(rows), "groups": list(groups),
    }  # fmt: skip


def test_rows_without_runs_here_stay(tmp_path):
    first = deep(tmp_path / "one", tmp_path, "--only", "sgd,vario", "--usual", "--seeds", "0,1,2")
    both = deep(tmp_path / "two", tmp_path, "--only", "adamw", "--usual", "--seeds", "0")
    assert [one["name"] for one in both["contenders"]] == ["sgd", "adamw", "vario"]
    assert [one for one in both["contenders"] if one["name"] != "adamw"] == first["contenders"]
    assert both["groups"] == first["groups"]
    again = deep(tmp_path / "two", tmp_path, "--only", "sgd", "--usual", "--seeds", "3")
    assert [one["seeds"] for one in again["contenders"]] == [[3], [0], [0, 1, 2]]
    assert [one["name"] for one in again["groups"]] == ["mixture-3-vario"]  # the ensemble's members were others
    timed = deep(tmp_path / "three", tmp_path, "--only", "adamw,vario", "--cost")
    assert [one["name"] for one in timed["contenders"] if one["cost"]] == ["adamw", "vario"]
    assert timed["cost_of_adamw"] == timed["contenders"][1]["cost"]
    assert [one["scores"] for one in timed["contenders"]] == [one["scores"] for one in again["contenders"]]


def test_what_is_missing_is_what_a_file_does_not_have(tmp_path):
    usual = ("--usual", "--seeds", "0,1")
    first = deep(tmp_path / "one", tmp_path, "--only", "sgd,adamw", *usual)
    again = command(tmp_path / "two", tmp_path, "--only", "sgd,adamw", *usual, "--missing")
    assert "short-images: no training is missing." in again.output
    assert not list((tmp_path / "two").rglob("final-*.json"))
    both = deep(tmp_path / "two", tmp_path, "--only", "sgd,adamw,vario", *usual, "--missing")
    assert {path.name.split("-")[1] for path in (tmp_path / "two").rglob("final-*.json")} == {"vario"}
    assert [one for one in both["contenders"] if one["name"] != "vario"] == first["contenders"]
    other = ("--only", "sgd", "--usual", "--seeds", "0,1,2", "--missing")  # a seed more: the file has means alone
    assert next(one["seeds"] for one in deep(tmp_path / "three", tmp_path, *other)["contenders"]) == [0, 1, 2]
    assert len(list((tmp_path / "three").rglob("final-sgd-*.json"))) == 3


def test_what_is_missing_of_several_tasks_runs_side_by_side(tmp_path):
    options = ("--only", "adamw", "--usual", "--seeds", "0", "--missing")
    run = command(tmp_path / "one", tmp_path, *options, tasks="images,text")
    assert run.exit_code == 0, run.output
    assert "2 tasks: seeds: 2 to run." in run.output
    assert {path.name for path in tmp_path.glob("*.json")} == {"short-images.json", "short-text.json"}


@pytest.mark.parametrize("option", ["--tuning", "--cost"])
def test_missing_goes_with_seeds(tmp_path, option):
    run = command(tmp_path, tmp_path, option, "--missing")
    assert run.exit_code == 1
    assert f"--missing is about seeds, which {option} does not run." in " ".join(run.output.split())


def test_machines_and_states_of_the_library_are_those_of_all_rows():
    kept = result(row("sgd"), machines=["NVIDIA H200"], code=["1"])
    both = with_kept_rows(result(row("adamw"), code=["2"]), {}, kept)
    assert (both["machines"], both["code"]) == (["NVIDIA H200", "a CPU"], ["1", "2"])
    older = {name: value for name, value in kept.items() if name != "machines"} | {"environment": {"cuda": "H100"}}
    assert with_kept_rows(result(row("adamw")), {}, older)["machines"] == ["H100", "a CPU"]


def test_times_of_two_machines_are_never_compared():
    kept = result(row("sgd", {"step_ms": 1.0}), row("adamw", {"step_ms": 2.0}), cost={"step_ms": 2.0})
    found = result(row("sgd", setting={"lr": 0.2}), row("adamw", setting={"lr": 0.1, "dropout": 0.1}))
    both = with_kept_rows(found, {}, kept)
    assert [one["cost"] for one in both["contenders"]] == [{"step_ms": 1.0}, None]  # masks take time, step sizes do not
    assert both["cost_of_adamw"] == {"step_ms": 2.0}
    both = with_kept_rows(None, {"vario": {"step_ms": 5.0}, "sgd": {"step_ms": 4.0}}, kept)
    assert [one["cost"] for one in both["contenders"]] == [{"step_ms": 4.0}, None]
    assert both["cost_of_adamw"] is None


def test_settings_that_were_tried_since_are_written_down(tmp_path):
    """Without any run with the one that is the best now, the row stays what it was, and says so."""
    one, results = contenders.BY_NAME["vario"], tmp_path / "short-images.json"
    (row,) = deep(tmp_path / "one", tmp_path, "--only", "vario", "--seeds", "0")["contenders"]
    runs = Bench(How(tmp_path / "two")).tuning(IMAGES, one)
    other = next(run for run in runs if dict(run.setting) != row["setting"])
    for loss, tuned in ((9.0, True), (0.01, False)):
        scores = {"averaged": {"nll": loss}, "running": {"nll": 10.0}}
        write_json(tmp_path / "two" / "runs" / f"{other.key}.json", {"scores": scores})
        assert command(tmp_path / "two", tmp_path, tasks="collect").exit_code == 0
        (now,) = json.loads(results.read_text())["contenders"]
        assert {"nll": loss, "predicts": "averaged", **dict(other.setting)} in now["grid"]
        assert (now["tuned"], len(now["grid"])) == (tuned, len(row["grid"]))
        same = set(row) - {"grid", "tuned"}
        assert {name: now[name] for name in same} == {name: row[name] for name in same}
    elsewhere = Bench(How(tmp_path / "three"), results=tmp_path)
    assert elsewhere.choice(IMAGES, one).setting == dict(other.setting)
    assert elsewhere.to_be_tried(IMAGES, one) == []


def test_settings_that_are_not_offered_any_more_are_not_forgotten():
    known = [{"lr": 0.1, "nll": 0.5, "predicts": "mean"}, {"lr": 0.3, "nll": 0.7, "predicts": "mean"}]
    kept = result(row("sgd", grid=known, predicts="mean", tuned=True))
    found = result(row("sgd", grid=[{"lr": 0.1, "nll": 0.5}, {"lr": 0.2, "nll": 0.4}]))
    for _ in range(2):  # nor the next time
        (now,) = with_kept_rows(found, {}, kept)["contenders"]
        assert (now["grid"], now["left"]) == (found["contenders"][0]["grid"], known[1:])
        kept = result(now | {"predicts": "mean", "tuned": True})
    again = replace(contenders.BY_NAME["sgd"], grids={"resnet": ({"lr": 0.3}, {"lr": 0.1})})
    assert tried_before(kept, again, IMAGES)[key_of({"lr": 0.3})] == {"mean": 0.7}
    anew = [{"lr": 0.3, "nll": 0.6, "predicts": "mean"}, {"lr": 0.1, "nll": 0.5, "predicts": "mean"}]
    (now,) = with_kept_rows(result(row("sgd", grid=anew, predicts="mean", tuned=True)), {}, kept)["contenders"]
    assert [one["lr"] for one in now["left"]] == [0.2]
    assert tried_before(result(now), again, IMAGES)[key_of({"lr": 0.3})] == {"mean": 0.6}
    same = result(row("sgd", grid=anew))
    assert "left" not in with_kept_rows(result(now), {}, same)["contenders"][0]


def test_a_grid_of_one_setting_forgets_nothing():
    """There is nothing to choose, so nothing is tried; it may grow again."""
    wide, one = ({"lr": 0.1}, {"lr": 0.2}), contenders.BY_NAME["sgd"]
    known = [{"lr": 0.1, "nll": 0.5, "predicts": "mean"}, {"lr": 0.2, "nll": None, "diverged": True}]
    kept = result(row("sgd", grid=known, predicts="mean", tuned=True))
    found = result(row("sgd", grid=[{"lr": 0.1, "nll": None}], predicts="mean", tuned=True))
    (now,) = with_kept_rows(found, {}, kept)["contenders"]
    assert (now["grid"], now["left"]) == (known[:1], known[1:])
    again = tried_before(result(now), replace(one, grids={"resnet": wide}), IMAGES)
    assert again == {key_of(wide[0]): {"mean": 0.5}, key_of(wide[1]): {}}
    old = result(row("sgd", grid=[known[0], {"lr": 0.2, "nll": None}], predicts="mean", tuned=True))
    assert with_kept_rows(found, {}, old)["contenders"][0]["left"] == known[1:]


def test_a_row_with_fewer_seeds_does_not_replace_one_with_more():
    """Nor its groups: of the other seeds there is nothing here."""
    group = {"name": "ensemble-3", "of": "sgd"}
    kept = result(row("sgd", seeds=[0, 1, 2, 3, 4]), groups=[group | {"members": 3}])
    found = result(row("sgd", seeds=[0, 1, 2]), row("adamw", seeds=[0]), groups=[group | {"members": 2}])
    both = with_kept_rows(found, {}, kept)
    assert [(one["name"], len(one["seeds"])) for one in both["contenders"]] == [("sgd", 5), ("adamw", 1)]
    assert [one["members"] for one in both["groups"]] == [3]
    other = result(row("sgd", setting={"lr": 0.2}, seeds=[0]))
    assert [one["seeds"] for one in with_kept_rows(other, {}, kept)["contenders"]] == [[0]]


def test_a_loss_that_leaves_takes_its_kind_of_predictions_along():
    """Old files say it once, for all; the row that comes next may predict in another way."""
    kept = result(row("ivon", grid=[{"sigma": 0.1, "nll": 0.5}, {"sigma": 0.2, "nll": 0.7}], predicts="running"))
    found = result(
        row("ivon", grid=[{"sigma": 0.1, "nll": 0.4, "predicts": "averaged"}], predicts="averaged", tuned=True)
    )
    (now,) = with_kept_rows(found, {}, kept)["contenders"]
    assert now["left"] == [{"sigma": 0.2, "nll": 0.7, "predicts": "running"}]
    back = replace(contenders.BY_NAME["ivon"], grids={"resnet": ({"sigma": 0.1}, {"sigma": 0.2})})
    assert tried_before(result(now), back, IMAGES)[key_of({"sigma": 0.2})] == {"running": 0.7}


def test_a_row_learns_no_way_to_predict_that_it_has_no_scores_of():
    kept = result(row("vario", grid=[{"lr": 0.1, "nll": None}], predicts="mean", tuned=False, scores={"mean": {}}))
    grid = [{"lr": 0.1, "nll": 0.4, "predicts": "averaged"}]
    choice = {"setting": {"lr": 0.1}, "tuned": True, "predicts": "averaged", "grid": grid}
    (now,) = with_kept_rows(None, {}, kept, {"vario": choice})["contenders"]
    assert (now["grid"], now["tuned"], now["predicts"]) == (grid, True, "mean")


def test_a_network_without_the_dropout_that_it_chose_not_to_have_is_drawn(tmp_path):
    """One that is tuned where its seeds are not: its row says how one network predicts."""
    task, one = replace(SHORT[1], name="gpt-books"), contenders.BY_NAME["adamw-dropout"]
    place = Bench(How(tmp_path))
    for run in place.tuning(task, one):
        loss = 1.0 + dict(run.setting)["dropout"]
        scores = {"mean": {"nll": loss}, "averaged": {"nll": loss}}
        write_json(tmp_path / "runs" / f"{run.key}.json", {"scores": scores})
    chosen = choices(task, place)["adamw-dropout"]
    assert (chosen["setting"]["dropout"], chosen["predicts"]) == (0.0, "mean")


def test_a_setting_that_diverged_is_known_also_where_it_was_not_the_row_s_own(tmp_path):
    one, results = contenders.BY_NAME["vario"], tmp_path / "short-images.json"
    (row,) = deep(tmp_path / "one", tmp_path, "--only", "vario", "--usual", "--seeds", "0")["contenders"]
    runs = Bench(How(tmp_path / "two")).tuning(IMAGES, one)
    for run in runs:
        loss = None if dict(run.setting) == row["setting"] else 0.01
        write_json(tmp_path / "two" / "runs" / f"{run.key}.json", {"scores": {"averaged": {"nll": loss}}})
    assert command(tmp_path / "two", tmp_path, tasks="collect").exit_code == 0
    (now,) = json.loads(results.read_text())["contenders"]
    assert (now["tuned"], [one.get("diverged", False) for one in now["grid"]].count(True)) == (False, 1)
    elsewhere = Bench(How(tmp_path / "three"), results=tmp_path)
    assert (elsewhere.to_be_tried(IMAGES, one), elsewhere.choice(IMAGES, one).complete) == ([], True)


def test_without_runs_or_times_a_file_is_left_alone():
    kept = result(row("sgd"))
    assert with_kept_rows(None, {}, kept) is None
    assert with_kept_rows(kept, {}, None) is kept


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"settings": {"epochs": 3}}'])
def test_a_file_of_something_else_has_nothing_to_keep(tmp_path, text):
    (tmp_path / "short-images.json").write_text(text)
    assert kept_in(tmp_path, IMAGES) is None
    assert kept_in(tmp_path / "nowhere", IMAGES) is None


def test_a_task_that_has_changed_keeps_nothing(tmp_path):
    write_json(tmp_path / "short-images.json", result() | {"settings": IMAGES.shown()})
    assert kept_in(tmp_path, IMAGES) is not None
    assert kept_in(tmp_path, replace(IMAGES, epochs=5)) is None


# -- settings that were chosen before --------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "name"), [("cifar10", "sgd"), ("fashion", "ivon"), ("cifar10-noise", "sgd")])
def test_what_was_chosen_before_is_taken(tmp_path, task, name):
    task, one = BY_NAME[task], contenders.BY_NAME[name]
    committed = json.loads((COMMITTED / f"{task.name}.json").read_text())
    known = next(row for row in committed["contenders"] if row["name"] == name)
    place = Bench(How(tmp_path), results=COMMITTED)
    choice = place.choice(task, one)
    assert (choice.setting, choice.complete) == (known["setting"], True)
    assert choice.losses == tuple(one["nll"] for one in known["grid"])
    assert choice.kind == table.own_kind(known)
    assert place.to_be_tried(task, one) == []
    assert not Bench(How(tmp_path)).choice(task, one).complete


def test_what_is_tried_here_joins_what_was_tried_before_and_counts_more(tmp_path):
    task, one = BY_NAME["cifar10"], contenders.BY_NAME["sgd"]
    place = Bench(How(tmp_path), results=COMMITTED)
    before = place.choice(task, one)
    for loss, chosen in ((0.3, before.setting), (0.1, one.grid(task)[0])):
        job = place.tuning(task, one)[0]
        write_json(tmp_path / "runs" / f"{job.key}.json", {"scores": {"mean": {"nll": loss}}})
        choice = place.choice(task, one)
        assert (choice.setting, choice.losses) == (chosen, (loss, *before.losses[1:]))
        assert choice.complete


def test_only_what_no_file_has_is_to_be_tried(tmp_path):
    """A grid that has become wider: the best so far is taken, and it is known not to be all."""
    task, one = BY_NAME["cifar10"], contenders.BY_NAME["sgd"]
    grid = one.grid(task)
    wider = replace(one, grids={"resnet": (*grid[2:], {"lr": 0.05}, {"lr": 0.5})})
    place = Bench(How(tmp_path), results=COMMITTED)
    assert [dict(run.setting) for run in place.to_be_tried(task, wider)] == [{"lr": 0.05}, {"lr": 0.5}]
    choice = place.choice(task, wider)
    assert (choice.setting, choice.complete) == (grid[2], False)
    assert choice.losses[2:] == (None, None)
    assert None not in choice.losses[:2]


def test_a_setting_that_diverged_before_is_not_tried_again(tmp_path):
    task, one = BY_NAME["cifar10"], contenders.BY_NAME["sgd"]
    kept = json.loads((COMMITTED / "cifar10.json").read_text())
    next(row for row in kept["contenders"] if row["name"] == "sgd")["grid"][2]["nll"] = None
    write_json(tmp_path / "cifar10.json", kept)
    choice = Bench(How(tmp_path), results=tmp_path).choice(task, one)
    assert (choice.setting, choice.losses[2], choice.complete) == (one.grid(task)[1], None, True)


def kept_with(row, **changes):
    """The committed file, with another row of SGD."""
    kept = kept_in(COMMITTED, BY_NAME["cifar10"])
    return kept | {"contenders": [one | changes if one["name"] == row else one for one in kept["contenders"]]}


def test_every_loss_of_a_file_is_known_also_where_not_all_settings_were_tried():
    """Or else a grid that became wider would be tried from the start, once it was written down."""
    task, one = BY_NAME["cifar10"], contenders.BY_NAME["sgd"]
    grid = kept_in(COMMITTED, task)["contenders"][0]["grid"]
    known = tried_before(kept_with("sgd", tuned=False, grid=[*grid, {"lr": 0.5, "nll": None}]), one, task)
    assert set(known) == {key_of(setting) for setting in one.grid(task)}
    assert {kind for losses in known.values() for kind in losses} == {"mean"}
    known = tried_before(kept_with("sgd", grid=[*grid, {"lr": 0.5, "nll": None}]), one, task)
    assert known[key_of({"lr": 0.5})] == {}  # it diverged
    assert tried_before(kept_with("sgd"), contenders.BY_NAME["vadam"], task) == {}


def test_a_loss_has_the_kind_of_predictions_that_it_is_of(tmp_path):
    """The best one's, in files that say no more; if that one has left the grid, they say nothing of the others."""
    task, one = BY_NAME["cifar10"], contenders.BY_NAME["ivon"]
    row = next(row for row in kept_in(COMMITTED, task)["contenders"] if row["name"] == "ivon")
    tried = [dict(key_of(setting)) for setting in row["grid"]]
    rest = tuple(setting for setting in tried if setting != row["setting"])
    without = replace(one, grids={"resnet": rest})
    old = [{name: value for name, value in setting.items() if name != "predicts"} for setting in row["grid"]]
    assert tried_before(kept_with("ivon", grid=old, left=[]), without, task) == {}
    assert set(tried_before(kept_with("ivon", grid=old, left=[]), one, task)) == {key_of(setting) for setting in old}
    said = [setting | {"predicts": "running"} for setting in row["grid"]]
    write_json(tmp_path / "cifar10.json", kept_with("ivon", grid=said))
    choice = Bench(How(tmp_path), results=tmp_path).choice(task, without)
    assert (choice.kind, choice.kinds, choice.complete) == ("running", ("running",) * len(rest), True)


def test_results_say_the_kind_of_every_loss(tmp_path):
    found = deep(tmp_path / "one", tmp_path, "--only", "vario", "--seeds", "0")
    (row,) = found["contenders"]
    kinds = [setting["predicts"] for setting in row["grid"]]
    assert set(kinds) <= {"averaged", "running"}
    best = min(row["grid"], key=lambda setting: setting["nll"])
    assert row["predicts"] == best["predicts"]
    there = Bench(How(tmp_path / "two"), results=tmp_path).choice(IMAGES, contenders.BY_NAME["vario"])
    here = Bench(How(tmp_path / "one")).choice(IMAGES, contenders.BY_NAME["vario"])
    assert there == here
