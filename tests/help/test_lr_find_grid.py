"""``lr_find`` against a grid search: its suggestion is within a factor of 3 of the best lr, by held-out log-loss.

The grid has steps of a factor of 3 around the optimizer's default; the best is that of the mean over the seeds.
"""

from __future__ import annotations

import math

import pytest

from tests.help.following import TASKS, Task
from vprop import Vario, Vprop

VPROP = (Vprop, {}, [0.1 * 3.0**k for k in range(-2, 4)])
VARIO = (Vario, {"batch_size": 32}, [0.001 * 3.0**k for k in range(-1, 6)])


def check(name, settings, seeds):
    constructor, arguments, grid = settings
    tasks = [Task(name, seed) for seed in seeds]
    reached = [
        sum(task.train((constructor, arguments | {"lr": lr})).log_loss for task in tasks) / len(tasks) for lr in grid
    ]
    best = grid[min(range(len(grid)), key=reached.__getitem__)]
    found = [task.found_lr((constructor, arguments)) for task in tasks]
    print(f"{name}, {constructor.__name__}:", {f"{lr:.2g}": round(x, 3) for lr, x in zip(grid, reached, strict=True)})
    print(f"  best {best:.2g}, found {found}")
    assert grid[0] < best < grid[-1]  # or it would be no search
    for lr in found:
        assert abs(math.log(lr / best)) <= math.log(3.01)


@pytest.mark.parametrize("settings", [VPROP, VARIO], ids=["Vprop", "Vario"])
def test_one_layer(settings):
    check("logistic_regression", settings, seeds=[0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [VPROP, VARIO], ids=["Vprop", "Vario"])
@pytest.mark.parametrize("name", TASKS)
def test_all_models(name, settings):
    check(name, settings, seeds=[0, 1] if name == "Transformer" else [0, 1, 2])


def test_the_trials_of_a_step_like_adams_reach_from_1e_5_to_1():
    """Whatever the default lr: the search goes on where the best is at its end."""
    task = Task("logistic_regression")
    for lr in (1e-5, 1.0):
        assert 0.01 <= task.found_lr((Vario, {"batch_size": 32, "lr": lr})) <= 0.3
