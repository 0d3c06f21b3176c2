"""A structure from outside of the package: what somebody writes who has another idea of a posterior.

``PerTensor`` keeps one variance for each tensor. It is made of public names alone, and what optimizers of the library
can do, ``TensorwiseVprop`` can do.
"""

import io
import math
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch import nn
from typing_extensions import Unpack

import vprop
from vprop.curvature import CurvatureEstimator, SquaredGradient
from vprop.optim.hyperparameters import Shared, not_centered, with_hyperparameters
from vprop.posterior import DiagonalPosterior, GaussianPrior, Posterior
from vprop.structures import MEAN, KeptPlan, Structure, TensorSpec, mean_of

# -- what somebody else writes -----------------------------------------------------------------------------------------


class PerTensorPosterior(Posterior):
    """q = N(μ, σ²I), one σ² for each parameter."""

    structure = "per_tensor"
    sections_by_parameter = ("scale",)

    def __init__(self, model, mean, scale, prior, **rest):
        super().__init__(model, mean, prior, **rest)
        self.scale = scale

    @property
    def variance(self):
        return {name: scale.square().expand_as(self.mean[name]) for name, scale in self.scale.items()}

    def _draw(self, seed, sample, snapshot=0):
        noises = self._noise(seed, sample, snapshot)
        return {name: self.mean[name] + self.scale[name] * eps for name, eps in noises}

    def _normals(self):
        return {name: torch.distributions.Normal(mean, self.scale[name]) for name, mean in self.mean.items()}

    def log_prob(self, weights):
        self._check_names(weights)
        return sum(normal.log_prob(weights[name]).double().sum() for name, normal in self._normals().items())

    def entropy(self):
        return sum(normal.entropy().double().sum() for normal in self._normals().values())

    def kl(self):
        total = 0.0
        for name, normal in self._normals().items():
            prior = torch.distributions.Normal(self.prior.mean[name], self.prior.precision[name].rsqrt())
            total += torch.distributions.kl_divergence(normal, prior).double().sum()
        return total

    def as_prior(self):
        variances = self.variance
        return {
            "prior_mean": [mean.clone() for mean in self.mean.values()],
            "prior_precision": [variances[name].reciprocal() for name in self.mean],
        }

    def _sections(self):
        return {"scale": self.scale}

    @classmethod
    def _from_sections(cls, model, mean, prior, sections, **rest):
        return cls(model, mean, sections["scale"], prior, **rest)


class PerTensor(Structure):
    """State per parameter: ``hess``, one number."""

    state_spec: ClassVar = {"hess": TensorSpec(like_parameter=False, shape=(), needed=True), "mean": MEAN}

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self._folded = {}

    def check_group(self, group):
        super().check_group(group)
        if group["betas"][0] != 0 or not isinstance(group["prior_precision"], float | int):
            raise ValueError(f"{self.optimizer} has no momentum, and one prior precision for all weights of a group.")

    def new_state(self, member):
        dtype = self.state_spec["hess"].dtype_for(member.p)
        hess = torch.full((), member.group["hess_init"], dtype=dtype, device=member.p.device)
        return super().new_state(member) | {"hess": hess}

    def variance(self, member, state):
        return (1 / (member.ess * (state["hess"] + member.damping))).expand_as(member.p)

    def plan(self, sample, evaluation_draw):
        return KeptPlan(
            (member.p, mean_of(member.p, state) + self.variance(member, state).sqrt() * eps)
            for member, state, eps in self.noises(sample, evaluation_draw)
        )

    def fold(self, sample, folded_samples):
        self.fold_gradients(self._folded, folded_samples)

    def forget(self):
        self._folded = {}

    def update(self, plan):
        if plan is not None:
            plan.take_out()
        for member in self.members:
            folded = self._folded.get(member.p)
            if folded is None:
                continue
            state, group = self.state_of(member), member.group
            mean, hess = mean_of(member.p, state), state["hess"]
            new_hess = hess.lerp(member.step.estimator.hess(folded, member.ess).mean(), 1 - group["betas"][1])
            pull = member.damping * (mean - member.prior_mean)
            direction = (folded.grad + pull) / (new_hess + member.damping)
            state["step"] += 1
            if not bool(torch.isfinite(direction).all()):
                self.count_unusable(torch.tensor(member.p.numel(), device=member.p.device))
                continue
            self.write_mean(
                member, state, mean - group["lr"] * direction.clamp(-group["clip_radius"], group["clip_radius"])
            )
            hess.copy_(new_hess)

    def posterior(self, model, **rest):
        model, named, mean, prior, ess = self.snapshot(model)
        scale = {name: self.variance(m, self.peek_state(m)).flatten()[0].sqrt() for name, m in named}
        return PerTensorPosterior(model, mean, scale, prior, ess=ess, **rest)


@with_hyperparameters(centered=not_centered("TensorwiseVprop", "whose curvature is the plain square"))
class TensorwiseVprop(vprop.VariationalOptimizer):
    """Vprop with one variance for each tensor: h ← β₂·h + (1−β₂)·ess·mean over weights of ∇ℓ(θ)²."""

    structure = PerTensor

    def __init__(self, params, lr: float = 0.1, **hyperparameters: Unpack[Shared]) -> None:
        super().__init__(params, {"lr": lr, **hyperparameters})

    def _curvature(self, group) -> CurvatureEstimator:
        return SquaredGradient()


# -- what they get -----------------------------------------------------------------------------------------------------

X = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1


def make(seed=0, dtype=torch.float32, **arguments):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=generator)
    model = model.to(dtype)
    arguments = {"lr": 0.2, "num_data": 32, "betas": (0.0, 0.9)} | arguments
    return model, TensorwiseVprop(model.parameters(), **arguments)


def loss_of(model):
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(X.to(dtype)), Y.to(dtype))


def loss_at_mean(model):
    with torch.no_grad():
        return float(loss_of(model))


def train(model, optimizer, steps, loop="closure"):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    handle = optimizer.attach(model) if loop == "attach" else None
    for _ in range(steps):
        if loop == "closure":
            optimizer.step(closure)
        elif loop == "block":
            for sample in range(optimizer.mc_samples):
                with optimizer.sampled_params(sample):
                    closure()
            optimizer.step()
        else:
            closure()
            optimizer.step()
    if handle is not None:
        handle.remove()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_step_is_the_formula():
    """With a quadratic loss and no sample all is known."""
    weight = nn.Parameter(torch.tensor([1.0, 3.0]))
    optimizer = TensorwiseVprop(
        [weight], lr=0.5, num_data=10, mc_samples=0, betas=(0.0, 0.9), hess_init=1.0, prior_precision=2.0
    )
    (0.5 * weight.square().sum()).backward()
    optimizer.step()
    hess = 0.9 * 1.0 + 0.1 * 10 * (1.0 + 9.0) / 2
    torch.testing.assert_close(optimizer.state[weight]["hess"], torch.tensor(hess))
    expected = torch.tensor([1.0, 3.0]) * (1 - 0.5 * (1 + 0.2) / (hess + 0.2))
    torch.testing.assert_close(weight.detach(), expected)
    [marginal] = optimizer.marginals()
    torch.testing.assert_close(marginal.variance, torch.full((2,), 1 / (10 * (hess + 0.2))))


@pytest.mark.parametrize("arguments", [{}, {"mc_samples": 2, "antithetic": True}], ids=["one_sample", "a_pair"])
def test_the_loops_agree(arguments):
    loops = ["closure", "block"] + ([] if arguments else ["attach"])
    results = []
    for loop in loops:
        model, optimizer = make(**arguments)
        start = loss_at_mean(model)
        train(model, optimizer, 60, loop)
        assert loss_at_mean(model) < 0.3 * start
        results.append(weights_of(model))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_checkpoint_goes_on_exactly(dtype):
    model, optimizer = make(dtype=dtype)
    train(model, optimizer, 7)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 7)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = make(seed=5, dtype=dtype)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, resumed, 7)
    assert torch.equal(weights_of(other), weights_of(model))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[p]["hess"].shape == ()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][key]), key


def test_a_checkpoint_of_another_method_is_refused():
    model, optimizer = make()
    train(model, optimizer, 2)
    diagonal = vprop.Vprop(model.parameters(), num_data=32)
    with pytest.raises(ValueError, match="checkpoint of TensorwiseVprop, the optimizer is Vprop"):
        diagonal.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="checkpoint of Vprop, the optimizer is TensorwiseVprop"):
        optimizer.load_state_dict(diagonal.state_dict())


@pytest.mark.parametrize(
    ("bad", "pattern"),
    [
        (torch.ones(4, 3), r"'hess' of parameter 0 has shape \(4, 3\), must have \(\)"),
        (torch.tensor(math.nan), r"'hess' of parameter 0 holds NaN or infinity"),
        (None, r"the state of parameter 0 has no 'hess'"),
    ],
    ids=["shape", "nan", "missing"],
)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(bad, pattern):
    model, optimizer = make()
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    entry = dict(saved["state"][0])
    entry.pop("hess")
    saved["state"] = saved["state"] | {0: entry if bad is None else entry | {"hess": bad}}
    before = optimizer.state[next(model.parameters())]["hess"].clone()
    with pytest.raises(ValueError, match=pattern):
        optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[next(model.parameters())]["hess"], before)


def test_looks_between_forward_and_backward_change_nothing():
    results = []
    for looks in (False, True):
        model, optimizer = make()
        optimizer.attach(model)
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model)
            if looks:
                model.eval()
                with torch.no_grad():
                    at_mean = loss_of(model)
                    with optimizer.sampled_params(train=False):
                        assert float(loss_of(model)) != float(at_mean)
                model.train()
                optimizer.posterior(model).predict(X, 2)
                optimizer.marginals()
            loss.backward()
            optimizer.step()
        results.append(weights_of(model))
    assert torch.equal(*results)


def test_a_held_sample_and_an_exception_leave_the_mean():
    model, optimizer = make()
    before = weights_of(model)
    optimizer.hold_sample()
    assert not torch.equal(weights_of(model), before)
    optimizer.release_sample()
    assert torch.equal(weights_of(model), before)
    with pytest.raises(KeyError), optimizer.sampled_params():
        raise KeyError
    assert torch.equal(weights_of(model), before)


def test_a_step_that_failed_leaves_nothing_folded():
    """The structure forgets what it folded, also if it keeps no account of whether it did."""
    results = []
    for fails in (False, True):
        model, optimizer = make(mc_samples=2)
        if fails:
            for sample in range(2):
                with optimizer.sampled_params(sample):
                    (100 * loss_of(model)).backward()
            optimizer.discard_samples()
            optimizer.zero_grad()
        train(model, optimizer, 3)
        results.append(weights_of(model))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_reported():
    model, optimizer = make()
    train(model, optimizer, 1)
    before = weights_of(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    with optimizer.sampled_params():
        pass
    with pytest.warns(RuntimeWarning, match="gradient elements were NaN or infinite"):
        optimizer.step()
    assert torch.equal(weights_of(model), before)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="TensorwiseVprop has no momentum"):
        make(betas=(0.9, 0.9))
    with pytest.raises(ValueError, match=r"Invalid noise='per_rank': must be \"shared\" for TensorwiseVprop"):
        make(noise="per_rank")
    with pytest.raises(ValueError, match="fused"):
        make(fused=True)


def test_diagnosis_and_the_automatic_prior():
    model, optimizer = make(prior_precision="auto")
    train(model, optimizer, 40)
    assert optimizer.param_groups[0]["prior_precision"] != 1.0
    str(optimizer.diagnose())


# -- the posterior -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    model, optimizer = make()
    train(model, optimizer, 30)
    return model, optimizer.posterior(model, likelihood="gaussian", noise_variance=0.1)


def as_diagonal(posterior):
    variance = {name: value.clone() for name, value in posterior.variance.items()}
    return DiagonalPosterior(posterior.model, posterior.mean, variance, posterior.prior, ess=posterior.ess)


def test_the_posterior_answers_as_the_diagonal_with_these_variances(trained):
    _, posterior = trained
    same = as_diagonal(posterior)
    assert posterior.num_parameters == 21
    weights = posterior.sample(seed=3)
    for name, weight in same.sample(seed=3).items():
        torch.testing.assert_close(weights[name], weight)
    for ours, theirs in [
        (posterior.kl(), same.kl()),
        (posterior.entropy(), same.entropy()),
        (posterior.log_prob(weights), same.log_prob(weights)),
        (posterior.predict(X, 4).samples, same.predict(X, 4).samples),
    ]:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_is_saved_and_loaded(trained, tmp_path):
    model, posterior = trained
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    loaded = vprop.load_posterior(path, model)
    assert type(loaded) is PerTensorPosterior
    assert list(loaded.mean) == list(posterior.mean)
    for name, scale in posterior.scale.items():
        assert scale.shape == ()
        assert torch.equal(loaded.scale[name], scale)
    assert torch.equal(loaded.predict(X, 3).samples, posterior.predict(X, 3).samples)
    assert (loaded.ess, loaded.likelihood, loaded.noise_variance) == (32.0, "gaussian", 0.1)


def test_a_file_without_its_sections_is_refused(trained, tmp_path, monkeypatch):
    model, posterior = trained
    path = tmp_path / "posterior.safetensors"
    monkeypatch.setattr(PerTensorPosterior, "_sections", lambda self: {})
    posterior.save(path)
    with pytest.raises(ValueError, match=r"it lacks tensors of \['scale'\]"):
        vprop.load_posterior(path, model)


def test_a_file_whose_class_is_not_imported(trained, tmp_path):
    path = tmp_path / "posterior.safetensors"
    trained[1].save(path)
    script = f"import torch, vprop; vprop.load_posterior({str(path)!r}, torch.nn.Linear(1, 1))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert (
        "unknown structure 'per_tensor': this version reads 'composed', 'diagonal', 'eigenbasis', 'full', 'mixture' "
        "and 'pruned'. " in run.stderr
    )
    assert "import the module with its posterior class before you load the file" in run.stderr


def test_a_class_that_does_not_say_how_is_not_merged(trained):
    with pytest.raises(TypeError, match=r"a PerTensorPosterior cannot be merged, because its class has no _merged\(\)"):
        vprop.merge([trained[1], trained[1]])


def test_a_class_that_says_how_is_merged(trained):
    class Mergeable(PerTensorPosterior):
        def _merged(self, shards, prior, rest):
            precision = {
                name: sum(shard.scale[name].pow(-2) for shard in shards) - (len(shards) - 1) * prior.precision[name]
                for name in self.mean
            }
            scale = {name: value.rsqrt() for name, value in precision.items()}
            return Mergeable(self.model, self.mean, scale, prior, **rest)

    _, posterior = trained
    shard = Mergeable(posterior.model, posterior.mean, posterior.scale, posterior.prior, ess=posterior.ess)
    whole, expected = vprop.merge([shard, shard]), vprop.merge([as_diagonal(posterior)] * 2)
    assert type(whole) is Mergeable
    assert whole.ess == 64.0
    for name, variance in expected.variance.items():
        torch.testing.assert_close(whole.variance[name], variance)


def test_the_names_of_structures_are_taken_once(trained, tmp_path):
    with pytest.raises(
        TypeError, match=r"Copy.structure: is 'diagonal', must be a word of its own: .*DiagonalPosterior"
    ):

        class Copy(PerTensorPosterior):
            structure = "diagonal"

    with pytest.raises(TypeError, match=r"Nameless.structure: is '', must be a word"):

        class Nameless(PerTensorPosterior):
            structure = ""


def test_a_class_without_a_name_is_not_saved(tmp_path):
    """It has no such thing where it is made of the base class alone."""

    class Anonymous(Posterior):
        variance = property(lambda self: {})
        _draw = log_prob = entropy = kl = as_prior = PerTensorPosterior.entropy

    posterior = Anonymous(nn.Linear(1, 1), {}, GaussianPrior({}, {}), ess=1.0)
    with pytest.raises(
        TypeError, match=r"save\(path\): Anonymous has no name for files. Give the class one: structure"
    ):
        posterior.save(tmp_path / "posterior.safetensors")
