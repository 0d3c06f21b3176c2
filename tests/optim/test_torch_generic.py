"""torch's generic optimizer checks over every row of the database: training. (State: test_torch_generic_state.py.)

A test that has torch's name does what torch's does, with what is named here one by one:

- a gradient belongs to a sample: ``backward()`` runs inside ``sampled_params()``, or ``step()`` is given an objective;
- ``prior_precision`` stands for ``weight_decay``, which is refused as an entry of a group;
- zero gradients are a step all the same: the prior pulls, and the curvature averages. Where the prior's mean is at the
  weights the mean stays;
- a tensor as ``lr`` needs no ``capturable``, also with ``foreach``;
- ``foreach`` and ``fused`` are choices of speed: test_torch_generic_implementations.py;
- one covariance over all weights (VON, VONG, Newton) needs them in one precision.

``test_torch_coverage.py`` has what torch checks and these files do not, each with the reason.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.optim.database import (
    CONSTRUCTION,
    DATABASE,
    DEVICE,
    NUM_DATA,
    SCHEDULERS,
    entries,
    every_implementation,
    every_input,
    every_optimizer,
    parameters,
)
from tests.optim.generic import Problem, nothing, squared_error, trained
from tests.table import TABLE

FULL = ("VON", "VONG", "Newton")

with_schedulers = pytest.mark.parametrize("schedulers", SCHEDULERS, ids=range(len(SCHEDULERS)))


def went_right(case, before, after):
    return after > before if case.maximizes else after < before


# -- the database ----------------------------------------------------------------------------------------------------


@every_input
def test_optim_infos_do_not_specify_global_cliquey_kwargs(case):
    assert not case.kwargs.keys() & {"foreach", "fused", "differentiable"}


def test_every_optimizer_of_the_package_is_enrolled():
    """One row of the table enrols an optimizer; this is what notices a missing one."""
    import vprop
    import vprop.baselines

    found = {
        name
        for module in (vprop, vprop.baselines)
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not vprop.VariationalOptimizer
    }
    assert found == {info.name for info in DATABASE}


# -- the direction of the steps --------------------------------------------------------------------------------------


def goes_right(case, steps, schedulers=(), **arguments):
    problem = Problem(**arguments)
    optimizer = case(problem.parameters, **case.forloop)
    made = [scheduler(optimizer) for scheduler in schedulers]
    before = problem.loss()
    for _ in range(5 if case.maximizes else steps):  # Newton's loss is beyond float32 after seven steps upwards
        problem.step_as_torch_does(optimizer)
        problem.advance(made)
    return went_right(case, before, problem.loss())


@every_input
@pytest.mark.parametrize("contiguous", [True, False])
def test_forloop_goes_right_direction(case, contiguous):
    assert goes_right(case, 10, contiguous=contiguous)


@pytest.mark.parametrize("case", entries(lambda entry: entry.input.desc in ("default", "tensor lr")))
@with_schedulers
def test_forloop_goes_right_direction_with_schedulers(case, schedulers):
    assert goes_right(case, 12, schedulers)


@every_optimizer
@with_schedulers
def test_param_group_with_lrscheduler_goes_right_direction(case, schedulers):
    problem = Problem()
    weight, bias = problem.parameters
    optimizer = case([{"params": [weight]}, {"params": [bias], "lr": 0.01}], lr=0.05)
    made = [scheduler(optimizer) for scheduler in schedulers]
    before = problem.loss()
    problem.train(optimizer, 12, made)
    assert problem.loss() < before
    assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(float(optimizer.param_groups[0]["lr"]) / 5)


def has_a_negative(entry):
    """Drawn labels are those of the loss, whatever its sign."""
    return not (entry.kwargs.get("sampled_fisher") or entry.kwargs.get("curvature") == "sampled_fisher")


@pytest.mark.parametrize("case", entries(lambda entry: not entry.maximizes and has_a_negative(entry)))
def test_maximize_is_minimizing_the_negative(case):
    problem, other = Problem(), Problem()
    problem.train(case(problem.parameters, maximize=True), 3)
    other.objective = other.objective_of(lambda *pair: -squared_error(*pair))
    other.train(case(other.parameters), 3)
    problem.same_weights(other, rtol=1e-5, atol=1e-6)


# -- the options of a group ------------------------------------------------------------------------------------------


@every_implementation
def test_param_groups_lr(case):
    """The group with a length of its own learns; one whose length is next to nothing stays."""
    problem = Problem()
    weight, bias = problem.parameters
    optimizer = case([{"params": [weight], **{"lr": 0.01} | case.kwargs}, {"params": [bias]}], lr=1e-28)
    before, start = problem.loss(), bias.detach().clone()
    for _ in range(5):
        problem.step_as_torch_does(optimizer)
    assert went_right(case, before, problem.loss())
    torch.testing.assert_close(bias.detach(), start, rtol=1e-6, atol=1e-6)


@every_implementation
def test_param_groups_weight_decay(case):
    """The prior of a group is its own: without any gradient of the data it alone moves the weights, or is at them."""
    problem = Problem(dtype=torch.float64 if not case.kwargs.get("fused") else torch.float32)
    weight, bias = problem.parameters
    groups = [{"params": [weight], "prior_precision": 500.0}, {"params": [bias], "prior_mean": [bias.detach().clone()]}]
    optimizer = case(groups, lr=0.05)
    before = [p.detach().norm() for p in problem.parameters]
    for _ in range(3):
        optimizer.step(problem.objective_of(nothing))
    shrunk = [float(p.detach().norm() / norm) for p, norm in zip(problem.parameters, before, strict=True)]
    assert shrunk[0] < 0.99
    assert shrunk[1] == pytest.approx(1, abs=1e-6 if case.kwargs.get("fused") else 1e-9)


# -- lr --------------------------------------------------------------------------------------------------------------


@every_implementation
def test_tensor_lr(case):
    numbers, *tensors = (Problem() for _ in range(4))
    optimizer = case(numbers.parameters, lr=0.05)
    lrs = [torch.tensor(0.05, dtype=torch.float64).reshape([1] * dimensions) for dimensions in range(3)]
    others = [case(problem.parameters, lr=lr) for problem, lr in zip(tensors, lrs, strict=True)]
    for _ in range(2):
        numbers.step_as_torch_does(optimizer)
        for problem, other in zip(tensors, others, strict=True):
            problem.step_as_torch_does(other)
            numbers.same_weights(problem, rtol=1e-6, atol=1e-7)


@every_optimizer
def test_a_scheduler_changes_a_tensor_in_place(case):
    """A captured graph, or a compiled step, reads that very tensor."""
    problem = Problem()
    lr = torch.tensor(0.05)
    optimizer = case(problem.parameters, lr=lr)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    problem.train(optimizer, 1, [scheduler])
    assert float(lr) == pytest.approx(0.025)
    assert optimizer.param_groups[0]["lr"].data_ptr() == lr.data_ptr()


# -- gradients that are not there ------------------------------------------------------------------------------------


@every_implementation
def test_step_is_noop_for_zero_grads(case):
    problem = Problem(dtype=torch.float64 if not case.kwargs.get("fused") else torch.float32)
    before = [p.detach().clone() for p in problem.parameters]
    optimizer = case(problem.parameters, prior_mean=before)
    for _ in range(3):
        optimizer.step(problem.objective_of(nothing))
    # To the rounding of a sample put in and taken out again, 1e-16, which Adam (BBVI) divides by its eps of 1e-8.
    rounding = 1e-6 if case.kwargs.get("fused") else 1e-7 if case.info.name == "BBVI" else 1e-14
    for p, start in zip(problem.parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), start, rtol=0.0, atol=rounding)


def needs_gradients_only(entry):
    return not entry(parameters()).needs_objective


@pytest.mark.parametrize("case", entries(needs_gradients_only, with_implementations=True))
def test_step_is_noop_when_params_have_no_grad(case):
    """Parameters that require none, as long as nothing but gradients is asked of them; from samples, by a closure."""
    weights = [p.requires_grad_(False) for p in Problem().parameters]
    optimizer = case(weights)
    before = [p.clone() for p in weights]
    for sample in range(max(1, optimizer.mc_samples)):
        with optimizer.sampled_params(sample):
            pass
    optimizer.step()
    assert float(optimizer.step(lambda: torch.tensor([1.0]))) == 1
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    assert all(torch.equal(p, start) for p, start in zip(weights, before, strict=True))


def has_one_sample(entry):
    return needs_gradients_only(entry) and entry(parameters()).mc_samples <= 1


@pytest.mark.parametrize("case", entries(has_one_sample, with_implementations=True))
def test_a_step_without_gradients_is_no_step(case):
    """Gradients of None, after a sample. Of several samples each must have one: ``test_samples.py``."""
    problem = Problem()
    optimizer = case(problem.parameters)
    before = [p.detach().clone() for p in problem.parameters]
    problem.step_as_torch_does(optimizer, backward=False)
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    for p, start in zip(problem.parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), start, rtol=1e-6, atol=1e-6)


@every_optimizer
@pytest.mark.parametrize("alone", [False, True])
def test_a_parameter_without_elements(case, alone):
    """Beside others, and as a group of its own."""
    problem = Problem()
    weights = problem.parameters
    problem.model.nothing = nn.Parameter(torch.zeros(0, 2))
    groups = [{"params": weights}, {"params": [problem.model.nothing]}]
    optimizer = case(groups if alone else [problem.model.nothing, *weights])
    before = problem.loss()
    problem.train(optimizer, 5)
    assert went_right(case, before, problem.loss())


@every_optimizer
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(case, to_none):
    problem, optimizer = trained(case)
    problem.objective()
    optimizer.zero_grad(set_to_none=to_none)
    for p in problem.parameters:
        assert p.grad is None if to_none else not p.grad.any()
    problem.train(optimizer, 1)


# -- parameters ------------------------------------------------------------------------------------------------------


@every_input
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_mixed_device_dtype(case, other):
    """As two groups; each parameter moves, and keeps its precision. (Two devices: test_cuda.py.)"""
    problem = Problem()
    problem.model.bias = nn.Parameter(problem.model.bias.detach().to(other))
    weight, bias = problem.parameters
    groups = [{"params": [weight]}, {"params": [bias]}]
    full = case.info.name in FULL or case.kwargs.get("structure") == "full"
    if full and other is torch.float64:
        with pytest.raises(ValueError, match=r"One covariance .* one precision, but there is .*diagonal optimizer"):
            case(groups)
        return
    optimizer = case(groups, lr=0.2)
    before = [p.detach().clone() for p in problem.parameters]
    problem.train(optimizer, 3)
    assert [weight.dtype, bias.dtype] == [torch.float32, other]
    assert all(not torch.equal(p, start) for p, start in zip(problem.parameters, before, strict=True))


@every_optimizer
def test_a_parameter_given_twice_is_one(case):
    """With torch's warning, which test_errors looks for."""
    once, _ = trained(case)
    twice = Problem()
    weight, bias = twice.parameters
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = case([weight, bias, weight, bias])
    assert len(optimizer.param_groups[0]["params"]) == 2
    twice.train(optimizer, 3)
    once.same_weights(twice)


def test_what_goes_with_a_parameter_given_twice_is_one_too():
    problem = Problem()
    weight, bias = problem.parameters
    means = [torch.ones_like(weight), torch.zeros_like(bias), torch.ones_like(weight)]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = TABLE[0].build([("w", weight), ("b", bias), ("w", weight)], num_data=10, prior_mean=means)
    group = optimizer.param_groups[0]
    assert group["param_names"] == ["w", "b"]
    assert [tuple(mean.shape) for mean in group["prior_mean"]] == [(4, 3), (4,)]


# -- arguments -------------------------------------------------------------------------------------------------------

ERRORS = [
    (info, number) for info in DATABASE for number in range(len(info.optim_error_inputs_func(DEVICE, torch.float32)))
]


def build(info, params, kwargs):
    return info.optim_cls(params, **({"num_data": NUM_DATA} | kwargs))


@pytest.mark.parametrize(("info", "number"), ERRORS, ids=lambda value: getattr(value, "name", value))
def test_errors(info, number):
    """Also as an entry of a group, where it is an argument; our own messages end with a remedy, a full sentence."""
    error = info.optim_error_inputs_func(DEVICE, torch.float32)[number]
    assert error.error_on is CONSTRUCTION
    params, kwargs = error.optimizer_error_input.params, error.optimizer_error_input.kwargs
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            build(info, params, kwargs)
        return
    with pytest.raises(error.error_type, match=error.error_regex) as caught:
        build(info, params, kwargs)
    if str(caught.value).startswith("Invalid "):
        assert str(caught.value).rstrip().endswith((".", ")"))
        with pytest.raises(error.error_type, match=error.error_regex):
            build(info, [{"params": params, **kwargs}], {})


@every_optimizer
class TestParametersOfAllKinds:
    def test_a_group_that_is_no_dict(self, case):
        with pytest.raises(TypeError, match="must be a dict"):
            case(parameters()).add_param_group(parameters())

    def test_a_group_without_names_beside_one_with_names(self, case):
        weight, bias = parameters()
        optimizer = case([("weight", weight)])
        with pytest.raises(ValueError, match="cannot add param group without names"):
            optimizer.add_param_group({"params": [bias]})
        assert len(optimizer.param_groups) == 1

    def test_a_generator_is_fine(self, case):
        weights = parameters()
        optimizer = case(p for p in weights)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in weights]


@every_implementation
def test_optimizer_can_be_printed(case):
    _, optimizer = trained(case, steps=1, lr=0.05)
    text = repr(optimizer)
    assert case.info.name in text
    assert "Parameter Group 0" in text
    assert "lr: 0.05" in text
