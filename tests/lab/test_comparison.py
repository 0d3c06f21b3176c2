"""The comparison of all methods: its protocol, its tables, and that the page's numbers are those of its results."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from vprop import metrics
from vprop.baselines import exact_vi_logistic
from vprop.lab.cli import app
from vprop.lab.comparison import compare, cost, laplace, nuts, page, protocol, scores, table, tasks, training
from vprop.lab.comparison.methods import BY_NAME, METHODS, taking_part
from vprop.lab.comparison.tasks import FULL, SHORT, TableSpec, task, validation_split
from vprop.lab.data import load
from vprop.lab.engine import run as engine
from vprop.lab.engine import sources
from vprop.lab.engine.grid import TUNING_SEED, at_edge, tried
from vprop.lab.errors import UsageError

ROOT = Path(__file__).parents[2]
LOGREG, MLP, CNN = SHORT


def vprop(*arguments, environment=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def fails(result, *words):
    assert result.exit_code == 1, result.output
    message = " ".join(result.output.split())
    assert message.startswith("Error: ")
    for word in words:
        assert word in message
    assert "Traceback" not in message


class TestThePage:
    PAGE = ROOT / "docs" / "methods.md"

    def test_its_tables_are_what_the_committed_results_give(self):
        text = self.PAGE.read_text(encoding="utf-8")
        assert page.places(text) == [spec.name for spec in FULL]
        assert page.with_tables(text, page.load_results(ROOT / "docs" / "methods" / "results")) == text

    def test_its_links_lead_somewhere(self):
        for target in re.findall(r"\]\(([^)#]+)\)", self.PAGE.read_text(encoding="utf-8")):
            assert target.startswith("http") or (self.PAGE.parent / target).exists(), target

    @pytest.mark.parametrize("name", ["nuts-a1a", "nuts-australian"])
    def test_the_reference_samples_have_converged(self, name):
        result = json.loads((ROOT / "docs" / "methods" / "results" / f"{name}.json").read_text())
        nuts.check(result)
        assert result["divergences"] == 0
        assert len(result["mean"]) == len(result["variance"])
        assert {"numpyro", "jax", "torch"} <= set(result["environment"])

    def test_results_come_from_the_protocol_as_it_is(self):
        """A change of grids or budgets makes the committed results those of another protocol."""
        for name, result in page.load_results(ROOT / "docs" / "methods" / "results").items():
            spec = next(spec for spec in FULL if spec.name == name)
            assert {key: result["settings"][key] for key in protocol._settings(spec)} == protocol._settings(spec)
            rows = {row["name"]: row for row in result["methods"]}
            assert set(rows) == {method.name for method in METHODS if spec.problem in method.problems}
            for method, row in ((BY_NAME[key], row) for key, row in rows.items()):
                assert [{k: v for k, v in entry.items() if k != "nll"} for entry in row["grid"]] == list(method.grid)


class TestFairness:
    def test_every_method_tries_the_same_number_of_settings(self):
        assert {len(method.grid) for method in METHODS} == {6} == {spec.settings for spec in FULL}
        assert all(len({tuple(sorted(s.items())) for s in method.grid}) == 6 for method in METHODS)
        assert all(tried(method, 6) == method.grid and len(tried(method, 2)) == 2 for method in METHODS)

    def test_names_are_unique(self):
        assert len(BY_NAME) == len(METHODS)
        assert len({spec.name for spec in (*FULL, *SHORT)}) == len(FULL) + len(SHORT)

    @pytest.mark.parametrize("name", BY_NAME)
    def test_a_run_evaluates_the_gradients_it_may(self, name, monkeypatch):
        calls = []
        backward = torch.Tensor.backward
        monkeypatch.setattr(torch.Tensor, "backward", lambda t, *a, **k: calls.append(1) or backward(t, *a, **k))
        method = BY_NAME[name]
        spec = CNN if "logreg" not in method.problems else LOGREG
        result = _run(spec, name).execute()
        assert len(calls) == spec.gradients
        assert result["scores"]["nll"] is not None

    def test_the_validation_rows_are_training_rows_and_no_test_rows(self):
        data = load("breast_cancer")
        part = validation_split(data)
        assert torch.equal(torch.cat([part.train_x, part.test_x]), data.train_x)
        assert torch.equal(torch.cat([part.train_y, part.test_y]), data.train_y)
        assert len(part.test_x) == round(0.2 * len(data.train_x))

    def test_settings_are_chosen_without_the_test_data(self, monkeypatch):
        """With other test data, and even without any, the scores that decide are the same."""
        run = dataclasses.replace(_run(LOGREG, "vprop-1"), part="tuning")
        usual = run.execute()["scores"]
        data = load("breast_cancer")
        task.cache_clear()
        nothing = dataclasses.replace(data, test_x=None, test_y=None)
        monkeypatch.setattr(tasks, "load_data", lambda spec, data_dir: nothing)
        assert run.execute()["scores"] == usual
        task.cache_clear()

    def test_the_number_of_rows_in_use_is_what_optimizers_are_told(self):
        for part, rows in (("tuning", 284 - 57), ("final", 284)):
            work = task(LOGREG, part, None)
            optimizer = BY_NAME["vprop-1"].build(work.model(0, 0.0).parameters(), work, 0, {"lr": 0.1})
            assert optimizer.param_groups[0]["num_data"] == rows == work.num_data

    def test_reported_seeds_are_not_the_one_of_tuning(self):
        assert all(spec.seeds <= TUNING_SEED for spec in (*FULL, *SHORT))

    def test_a_choice_at_the_edge_of_the_grid_is_said(self):
        lrs = sorted({setting["lr"] for setting in BY_NAME["cvi"].grid})
        assert [at_edge(BY_NAME["cvi"], {"lr": lr}) for lr in lrs] == [True, False, True]
        assert not at_edge(BY_NAME["cvi"], None)

    def test_the_best_setting_is_the_one_with_the_lowest_loss_and_never_one_that_diverged(self):
        grid = [{"lr": 0.1, "nll": 0.5}, {"lr": 0.2, "nll": None}, {"lr": 0.3, "nll": 0.4}]
        assert protocol.LOSS.best(grid) == {"lr": 0.3}
        assert protocol.LOSS.best([{"lr": 0.1, "nll": None}]) is None

    def test_step_sizes_fall_to_zero_and_batches_are_whole(self):
        assert _run(LOGREG, "vprop-1").schedule == "cosine"
        assert engine.SCHEDULES["cosine"](1, 100) == 1
        assert engine.SCHEDULES["cosine"](100, 100) < 0.001
        rows = list(engine.batches(70, 32, 5, seed=0))
        assert [len(batch) for batch in rows] == [32] * 5
        assert len(set(torch.cat(rows[:2]).tolist())) == 64


def _run(spec: TableSpec, name: str) -> training.ScoredRun:
    return training.ScoredRun.of(spec, "x", None, "final", BY_NAME[name], BY_NAME[name].grid[0], 0)


class TestKeys:
    def test_what_decides_a_run_is_in_its_key(self):
        run = _run(LOGREG, "vprop-1")
        others = [
            dataclasses.replace(run, seed=1),
            dataclasses.replace(run, part="tuning"),
            dataclasses.replace(run, method=BY_NAME["cvi"]),
            dataclasses.replace(run, setting=()),
            dataclasses.replace(run, fingerprint="y"),
            dataclasses.replace(run, spec=dataclasses.replace(LOGREG, gradients=9)),
        ]
        assert len({run.key, *(other.key for other in others)}) == 7
        assert dataclasses.replace(run, data_dir=Path("elsewhere")).key == run.key

    def test_a_change_of_an_optimizer_is_one_too(self, monkeypatch):
        run, sampled = _run(LOGREG, "vprop-1"), nuts.Sampling(LOGREG, "x")
        before = run.key, sampled.key
        monkeypatch.setattr(sources, "core", lambda: "changed")
        assert run.key != before[0]
        assert sampled.key == before[1], "its sampler is not the library's"


class TestVariances:
    def test_quantiles_of_the_ratio(self):
        reference = torch.linspace(1, 2, 11)
        assert scores.ratio_quantiles(0.5 * reference, reference) == pytest.approx(
            {"low": 0.5, "median": 0.5, "high": 0.5}
        )
        ratios = scores.ratio_quantiles(torch.arange(11.0), torch.ones(11))
        assert ratios == pytest.approx({"low": 1.0, "median": 5.0, "high": 9.0})

    def test_laplace_of_the_network_is_the_hessian_of_the_data(self):
        """Against second derivatives by torch, one weight at a time."""
        work = task(MLP, "final", None)
        model = work.model(0, 0.0)
        variance = laplace.laplace_variance(work, model)
        weights = dict(model.named_parameters())
        name = "4.weight"
        before = sum(p.numel() for p in list(weights.values())[: list(weights).index(name)])
        loss = work.loss_fn(model(work.train_x), work.train_y)
        (grad,) = torch.autograd.grad(loss, weights[name], create_graph=True)
        for i in range(3):
            hess = torch.autograd.grad(grad[0, i], weights[name], retain_graph=True)[0][0, i].clamp_min(0)
            expected = 1 / (work.num_data * float(hess) + work.prior_precision)
            assert float(variance[before + i]) == pytest.approx(expected, rel=1e-3)

    def test_laplace_of_images_is_the_mean_of_squared_gradients(self):
        work = task(CNN, "final", None)
        model = work.model(0, 0.0)
        squares = torch.zeros_like(model[-1].bias)
        for x, y in zip(work.train_x, work.train_y, strict=True):
            (grad,) = torch.autograd.grad(work.loss_fn(model(x[None]), y[None]), model[-1].bias)
            squares += grad.square()
        expected = 1 / (squares.double() + work.prior_precision)
        assert torch.allclose(laplace.laplace_variance(work, model)[-10:], expected, rtol=1e-3)

    def test_full_covariance_methods_are_held_against_the_full_gaussian(self):
        exact = {"diagonal": {"variance": [1.0, 1.0]}, "full": {"variance": [2.0, 2.0]}}
        run = {"variance": [2.0, 2.0]}
        assert protocol._ratios(BY_NAME["cvi"], run, exact, None)["exact"]["median"] == 2
        assert protocol._ratios(BY_NAME["von"], run, exact, {"variance": [4.0, 4.0]}) == {
            "exact": {"low": 1, "median": 1, "high": 1},
            "nuts": {"low": 0.5, "median": 0.5, "high": 0.5},
        }

    def test_given_time_cvi_comes_to_the_exact_variances(self):
        """No seed is lucky: with the exact Hessian and a long run all ratios come near 1."""
        spec = dataclasses.replace(LOGREG, gradients=600)
        work = task(spec, "final", None)
        model = work.model(0, 0.0)
        optimizer = BY_NAME["cvi"].build(model.parameters(), work, 0, {"lr": 0.1, "beta2": 0.98})
        assert list(engine.train(work, model, optimizer, 32, 600, seed=0, schedule="cosine"))[-1] == 600
        exact = exact_vi_logistic(work.train_x, work.train_y, work.prior_precision)
        ratios = scores.ratio_quantiles(scores.flat(optimizer.posterior(model).variance), exact.variance)
        assert 0.8 < ratios["low"] <= ratios["high"] < 1.25


class TestScores:
    def test_of_a_run_that_left_the_finite_numbers(self):
        work = task(LOGREG, "final", None)
        probs = torch.full((len(work.test_y), 2), 0.5)
        assert scores.score_probs(work, probs)["accuracy"] is not None
        assert set(scores.score_probs(work, probs * torch.nan).values()) == {None}

    def test_an_infinite_loss_is_none_beside_an_accuracy(self):
        work = task(LOGREG, "final", None)
        found = scores.score_probs(work, torch.cat([work.test_y, 1 - work.test_y], dim=1))
        assert found["nll"] is None
        assert found["accuracy"] == 0

    def test_probabilities_are_averaged_not_logits(self):
        work = task(LOGREG, "final", None)
        outputs = torch.stack([torch.zeros_like(work.test_y), torch.full_like(work.test_y, 2.0)])
        probs = outputs.sigmoid().mean(0)
        found = scores.score_outputs(work, outputs)
        assert found["nll"] == pytest.approx(metrics.nll(probs, work.test_y))
        assert found["ece"] == pytest.approx(metrics.expected_calibration_error(probs, work.test_y))
        assert found["accuracy"] == metrics.accuracy(probs, work.test_y)

    def test_a_sure_but_wrong_prediction_has_a_finite_loss_whichever_label_it_is(self):
        work = task(LOGREG, "final", None)
        wrong = torch.where(work.test_y > 0.5, -100.0, 100.0)
        assert scores.score_outputs(work, wrong[None])["nll"] == pytest.approx(100)


class TestCost:
    def test_of_adam_is_about_that_of_rmsprop_and_of_two_samples_more(self):
        """Bounds that a busy machine keeps: the timings of a pair are next to each other."""
        work = task(CNN, "final", None)
        adam, pair = (cost.relative_cost(work, BY_NAME[name], CNN.batch, 5) for name in ("adam", "vprop-2-centered"))
        assert 0.2 < adam < 5
        assert pair > 1.2
        assert pair > adam

    def test_every_method_of_a_task_is_measured(self):
        names = tuple(method.name for method in taking_part(task(LOGREG, "final", None)))
        spec = dataclasses.replace(LOGREG, timing_rounds=1)
        ratios = cost.Cost(spec, "x", names).execute()["ratios"]
        assert tuple(ratios) == names
        assert all(ratio > 0 for ratio in ratios.values())


ROW = {
    "name": "cvi",
    "label": "CVI",
    "gradients": 1,
    "posterior": "diagonal",
    "grid": [],
    "chosen": {"lr": 0.1, "beta2": 0.98},
    "at_edge": True,
    "scores": {name: {"mean": 0.25, "standard_error": 0.001} for name in ("accuracy", "nll", "ece")},
    "ratios": {
        "exact": {
            name: {"mean": v, "standard_error": None} for name, v in (("low", 0.5), ("median", 1), ("high", 12345))
        }
    },
    "seconds": 1.0,
    "cost": 2.345,
}
RESULT = {
    "task": "a1a",
    "title": "A title",
    "environment": {"vprop": "1", "torch": "2", "machine": "m"},
    "settings": {"prior_precision": 0.5, "batch": 32, "gradients": 2000, "samples": 64, "seeds": 3},
    "num_data": 1605,
    "num_test": 30956,
    "num_parameters": 123,
    "references": [
        {"name": "exact-diagonal", "label": "exact", "ratios": None, "scores": {"accuracy": 1, "nll": 0, "ece": None}}
    ],
    "methods": [ROW],
}


class TestTables:
    def rows(self, result):
        return [
            [c.strip() for c in line.strip("|").split("|")] for line in table.table(result).splitlines() if "|" in line
        ]

    def test_a_row(self):
        head, _, row, reference = self.rows(RESULT)
        assert head[5] == "variance / exact"
        assert row == [
            "CVI", "1", "0.2500 ± 0.0010", "0.2500 ± 0.0010", "0.2500 ± 0.0010", "1 (0.5–12,000)", "2.3", "0.1, 0.98 *",
        ]  # fmt: skip
        assert reference == ["*exact*", "–", "1.0000", "0.0000", "∞", "–", "–", "–"]
        assert len({len(cells) for cells in self.rows(RESULT)}) == 1

    def test_the_caption_names_sizes_and_budgets(self):
        text = table.caption(RESULT)
        for words in (
            "1,605 training",
            "30,956 test",
            "123 weights",
            "λ = 0.5",
            "2,000 gradients",
            "64 weight samples",
        ):
            assert words in text

    def test_what_diverged_and_what_is_infinite(self):
        nothing = {"mean": None, "standard_error": None}
        never = ROW | {"chosen": None, "at_edge": False, "ratios": {}}
        some = ROW | {"scores": dict.fromkeys(ROW["scores"], nothing), "ratios": {}}
        infinite = ROW | {"scores": ROW["scores"] | {"nll": nothing}}
        rows = self.rows(RESULT | {"methods": [never, some, infinite]})[2:-1]
        assert rows[0][2:6] == ["diverged", "–", "–", "–"]
        assert rows[0][-1] == "–"
        assert rows[1][2] == "diverged"
        assert rows[2][3] == "∞"

    def test_one_seed_has_no_error(self):
        single = ROW | {"scores": {name: {"mean": 0.5, "standard_error": None} for name in ROW["scores"]}}
        assert self.rows(RESULT | {"methods": [single]})[2][2] == "0.5000"

    def test_only_the_marked_places_of_a_page_change(self):
        text = "before\n<!-- table: a1a -->\nold\n<!-- end -->\nbetween\n<!-- table: cnn -->\n<!-- end -->\nafter\n"
        drawn = page.with_tables(text, {"a1a": RESULT})
        assert drawn.startswith("before\n<!-- table: a1a -->\n1,605 training")
        assert drawn.endswith("<!-- end -->\nbetween\n<!-- table: cnn -->\n*Not run yet.*\n<!-- end -->\nafter\n")
        assert "old" not in drawn
        assert page.with_tables(drawn, {"a1a": RESULT}) == drawn


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished short run, shared by the tests that only look at it."""
    out = tmp_path_factory.mktemp("finished")
    result = vprop("compare", "logreg", "--short", "--workers", 1, "--out", out)
    assert result.exit_code == 0, result.output
    return out


class TestTheCommand:
    def test_a_short_run_leaves_results_and_a_table(self, finished):
        result = json.loads((finished / "results" / "logreg-short.json").read_text())
        assert result["command"] == "vprop compare logreg --short"
        assert result["environment"]["torch"]
        rows = {row["name"]: row for row in result["methods"]}
        assert set(rows) == {method.name for method in METHODS if "logreg" in method.problems}
        for name, row in rows.items():
            assert len(row["grid"]) == 2
            assert row["chosen"] in [{k: v for k, v in entry.items() if k != "nll"} for entry in row["grid"]]
            assert row["scores"]["nll"]["mean"] > 0
            assert row["cost"] > 0
            assert ("exact" in row["ratios"]) == (BY_NAME[name].kind == "posterior")
        assert {row["name"] for row in result["references"]} == {"exact-diagonal", "exact-full"}
        text = (finished / "tables.md").read_text()
        assert all(row["label"] in text for row in rows.values())

    def test_a_second_run_takes_the_first_one_up(self, finished):
        result = vprop("compare", "logreg", "--short", "--workers", 1, "--out", finished)
        assert "28 of 28 runs were done before" in result.output
        assert "29 of 29 runs were done before" in result.output

    def test_drawing_again_does_not_train(self, finished, tmp_path):
        shutil.copytree(finished / "results", tmp_path / "results")
        place = tmp_path / "page.md"
        place.write_text("A page.\n<!-- table: logreg-short -->\n<!-- end -->\n")
        result = vprop("compare", "table", "--out", tmp_path, "--page", place)
        assert result.exit_code == 0, result.output
        assert "| Vprop-1 |" in place.read_text()
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("spec", [MLP, CNN], ids=["mlp", "cnn"])
    def test_networks_have_a_laplace_ratio(self, spec):
        result = _run(spec, "vprop-1").execute()
        assert result["ratios"]["laplace"]["median"] > 0
        assert "ratios" not in _run(spec, "adam").execute()

    @pytest.mark.slow
    @pytest.mark.parametrize("what", ["mlp", "cnn"])
    def test_the_networks_end_to_end(self, what, tmp_path):
        result = vprop("compare", what, "--short", "--workers", 1, "--out", tmp_path)
        assert result.exit_code == 0, result.output
        assert "variance / Laplace" in (tmp_path / "tables.md").read_text()


class TestNuts:
    @pytest.fixture
    def missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "numpyro", None)

    def test_says_what_to_install(self, missing, tmp_path):
        fails(vprop("compare", "nuts", "--short", "--out", tmp_path), "pip install numpyro", "redrawn without it")

    def test_a_sample_that_has_not_converged_is_no_reference(self):
        good = {"task": "nuts-a1a", "r_hat_max": 1.001, "ess_min": 1000.0}
        nuts.check(good)
        for bad in ({"r_hat_max": 1.2}, {"r_hat_max": float("nan")}, {"ess_min": 100.0}):
            with pytest.raises(UsageError, match=r"nuts-a1a has not converged: r-hat is up to .* Use more draws"):
                nuts.check(good | bad)

    def test_a_sample_for_other_data_is_not_used(self, tmp_path):
        path = tmp_path / "nuts-logreg-short.json"
        assert nuts.load(tmp_path, LOGREG, "x") is None
        path.write_text("{")
        assert nuts.load(tmp_path, LOGREG, "x") is None
        path.write_text('{"fingerprint": "x"}')
        assert nuts.load(tmp_path, LOGREG, "x") == {"fingerprint": "x"}
        assert nuts.load(tmp_path, LOGREG, "y") is None

    def test_the_command_does_not_import_it(self):
        program = "import sys, vprop.lab.cli, vprop.lab.comparison.compare as _; print('jax' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"

    @pytest.mark.slow
    @pytest.mark.skipif(not nuts.installed(), reason="NumPyro, an extra of its own, is not installed")
    def test_end_to_end(self, tmp_path):
        """Enough draws for the mean and variance of the widest Gaussian-like direction to be plausible."""
        result = vprop("compare", "nuts", "--short", "--workers", 1, "--out", tmp_path)
        assert result.exit_code == 0, result.output
        stored = json.loads((tmp_path / "results" / "nuts-logreg-short.json").read_text())
        assert len(stored["variance"]) == 31
        assert stored["scores"]["accuracy"] > 0.9


class TestWhatCanGoWrong:
    def test_an_unknown_task(self):
        assert vprop("compare", "everything").exit_code == 2

    def test_a_table_without_results(self, tmp_path):
        fails(vprop("compare", "table", "--out", tmp_path), "no results", "vprop compare logreg")

    def test_a_page_that_is_not_there(self, tmp_path):
        fails(vprop("compare", "table", "--out", tmp_path, "--page", tmp_path / "none.md"), "no page", "--page")

    def test_a_page_without_places(self, tmp_path):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "a1a.json").write_text(json.dumps(RESULT))
        (tmp_path / "page.md").write_text("nothing")
        fails(vprop("compare", "table", "--out", tmp_path, "--page", tmp_path / "page.md"), "<!-- table: a1a -->")

    @pytest.mark.parametrize(
        ("text", "words"), [("{", "no JSON file"), ("{}", "no result of this version"), ("[]", "no")]
    )
    def test_a_result_that_is_none(self, tmp_path, text, words):
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "a1a.json").write_text(text)
        fails(vprop("compare", "table", "--out", tmp_path), words, "again")

    def test_a_number_of_workers_that_makes_no_sense(self, tmp_path):
        fails(
            vprop("compare", "logreg", "--workers", -1, "--out", tmp_path), "Invalid --workers -1: must be at least 0"
        )

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        fails(vprop("compare", "logreg", "--short", "--out", tmp_path / "file" / "out"), "Cannot write to", "--out")

    def test_missing_data(self, tmp_path):
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
        nowhere = {"VPROP_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "no_proxy": "", "NO_PROXY": ""}
        result = vprop("compare", "cnn", "--out", tmp_path / "out", environment=nowhere | proxies)
        fails(result, "fashion_mnist", "With --short no file is needed")

    def test_a_request_for_all_without_numpyro_says_so(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "numpyro", None)
        console = Console(record=True, file=io.StringIO())
        assert not compare._should_sample(LOGREG, compare.ComparisonRequest(tmp_path), console)
        assert "pip install numpyro" in console.export_text()
