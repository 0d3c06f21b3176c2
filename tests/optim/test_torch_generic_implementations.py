"""torch's generic optimizer checks over every row of the database: implementations, step by step against the for-loop.

``foreach`` is compared in float64 and ``fused`` in the precisions that kernels take, with torch's own tolerances.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optim.database import DEVICE, TESTCASE, TensorTracker, entries, every_optimizer
from tests.optim.generic import Layers, Problem, trained


def has(implementation, of_structures=("diagonal", "eigenbasis", "full")):
    return lambda entry: (
        implementation in entry.info.supported_impls
        and entry.kwargs.get("structure", "diagonal") in of_structures
        and (implementation != "fused" or DEVICE in entry.info.supports_fused_on)
    )


def compare_with_forloop(case, implementation, dtype, **tolerance):
    """Seven steps side by side, weights and state: one without any gradient, two with a frozen layer.

    Of several samples each must have a gradient: to go on without one is an error (``test_samples.py``).
    """
    problems = [Problem(Layers(dtype)) for _ in range(2)]
    optimizers = [
        case(problem.parameters, **(case.forloop | {implementation: chosen}))
        for problem, chosen in zip(problems, (False, True), strict=True)
    ]
    tracker = TensorTracker(tolerance)
    for step in range(7):
        for problem, optimizer in zip(problems, optimizers, strict=True):
            if step in (3, 5):
                problem.model.second.requires_grad_(step == 5)
            problem.step_as_torch_does(optimizer, backward=step != 2 or optimizer.mc_samples > 1)
        for p, q in zip(problems[0].parameters, problems[1].parameters, strict=True):
            tracker.add(p)
            tracker.pop_check_set(q, TESTCASE)
            state, other = optimizers[0].state[p], optimizers[1].state[q]
            assert state.keys() == other.keys()
            for key in state:
                tracker.add(state[key])
                tracker.pop_check_set(other[key], TESTCASE)
        assert tracker.all_popped()


@pytest.mark.parametrize("case", entries(has("foreach")))
def test_foreach_matches_forloop(case):
    compare_with_forloop(case, "foreach", torch.float64)


@pytest.mark.parametrize("case", entries(has("fused", of_structures=("diagonal",))))
def test_fused_matches_forloop(case):
    compare_with_forloop(case, "fused", torch.float32)


@pytest.mark.parametrize("case", entries(has("fused"), first_of_each=True))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_matches_forloop_for_coarse_weights(case, dtype):
    compare_with_forloop(case, "fused", dtype)


@pytest.mark.parametrize("case", entries(has("fused"), first_of_each=True))
def test_fused_error_on_params_on_meta(case):
    """Said when it is built, where torch says it at the step."""
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"Invalid fused=True: .* on meta"):
        case(model.parameters(), fused=True)


@pytest.mark.parametrize("case", entries(has("foreach"), first_of_each=True))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_set_default_dtype_works_with_foreach(case, dtype):
    torch.set_default_dtype(dtype)
    try:
        compare_with_forloop(case, "foreach", torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)


@every_optimizer
def test_the_default_precision_is_nobodys_business(case):
    """torch.set_default_dtype, for the time of the steps; what the steps do does not depend on it."""
    here, elsewhere = trained(case)[0], Problem()
    optimizer = case(elsewhere.parameters)
    torch.set_default_dtype(torch.float64)
    try:
        elsewhere.train(optimizer, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    here.same_weights(elsewhere)
    assert all(
        value.dtype != torch.float64 or key == "hess" for s in optimizer.state.values() for key, value in s.items()
    )


@pytest.mark.parametrize("case", entries(has("fused"), first_of_each=True))
def test_defaults_changed_to_foreach(case):
    """The default is the fastest there is: here a kernel, for all parameters together."""
    assert len(trained(case, steps=1)[1]._structure._packs.packs) == 1
    assert not trained(case, steps=1, **case.forloop)[1]._structure._packs.packs
