"""`vprop bench predict`: what a prediction costs, beside as many forwards of the model as it stands for.

A prediction with S draws is compared with S plain forwards, model(x) without gradients, at the same weights: the draws,
the replica that keeps the model untouched and the gathering of results are what it costs above them. With one thread on
a CPU the time is that of the processor, to which others on the machine add little; else it is that of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import vprop
from vprop.lab.bench.clock import Call, Report, spread, wait
from vprop.lab.bench.errors import EXPECTED, BenchError, Unavailable, first_line, matching
from vprop.lab.bench.models import ResNet
from vprop.posterior import Posterior

REFERENCE = "plain forwards"


class Case(NamedTuple):
    """A model with data to predict."""

    name: str
    model: nn.Module
    x: Tensor

    @property
    def posterior(self) -> Posterior:
        """With weights that are drawn from around the first ones."""
        return vprop.Vprop(self.model.parameters(), num_data=1e6).posterior(self.model, likelihood="categorical")


def cases(device: torch.device, short: bool) -> Iterator[Case]:
    """From a few thousand weights to as many as the device is for, with one example and with many."""
    on_gpu = device.type == "cuda"
    sizes = {"small MLP": (20, 50, 3), "MLP": (784, 400, 10)} | ({"wide MLP": (784, 4096, 10)} if on_gpu else {})
    for name, (inputs, width, outputs) in sizes.items():
        torch.manual_seed(0)
        with device:
            layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
            model = nn.Sequential(*layers, nn.Linear(width, outputs)).eval()
            for rows in (1, 8) if short else (1, 32, 256):
                yield Case(f"{name}, {rows} rows", model, torch.randn(rows, inputs))
    torch.manual_seed(0)
    with device:
        resnet = ResNet((1, 1) if short else (3, 4, 6, 3) if on_gpu else (2, 2, 2, 2), 64 if on_gpu else 8, 10).eval()
        yield Case(
            "ResNet", resnet, torch.randn(2 if short else 64 if on_gpu else 16, 3, *(2 * (64 if on_gpu else 32,)))
        )


# -- who is measured -----------------------------------------------------------------------------------------------


def _plain(case: Case, samples: int) -> Call:
    def call() -> None:
        with torch.no_grad():
            for _ in range(samples):
                case.model(case.x)

    return call


def _linearized(case: Case, samples: int) -> Call:
    posterior = case.posterior
    with torch.no_grad():
        elements = case.model(case.x).numel() * posterior.num_parameters
    if elements > MOST_DERIVATIVES:
        raise Unavailable(f"{elements:.1e} derivatives take too long: this is for small models, or for a last layer")
    return lambda: posterior.predict(case.x, samples, method="linearized")


def _predict(**arguments: Any) -> Callable[[Case, int], Call]:
    def make(case: Case, samples: int) -> Call:
        posterior = case.posterior
        return lambda: posterior.predict(case.x, samples, **arguments)

    return make


def _in_batches(case: Case, samples: int) -> Call:
    """Eight batches that are the same: what the first one made is there for the others. The time is that of one."""
    posterior = case.posterior
    return lambda: posterior.predict((case.x for _ in range(BATCHES)), samples)


def _last_layer(**arguments: Any) -> Callable[[Case, int], Call]:
    def make(case: Case, samples: int) -> Call:
        posterior = case.posterior.last_layer()
        return lambda: posterior.predict(case.x, samples, **arguments)

    return make


BATCHES = 8
MOST_DERIVATIVES = 2e8
"""Of all outputs by all weights that a linearised prediction is measured with."""
CONTENDERS: dict[str, Callable[[Case, int], Call]] = {
    REFERENCE: _plain,
    "predict": _predict(),
    "predict in a loop": _predict(vmap=False),
    "predict with vmap": _predict(vmap=True),
    "a batch of a loader": _in_batches,
    "linearized": _linearized,
    "last layer": _last_layer(),
    "last layer linearized": _last_layer(method="linearized"),
}


def choose(words: list[str]) -> list[str]:
    """Those whose name holds one of the words, and the reference; all if there are none."""
    wanted = matching(words, list(CONTENDERS))
    return wanted if REFERENCE in wanted else [REFERENCE, *wanted]


def measure(case: Case, names: list[str], samples: int, rounds: int, report: Report) -> list[dict[str, Any]]:
    """A row for each contender: seconds for a prediction with all its draws, in turns, and beside the forwards."""
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name in names:
        report(f"{case.name}: {name}")
        try:
            calls[name] = CONTENDERS[name](case, samples)
            calls[name]()
            rows[name] = {"name": name, "available": True}
        except EXPECTED as error:
            rows[name] = {"name": name, "available": False, "reason": f"{case.name}: {first_line(error)}"}
    if REFERENCE not in calls:
        raise BenchError(f"{REFERENCE}, which times are divided by, cannot run here: {rows[REFERENCE]['reason']}")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {name: max(1, int(0.01 / _seconds(call, 1, case.x.device))) for name, call in calls.items()}
    for number in range(rounds):
        report(f"{case.name}: round {number + 1} of {rounds}")
        for name, call in calls.items():
            once = _seconds(call, repeats[name], case.x.device)
            seconds[name].append(once / BATCHES if name == "a batch of a loader" else once)
    for name, times in seconds.items():
        # Of the least: others that use the machine can only add.
        rows[name] |= {"time": spread(times), "ratio": min(times) / min(seconds[REFERENCE])}
    return list(rows.values())


def _seconds(call: Call, repeats: int, device: torch.device) -> float:
    """For a call, of so many in a row."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    wait(device)
    started = clock()
    for _ in range(repeats):
        call()
    wait(device)
    return max(clock() - started, 1e-9) / repeats
