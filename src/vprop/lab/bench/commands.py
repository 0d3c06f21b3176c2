"""The commands `vprop bench step`, `memory`, `train`, `predict`, `plot` and `page`."""

from __future__ import annotations

import gc
import shlex
import sys
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vprop.lab.command import messages
from vprop.lab.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from rich.console import Console

    from vprop.lab.bench.clock import Report

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Measure what a step costs, in time and memory, beside torch's optimizers and installed peers.",
)

WIDTH = 120
"""Of tables that go to a file."""


class Device(str, Enum):
    """Where to measure."""

    CPU = "cpu"
    CUDA = "cuda"


DeviceOption = Annotated[Device | None, typer.Option(help="Where to measure; a GPU if there is one.")]
ParamsOption = Annotated[
    float | None, typer.Option(help="Number of parameters, e.g. 12.6e6 (the default on a CPU; 1.007e9 on a GPU).")
]
TensorsOption = Annotated[int | None, typer.Option(help="Number of tensors (12 on a CPU; 120 on a GPU).")]
ShortOption = Annotated[bool, typer.Option("--short", help="Small sizes and few repeats, to see that it runs.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads of torch on the CPU.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="File for the result.")]
OnlyOption = Annotated[
    list[str] | None, typer.Option(help="Only contenders whose name holds this; can be given several times.")
]


@app.command()
def step(
    device: DeviceOption = None,
    params: ParamsOption = None,
    tensors: TensorsOption = None,
    short: ShortOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds of measuring for each contender.")] = 1.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Cost against parameters and against tensors, too.")] = False,
    sweep_minutes: Annotated[float, typer.Option(min=0.0, help="Time after which each of the two sweeps ends.")] = 10.0,
) -> None:
    """Time of the optimizer alone, sampling included, on tensors whose gradients are there already."""
    with _measuring(json, device, threads) as (place, result, report):
        from vprop.lab.bench.contenders import choose
        from vprop.lab.bench.step import measure, sizes
        from vprop.lab.bench.step import sweep as measure_sweep
        from vprop.lab.bench.tensors import Tensors

        chosen, (size, count) = choose(only or []), _size(place, params, tensors, short)
        budget = 0.02 if short else budget
        on = Tensors(size, count, place)
        result["settings"] = {"params": on.numel, "tensors": count, "dtype": "float32", "budget": budget}
        result["rows"], result["copy"] = measure(chosen, on, budget, report)
        del on
        if sweep:
            most, many = (1e5, 100) if short else (1e9 if place.type == "cuda" else 3e7, 10_000)
            fixed = 1e5 if short else 1e8 if place.type == "cuda" else 12.6e6
            along = {
                "parameters": [(params, count) for params in sizes(1e4, most)],
                "tensors": [(fixed, int(number)) for number in sizes(1, many)],
            }
            result["sweep"] = {
                name: measure_sweep(points, place, budget / 4, sweep_minutes, report) for name, points in along.items()
            }


@app.command()
def memory(
    device: DeviceOption = None,
    params: ParamsOption = None,
    tensors: TensorsOption = None,
    short: ShortOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
) -> None:
    """Memory beyond weights and gradients, in units of the parameters' size: steady, and at most in a step."""
    with _measuring(json, device, threads) as (place, result, report):
        from vprop.lab.bench.contenders import MEASURED, choose
        from vprop.lab.bench.memory import measure

        chosen, (size, count) = choose(only or [], MEASURED), _size(place, params, tensors, short, small=1e6)
        if short and not only:  # each takes a process, and seconds: for a look, one of the three loops
            chosen = [contender for contender in chosen if not contender.name.endswith(("context", "attach"))]
        result["settings"] = {"params": size, "tensors": count, "dtype": "float32"}
        result["rows"] = measure(chosen, size, count, place, report)


@app.command()
def train(
    device: DeviceOption = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often it is each contender's turn.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps that are timed in a row.")] = None,
    short: ShortOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
) -> None:
    """Whole training steps of a GPT and a ResNet on random data: time in turns, and peak memory on a GPU."""
    with _measuring(json, device, threads) as (place, result, report):
        from vprop.lab.bench.models import TASKS
        from vprop.lab.bench.step import clean_up
        from vprop.lab.bench.train import choose, measure

        names, on_gpu = choose(only or []), place.type == "cuda"
        rounds, steps = rounds or (2 if short else 10), steps or (1 if short or not on_gpu else 5)
        result |= {"settings": {"rounds": rounds, "steps": steps, "autocast": on_gpu}, "models": []}
        for kind, make in TASKS.items():
            task, batch = make("usual" if on_gpu and not short else "tiny" if short else "small", place)
            count = sum(p.numel() for p in task.parameters())
            rows = measure(task, names, rounds, steps, report)
            result["models"].append({"model": kind, "params": count, "batch": batch, "rows": rows})
            del task
            clean_up()


@app.command()
def predict(
    device: DeviceOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Draws of the weights in a prediction.")] = 32,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often it is each contender's turn.")] = None,
    short: ShortOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
) -> None:
    """Time of a prediction beside as many plain forwards: sampled in a loop or at once, linearised, last layer only."""
    with _measuring(json, device, threads) as (place, result, report):
        from vprop.lab.bench.predict import cases, choose, measure
        from vprop.lab.bench.step import clean_up

        names, rounds = choose(only or []), rounds or (2 if short else 9)
        result |= {"settings": {"samples": samples, "rounds": rounds}, "predictions": []}
        for case in cases(place, short):
            rows = measure(case, names, samples, rounds, report)
            count = sum(p.numel() for p in case.model.parameters())
            result["predictions"].append({"model": case.name, "params": count, "rows": rows})
            clean_up()


@app.command()
def page(
    pages: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Markdown files with marked tables.")
    ],
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path("benchmarks/results"),
) -> None:
    """Make the tables of Markdown pages anew from result files."""
    with _session() as console:
        from vprop.files import write_text
        from vprop.lab.bench.tables import filled

        for path in pages:
            write_text(path, filled(path.read_text(encoding="utf-8"), results))
            console.print(f"Tables of {path} are those of {results}.")


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Results of `vprop bench step --sweep --json FILE`.")],
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("out/bench"),
) -> None:
    """Draw cost against parameters and against tensors, from result files."""
    with _session() as console:
        from vprop.lab.bench.errors import BenchError
        from vprop.lab.engine.store import read_json, require_writable

        remedy = "vprop bench step --sweep --json FILE"
        results = {path: read_json(path, remedy) for path in files}
        for path, result in results.items():
            if "sweep" not in result:
                raise BenchError(f"{path} has no sweep to draw: make one with `{remedy}`.")
        try:
            from vprop.lab.bench.plot import draw
        except ImportError as error:
            raise BenchError(f"Plots need {error.name}: pip install {error.name}") from error
        require_writable(out)
        for path, result in results.items():
            for made in draw(result, out, path.stem):
                console.print(f"Plot: {made}", soft_wrap=True)


# -- what the commands share -------------------------------------------------------------------------------------------


@contextmanager
def _session(json: Path | None = None) -> Iterator[Console]:
    """Errors in a sentence, and a word about the file when it is interrupted."""
    from rich.console import Console

    from vprop.lab.bench.errors import BenchError

    with messages(remedy=""):
        try:
            yield Console() if sys.stdout.isatty() else Console(width=WIDTH)
        except (RuntimeError, MemoryError) as error:  # on a CPU torch has no type for it
            if not any(words in str(error) for words in ("out of memory", "allocate memory")):
                raise
            raise BenchError("This does not fit into memory. Use fewer --params.") from error
        except KeyboardInterrupt:
            what = "nothing was" if json is None else f"{json} was not"
            raise Interrupted(f"Interrupted: {what} written.") from None
        finally:
            gc.unfreeze()


@contextmanager
def _measuring(
    json: Path | None, device: Device | None, threads: int | None
) -> Iterator[tuple[torch.device, dict[str, Any], Report]]:
    """Where to measure, the result to fill, and who is told of what is measured; shown and written at the end."""
    import torch

    from vprop.lab.bench.errors import BenchError
    from vprop.lab.bench.tables import show
    from vprop.lab.engine.store import require_writable, write_json

    with _session(json) as console:
        if device is Device.CUDA and not torch.cuda.is_available():
            raise BenchError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
        if json is not None:
            if json.is_dir():
                raise BenchError(f"Cannot write to {json}: it is a folder. Choose a file with --json.")
            require_writable(json.parent, json, "Choose another file with --json.")
        if threads is not None:
            torch.set_num_threads(threads)
        gc.freeze()  # what is loaded by now need not be looked through after each contender
        place = torch.device(device.value if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
        result = _origin(place)
        with console.status("measuring") as status:
            yield place, result, status.update
        show(result, console)
        if json is not None:
            write_json(json, result, indent=1)
            console.print(f"Result: {json}", soft_wrap=True)


def _size(
    place: torch.device, params: float | None, tensors: int | None, short: bool, small: float = 1e5
) -> tuple[float, int]:
    """Parameters and tensors, with defaults for the device."""
    from vprop.lab.bench.errors import BenchError

    usual = (small, 4) if short else (1.007e9, 120) if place.type == "cuda" else (12.6e6, 12)
    size, count = params if params is not None else usual[0], tensors if tensors is not None else usual[1]
    if count < 1:
        raise BenchError(f"Invalid --tensors {count}: must be at least 1.")
    if not count <= size < 1e12:
        raise BenchError(f"Invalid --params {size:g}: must be at least the number of tensors, {count}, and below 1e12.")
    return size, count


def _origin(place: torch.device) -> dict[str, Any]:
    """What a file says about where it comes from."""
    from vprop.lab.bench.peers import version
    from vprop.lab.environment import environment, processor

    words = sys.argv[1:]
    words = words[words.index("bench") + 1 :] if "bench" in words else words
    if "--json" in words:  # where the file was written to is nobody's business
        place_of_path = words.index("--json")
        del words[place_of_path : place_of_path + 2]
    words = [word for word in words if not word.startswith("--json=")]
    found = environment() | {"device": place.type, "processor": processor(), "triton": version("triton")}
    peers = {package: version(package) for package in ("ivon-opt", "pyro-ppl")}
    return {"command": shlex.join(["vprop", "bench", *words]), "environment": found | {"peers": peers}}
