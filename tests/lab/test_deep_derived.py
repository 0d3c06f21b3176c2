"""What is made from the weights of another run: other statistics of BatchNorm, Laplace's approximations."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.lab.deep import IMAGES, bench, pool
from vprop.lab.deep import contenders, results
from vprop.lab.deep.contenders import taking_part
from vprop.lab.deep.protocol import Bench, _make_weights, run_tasks
from vprop.lab.deep.run import weights_path
from vprop.lab.deep.tasks import BY_NAME
from vprop.lab.deep.workloads import How
from vprop.lab.engine.store import Store


def test_statistics_anew_are_those_of_the_last_weights(tmp_path):
    """Of training images as they are trained on; all but BatchNorm's buffers is the network that SGD left."""
    anew, place = contenders.BY_NAME["sgd-statistics"], bench(tmp_path)
    ours = pool(tmp_path / "runs")
    run_tasks([IMAGES], (anew,), (0,), ("seeds",), place, ours)
    run = place.run(IMAGES, anew, anew.grid(IMAGES)[0], 0, "final")
    network = run.network(work := run.work())
    before = [one.running_mean.clone() for one in network.modules() if isinstance(one, nn.BatchNorm2d)]
    inputs = next(work.chunks(torch.Generator().manual_seed(0)))[0]
    for layer in (one for one in network.modules() if isinstance(one, nn.BatchNorm2d)):
        layer.momentum = 1.0  # the batch's, and nothing of before
    with torch.no_grad():
        network.train()(inputs)
        expected = F.cross_entropy(network.eval()(work.test), work.labels)
    after = [one.running_mean for one in network.modules() if isinstance(one, nn.BatchNorm2d)]
    assert not any(torch.allclose(old, new, rtol=1e-3) for old, new in zip(before, after, strict=True))
    found = Store(tmp_path / "runs").load(run.key)
    assert list(found["scores"]) == ["mean"]
    assert found["scores"]["mean"]["nll"] == pytest.approx(float(expected), rel=1e-5)
    rows = {row["name"]: row for row in results.collect(IMAGES, place)["contenders"]}
    assert (rows["sgd-statistics"]["predicts"], rows["sgd-statistics"]["base"]) == ("mean", rows["sgd"]["setting"])
    assert anew not in taking_part(BY_NAME["cifar10-frn"])  # which has no BatchNorm


def test_networks_for_laplace_are_trained_where_their_weights_are_not(tmp_path):
    """A file of results has the figures of SGD, but not its weights."""
    sgd, laplace, place = contenders.BY_NAME["sgd"], contenders.BY_NAME["laplace-last"], bench(tmp_path)
    jobs = [place.run(IMAGES, laplace, laplace.grid(IMAGES)[0], seed, "final") for seed in (0, 1, 2)]
    done = place.run(IMAGES, sgd, sgd.grid(IMAGES)[0], 0, "final")
    figures = place.run(IMAGES, sgd, sgd.grid(IMAGES)[0], 1, "final")
    store = Store(tmp_path / "runs")
    store.save(done.key, done.execute())
    before = weights_path(done).stat().st_mtime_ns
    store.save(figures.key, {"seconds": 1.0})
    store.save(jobs[2].key, {"seconds": 1.0})  # it is there already
    _make_weights(jobs, "images", pool(tmp_path / "runs"))
    made = {path.stem.split("-")[-2] for path in (tmp_path / "weights").rglob("*.pt")}
    assert (made, weights_path(done).stat().st_mtime_ns) == ({"seed0", "seed1"}, before)
    assert "scores" in store.load(figures.key)


def test_figures_stay_where_there_is_no_time_for_their_weights(tmp_path):
    sgd, laplace, place = contenders.BY_NAME["sgd"], contenders.BY_NAME["laplace-last"], bench(tmp_path)
    figures = place.run(IMAGES, sgd, sgd.grid(IMAGES)[0], 0, "final")
    Store(tmp_path / "runs").save(figures.key, {"seconds": 1.0})
    ours = pool(tmp_path / "runs", stop_at=time.time() - 1)
    run_tasks([IMAGES], (laplace,), (0,), ("seeds",), place, ours)
    assert Store(tmp_path / "runs").load(figures.key) == {"seconds": 1.0}
    assert (ours.unfinished, ours.failures) == ([figures.key], {})


def test_the_key_of_what_is_made_around_a_run_is_of_what_decides_it_alone(tmp_path):
    task, laplace = BY_NAME["cifar10-40"], contenders.BY_NAME["laplace-last"]
    keys = {
        Bench(how, data).run(asked, laplace, {"diagonal": 0}, 0, "final").key
        for how in (How(tmp_path), How(tmp_path / "other", stop_at=1.0, fast=("compile",)))
        for data in (None, tmp_path)
        for asked in (task, replace(task, timed_on=None, title="Another"))
    }
    others = {
        Bench(How(tmp_path)).run(asked, laplace, {"diagonal": 0}, seed, "final").key
        for asked, seed in ((task, 1), (replace(task, epochs=3), 0))
    }
    assert (len(keys), len(others), len(keys | others)) == (1, 2, 3)
