"""The experiments: fair tuning, honest counting, caching, and what the small ones must show."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console

import vprop as library
from vprop.lab.engine import pool, sources
from vprop.lab.engine.binary import problem
from vprop.lab.engine.grid import at_edge
from vprop.lab.engine.store import Store, key_of, write_json
from vprop.lab.errors import LabError
from vprop.lab.experiments import curves, explore, filter, memory
from vprop.lab.experiments.methods import BY_NAME, METHODS
from vprop.lab.experiments.run import CurveRun

TINY = CurveRun(
    fingerprint="x",
    method=BY_NAME["vprop-2"],
    setting=(("beta2", 0.9), ("lr", 0.1)),
    seed=0,
    gradients=20,
    batch=None,
    problem="logreg",
    data="breast_cancer",
    points=4,
)


@pytest.fixture
def workers(tmp_path):
    return pool.Pool(Store(tmp_path / "runs"), Console(quiet=True), workers=1)


class TestFairness:
    def test_every_method_tries_the_same_number_of_settings(self):
        assert {len(method.grid) for method in METHODS} == {8}
        assert all(len({tuple(sorted(setting.items())) for setting in method.grid}) == 8 for method in METHODS)

    def test_names_are_unique(self):
        assert len(BY_NAME) == len(METHODS)

    @pytest.mark.parametrize("name", [method.name for method in METHODS])
    def test_a_run_counts_the_gradients_that_it_evaluates(self, name, monkeypatch):
        """Count real backward passes of the loss, and compare with what the figure claims."""
        calls = []
        backward = torch.Tensor.backward

        def counted(tensor, *args, **kwargs):
            calls.append(1)
            return backward(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "backward", counted)
        method = BY_NAME[name]
        kind = "logreg" if "logreg" in method.problems else "mlp"
        setting = tuple(sorted(method.grid[0].items()))
        result = replace(TINY, problem=kind, method=method, setting=setting, gradients=20).execute()
        drawn = 2 if name == "vprop-2-fisher" else 1  # gradients on drawn labels go through torch.autograd.grad
        assert len(calls) * drawn == result["passes"][-1]
        assert result["passes"][-1] == result["paper_passes"][-1] * method.gradients

    def test_passes_of_mini_batches(self):
        result = replace(TINY, batch=32, gradients=40).execute()
        steps, per_step = 20, 32 / problem("logreg", "breast_cancer", None).num_data
        assert result["paper_passes"][-1] == pytest.approx(steps * per_step)
        assert result["passes"][-1] == pytest.approx(2 * steps * per_step)

    def test_step_sizes_are_chosen_without_the_test_data(self, monkeypatch):
        task = problem("logreg", "breast_cancer", None)
        monkeypatch.setattr(task, "test_x", None)
        monkeypatch.setattr(task, "test_y", None)
        for name in ("vprop-2", "rmsprop", "vong-2-centered"):
            setting = tuple(sorted(BY_NAME[name].grid[1].items()))
            assert math.isfinite(replace(TINY, method=BY_NAME[name], setting=setting, points=0).execute()["score"])

    def test_a_choice_at_the_edge_of_the_grid_is_said(self):
        method = BY_NAME["vprop-1"]
        lrs = sorted({setting["lr"] for setting in method.grid})
        assert [at_edge(method, {"lr": lr}) for lr in lrs] == [True, False, False, True]
        assert not at_edge(method, None)

    def test_one_seed_has_no_spread(self):
        assert curves.over_seeds([[1.0, None]]) == {"mean": [1.0, None], "std": [None, None]}
        assert curves.over_seeds([[1.0, 2.0], [3.0, None]])["mean"] == [2.0, None]

    def test_the_best_setting_is_chosen_and_a_diverged_one_never(self):
        grid = BY_NAME["vprop-1"].grid
        scores = [None, -5.0, -3.0, None, -9.0, -4.0, None, -8.0]
        entries = [setting | {"score": score} for setting, score in zip(grid, scores, strict=True)]
        assert curves.SCORE.best(entries) == grid[2]
        assert curves.SCORE.best([setting | {"score": None} for setting in grid]) is None


class TestRuns:
    def test_the_same_run_twice_is_the_same(self):
        first, second = TINY.execute(), TINY.execute()
        assert first["elbo"] == second["elbo"]
        assert first["log_loss"] == second["log_loss"]

    def test_seeds_differ(self):
        assert TINY.execute()["elbo"] != replace(TINY, seed=1).execute()["elbo"]

    def test_a_diverging_run_has_none_and_no_exception(self):
        diverging = replace(TINY, method=BY_NAME["bbvi"], setting=(("lr", 1e30),), gradients=40)
        result = diverging.execute()
        assert result["elbo"][-1] is None
        tuning = replace(diverging, points=0).execute()
        assert tuning["score"] is None
        json.dumps([result, tuning], allow_nan=False)

    def test_the_key_depends_on_everything_but_the_folder(self, tmp_path):
        other = [
            replace(TINY, seed=1),
            replace(TINY, batch=32),
            replace(TINY, gradients=21),
            replace(TINY, setting=(("beta2", 0.9), ("lr", 0.2))),
            replace(TINY, fingerprint="y"),
            replace(TINY, problem="mlp"),
            replace(TINY, method=BY_NAME["vprop-1"]),
            replace(TINY, schedule="cosine"),
        ]
        assert len({TINY.key, *(entry.key for entry in other)}) == 9
        assert replace(TINY, data_dir=tmp_path).key == TINY.key

    def test_the_key_depends_on_the_code(self, tmp_path):
        """A constant that is changed makes new runs; the results of the old code are not taken for those of the new."""
        keys = set()
        for number in (1, 2):
            path = tmp_path / f"module{number}.py"
            path.write_text(f"PRIOR = {number}\n")
            spec = importlib.util.spec_from_file_location(f"module{number}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            keys |= {key_of({"seed": 0}, module), key_of({"seed": 0}, module)}
        assert len(keys) == 2

    def test_every_experiment_has_the_librarys_code_in_its_key(self, monkeypatch):
        jobs = [TINY, filter.Pass("ekf", "breast_cancer", "x", 0, 10), explore.Walk("newton", 0)]
        before = [job.key for job in jobs]
        assert [job.key for job in jobs] == before
        monkeypatch.setattr(sources, "core", lambda: "changed")
        assert not set(before) & {job.key for job in jobs}

    def test_a_changed_file_of_the_library_is_another_core(self, tmp_path, monkeypatch):
        """In a copy of the library; what only the lab and the integrations read is left out."""
        root = tmp_path / "vprop"
        shutil.copytree(Path(library.__file__).parent, root, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        monkeypatch.setattr(library, "__file__", str(root / "__init__.py"))
        computed = sources.core.__wrapped__
        before = computed()
        for name in ("lab/plots.py", "lab/report/page.py", "integrations/sklearn/classifier.py"):
            (root / name).write_text("# changed\n")
        assert computed() == before
        seen = {before}
        for name in ("optim/vprop.py", "curvature/price.py", "noise.py", "functional/new.py", "kernels/cpu.c"):
            (root / name).write_text("// changed\n")
            seen.add(computed())
        (root / "noise.py").rename(root / "noises.py")
        assert len(seen | {computed()}) == 7

    def test_full_batch_elbo_is_the_posteriors_own(self):
        """The figure's quadrature against the library's Monte Carlo; 5 standard errors, once in 1.7 million."""
        task = problem("logreg", "breast_cancer", None)
        model = task.model(0)
        setting = {"lr": 0.1, "beta2": 0.9}
        optimizer = BY_NAME["cvi-10"].build(model.parameters(), task, 0, setting)
        for _ in range(10):
            optimizer.step(task.objective(model, None))
        posterior = optimizer.posterior(model)
        estimate = posterior.elbo_estimate(task.objective(model, None), num_samples=500)
        assert abs(task.score_posterior(posterior).elbo - estimate.value) < 5 * estimate.standard_error


class TestPool:
    def test_nothing_is_run_twice(self, workers, monkeypatch):
        jobs = [TINY, replace(TINY, seed=1)]
        first = workers.run_all("Tiny", jobs)
        monkeypatch.setattr(workers, "_run_waiting", lambda *_: pytest.fail("ran again"))
        assert workers.run_all("Tiny", jobs) == first

    def test_a_damaged_file_is_run_again(self, workers):
        key, first = TINY.key, TINY.execute()
        workers.store.save(key, first)
        (workers.store.folder / f"{key}.json").write_bytes(b"\xff\xfe")
        assert workers.store.load(key) is None
        (workers.store.folder / f"{key}.json").write_text('{"half": ')
        again = workers.run_all("Tiny", [TINY])[key]
        assert again["elbo"] == first["elbo"]

    def test_a_failing_run_is_an_error_and_the_finished_ones_are_kept(self, workers):
        bad = replace(TINY, data="no-such-data")
        with pytest.raises(Exception, match="no-such-data"):
            workers.run_all("Tiny", [TINY, bad])
        assert workers.store.load(TINY.key) is not None

    @pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="only POSIX systems block signals")
    def test_a_worker_starts_deaf_to_interrupts(self):
        def blocked():
            return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

        executor = MagicMock()
        executor.submit.side_effect = lambda work: blocked()
        assert pool.submit(executor, TINY) is True
        assert not blocked()

    def test_a_worker_that_is_ended_from_outside_is_told_in_words(self, workers, monkeypatch):
        executor = MagicMock(_processes={})
        executor.submit.return_value = Future()
        executor.submit.return_value.set_exception(BrokenProcessPool("a process died"))
        monkeypatch.setattr(pool, "ProcessPoolExecutor", MagicMock(return_value=executor))
        with pytest.raises(LabError, match=r"ended from outside.* 0 of 1 runs of «Tiny».*--workers"):
            workers.run_all("Tiny", [TINY])

    def test_a_file_is_written_whole_or_not_at_all(self, tmp_path):
        write_json(tmp_path / "a.json", {"x": 1})
        with pytest.raises(ValueError, match="Out of range float"):
            write_json(tmp_path / "a.json", {"x": math.nan})
        assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
        assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_memory_is_what_the_paper_says():
    """Vprop keeps two numbers per weight, BBVI with RMSprop four, with Adam six: of four bytes each."""
    rows = {row["label"]: row["bytes_per_parameter"] for row in memory.memory(weights=50_000)["rows"]}
    expected = {"RMSprop": 8, "Vprop": 8, "BBVI": 8, "BBVI with RMSprop": 16, "BBVI with Adam": 24, "Adam": 12}
    assert {label: round(rows[label], 1) for label in expected} == expected


class TestExplore:
    def test_newton_and_gradient_descent_stop_in_the_near_minimum(self):
        for label in ("Newton", "Gradient descent"):
            end = explore.Walk(label, 0).execute()["points"][-1]
            assert math.dist(end, explore._nearest_minimum()) < 0.1

    def test_sampling_escapes(self):
        ends = [explore.Walk("VON-1", seed).execute()["points"][-1] for seed in range(5)]
        assert sum(math.dist(end, explore.GLOBAL_MINIMUM) < explore.REACHED for end in ends) >= 4

    def test_the_global_minimum_is_one(self):
        axis = torch.linspace(-3.6, 3.2, 200, dtype=torch.float64)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1)
        center = torch.tensor(explore.GLOBAL_MINIMUM, dtype=torch.float64)
        assert float(explore.landscape(center)) == 0.0
        assert float(explore.landscape(grid).min()) > 0


def test_von_as_a_filter_is_the_kalman_filter():
    """For logistic regression the Hessian is the Fisher: one natural-gradient step per example is the EKF's update."""
    results = {
        name: filter.Pass(name, "breast_cancer", "x", 0, examples=60).execute() for name in ("ekf", "von", "vong")
    }
    assert filter._distance(results["von"], results["ekf"]) < 1e-9
    torch.testing.assert_close(
        torch.tensor(results["von"]["precision"]), torch.tensor(results["ekf"]["precision"]), rtol=1e-6, atol=1e-6
    )
    assert filter._distance(results["vong"], results["ekf"]) > 1e-3
