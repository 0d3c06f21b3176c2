"""Samples: what is in the weights when, errors of use, exceptions, and evaluation without a trace."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.harness import assert_same_run, backward, everything, make_batch, make_model, train
from tests.table import cases
from vprop import Vprop, noise
from vprop.optim.sampling import Sampling
from vprop.structures import written


def weights_of(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def sample_backward(optimizer, model):
    for sample in range(max(1, optimizer.mc_samples)):
        with optimizer.sampled_params(sample):
            backward(model, [make_batch()])


@pytest.mark.parametrize("case", cases(any_loop=True))
def test_re_entering_before_the_step_gives_the_same_draw_and_the_step_a_new_one(case):
    model = make_model()
    optimizer = case(model.parameters())
    seen = []
    for _ in range(2):
        for _ in range(2):
            with optimizer.sampled_params():
                seen.append(weights_of(model))
        optimizer.discard_samples()
        optimizer.zero_grad()
        sample_backward(optimizer, model)
        optimizer.step()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-6, atol=1e-7)
    if case.mc_samples > 0:
        assert (seen[0] - seen[2]).abs().max() > 1e-2


def test_a_sample_has_the_posteriors_distribution():
    """θ = μ + σε with exactly the ε of the documented address."""
    model, optimizer = train(Vprop, num_data=100, steps=3)
    posterior = optimizer.posterior(model)
    with optimizer.sampled_params():
        for number, (name, p) in enumerate(model.named_parameters()):
            eps = noise.normal(0, p.numel(), noise.Draw(0, number, step=3)).view(p.shape)
            expected = posterior.mean[name] + posterior.variance[name].sqrt() * eps
            torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)


def test_evaluation_under_inference_mode_before_the_first_step():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    with torch.inference_mode(), optimizer.sampled_params():
        model(make_batch()[0])
    train(Vprop, model=model, optimizer=optimizer, steps=2)
    assert not optimizer.state[model[0].weight]["hess"].is_inference()


def test_antithetic_pairs_mirror_each_other():
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100, mc_samples=4, antithetic=True)
    mean, seen = weights_of(model), []
    for sample in range(4):
        with optimizer.sampled_params(sample):
            seen.append(weights_of(model) - mean)
            backward(model, [make_batch()])
    torch.testing.assert_close(seen[0], -seen[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen[2], -seen[3], rtol=1e-4, atol=1e-6)
    assert (seen[0] - seen[2]).abs().max() > 1e-2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("case", cases(any_loop=True))
def test_an_exception_inside_a_sample_leaves_the_mean_and_a_usable_optimizer(case, error):
    model, optimizer = train(case, steps=2)
    before = weights_of(model)

    def closure():
        backward(model, [make_batch()])
        raise error("in the middle")

    def run_in_sample(trial):
        if trial == "closure":
            optimizer.step(closure)
        else:
            with optimizer.sampled_params(train=trial == "context"):
                closure()

    for trial in ("context", "closure", "evaluation"):
        with pytest.raises(error, match="in the middle"):
            run_in_sample(trial)
        torch.testing.assert_close(weights_of(model), before, rtol=1e-6, atol=1e-6)
    optimizer.zero_grad()
    undisturbed = train(case, steps=4)
    train(case, model=model, optimizer=optimizer, first_step=2, steps=2)
    assert_same_run(undisturbed, (model, optimizer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entering", [True, False])
def test_an_interrupt_while_a_sample_is_written_or_taken_out(monkeypatch, entering):
    """Ctrl-C half-way through the parameters: the written ones are taken out again, the others stay."""
    monkeypatch.setattr(written, "KEPT_ELEMENTS", 0)  # as for large models, whose noise is generated twice
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100, foreach=False)
    before, generate, calls = weights_of(model), noise.normals_like, []

    def interrupted(parameters, draws, **options):
        calls.append(parameters)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(parameters, draws, **options)

    if entering:
        monkeypatch.setattr(noise, "normals_like", interrupted)
    with pytest.raises(KeyboardInterrupt), optimizer.sampled_params():
        monkeypatch.setattr(noise, "normals_like", interrupted)
    assert len(calls) >= 3
    with optimizer.sampled_params():
        pass
    torch.testing.assert_close(weights_of(model), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("train", "method"), [(True, "put_mean_back"), (False, "end_evaluation")])
def test_an_interrupt_at_the_end_of_a_block_does_not_leave_the_sample_active(monkeypatch, train, method):
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=100)
    before, calls, end = weights_of(model), [], getattr(Sampling, method)

    def interrupted(sampling):
        calls.append(sampling)
        if len(calls) == 1:
            raise KeyboardInterrupt
        end(sampling)

    with pytest.raises(KeyboardInterrupt), optimizer.sampled_params(train=train):
        monkeypatch.setattr(Sampling, method, interrupted)
    torch.testing.assert_close(weights_of(model), before, rtol=1e-5, atol=1e-6)
    optimizer.discard_samples()  # an error inside of a sample


class TestErrorsOfUse:
    @pytest.mark.parametrize("case", cases())
    @pytest.mark.parametrize(
        "what", ["step", "sampled_params", "evaluation", "posterior", "discard_samples", "load_state_dict"]
    )
    def test_inside_a_sample(self, case, what):
        model = make_model()
        optimizer = case(model.parameters())
        calls = {
            "step": optimizer.step,
            "sampled_params": lambda: optimizer.sampled_params().__enter__(),
            "evaluation": lambda: optimizer.sampled_params(train=False).__enter__(),
            "posterior": lambda: optimizer.posterior(model),
            "discard_samples": optimizer.discard_samples,
            "load_state_dict": lambda: optimizer.load_state_dict(optimizer.state_dict()),
        }
        before = weights_of(model)
        with optimizer.sampled_params():
            sampled = weights_of(model)
            with pytest.raises(RuntimeError, match=r"inside an active sample: .*Leave the .*sampled_params\(\)"):
                calls[what]()
            assert torch.equal(weights_of(model), sampled)
        torch.testing.assert_close(weights_of(model), before, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("case", [case for case in cases(any_loop=True) if case.values[0].mc_samples > 0])
    def test_step_without_a_sample(self, case):
        model = make_model()
        optimizer = case(model.parameters())
        backward(model, [make_batch()])
        with pytest.raises(RuntimeError, match=r"step\(\) without a sample: mc_samples=\d.*attach.*mc_samples=0"):
            optimizer.step()

    @pytest.mark.parametrize("case", [case for case in cases(any_loop=True) if case.values[0].mc_samples > 1])
    def test_step_after_too_few_samples(self, case):
        model = make_model()
        optimizer = case(model.parameters())
        with optimizer.sampled_params(0):
            backward(model, [make_batch()])
        with pytest.raises(RuntimeError, match=r"step\(\) after 1 of mc_samples=\d samples\..* k = 0…\d"):
            optimizer.step()

    def test_samples_out_of_order(self):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100, mc_samples=3)
        with pytest.raises(RuntimeError, match=r"sampled_params\(1\): sample 0 of this step is due"):
            optimizer.sampled_params(1).__enter__()
        for sample in (0, 1):
            with optimizer.sampled_params(sample):
                backward(model, [make_batch()])
        with pytest.raises(RuntimeError, match=r"sampled_params\(0\): sample 1 .* all micro-batches of one sample"):
            optimizer.sampled_params(0).__enter__()

    def test_a_gradient_thrown_away_between_samples(self):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100, mc_samples=2)
        with optimizer.sampled_params(0):
            backward(model, [make_batch()])
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"Sample 0 has no gradient\..*optimizer\.zero_grad\(\)"):
            optimizer.sampled_params(1).__enter__()

    def test_copying_inside_a_sample(self):
        optimizer = Vprop(make_model().parameters(), num_data=100)
        with optimizer.sampled_params(), pytest.raises(RuntimeError, match=r"cannot be copied .*discard_samples\(\)"):
            copy.deepcopy(optimizer)

    @pytest.mark.parametrize(("centered", "antithetic"), [(True, True), (True, False), (False, True)])
    def test_groups_edited_into_what_cannot_work(self, centered, antithetic):
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100, mc_samples=2, centered=centered, antithetic=antithetic)
        optimizer.param_groups[0]["mc_samples"] = 1
        with pytest.raises(ValueError, match=r"Invalid mc_samples=1: must be >= 2 when"):
            optimizer.step(lambda: backward(model, [make_batch()]))

    @pytest.mark.parametrize("mc_samples", [0, 1, 2])
    def test_sample_number_out_of_range(self, mc_samples):
        optimizer = Vprop(make_model().parameters(), num_data=100, mc_samples=mc_samples)
        last = max(1, mc_samples) - 1
        with pytest.raises(ValueError, match=rf"Invalid sample=5: must be in 0…{last} with mc_samples={mc_samples}"):
            optimizer.sampled_params(5).__enter__()
        with pytest.raises(ValueError, match=r"Invalid sample=1: must be left out with train=False"):
            optimizer.sampled_params(1, train=False).__enter__()

    def test_different_mc_samples_in_two_groups(self):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "mc_samples": k} for k in (1, 2)]
        with pytest.raises(ValueError, match=r"Invalid mc_samples=\[1, 2\]: must be the same in all parameter groups"):
            Vprop(groups, num_data=100)

    def test_backward_after_the_block_is_an_error_of_autograd(self):
        """The weights have changed since the forward; torch notices, because the change is an ordinary one."""
        model = make_model()
        optimizer = Vprop(model.parameters(), num_data=100)
        x, y = make_batch()
        with optimizer.sampled_params():
            loss = torch.nn.functional.cross_entropy(model(x), y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("case", cases())
def test_evaluation_leaves_no_trace(case):
    """Not a bit of the weights, the state or the later noise, before, between and after steps."""
    undisturbed = train(case, steps=4)
    model = make_model()
    optimizer = case(model.parameters())
    for step in range(4):
        before, keys = everything(model, optimizer), list(optimizer.state)
        copies = {name: tensor.clone() for name, tensor in before.items()}
        draws = []
        for _ in range(2):
            with optimizer.sampled_params(train=False):
                draws.append(weights_of(model))
        optimizer.posterior(model).predict(make_batch()[0], num_samples=2)
        optimizer.posterior(model).sample()
        assert (draws[0] - draws[1]).abs().max() > 1e-3
        after = everything(model, optimizer)
        assert list(optimizer.state) == keys
        assert after.keys() == copies.keys()
        assert all(torch.equal(after[name], copies[name]) for name in copies)
        train(case, model=model, optimizer=optimizer, first_step=step, steps=1)
    assert_same_run(undisturbed, (model, optimizer))


def test_the_mean_drifts_no_more_than_rounding():
    """2000 samples written and taken out: the weights move by a few float32 roundings of themselves."""
    model = make_model()
    optimizer = Vprop(model.parameters(), num_data=1000)
    before = weights_of(model)
    for _ in range(2000):
        with optimizer.sampled_params():
            pass
    std = float(next(iter(optimizer.posterior(model).variance.values())).sqrt().mean())
    assert (weights_of(model) - before).abs().max() < 0.01 * std


@pytest.mark.parametrize("case", cases())
def test_no_global_random_state_is_touched(case):
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    model, optimizer = train(case, steps=2)
    posterior = optimizer.posterior(model)
    posterior.sample()
    posterior.predict(make_batch()[0])
    assert torch.equal(torch.rand(3), expected)


def test_the_seed_decides():
    first, again, other = train(Vprop, num_data=50), train(Vprop, num_data=50), train(Vprop, num_data=50, seed=1)
    assert_same_run(first, again)
    assert (weights_of(first[0]) - weights_of(other[0])).abs().max() > 1e-4
