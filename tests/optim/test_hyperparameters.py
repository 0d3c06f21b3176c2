"""A hyperparameter is declared once; constructor, signature, group, checks and documentation have it from there."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from torch import nn

import vprop
from tests.table import LESS_THAN_SHARED, TABLE
from vprop import IVON, Vadam, Vprop
from vprop.baselines import BBVI, Newton
from vprop.optim.hyperparameters import Shared, declared_in

SHARED = [
    *("num_data", "prior_precision", "prior_mean", "betas", "mc_samples", "antithetic", "centered"),
    *("batch_size", "init_steps", "preconditioner", "temperature", "hess_init", "clip_radius", "seed"),
    *("hess_floor", "noise_limit", "noise", "maximize", "foreach", "fused", "capturable"),
]
FLOORS = {"hess_floor", "noise_limit"}
OF_MINI_BATCHES = {"batch_size", "init_steps", "preconditioner"}
NOT_TAKEN = {
    "BBVI": {"noise", *FLOORS, *OF_MINI_BATCHES},
    "Newton": {
        *("mc_samples", "antithetic", "centered", "noise", "foreach", "fused", "capturable"),
        *(FLOORS | OF_MINI_BATCHES),
    },
    "Vadam": OF_MINI_BATCHES,
    "VON": {"preconditioner", *FLOORS},
    "VONG": {"preconditioner", *FLOORS},
}
BASES = ["structure", "max_basis_dim", "basis_every", "basis_beta"]
OWN = {
    "Vprop": ["sampled_fisher", *BASES, "max_parameters"],
    "Vario": [*BASES, "max_parameters"],
    "IVON": [*BASES, "rescale_lr"],
    "VOGN": ["chunk_size"],
    "CVI": ["chunk_size"],
    "VON": ["chunk_size", "max_parameters"],
    "VONG": ["sampled_fisher", "max_parameters"],
    "MeanField": ["curvature", "riemannian", "chunk_size"],
    "BBVI": ["method", "lr_std", "eps"],
    "Newton": ["chunk_size", "max_parameters"],
}
ROWS = [*TABLE, *LESS_THAN_SHARED]


def weights():
    return [nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("info", ROWS, ids=lambda info: info.name)
class TestEveryOptimizer:
    def test_the_signature(self, info):
        """The shared arguments in their order, the method's own after them, all but lr by keyword."""
        found = inspect.signature(info.constructor).parameters
        shared = [name for name in SHARED if name not in NOT_TAKEN.get(info.name, ())]
        assert list(found) == ["params", "lr", *shared, *OWN.get(info.name, [])]
        kinds = [parameter.kind for parameter in found.values()]
        by_position, by_keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        assert kinds == [by_position] * 2 + [by_keyword] * (len(kinds) - 2)
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in found.values())
        required = [name for name, parameter in found.items() if parameter.default is inspect.Parameter.empty]
        assert required == ["params", "num_data", *info.required]

    def test_defaults_are_those_of_the_group(self, info):
        optimizer = info.build(weights(), num_data=10)
        for name, parameter in inspect.signature(info.constructor).parameters.items():
            if name not in ("params", "num_data", *info.required):
                assert optimizer.defaults[name] == optimizer.param_groups[0][name] == parameter.default

    def test_every_argument_is_documented(self, info):
        section = info.constructor.__doc__.split("Args:\n")[1].split("\n\n")[0]
        documented = [line.split(":")[0].strip() for line in section.splitlines() if line[4] != " "]
        assert documented == list(inspect.signature(info.constructor).parameters)
        assert max(map(len, section.splitlines())) <= 120

    def test_another_name_is_an_error_as_in_python(self, info):
        with pytest.raises(TypeError, match=rf"{info.name}\.__init__\(\) got an unexpected .* 'alpha'$"):
            info.build(weights(), num_data=10, alpha=0.1)
        with pytest.raises(TypeError, match=r"'weight_decay'\. .* pass prior_precision=weight_decay\*num_data"):
            info.build(weights(), num_data=10, weight_decay=0.1)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'hes_init'\. Did you mean 'hess_init'\?"):
            info.build(weights(), num_data=10, hes_init=0.1)

    def test_what_is_missing_is_named(self, info):
        names = " and ".join(repr(name) for name in ("num_data", *info.required))
        missing = rf"{info.name}\.__init__\(\) missing \d required keyword-only .*: {names}\. "
        with pytest.raises(TypeError, match=missing + r"Pass num_data=len\(train_set\)"):
            info.constructor(weights())
        with pytest.raises(TypeError, match=rf"{info.name}\.__init__\(\) missing 1 required positional .* 'params'"):
            info.constructor(num_data=10, **info.required)

    def test_too_many_by_position(self, info):
        with pytest.raises(TypeError, match=rf"{info.name}\.__init__\(\) takes from 2 to 3 positional arguments"):
            info.constructor(weights(), 0.1, 10, num_data=10, **info.required)

    def test_params_by_name(self, info):
        assert len(info.build(params=weights(), num_data=10).param_groups) == 1

    def test_subclasses_copies_and_pickles(self, info):
        class Mine(info.constructor):
            def __init__(self, params, lr=0.3, *, num_data, **rest):
                super().__init__(params, lr, num_data=num_data, **rest)

        optimizer = Mine(weights(), num_data=10, temperature=0.5, **info.required)
        assert (optimizer.defaults["lr"], optimizer.defaults["temperature"]) == (0.3, 0.5)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'temperatur'\. Did you mean 'temperature'"):
            Mine(weights(), num_data=10, temperatur=0.5, **info.required)
        with pytest.raises(ValueError, match=r"Invalid temperature=0: "):
            optimizer.add_param_group({"params": weights(), "temperature": 0})
        built = info.build(weights(), num_data=10)
        for copied in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
            assert copied.defaults == built.defaults


def test_methods_differ_where_they_say_so():
    found = {constructor: inspect.signature(constructor).parameters for constructor in (Vprop, IVON, Vadam, Newton)}
    assert [found[c]["betas"].default for c in found] == [(0.0, 0.999), (0.9, 0.99999), (0.9, 0.999), (0.0, 0.0)]
    assert [found[c]["lr"].default for c in found] == [0.1, 0.1, 0.001, 1.0]
    assert [found[c]["hess_init"].default for c in found] == [1.0, 1.0, 0.0, 1.0]
    assert "centered: not for IVON, whose curvature is no spread." in IVON.__doc__
    assert "centered: take the curvature from the spread" in Vprop.__doc__
    assert declared_in(Shared)["betas"].default == (0.0, 0.999)  # which no method has changed for the others


def test_help_shows_arguments_and_examples():
    text = inspect.getdoc(Vprop)
    assert text.index("Args:") < text.index(">>> import torch")
    shown = str(inspect.signature(Vprop))
    assert shown.startswith("(params: 'ParamsT', lr: float | torch.Tensor = 0.1, *, num_data: float, prior_precision: ")
    assert get_type_hints(BBVI.__init__)["lr_std"] == float | None
    assert list(inspect.signature(BBVI.__init__).parameters)[:3] == ["self", "params", "lr"]


def test_a_field_that_declares_nothing_is_refused():
    class Arguments(Shared):
        plain: float

    with pytest.raises(TypeError, match=r"Arguments\.plain: must be Annotated\[type, Hyperparameter\(\.\.\.\)\]"):
        declared_in(Arguments)


def test_the_line_that_gave_the_weights_is_warned_of():
    shared = [nn.Parameter(torch.zeros(2).share_memory_())]
    with pytest.warns(UserWarning, match="is in shared memory") as warned:
        vprop.Vprop(shared, num_data=10)
    assert warned[0].filename == __file__


EDIT = """
    toy: Annotated[float, Hyperparameter("a toy.", 0.5, checks.positive("Play."))]
"""
LOOK = """
import inspect, sys, torch
sys.path.insert(0, {root!r})
import vprop
from tests.table import LESS_THAN_SHARED, TABLE

assert vprop.__file__.startswith({copy!r})
for info in [*TABLE, *LESS_THAN_SHARED]:
    build = lambda **rest: info.build([torch.zeros(2, requires_grad=True)], num_data=10, **rest)
    toy = inspect.signature(info.constructor).parameters["toy"]
    assert (toy.default, toy.annotation, toy.kind) == (0.5, float, inspect.Parameter.KEYWORD_ONLY)
    assert build().param_groups[0]["toy"] == 0.5 and build(toy=2.0).param_groups[0]["toy"] == 2.0
    assert "    toy: a toy." in info.constructor.__doc__.splitlines()
    for wrong in (lambda: build(toy=-1), lambda: build().add_param_group(dict(params=[torch.zeros(1)], toy=-1))):
        try:
            wrong()
        except ValueError as error:
            assert str(error) == "Invalid toy=-1: must be a finite number > 0. Play.", error
        else:
            raise AssertionError(info.name)
    print(info.name)
"""


def test_another_argument_for_all_is_one_edit(tmp_path):
    """One field more in a copy of the sources: every optimizer has it, everywhere."""
    package = Path(vprop.__file__).parent
    shutil.copytree(package, tmp_path / "vprop", ignore=shutil.ignore_patterns("__pycache__"))
    declarations = tmp_path / "vprop" / "optim" / "hyperparameters" / "shared.py"
    before = declarations.read_text()
    head, _, rest = before.partition("    seed: Annotated[")
    declarations.write_text(head.rstrip() + EDIT + "    seed: Annotated[" + rest)
    look = LOOK.format(root=str(Path(__file__).parents[2]), copy=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", look], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [info.name for info in ROWS]
