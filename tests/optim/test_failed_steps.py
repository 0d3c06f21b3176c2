"""A step that fails changes nothing, and leaves nothing behind that the next one would take in."""

import pytest
import torch
from torch import nn

import vprop
from tests.structures.test_edited_groups import ARGUMENTS

CASES = [
    (vprop.Vprop, {}),
    (vprop.Vprop, {"fused": False}),
    (vprop.Vprop, {"structure": "eigenbasis"}),
    (vprop.Vprop, {"structure": "eigenbasis", "fused": False}),
    (vprop.IVON, {}),
    (vprop.IVON, {"structure": "eigenbasis"}),
    (vprop.IVON, {"structure": "eigenbasis", "fused": False}),
    (vprop.Vprop, {"structure": "full"}),
]
IDS = ["-".join([kind.__name__, *map(str, arguments.values())]) for kind, arguments in CASES]


def make(kind, **arguments):
    """Two parameters: the first with plain gradients, the second one with sparse ones where we say so."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5, 2))]
    return params, kind(params, **(ARGUMENTS | arguments))


def set_gradients(params, value, sparse=False):
    for p in params:
        p.grad = torch.full_like(p, value)
    if sparse:
        params[-1].grad = params[-1].grad.to_sparse()


def one_step(params, optimizer, value, samples=1):
    for i in range(samples):
        with optimizer.sampled_params(i):
            set_gradients(params, value + i)
    optimizer.step()


def require_same(params, optimizer, others, other):
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(value, other.state[q][key]) for key, value in optimizer.state[p].items())


@pytest.mark.parametrize(("kind", "arguments"), CASES, ids=IDS)
def test_the_next_step_is_as_if_it_had_not_been(kind, arguments):
    (params, optimizer), (others, other) = make(kind, **arguments), make(kind, **arguments)
    with optimizer.sampled_params():
        set_gradients(params, 5.0, sparse=True)
    with pytest.raises(RuntimeError, match="has a sparse gradient"):
        optimizer.step()
    optimizer.zero_grad()
    one_step(params, optimizer, 1.0)
    one_step(others, other, 1.0)
    require_same(params, optimizer, others, other)


@pytest.mark.parametrize(("kind", "arguments"), CASES, ids=IDS)
def test_the_step_can_be_made_with_better_gradients(kind, arguments):
    (params, optimizer), (others, other) = make(kind, **arguments), make(kind, **arguments)
    with optimizer.sampled_params():
        set_gradients(params, 5.0, sparse=True)
    with pytest.raises(RuntimeError, match="has a sparse gradient"):
        optimizer.step()
    set_gradients(params, 1.0)
    optimizer.step()
    one_step(others, other, 1.0)
    require_same(params, optimizer, others, other)


@pytest.mark.parametrize(("kind", "arguments"), CASES, ids=IDS)
@pytest.mark.parametrize("fails", [0, 1])
def test_a_step_of_several_samples_starts_over(kind, arguments, fails):
    arguments = arguments | {"mc_samples": 2}
    (params, optimizer), (others, other) = make(kind, **arguments), make(kind, **arguments)
    with optimizer.sampled_params(0):
        set_gradients(params, 5.0, sparse=fails == 0)
    with pytest.raises(RuntimeError, match="has a sparse gradient"):  # noqa: PT012 (one of the two)
        with optimizer.sampled_params(1):
            set_gradients(params, 7.0, sparse=fails == 1)
        optimizer.step()
    optimizer.zero_grad()
    one_step(params, optimizer, 1.0, samples=2)
    one_step(others, other, 1.0, samples=2)
    require_same(params, optimizer, others, other)


def test_zero_grad_drops_samples_that_it_cannot_fold():
    (params, optimizer), (others, other) = (make(vprop.IVON, structure="eigenbasis", mc_samples=2) for _ in range(2))
    with optimizer.sampled_params(0):
        set_gradients(params, 5.0, sparse=True)
    with pytest.raises(RuntimeError, match="has a sparse gradient"):
        optimizer.zero_grad()
    optimizer.zero_grad()
    one_step(params, optimizer, 1.0, samples=2)
    one_step(others, other, 1.0, samples=2)
    require_same(params, optimizer, others, other)


def test_a_missing_sample_is_no_failure():
    """The step says that a sample is missing; the one that is there counts."""
    (params, optimizer), (others, other) = (make(vprop.Vprop, fused=False, mc_samples=2) for _ in range(2))
    with optimizer.sampled_params(0):
        set_gradients(params, 1.0)
    with pytest.raises(RuntimeError, match="sample"):
        optimizer.step()
    with optimizer.sampled_params(1):
        set_gradients(params, 2.0)
    optimizer.step()
    one_step(others, other, 1.0, samples=2)
    require_same(params, optimizer, others, other)


@pytest.mark.parametrize(
    "structures", [("eigenbasis", "diagonal"), ("full", "diagonal"), ("full", "eigenbasis"), ("diagonal", "diagonal")]
)
@pytest.mark.parametrize("sparse_first", [True, False])
def test_no_part_of_a_composition_is_updated_when_another_cannot_be(structures, sparse_first):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5, 2))]
    groups = [{"params": [p], "structure": name} for p, name in zip(params, structures, strict=True)]
    optimizer = vprop.Vprop(groups, **ARGUMENTS)
    one_step(params, optimizer, 1.0)
    before = [p.detach().clone() for p in params]
    states = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in params]
    with optimizer.sampled_params():
        set_gradients(params[::-1] if sparse_first else params, 2.0, sparse=True)
    with pytest.raises(RuntimeError, match=f"Parameter {0 if sparse_first else 1} has a sparse gradient"):
        optimizer.step()
    for p, old, state in zip(params, before, states, strict=True):
        torch.testing.assert_close(p.detach(), old, rtol=1e-6, atol=1e-6)  # a sample was in and out
        assert all(torch.equal(value, optimizer.state[p][key]) for key, value in state.items())
    one_step(params, optimizer, 1.0)
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2]


@pytest.mark.parametrize("attached", [True, False])
def test_a_refused_closure_leaves_no_sample_behind_so_that_an_edit_helps(attached):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return model, vprop.Vario(model.parameters(), num_data=8, batch_size="objective")

    def closure_of(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2)).square().mean()
            loss.backward()
            return loss

        return closure

    (model, optimizer), (other_model, other) = make(), make()
    if attached:
        optimizer.attach(model)
        closure_of(model, optimizer)()
    else:
        with optimizer.sampled_params():
            closure_of(model, optimizer)()
    with pytest.raises(ValueError, match='batch_size="objective" needs'):
        optimizer.step(closure_of(model, optimizer))
    for one in (optimizer, other):
        one.param_groups[0]["batch_size"] = 4
    optimizer.step(closure_of(model, optimizer))
    other.step(closure_of(other_model, other))
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)  # a sample was in and out
