"""Several structures in one optimizer: a full last layer, an eigenbasis for hidden layers, a diagonal for the rest."""

import copy
import math

import pytest
import torch
from torch import nn

import vprop
from tests.harness import LOOPS, assert_same_run, make_batch, make_model, train
from vprop.posterior import ComposedPosterior, DiagonalPosterior

FULL = {"structure": "full", "preconditioner": "precision", "noise_limit": math.inf, "lr": 0.05}
COMMON = {"lr": 0.01, "num_data": 200, "batch_size": 12, "basis_every": 2}


def groups_of(model):
    """Of make_model(): Linear(4, 8), Tanh, Linear(8, 3)."""
    hidden, last = model[0], model[2]
    return [
        {"params": [hidden.weight], "structure": "eigenbasis"},
        {"params": [hidden.bias]},
        {"params": [last.weight, last.bias], **FULL},
    ]


def make(model=None, **arguments):
    model = make_model() if model is None else model
    return model, vprop.Vario(groups_of(model), **(COMMON | arguments))


def test_the_loops_agree():
    runs = []
    for loop in LOOPS:
        model, optimizer = make()
        runs.append(train(None, loop, model=model, optimizer=optimizer))
    assert_same_run(runs[0], runs[1])
    assert_same_run(runs[0], runs[2])


def test_states_are_those_of_the_structures():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer)
    keys = [set(optimizer.state[p]) for p in model.parameters()]
    assert "left_basis" in keys[0]
    assert "left_basis" not in keys[1]
    assert optimizer.state[model[2].weight]["hess"].shape == (27, 27)
    assert "hess" not in keys[3]


def test_one_step_by_parts():
    """Each group steps as in an optimizer of its own over that group, with the gradients of the whole."""
    model, optimizer = make(seed=4)
    parts = copy.deepcopy(model)
    x, y = make_batch()
    with optimizer.sampled_params():
        nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for i, group in enumerate(groups_of(parts)):
        # The noise of a parameter is addressed by its number: frozen ones before it keep the place.
        frozen = [nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(i)]
        params = [*frozen, *group.pop("params")]
        alone = vprop.Vario(params, **(COMMON | {"seed": 4} | group))
        with alone.sampled_params():
            for p, q in zip(parts.parameters(), model.parameters(), strict=True):
                p.grad = q.grad.clone()
        alone.step()
    for p, q in zip(model.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_checkpoint_goes_on_exactly():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=3)
    other, resumed = make(copy.deepcopy(model), seed=9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(None, model=model, optimizer=optimizer, steps=4, first_step=3)
    train(None, model=other, optimizer=resumed, steps=4, first_step=3)
    assert_same_run((model, optimizer), (other, resumed))


def test_copies_keep_their_structures():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=2)
    both = copy.deepcopy((model, optimizer))
    train(None, model=both[0], optimizer=both[1], steps=3, first_step=2)
    train(None, model=model, optimizer=optimizer, steps=3, first_step=2)
    assert_same_run((model, optimizer), both)


def test_a_group_that_joins_with_another_structure():
    model = make_model()
    optimizer = vprop.Vario(model[0].parameters(), **COMMON)
    train(None, model=model, optimizer=optimizer, steps=2)
    optimizer.add_param_group({"params": model[2].parameters(), "structure": "eigenbasis"})
    train(None, model=model, optimizer=optimizer, steps=2, first_step=2)
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [4, 4, 2, 2]
    assert "left_basis" in optimizer.state[model[2].weight]


def test_a_group_that_is_refused_leaves_all_as_it_was():
    model = make_model()
    optimizer = vprop.Vario(model[0].parameters(), **COMMON)
    structure = optimizer._structure
    with pytest.raises(ValueError, match="Invalid preconditioner='root': must be 'precision' for a full covariance"):
        optimizer.add_param_group({"params": model[2].parameters(), "structure": "full"})
    assert len(optimizer.param_groups) == 1
    assert optimizer._structure is structure
    train(None, model=model, optimizer=optimizer, steps=1)


def test_the_structure_of_a_state_stays():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=1)
    optimizer.param_groups[0]["structure"] = "diagonal"
    with pytest.raises(ValueError, match="Invalid structure='diagonal': must be 'eigenbasis', as it was when"):
        train(None, model=model, optimizer=optimizer, steps=1)
    train(None, model=model, optimizer=optimizer, steps=1)  # as it was


def test_before_the_first_step_it_may_be_changed():
    model, optimizer = make()
    optimizer.param_groups[1]["structure"] = "eigenbasis"
    train(None, model=model, optimizer=optimizer, steps=1)
    assert "left_basis" in optimizer.state[model[0].bias]


# -- the posterior -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    model, optimizer = make()
    train(None, model=model, optimizer=optimizer, steps=20)
    return model, optimizer, optimizer.posterior(model, likelihood="categorical")


def test_the_posterior_is_that_of_its_parts(trained):
    model, optimizer, posterior = trained
    assert list(posterior.mean) == [name for name, _ in model.named_parameters()]
    assert sorted(posterior.parts) == ["diagonal", "eigenbasis", "full"]
    weights = posterior.sample(seed=1)
    for question in (lambda q: q.kl(), lambda q: q.entropy(), lambda q: q.log_prob(weights)):
        total = sum(question(part) for part in posterior.parts.values())
        torch.testing.assert_close(question(posterior), total)
    for marginal, (name, p) in zip(optimizer.marginals(), model.named_parameters(), strict=True):
        assert marginal.parameter is p
        torch.testing.assert_close(marginal.variance.float(), posterior.variance[name].float())
    assert posterior.ess == 200.0
    x, y = make_batch()
    assert posterior.predict(x, 3).probs.shape == (len(x), 3)
    assert torch.isfinite(posterior.elbo(vprop.Objective(model, nn.functional.cross_entropy, x, y), 4))


def test_a_posterior_of_nothing_and_of_another_model_is_refused():
    model, optimizer = make()
    with pytest.raises(ValueError, match="4 of the optimizer's parameters are not parameters of this model"):
        optimizer.posterior(make_model())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="none of the optimizer's parameters requires a gradient"):
        optimizer.posterior(model)


def test_the_parts_draw_different_noise(trained):
    """Each part numbers its parameters from 0."""
    _, _, posterior = trained
    flat = []
    first = [next(iter(part.mean)) for part in posterior.parts.values()]
    for seed in range(200):
        drawn = posterior.sample(seed)
        flat.append(torch.stack([(drawn[name] - posterior.mean[name]).flatten()[0] for name in first]))
    correlations = torch.corrcoef(torch.stack(flat).T)
    # 200 independent pairs: a standard error of 0.07; five of them have a false-alarm rate below 10⁻⁵.
    assert float((correlations - torch.eye(3)).abs().max()) < 0.36


def test_it_is_saved_and_loaded(trained, tmp_path):
    model, _, posterior = trained
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = vprop.load_posterior(tmp_path / "posterior.safetensors", model)
    assert type(loaded) is ComposedPosterior
    x, _ = make_batch()
    assert torch.equal(loaded.predict(x, 3).samples, posterior.predict(x, 3).samples)
    torch.testing.assert_close(loaded.kl(), posterior.kl(), rtol=0, atol=0)


def test_what_it_cannot_do(trained):
    posterior = trained[2]
    with pytest.raises(TypeError, match=r"as_prior\(\): a ComposedPosterior has parts of different structures, \['d"):
        posterior.as_prior()
    with pytest.raises(TypeError, match=r"a ComposedPosterior cannot be merged.*Merge \[p.as_diagonal\(\)"):
        vprop.merge([posterior, posterior])
    with pytest.raises(TypeError, match=r"prune\(\).*posterior.as_diagonal\(\).prune\(...\)"):
        posterior.prune(0.5)


def test_the_nearest_diagonal_is_that_of_each_part(trained):
    model, _, posterior = trained
    diagonal = posterior.as_diagonal()
    assert type(diagonal) is DiagonalPosterior
    assert list(diagonal.mean) == list(posterior.mean)
    own = [part.as_diagonal() for part in posterior.parts.values()]
    for part in own:
        for name, variance in part.variance.items():
            assert torch.equal(diagonal.variance[name], variance)
    torch.testing.assert_close(diagonal.entropy(), sum(part.entropy() for part in own))
    assert diagonal.entropy() < posterior.entropy()
    assert diagonal.ess == posterior.ess
    following = vprop.Vprop(model.parameters(), num_data=10, **diagonal.as_prior())
    assert torch.equal(following.param_groups[0]["prior_mean"][0], posterior.mean["0.weight"])
    assert type(vprop.merge([diagonal, diagonal])) is DiagonalPosterior
    diagonal.prune(0.5)


def test_a_part_that_has_no_nearest_diagonal_is_named(trained):
    posterior = copy.copy(trained[2])
    posterior.parts = posterior.parts | {"full": vprop.Mixture([posterior.parts["full"]])}
    with pytest.raises(TypeError, match=r"as_diagonal\(\): the part Mixture has no as_diagonal\(\)"):
        posterior.as_diagonal()
