"""The commands `vprop bench step`, `memory`, `train`, `plot` and `page`."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable
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


class Model(str, Enum):
    """What to train."""

    GPT = "gpt"
    RESNET = "resnet"
    ALL = "all"


DeviceOption = Annotated[Device | None, typer.Option(help="Where to measure; a GPU if there is one.")]
ParamsOption = Annotated[
    float | None, typer.Option(help="Number of parameters, e.g. 12.6e6 (the default on a CPU; 1.007e9 on a GPU).")
]
TensorsOption = Annotated[int | None, typer.Option(help="Number of tensors (12 on a CPU; 120 on a GPU).")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes and few repeats, to see that it runs.")]
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
    quick: QuickOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds of measuring for each contender.")] = 1.0,
    sweep: Annotated[bool, typer.Option("--sweep", help="Cost against parameters and against tensors, too.")] = False,
    sweep_minutes: Annotated[float, typer.Option(min=0.0, help="Time after which each of the two sweeps ends.")] = 10.0,
) -> None:
    """Time of the optimizer alone, sampling included, on tensors whose gradients are there already."""
    with _session(json) as console:
        from vprop.lab.bench import contenders, show
        from vprop.lab.bench.step import Plan, measure
        from vprop.lab.bench.sweep import Sweep
        from vprop.lab.bench.tensors import Tensors

        place = _prepare(device, threads, json)
        chosen = contenders.choose(only or [])
        if quick and not only:
            chosen = [contender for contender in chosen if contender.path != "compiled"]
        size, count = _size(place, params, tensors, quick)
        result = _result(place, {"params": size, "tensors": count, "dtype": "float32", "budget": budget})
        with _shown(console, lambda: show.step_table(result, console)) as report:
            plan = Plan(place, 0.02 if quick else budget, report=report)
            on = Tensors(size, count, place)
            result["settings"]["params"] = on.numel
            result["copy"] = measure(chosen, on, plan, result["rows"])
            del on
            if sweep:
                result["sweep"] = _sweep(Sweep(plan, sweep_minutes), place, count, quick)
        if sweep:
            for along in ("parameters", "tensors"):
                show.sweep_table(result["sweep"][along], along, console)
            if result["sweep"]["out_of_time"]:
                console.print(
                    f"A sweep ended early, after {sweep_minutes:g} minutes (--sweep-minutes).", style="yellow"
                )
        _save(result, json, console)


def _sweep(sweep: Any, place: torch.device, tensors: int, quick: bool) -> dict[str, Any]:
    on_gpu = place.type == "cuda"
    along: dict[str, Any] = {"parameters": [], "tensors": []}
    sweep.over_parameters(1e5 if quick else 1e9 if on_gpu else 1e8, tensors, along["parameters"])
    sweep.over_tensors(1e5 if quick else 1e8 if on_gpu else 12.6e6, 100 if quick else 10_000, along["tensors"])
    return along | {"out_of_time": sweep.out_of_time}


@app.command()
def memory(
    device: DeviceOption = None,
    params: ParamsOption = None,
    tensors: TensorsOption = None,
    quick: QuickOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
) -> None:
    """Memory beyond weights and gradients, in units of the parameters' size: steady, and at most in a step."""
    with _session(json) as console:
        from vprop.lab.bench import contenders, show
        from vprop.lab.bench.memory import measure
        from vprop.lab.bench.step import Plan

        place = _prepare(device, threads, json)
        chosen = contenders.choose(only or [], contenders.for_memory())
        size, count = _size(place, params, tensors, quick, small=1e6)
        result = _result(place, {"params": size, "tensors": count, "dtype": "float32"})
        with _shown(console, lambda: show.memory_table(result, console)) as report:
            measure(chosen, size, count, Plan(place, report=report), result["rows"])
        _save(result, json, console)


@app.command()
def train(
    model: Annotated[Model, typer.Argument(help="What to train: gpt, resnet or both.")] = Model.ALL,
    device: DeviceOption = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Examples in a batch: as many as fill the device.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="torch.compile the model.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often it is each contender's turn.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps that are timed in a row.")] = None,
    quick: QuickOption = False,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    only: OnlyOption = None,
) -> None:
    """Whole training steps of a GPT and a ResNet on random data: time in turns, and peak memory on a GPU."""
    with _session(json) as console:
        from vprop.lab.bench import show
        from vprop.lab.bench.step import clean_up
        from vprop.lab.bench.train import Rounds, choose, measure
        from vprop.lab.bench.training_sizes import sized_task

        place = _prepare(device, threads, json)
        names = choose(only or [])
        small = quick or place.type == "cpu"
        plan = Rounds(rounds or (2 if quick else 10), steps or (1 if small else 5))
        settings = {"rounds": plan.count, "steps": plan.steps, "compiled": compile, "autocast": place.type == "cuda"}
        result = _result(place, settings)
        del result["rows"]
        result["models"] = []
        with _shown(console, lambda: show.train_table(result, console)) as plan.report:
            for kind in ("gpt", "resnet") if model is Model.ALL else (model.value,):
                task, examples = sized_task(kind, place, batch, compile, quick)
                count = sum(p.numel() for p in task.parameters())
                entry: dict[str, Any] = {"model": kind, "params": count, "batch": examples, "rows": []}
                result["models"].append(entry)
                measure(task, names, plan, entry["rows"])
                del task
                clean_up()
        _save(result, json, console)


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
        from vprop.lab.bench.page import filled

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
        from vprop.lab.bench.output import load
        from vprop.lab.engine.store import require_writable

        results = [(path, load(path)) for path in files]
        for path, result in results:
            if "sweep" not in result:
                raise BenchError(
                    f"{path} has no sweep to draw: make one with `vprop bench step --sweep --json {path}`."
                )
        try:
            from vprop.lab.bench.plot import draw
        except ImportError as error:
            raise BenchError(f'Plots need {error.name}: pip install "vprop[lab]".') from error
        require_writable(out)
        for path, result in results:
            for made in draw(result, out, path.stem):
                console.print(f"Plot: {made}", soft_wrap=True)


# -- what the commands share -------------------------------------------------------------------------------------------


@contextmanager
def _session(json: Path | None = None) -> Iterator[Console]:
    """Errors in a sentence, and a word about the file when it is interrupted."""
    from rich.console import Console

    from vprop.lab.bench.errors import BenchError, ran_out_of_memory

    with messages(remedy=""):
        try:
            yield Console() if sys.stdout.isatty() else Console(width=WIDTH)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            raise BenchError("This does not fit into memory. Use fewer --params, or a smaller --batch.") from error
        except KeyboardInterrupt:
            what = "nothing was" if json is None else f"{json} was not"
            raise Interrupted(f"Interrupted: {what} written.") from None
        finally:
            gc.unfreeze()


def _prepare(device: Device | None, threads: int | None, json: Path | None) -> torch.device:
    """Refuse what cannot work, before anything is measured."""
    import torch

    from vprop.lab.bench.errors import BenchError
    from vprop.lab.bench.output import require_file

    if device is Device.CUDA and not torch.cuda.is_available():
        raise BenchError("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    if json is not None:
        require_file(json)
    if threads is not None:
        torch.set_num_threads(threads)
    gc.freeze()  # what is loaded by now need not be looked through after each contender
    return torch.device(device.value if device is not None else "cuda" if torch.cuda.is_available() else "cpu")


def _size(
    place: torch.device, params: float | None, tensors: int | None, quick: bool, small: float = 1e5
) -> tuple[float, int]:
    """Parameters and tensors, with defaults for the device."""
    from vprop.lab.bench.errors import BenchError

    usual = (small, 4) if quick else (1.007e9, 120) if place.type == "cuda" else (12.6e6, 12)
    size, count = params if params is not None else usual[0], tensors if tensors is not None else usual[1]
    if count < 1:
        raise BenchError(f"Invalid --tensors {count}: must be at least 1.")
    if not count <= size < 1e12:
        raise BenchError(f"Invalid --params {size:g}: must be at least the number of tensors, {count}, and below 1e12.")
    return size, count


def _result(place: torch.device, settings: dict[str, Any]) -> dict[str, Any]:
    from vprop.lab.bench.output import surroundings

    words = sys.argv[1:]
    words = words[words.index("bench") + 1 :] if "bench" in words else words
    if "--json" in words:  # where the file was written to is nobody's business
        place_of_path = words.index("--json")
        del words[place_of_path : place_of_path + 2]
    command = shlex.join(["vprop", "bench", *words])
    return {"command": command, "environment": surroundings(place), "settings": settings, "rows": []}


@contextmanager
def _shown(console: Console, show: Callable[[], None]) -> Iterator[Callable[[str], None]]:
    """A line that says what is being measured, and then the table; of what was measured before an interrupt, too."""
    try:
        with console.status("measuring") as status:
            yield lambda text: status.update(f"measuring {text}")
    except KeyboardInterrupt:
        show()
        raise
    show()


def _save(result: dict[str, Any], json: Path | None, console: Console) -> None:
    from vprop.lab.engine.store import write_json

    if json is not None:
        write_json(json, result, indent=1)
        console.print(f"Result: {json}", soft_wrap=True)
