"""Runs of `vprop compare deep`: equal budgets, choices without test data, and runs that are stopped and go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.lab.deep import IMAGES, bench, pool
from vprop.lab.deep import contenders, results, table
from vprop.lab.deep.contenders import CONTENDERS, GROUPS, taking_part
from vprop.lab.deep.gpt import CharacterGPT, adapt
from vprop.lab.deep.protocol import Bench, run_cost, run_tasks
from vprop.lab.deep.run import DeepRun
from vprop.lab.deep.tasks import BY_NAME, SHORT, TASKS
from vprop.lab.deep.workloads import How
from vprop.lab.engine.pool import Pool
from vprop.lab.engine.store import Store, write_json

# -- the configuration -----------------------------------------------------------------------------------------------


def test_names_are_unique_and_known():
    assert len({task.name for task in (*TASKS, *SHORT)}) == len(BY_NAME)
    assert len({one.name for one in (*CONTENDERS, *GROUPS)}) == len(CONTENDERS) + len(GROUPS)
    assert all(task.tuned_on is None or task.tuned_on in BY_NAME for task in TASKS)
    timed = [(task, BY_NAME[task.timed_on]) for task in TASKS if task.timed_on]
    assert all(other.timed_on is None for _, other in timed)
    assert all(task.data == other.data and task.norm == other.norm for task, other in timed)
    assert all(
        (task.family, task.batch, task.width) == (other.family, other.batch, other.width) for task, other in timed
    )
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
        assert taking_part(task) == taking_part(other)
        assert all(one.grid(task) == one.grid(other) for one in taking_part(task))


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
    assert ("running" in result["scores"]) == (one.kind in ("posterior", "peer"))
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("count", [200, 50_000])
@pytest.mark.parametrize("make", [contenders.floored, contenders.centred, contenders.ivon])
def test_sigma_is_the_noise_however_many_data_there_are(make, count):
    """Where the gradient says nothing; and a step is SGD's with momentum, of size speed/10."""
    model = torch.nn.Linear(50, 1, bias=False)
    facts = {"num_data": count, "batch_size": 16, "seed": 0}
    optimizer = make(model.parameters(), facts, sigma=0.008, decay=1e-6)

    def closure(slope=0.0):
        optimizer.zero_grad()
        loss = slope * model.weight.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    sigma = optimizer.posterior(model).variance["weight"].sqrt()
    torch.testing.assert_close(sigma, torch.full_like(sigma, 0.008), rtol=5e-3, atol=0)
    before = model.weight.detach().clone()
    optimizer.step(lambda: closure(1e-4))
    # the average of a zero and a slope, debiased: 0.1/(1 − 0.9²) of it, times the speed, 1
    moved = (before - model.weight.detach()).mean() / (1e-4 * 0.1 / (1 - 0.9**2))
    assert float(moved) == pytest.approx(1.0, rel=0.05)


def test_noise_that_is_held_has_a_floor_where_it_starts():
    facts, weight = {"num_data": 50_000, "seed": 0}, torch.nn.Parameter(torch.zeros(3))
    free, held = (contenders.ivon([weight], facts, 0.008, held=held).param_groups[0] for held in (0.0, 1.0))
    assert free["hess_floor"] == 0
    assert held["hess_floor"] == pytest.approx(1 / (50_000 * 0.008**2))


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
    grid = contenders.BY_NAME["ivon"].grid(IMAGES)
    choice = stored(bench(tmp_path), IMAGES, "ivon", (0.5, None, 0.3, 0.4))
    assert choice.setting == grid[2]
    assert choice.complete
    assert choice.losses == (0.5, None, 0.3, 0.4)


def test_the_statistics_of_batch_norm_are_chosen_as_settings_are(tmp_path):
    place, one = bench(tmp_path), contenders.BY_NAME["vario"]
    own, running = (0.5, None), (0.6, 0.4)
    for run, *losses in zip(place.tuning(IMAGES, one), own, running, strict=True):
        scores = dict(zip(("mean", "averaged", "running"), ({"nll": loss} for loss in (0.1, *losses)), strict=True))
        write_json(tmp_path / "runs" / f"{run.key}.json", {"scores": scores})
    choice = place.choice(IMAGES, one)
    assert (choice.setting, choice.kind, choice.losses) == (one.grid(IMAGES)[1], "running", (0.5, 0.4))
    row = {"scores": {"averaged": 1, "running": 2}, "predicts": choice.kind}
    assert table.own_scores(row) == 2
    assert place.choice(IMAGES, contenders.BY_NAME["sgd"]).kind == "mean"


def test_without_tuning_the_first_setting_is_taken_and_said_to_be_untuned(tmp_path):
    grid = contenders.BY_NAME["ivon"].grid(IMAGES)
    choice = bench(tmp_path).choice(IMAGES, contenders.BY_NAME["ivon"])
    assert (choice.setting, choice.complete) == (grid[0], False)
    choice = stored(bench(tmp_path), IMAGES, "ivon", (0.5, 0.4, "not run", "not run"))
    assert (choice.setting, choice.complete) == (grid[1], False)


def test_the_cost_is_that_of_the_chosen_setting_before_any_other(tmp_path, monkeypatch):
    place, one = bench(tmp_path), contenders.BY_NAME["ivon"]
    stored(place, IMAGES, "ivon", (0.5, 0.4, 0.3, 0.4))
    store, grid = Store(tmp_path / "runs"), one.grid(IMAGES)
    assert results._cost(IMAGES, one, place, store) is None
    for at, ms in ((0, 5.0), (2, 7.0)):
        store.save(place.cost(IMAGES, one, grid[at]).key, {"step_ms": ms})
        assert results._cost(IMAGES, one, place, store) == {"step_ms": ms}
    asked = []
    monkeypatch.setattr(Pool, "run_all", lambda pool, title, jobs: asked.extend(jobs))
    run_cost(IMAGES, [one], place, Pool(store, Console()))
    assert [job.key for job in asked] == [place.cost(IMAGES, one, grid[2]).key]


def test_a_task_can_take_the_settings_of_another(tmp_path):
    place, one = bench(tmp_path), contenders.BY_NAME["sgd"]
    runs = place.tuning(BY_NAME["cifar10-noise"], one)
    assert {run.task.name for run in runs} == {"cifar10-40"}
    assert [run.key for run in runs] == [run.key for run in place.tuning(BY_NAME["cifar10-40"], one)]
    assert {(run.part, run.seed) for run in runs} == {("tuning", 100)}
    noisy = BY_NAME["cifar10-noise"]
    kept = place.run(noisy, one, one.grid(noisy)[0], 0, "final").key
    assert place.run(replace(noisy, tuned_on=None), one, one.grid(noisy)[0], 0, "final").key == kept


def test_layers_in_an_eigenbasis_leave_embeddings_norms_and_biases_diagonal():
    model = CharacterGPT(5, 4, layers=1, width=4, heads=1)
    matrices, others = contenders.BY_NAME["vario-eigenbasis"].groups(model)
    assert (matrices["structure"], "structure" in others) == ("eigenbasis", False)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in others["params"]} == {
        *("character.weight", "place.weight", "norm.weight"),
        *("blocks.0.before_attention.weight", "blocks.0.before_layers.weight"),
    }
    assert len(matrices["params"]) + len(others["params"]) == len(names)
    adapters = contenders.layers_in_an_eigenbasis(adapt(model, 1))  # what is frozen is in no group
    assert [len(group["params"]) for group in adapters] == [8]


def test_a_posterior_with_dropout_is_judged_with_masks_and_without(tmp_path):
    """Runs from before that are not mixed with others, whose "averaged" means something else."""
    place, one, task = bench(tmp_path), contenders.BY_NAME["vario"], SHORT[1]
    setting = next(setting for setting in one.grid(task) if "dropout" in setting)
    job = place.run(task, one, setting, 0, "final")
    new = job.execute()
    assert list(new["scores"]) == ["mean", "averaged", "unmasked"]
    assert len({scores["nll"] for scores in new["scores"].values()}) == 3
    old = {**new, "scores": {kind: new["scores"][kind] for kind in ("mean", "averaged")}}
    store = Store(tmp_path / "runs")
    for seed in (1, 2):
        store.save(place.run(task, one, setting, seed, "final").key, old)
    assert [run.seed for run, _ in results._runs(task, one, setting, place, store)] == [1, 2]
    store.save(job.key, new)
    assert [run.seed for run, _ in results._runs(task, one, setting, place, store)] == [0]


def test_dropout_that_was_chosen_not_to_be_used_is_one_network(tmp_path):
    """All masks are the same: a row of draws, and an ensemble over masks, would show the same figures again."""
    place, one = bench(tmp_path), contenders.BY_NAME["adamw-dropout"]
    task = replace(SHORT[1], name="gpt-books")  # whose grid has a setting without dropout
    with_masks, without = (next(s for s in one.grid(task) if (s["dropout"] > 0) == used) for used in (True, False))
    groups = {}
    for setting, kinds in ((with_masks, ["mean", "averaged"]), (without, ["mean"])):
        store = Store(tmp_path / "runs")
        for seed in range(3):
            store.save((run := place.run(task, one, setting, seed, "final")).key, run.execute())
        (row,) = results.collect(task, place)["contenders"]
        assert (row["setting"], list(row["scores"]), list(row["diagrams"])) == (setting, kinds, kinds)
        assert (row["predicts"], bool(row["nll_by_draws"])) == (kinds[-1], setting is with_masks)
        groups[row["predicts"]] = [group["name"] for group in results.collect(task, place)["groups"]]
        for seed in range(3):
            (tmp_path / "runs" / f"{place.run(task, one, setting, seed, 'final').key}.json").unlink()
    assert groups == {"averaged": ["ensemble-3-dropout", "ensemble-3-masks"], "mean": ["ensemble-3-dropout"]}


def test_a_task_may_have_a_grid_of_its_own():
    ivon = contenders.BY_NAME["ivon"]
    tasks = {task.name: task for task in TASKS}
    assert ivon.grid(tasks["cifar10-frn"]) != ivon.grid(tasks["fashion-plain"]) == ivon.grid(tasks["fashion"])
    assert all(len(one.grid(task)) <= 4 for one in contenders.CONTENDERS for task in TASKS)


def test_seeds_wait_until_all_settings_were_tried(tmp_path, monkeypatch):
    """The best of those that happened to be tried is not what was asked for, and seeds are most of the work."""
    adamw, place = contenders.BY_NAME["adamw"], bench(tmp_path)
    compute, bad, failed = DeepRun.compute, tuple(adamw.grid(IMAGES)[1].items()), []

    def fails_once(run):
        if run.setting == bad and run.contender == "adamw" and not failed:
            failed.append(run)
            raise RuntimeError("out of luck")
        return compute(run)

    monkeypatch.setattr(DeepRun, "compute", fails_once)
    chosen = (contenders.BY_NAME["vario"], adamw)
    for labels in ({"vario"}, {"vario", "adamw"}):
        ours = pool(tmp_path / "runs")
        run_tasks([IMAGES], chosen, (0,), ("tuning", "seeds"), place, ours)
        waits = (
            "short-images: AdamW waits for the settings that were not tried. --usual" in ours.console.file.getvalue()
        )
        assert waits == bool(ours.failures) == (labels == {"vario"})
        assert {path.name.split("-")[1] for path in (tmp_path / "runs").rglob("final-*.json")} == labels


def test_a_contender_with_one_setting_has_a_row_and_is_tuned(tmp_path):
    one, place = contenders.BY_NAME["sgd-cycles"], bench(tmp_path)
    (setting,) = one.grid(IMAGES)
    run = place.run(IMAGES, one, setting, 0, "final")
    Store(tmp_path / "runs").save(run.key, run.execute())
    (row,) = results.collect(IMAGES, place)["contenders"]
    assert (row["tuned"], row["grid"]) == (True, [{**setting, "nll": None}])
    ours = pool(tmp_path / "runs")
    run_tasks([IMAGES], (one,), (0,), ("tuning", "seeds"), place, ours)
    assert "waits" not in ours.console.file.getvalue()


def test_times_of_a_task_may_be_those_of_another_with_the_same_steps(tmp_path):
    task, one, place = BY_NAME["cifar10-40"], contenders.BY_NAME["ivon"], bench(tmp_path)
    elsewhere = place.cost(BY_NAME["cifar10"], one, one.grid(BY_NAME["cifar10"])[0])
    Store(tmp_path / "runs").save(elsewhere.key, {"step_ms": 2.0, "seconds": 1.0})
    assert elsewhere.key.startswith("cifar10/")
    assert results.costs(task, place) == results.costs(BY_NAME["cifar10"], place) == {"ivon": {"step_ms": 2.0}}
    assert results.costs(BY_NAME["cifar10-frn"], place) == {}
    assert "timed_on" not in task.shown()
    assert place.run(task, one, {"sigma": 0.01}, 0, "final").key == place.run(
        replace(task, timed_on=None), one, {"sigma": 0.01}, 0, "final"
    ).key  # fmt: skip


@pytest.mark.parametrize(
    "name", ["sgd", "adamw-dropout", "swag", "vario", "ivon", "vprop-centred", "sgd-cycles", "ivon-cycles"]
)
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
