"""torch's generic optimizer checks over every optimizer of the table: training. (State: test_torch_generic_state.py.)

What torch asks of its own optimizers and ours answer differently, each with a test below that says how:

- complex parameters are refused, and sparse ones and sparse gradients: ``test_parameters.py``;
- ``differentiable`` does not exist: the steps write samples into the weights, which no graph can go through;
- ``weight_decay`` of a group is refused, ``prior_precision`` does its work;
- zero gradients are a step all the same: the prior pulls, and the curvature averages. Where the prior's mean is at the
  weights the mean stays;
- a step without any gradient needs a sample first, or a closure;
- a tensor as ``lr`` needs no ``capturable``, also with ``foreach``;
- ``foreach`` and ``fused`` are choices of speed; kernels round differently, so runs agree to rounding;
- one covariance over all weights (VON, VONG, Newton) needs them in one precision.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.optim.generic import EVERY_CASE, EVERY_OPTIMIZER, SCHEDULERS, Problem, nothing, squared_error, trained
from tests.table import TABLE, cases

FULL = ("VON", "VONG", "Newton")

every_case = pytest.mark.parametrize("case", EVERY_CASE)
every_optimizer = pytest.mark.parametrize("case", EVERY_OPTIMIZER)

# -- the direction of the steps --------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_loss_goes_down(case, contiguous):
    problem = Problem(contiguous=contiguous)
    optimizer = case(problem.parameters)
    before = problem.loss()
    problem.train(optimizer, 20)
    assert problem.loss() < before


@every_optimizer
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_loss_goes_down_with_schedulers(case, scheduler):
    problem = Problem()
    optimizer = case(problem.parameters)
    before = problem.loss()
    problem.train(optimizer, 20, SCHEDULERS[scheduler](optimizer))
    assert problem.loss() < before


@every_case
def test_maximize_goes_up(case):
    problem = Problem()
    optimizer = case(problem.parameters, maximize=True)
    before = problem.loss()
    problem.train(optimizer, 5)
    assert problem.loss() > before


@pytest.mark.parametrize("case", [c for c in EVERY_CASE if "fisher" not in c.id])  # its labels have no negative
def test_maximize_is_minimizing_the_negative(case):
    problem, other = Problem(), Problem()
    problem.train(case(problem.parameters, maximize=True), 3)
    other.objective = other.objective_of(lambda *pair: -squared_error(*pair))
    other.train(case(other.parameters), 3)
    problem.same_weights(other, rtol=1e-5, atol=1e-6)


@every_optimizer
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_groups_with_their_own_lr_and_schedulers(case, scheduler):
    problem = Problem()
    weight, bias = problem.parameters
    optimizer = case([{"params": [weight]}, {"params": [bias], "lr": 0.01}])
    schedulers = SCHEDULERS[scheduler](optimizer)
    before = problem.loss()
    problem.train(optimizer, 20, schedulers)
    assert problem.loss() < before
    assert float(optimizer.param_groups[1]["lr"]) == pytest.approx(float(optimizer.param_groups[0]["lr"]) / 5)


@every_case
def test_the_lr_of_a_group_is_its_own(case):
    """A group with lr=0 stays; the other moves as it would alone with its lr."""
    problem = Problem()
    weight, bias = problem.parameters
    optimizer = case([{"params": [weight], "lr": 0.0}, {"params": [bias]}])
    before = [p.detach().clone() for p in problem.parameters]
    problem.train(optimizer, 3)
    torch.testing.assert_close(weight.detach(), before[0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(bias, before[1], atol=1e-3)


@every_case
def test_the_prior_of_a_group_is_its_own_as_weight_decay_is(case):
    """Without any gradient of the data the prior alone moves the weights: to zero, or nowhere, where it is at them."""
    problem = Problem(dtype=torch.float64)
    weight, bias = problem.parameters
    groups = [{"params": [weight], "prior_precision": 500.0}, {"params": [bias], "prior_mean": [bias.detach().clone()]}]
    optimizer = case(groups)
    before = [p.detach().norm() for p in problem.parameters]
    for _ in range(3):
        optimizer.step(problem.objective_of(nothing))
    shrunk = [float(p.detach().norm() / norm) for p, norm in zip(problem.parameters, before, strict=True)]
    assert shrunk[0] < 0.99
    assert shrunk[1] == pytest.approx(1, abs=1e-9)


# -- lr --------------------------------------------------------------------------------------------------------------

SHAPES = {"()": (), "(1,)": (1,)}


@every_case
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_as_lr_is_a_number(case, shape):
    numbers, tensors = Problem(), Problem()
    lr = torch.full(SHAPES[shape], 0.05, dtype=torch.float64)
    first, second = case(numbers.parameters, lr=0.05), case(tensors.parameters, lr=lr)
    for problem, optimizer in ((numbers, first), (tensors, second)):
        problem.train(optimizer, 2, SCHEDULERS["StepLR"](optimizer))
    numbers.same_weights(tensors, rtol=1e-6, atol=1e-7)


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


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("case", cases())
def test_foreach_needs_no_capturable_for_a_tensor_as_lr(case, foreach):
    numbers, tensors = Problem(), Problem()
    numbers.train(case(numbers.parameters, foreach=foreach), 2)
    tensors.train(case(tensors.parameters, foreach=foreach, lr=torch.tensor(0.05)), 2)
    numbers.same_weights(tensors, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", cases())
def test_the_implementations_agree(case):
    runs = {}
    for foreach in (False, True, None):
        runs[foreach] = Problem(), None
        runs[foreach][0].train(case(runs[foreach][0].parameters, foreach=foreach), 5)
    for foreach in (True, None):
        runs[False][0].same_weights(runs[foreach][0], rtol=1e-4, atol=1e-5)


# -- gradients that are not there ------------------------------------------------------------------------------------


@every_case
def test_zero_gradients_leave_the_mean_where_the_prior_does(case):
    problem = Problem(dtype=torch.float64)
    before = [p.detach().clone() for p in problem.parameters]
    optimizer = case(problem.parameters, prior_mean=before)
    for _ in range(3):
        optimizer.step(problem.objective_of(nothing))
    # To the rounding of a sample put in and taken out again, 1e-16, which Adam (BBVI) divides by its eps of 1e-8.
    for p, start in zip(problem.parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), start, rtol=0.0, atol=1e-7 if case.info.name == "BBVI" else 1e-14)


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_a_step_without_gradients_is_no_step(case):
    """After samples were drawn, and with a closure; gradients of None, and parameters that require none."""
    problem = Problem()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = case([*problem.parameters, frozen])
    before = [p.detach().clone() for p in (*problem.parameters, frozen)]
    if case.mc_samples <= 1:
        with optimizer.sampled_params():
            pass
        optimizer.step()
    assert all(int(state["step"]) == 0 for state in optimizer.state.values())
    for p, start in zip((*problem.parameters, frozen), before, strict=True):
        torch.testing.assert_close(p.detach(), start, rtol=1e-6, atol=1e-6)
    assert torch.equal(frozen, before[-1])


@every_case
@pytest.mark.parametrize("alone", [False, True])
def test_a_parameter_without_elements(case, alone):
    """Beside others, and as a group of its own."""
    problem = Problem()
    problem.model.nothing = nn.Parameter(torch.zeros(0, 2))
    others = [{"params": problem.parameters}, {"params": [problem.model.nothing]}]
    optimizer = case(others if alone else [problem.model.nothing, *problem.parameters])
    before = problem.loss()
    problem.train(optimizer, 5)
    assert problem.loss() < before


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


@every_case
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_two_precisions_in_one_optimizer(case, other):
    """As two groups; each parameter moves, and keeps its precision."""
    problem = Problem()
    problem.model.bias = nn.Parameter(problem.model.bias.detach().to(other))
    weight, bias = problem.parameters
    groups = [{"params": [weight]}, {"params": [bias]}]
    if case.info.name in FULL and other is torch.float64:
        with pytest.raises(ValueError, match=r"One covariance .* one precision, but there is .*diagonal optimizer"):
            case(groups)
        return
    optimizer = case(groups)
    before = [p.detach().clone() for p in problem.parameters]
    problem.train(optimizer, 3)
    assert [weight.dtype, bias.dtype] == [torch.float32, other]
    assert all(not torch.equal(p, start) for p, start in zip(problem.parameters, before, strict=True))


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


@every_optimizer
def test_a_parameter_given_twice_is_one_and_torchs_warning(case):
    once, _ = trained(case)
    twice = Problem()
    weight, bias = twice.parameters
    with pytest.warns(UserWarning, match="parameter group with duplicate parameters"):
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


@every_optimizer
class TestErrorsOfAllOptimizers:
    def test_a_bare_tensor(self, case):
        with pytest.raises(TypeError, match="should be an iterable of Tensors or dicts"):
            case(Problem().parameters[0])

    def test_a_set(self, case):
        with pytest.raises(TypeError, match="ordered collections"):
            case([{"params": set(Problem().parameters)}])

    def test_a_group_that_is_no_dict(self, case):
        with pytest.raises(TypeError, match="must be a dict"):
            case(Problem().parameters).add_param_group([nn.Parameter(torch.zeros(1))])

    def test_a_parameter_in_two_groups(self, case):
        weight = Problem().parameters[0]
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            case([{"params": [weight]}, {"params": [weight]}])

    def test_what_is_no_leaf(self, case):
        with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
            case([Problem().parameters[0] * 2])

    def test_what_is_no_tensor(self, case):
        with pytest.raises(TypeError, match="can only optimize Tensors"):
            case([1.0])

    def test_names_of_some(self, case):
        weight, bias = Problem().parameters
        with pytest.raises(ValueError, match="Some param names are missing"):
            case([("weight", weight), bias])
        optimizer = case([("weight", weight)])
        with pytest.raises(ValueError, match="cannot add param group without names"):
            optimizer.add_param_group({"params": [bias]})
        assert len(optimizer.param_groups) == 1

    def test_an_lr_of_two_elements(self, case):
        with pytest.raises(ValueError, match=r"Invalid lr=tensor\(\[0\.1000, 0\.1000\]\): must be"):
            case(Problem().parameters, lr=torch.tensor([0.1, 0.1]))

    def test_differentiable(self, case):
        with pytest.raises(TypeError, match="unexpected keyword argument 'differentiable'"):
            case(Problem().parameters, differentiable=True)

    def test_a_generator_of_parameters_is_fine(self, case):
        problem = Problem()
        optimizer = case(p for p in problem.parameters)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in problem.parameters]


@every_case
def test_it_can_be_printed(case):
    _, optimizer = trained(case, steps=1)
    text = repr(optimizer)
    assert case.info.name in text
    assert "Parameter Group 0" in text
    assert "lr: 0.05" in text


@every_case
def test_momentum_costs_memory_only_where_there_is_some(case):
    """State per weight: a variance, and a momentum if β₁ > 0. BBVI has what its method keeps."""
    _, optimizer = trained(case, steps=1)
    keys = {key for state in optimizer.state.values() for key in state}
    if case.info.name == "BBVI":
        assert "momentum" not in keys
    else:
        assert ("momentum" in keys) == (optimizer.param_groups[0]["betas"][0] > 0)
    assert "mean" not in keys


def test_every_optimizer_of_the_package_is_enrolled():
    """One row enrols an optimizer; this is what notices a missing one."""
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
    assert found == {parameter.values[0].info.name for parameter in EVERY_OPTIMIZER}
