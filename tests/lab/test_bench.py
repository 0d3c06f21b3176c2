"""`vprop bench`: what its result files promise, how it counts, and what it refuses. Nothing here depends on a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from vprop.lab.bench import clock, commands, contenders, limits, memory, models, peers, predict, step, tables, train
from vprop.lab.bench.contenders import Contender
from vprop.lab.bench.errors import BenchError, Unavailable
from vprop.lab.bench.tensors import Tensors
from vprop.lab.cli import app

CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--threads", "1", "--short", "--params", "2000", "--tensors", "3")
SPREAD = {"median", "low", "high", "least", "count"}


@pytest.fixture(autouse=True)
def threads():
    """The command sets the number of threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def fails(result, *words):
    assert result.exit_code == 1, result.output
    message = " ".join(result.output.split())
    assert message.startswith("Error: ")
    for word in words:
        assert word in message
    assert "Traceback" not in message


def one(name):
    return contenders.by_name(name)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a run of `vprop bench step`, with what it showed."""
    path = tmp_path_factory.mktemp("bench") / "step.json"
    picked = ("RMSprop", "AdamW fused", "Vprop fused", "Vprop foreach", "Vprop centred", "ivon-opt")
    done = bench("step", *TINY, "--json", path, "--sweep", *(word for name in picked for word in ("--only", name)))
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text()) | {"shown": done.output}


@pytest.mark.parametrize("words", [["--json", "/home/me/x.json"], ["--json=/home/me/x.json"]])
def test_a_result_does_not_say_where_it_was_written_to(words, monkeypatch):
    monkeypatch.setattr("sys.argv", ["vprop", "bench", "step", *words, "--short"])
    assert commands._origin(torch.device("cpu"))["command"] == "vprop bench step --short"


class TestStep:
    def test_the_file_says_where_it_comes_from(self, result):
        assert result["command"].startswith("vprop bench")
        assert {"vprop", "torch", "threads", "device", "processor", "peers"} <= set(result["environment"])
        assert result["settings"]["params"] == 3 * (2000 // 3 + 1) - 3 * (667 % 4)
        assert result["settings"]["tensors"] == 3
        assert result["copy"]["bytes"] == 8 * result["settings"]["params"]

    def test_rows_have_what_is_promised(self, result):
        rows = {row["name"]: row for row in result["rows"] if row["available"]}
        assert {"RMSprop default", "AdamW fused", "Vprop fused attach", "Vprop fused: sample alone"} <= set(rows)
        for row in rows.values():
            assert SPREAD == set(row["time"]) == set(row["reference_time"])
            assert row["time"]["low"] <= row["time"]["median"] <= row["time"]["high"]

    def test_ratios_are_those_of_the_medians(self, result):
        rate = result["copy"]["bytes_per_second"]
        for row in (row for row in result["rows"] if row["available"]):
            median = row["time"]["median"]
            assert row["ratio"] == pytest.approx(median / row["reference_time"]["median"])
            limit = row["bytes_per_param"] * result["settings"]["params"] / rate
            assert row["limit"] == pytest.approx(limit)
            assert row["times_limit"] == pytest.approx(median / limit)
        assert next(row for row in result["rows"] if row["name"] == "RMSprop default")["ratio"] == 1

    def test_who_cannot_take_part_is_listed_with_the_reason(self, result):
        row = next(row for row in result["rows"] if row["name"] == "Vprop fused CUDA graph closure")
        if not torch.cuda.is_available():
            assert not row["available"]
            assert row["reason"] == "a CUDA graph needs a CUDA device"
            assert "Not available here: Vprop fused CUDA graph closure" in result["shown"]

    def test_sweeps_go_along_parameters_and_tensors(self, result):
        for along, key in (("parameters", "params"), ("tensors", "tensors")):
            rows = [row for row in result["sweep"][along] if row["available"] and row["name"] == "RMSprop default"]
            assert len(rows) >= 3
            assert all(a[key] < b[key] for a, b in pairwise(rows))

    def test_plots_are_drawn_from_the_file(self, result, tmp_path):
        path = tmp_path / "result.json"
        path.write_text(json.dumps(result))
        done = bench("plot", path, "--out", tmp_path / "plots")
        assert done.exit_code == 0, done.output
        assert {p.name for p in (tmp_path / "plots").iterdir()} == {"result-parameters.png", "result-tensors.png"}


class TestContenders:
    def test_all_methods_and_loops_are_there(self):
        names = [contender.name for contender in contenders.TIMED]
        assert len(names) == len(set(names))
        for method in ("Vprop", "Vprop centred", "IVON", "Vadam"):
            assert {f"{method} fused closure", f"{method} fused context", f"{method} foreach closure"} <= set(names)
        assert {"Vprop fused attach", "SGD default", "RMSprop foreach", "ivon-opt"} <= set(names)
        assert names[0] == contenders.REFERENCE
        assert {*names, "Pyro BBVI"} - {contender.name for contender in contenders.MEASURED} == {contenders.GRAPH.name}

    @pytest.mark.parametrize("loop", ["closure", "context", "attach"])
    @pytest.mark.parametrize("method", contenders.METHODS, ids=lambda method: method.name)
    def test_a_call_is_one_step_with_a_sample(self, method, loop):
        """The weights are moved by the noiseless step: the mean is back in them."""
        if method.pair and loop == "attach":
            pytest.skip("several samples need a closure or a context")
        tensors = Tensors(40, 2, CPU)
        (call,) = contenders.ours(method, "foreach", loop).ready(tensors).values()
        call()
        for weight, grad in zip(tensors.weights, tensors.grads, strict=True):
            torch.testing.assert_close(weight, 20 * grad, rtol=0, atol=1e-5)
            assert not torch.equal(weight, 20 * grad)

    def test_the_parts_are_sample_restore_and_step(self):
        tensors = Tensors(40, 2, CPU)
        stages = contenders.ours(contenders.METHODS[0], "foreach", "in parts").ready(tensors)
        assert list(stages) == ["sample", "restore", "step"]
        mean = tensors.weights[0].clone()
        stages["sample"]()
        assert (tensors.weights[0] - mean).abs().max() > 1e-4
        stages["restore"]()
        torch.testing.assert_close(tensors.weights[0], mean, rtol=0, atol=1e-7)

    def test_a_path_that_is_refused_is_not_available(self):
        def refuse(tensors):
            raise ValueError("Invalid fused=True: not here.\nMore text.")

        with pytest.raises(Unavailable, match=r"^Invalid fused=True: not here\.$"):
            Contender("Some fused", refuse).ready(Tensors(4, 1, CPU))

    def test_a_peer_that_is_not_installed_is_said_so(self):
        with pytest.raises(Unavailable, match=r"^not installed: pip install no-such-package$"):
            peers.require("no_such_module", "no-such-package")
        assert peers.version("no-such-package") is None

    @pytest.mark.parametrize(("name", "module"), [("ivon-opt", "ivon"), ("Pyro BBVI", "pyro")])
    def test_peers_make_a_step_where_they_are_installed(self, name, module):
        pytest.importorskip(module)
        one(name).ready(Tensors(600, 2, CPU))["step"]()


class TestLimits:
    def test_bytes_are_those_of_the_tensors_that_are_read_and_written(self):
        tensor = 4
        read_mean_and_hess_write_sample = 3 * tensor
        read_weight_grad_hess_write_mean_hess = 5 * tensor
        assert limits.loop_bytes("sample") == read_mean_and_hess_write_sample == 12
        assert limits.loop_bytes("step") == read_weight_grad_hess_write_mean_hess == 20
        assert limits.loop_bytes("closure") == limits.loop_bytes("attach") == 32
        assert limits.loop_bytes("context") == 32 + limits.loop_bytes("restore")
        assert limits.loop_bytes("closure", momentum=True) == 32 + 2 * tensor
        assert limits.loop_bytes("closure", pair=True) == 12 + 12 + 24

    def test_contenders_have_the_bytes_of_their_method(self):
        assert one("Vprop fused closure").bytes_per_param == {"closure": 32}
        assert one("IVON fused attach").bytes_per_param == {"attach": 40}
        assert one("Vprop fused in parts").bytes_per_param == {"sample": 12, "restore": 12, "step": 20}
        assert one("ivon-opt").bytes_per_param == {"step": 52}
        assert one("AdamW fused").bytes_per_param == {"step": 28}


FAKE = """
import json, torch
from vprop.lab.bench.contenders import Contender
from vprop.lab.bench.memory import measure_resident

class Fake:
    def __init__(self, tensors):
        self.state = [torch.ones(tensors.size) for _ in range(tensors.count)]   # one parameter-size
    def __call__(self):
        temporaries = [torch.ones_like(s) for s in self.state for _ in range(2)]  # two more

print(json.dumps(measure_resident(Contender("Fake", lambda tensors: {"step": Fake(tensors)}), 4e6, 4)))
"""


class TestMemory:
    @pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
    def test_resident_memory_counts_a_known_allocation(self):
        environment = os.environ | memory.GIVE_BACK_AT_ONCE | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", FAKE], env=environment, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert found["steady"] == pytest.approx(1, abs=0.1)
        assert found["peak"] == pytest.approx(3, abs=0.2)

    def test_the_command(self, tmp_path):
        arguments = (
            "--device",
            "cpu",
            "--threads",
            "1",
            "--params",
            "2e6",
            "--tensors",
            "4",
            "--only",
            "AdamW fused",
        )
        done = bench("memory", *arguments, "--json", tmp_path / "memory.json")
        assert done.exit_code == 0, done.output
        (row,) = json.loads((tmp_path / "memory.json").read_text())["rows"]
        assert row["steady"] == pytest.approx(2, abs=0.2)  # both averages
        assert row["peak"] >= row["steady"] - 0.1
        assert "AdamW fused" in done.output

    def test_a_process_that_is_ended_is_not_available(self, monkeypatch):
        ended = lambda pool, function, *arguments: ProcessPoolExecutor.submit(pool, os._exit, 9)  # noqa: E731
        monkeypatch.setattr(memory, "ProcessPoolExecutor", type("Pool", (ProcessPoolExecutor,), {"submit": ended}))
        with pytest.raises(Unavailable, match="its process was ended"):
            memory.in_a_process("SGD default", 100, 1)


class TestTrain:
    def test_the_command(self, tmp_path):
        path = tmp_path / "train.json"
        arguments = ("--device", "cpu", "--threads", "1", "--short", "--only", "Vprop default", "--only", "ivon")
        done = bench("train", *arguments, "--json", path)
        assert done.exit_code == 0, done.output
        result = json.loads(path.read_text())
        assert [model["model"] for model in result["models"]] == ["gpt", "resnet"]
        for model in result["models"]:
            rows = {row["name"]: row for row in model["rows"]}
            assert rows["AdamW fused"]["ratio"]["median"] == 1  # the reference, though nobody asked for it
            assert SPREAD == set(rows["Vprop default closure"]["time"]) == set(rows["Vprop default closure"]["ratio"])
            assert rows["ivon-opt"]["available"]

    def test_the_usual_models_have_the_usual_sizes(self):
        with torch.device("meta"):
            gpt = models.GPT(*models.GPT_SIZES["usual"][0])
            resnet = models.ResNet(*models.RESNET_SIZES["usual"][0])
        assert sum(p.numel() for p in gpt.parameters()) == pytest.approx(124e6, rel=0.005)
        assert sum(p.numel() for p in resnet.parameters()) == 25_557_032  # ResNet-50

    @pytest.mark.parametrize("name", [name for name in train.CONTENDERS if name.startswith("Vprop")])
    def test_every_loop_leaves_the_mean_in_the_weights_of_a_copy(self, name, monkeypatch):
        copies = []
        monkeypatch.setattr(train, "deepcopy", lambda task: copies.append(deepcopy(task)) or copies[-1])
        task = models.Task(nn.Linear(3, 2), torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
        before = task.net.weight.detach().clone()
        step = train.step_of(name, task)
        step()
        step()
        assert torch.equal(task.net.weight, before)
        torch.testing.assert_close(copies[0].net.weight.detach(), before, rtol=0, atol=1e-4)

    def test_without_the_reference_there_are_no_ratios(self, monkeypatch):
        monkeypatch.setitem(train.CONTENDERS, train.REFERENCE, (torch.optim.SGD, {"lr": -1.0}, train.plain_loop))
        fails(bench("train", "--device", "cpu", "--short", "--only", "ivon"), "AdamW fused, which times are divided by")


class TestPredict:
    def test_the_command(self, tmp_path):
        path = tmp_path / "predict.json"
        done = bench("predict", "--device", "cpu", "--threads", "1", "--short", "--samples", "3", "--json", path)
        assert done.exit_code == 0, done.output
        result = json.loads(path.read_text())
        assert result["settings"] == {"samples": 3, "rounds": 2}
        assert {"small MLP, 1 rows", "MLP, 8 rows", "ResNet"} < {model["model"] for model in result["predictions"]}
        for model in result["predictions"]:
            assert [row["name"] for row in model["rows"]] == list(predict.CONTENDERS)
            for row in model["rows"]:
                assert set(row["time"]) == SPREAD
                assert row["ratio"] == pytest.approx(row["time"]["least"] / model["rows"][0]["time"]["least"])
        table = tables.cells(result, "", ["plain forwards", "predict", "linearized"])
        assert table[0] == ["", "weights", "plain forwards", "× predict", "× linearized"]
        assert len(table) == 1 + len(result["predictions"])

    @pytest.mark.parametrize("name", predict.CONTENDERS)
    def test_a_call_is_a_prediction_of_all_rows(self, name, monkeypatch):
        case = next(predict.cases(CPU, short=True))
        rows = []
        case.model[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
        predict.CONTENDERS[name](case, 3)()
        forwards = {"predict with vmap": 1, "a batch of a loader": 3 * predict.BATCHES, "last layer": 1}
        if "linearized" not in name:
            assert rows == [1] * forwards.get(name, 3)

    def test_a_contender_that_cannot_is_left_out(self, monkeypatch):
        def refuse(case, samples):
            raise RuntimeError("not this model")

        monkeypatch.setitem(predict.CONTENDERS, "linearized", refuse)
        case = next(predict.cases(CPU, short=True))
        rows = predict.measure(case, [predict.REFERENCE, "linearized"], 2, 1, lambda words: None)
        assert rows[1] == {"name": "linearized", "available": False, "reason": f"{case.name}: not this model"}
        table = tables.cells({"predictions": [{"model": case.name, "params": 5, "rows": rows}]})
        assert table[1][-1] == tables.NOTHING
        monkeypatch.setitem(predict.CONTENDERS, predict.REFERENCE, refuse)
        with pytest.raises(BenchError, match="plain forwards, which times are divided by, cannot run here"):
            predict.measure(case, [predict.REFERENCE], 2, 1, lambda words: None)


class TestErrors:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
    @pytest.mark.parametrize("command", ["step", "memory", "train", "predict"])
    def test_no_gpu(self, command):
        fails(bench(command, "--device", "cuda"), "--device cuda: torch finds no CUDA device here.", "--device cpu")

    @pytest.mark.parametrize("command", ["step", "memory", "train", "predict"])
    def test_a_file_that_cannot_be_written_is_refused_before_the_run(self, command, tmp_path, monkeypatch):
        monkeypatch.setattr("vprop.lab.bench.commands._origin", lambda *_: pytest.fail("it was run"))
        (tmp_path / "file").touch()
        fails(bench(command, "--device", "cpu", "--json", tmp_path / "file" / "x.json"), "Cannot write to", "--json")
        fails(bench(command, "--device", "cpu", "--json", tmp_path), "it is a folder")

    def test_names_that_nobody_has(self):
        fails(bench("step", "--device", "cpu", "--only", "Adagrad"), "'Adagrad'", "RMSprop default", "ivon-opt")
        fails(bench("train", "--device", "cpu", "--only", "Adagrad"), "'Adagrad'", "AdamW fused", "ivon-opt")

    @pytest.mark.parametrize(("option", "value"), [("--device", "tpu"), ("--params", "many")])
    def test_values_that_are_none(self, option, value):
        result = bench("step", option, value)
        assert result.exit_code == 2
        assert f"Invalid value for '{option}'" in result.output

    def test_sizes(self):
        fails(bench("step", "--device", "cpu", "--params", "3", "--tensors", "4"), "Invalid --params 3")
        fails(bench("step", "--device", "cpu", "--tensors", "0"), "Invalid --tensors 0: must be at least 1")

    def test_what_does_not_fit(self):
        fails(
            bench("step", "--device", "cpu", "--params", "9e11", "--tensors", "1"),
            "does not fit into memory",
            "--params",
        )

    def test_what_cannot_be_drawn(self, tmp_path):
        fails(bench("plot", tmp_path / "none.json"), "Cannot use", "none.json")
        (tmp_path / "other.json").write_text("no JSON")
        fails(bench("plot", tmp_path / "other.json"), "is no JSON file")
        (tmp_path / "plain.json").write_text('{"command": "vprop bench step"}')
        fails(bench("plot", tmp_path / "plain.json"), "no sweep to draw", "--sweep")

    def test_an_interrupt_writes_nothing_and_says_so(self, tmp_path, monkeypatch):
        def interrupted(contender, *_):
            if contender.name == "SGD default":
                raise KeyboardInterrupt
            return []

        monkeypatch.setattr(step, "_rows", interrupted)
        result = bench("step", *TINY, "--json", tmp_path / "x.json")
        assert result.exit_code == 130
        assert "x.json was not written." in " ".join(result.output.split())
        assert list(tmp_path.iterdir()) == []


class TestSweep:
    def test_a_slow_contender_is_left_out_at_larger_sizes(self, monkeypatch):
        seen = []

        def measured(chosen, tensors, budget, report):
            seen.append([contender.name for contender in chosen])
            times = (9.0 if tensors.numel > 20_000 and "Vprop" in contender.name else 0.1 for contender in chosen)
            rows = zip(chosen, times, strict=True)
            return [{"name": c.name, "available": True, "time": {"median": seconds}} for c, seconds in rows], {}

        monkeypatch.setattr(step, "measure", measured)
        points = [(params, 2) for params in step.sizes(1e4, 1e5)]
        rows = step.sweep(points, CPU, 0.1, 1, lambda text: None)
        assert ["Vprop fused closure" in names for names in seen] == [True, True, False]
        assert [row["params"] for row in rows if row["name"] == "AdamW fused"] == [10_000, 30_000, 100_000]

    def test_it_ends_when_its_time_is_over(self):
        assert step.sweep([(1e4, 1)], CPU, 0.1, 0, lambda text: None) == []


def test_blocks_of_all_contenders_take_turns():
    order = []
    runners = [clock.Runner({"step": lambda name=name: order.append(name)}, CPU) for name in "ab"]
    order.clear()
    for runner in runners:
        runner.seconds = 1.0
    clock.in_turns(runners, budget=0.0)
    assert "".join(order) == "ababab"
    assert len(runners[0].times["step"]) == 3


def test_on_a_gpu_the_time_is_that_between_events(monkeypatch):
    """With a stand-in for the device: each call takes its number of milliseconds there."""
    device = {"now": 0.0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = device["now"]

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = [lambda ms=ms: device.update(now=device["now"] + ms) for ms in (2.0, 5.0)]
    rows = clock.stage_seconds(calls, 3, torch.device("cuda"))
    assert rows == [pytest.approx([2e-3, 5e-3])] * 3
    assert device["now"] == 4 * 7.0  # the first ones do not count


@pytest.mark.cuda
class TestOnAGPU:
    def test_step(self, tmp_path):
        arguments = ("--device", "cuda", "--short", "--only", "RMSprop", "--only", "Vprop", "--sweep")
        assert bench("step", *arguments, "--json", tmp_path / "x.json").exit_code == 0
        result = json.loads((tmp_path / "x.json").read_text())
        row = next(row for row in result["rows"] if row["name"] == "Vprop fused CUDA graph closure")
        assert row["available"]
        assert set(row["time"]) == SPREAD

    def test_memory(self, tmp_path):
        arguments = ("--device", "cuda", "--params", "4e6", "--tensors", "4", "--only", "RMSprop default")
        assert bench("memory", *arguments, "--json", tmp_path / "x.json").exit_code == 0
        (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
        assert row["steady"] == pytest.approx(1, abs=0.01)

    def test_train(self, tmp_path):
        assert bench("train", "--device", "cuda", "--short", "--json", tmp_path / "x.json").exit_code == 0
        for model in json.loads((tmp_path / "x.json").read_text())["models"]:
            assert all(row["peak_bytes"] > 4 * model["params"] for row in model["rows"] if row["available"])


def test_by_name_lists_the_allowed_ones():
    with pytest.raises(BenchError, match=r"Invalid contender 'x'\. There are: RMSprop default"):
        contenders.by_name("x")


def test_bench_alone_imports_nothing_heavy():
    """It must run on a machine that has torch, typer and rich."""
    code = (
        "import sys\nfor name in ('numpy', 'sklearn', 'matplotlib', 'plotly', 'scipy'): sys.modules[name] = None\n"
        f"sys.argv = ['bench', 'step', *{TINY}, '--only', 'SGD']\n"
        "import runpy\nrunpy.run_module('vprop.lab.bench', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SGD default" in done.stdout


def test_tables_tell_the_best_unit():
    assert [tables.seconds(value) for value in (12.0, 0.5, 7.53e-3, 9e-5)] == ["12.0 s", "500 ms", "7.53 ms", "90.0 µs"]
