"""What a person may pass by mistake to the public functions: each is refused in words that say what to pass."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vprop
from vprop import GaussianLikelihood, GaussianPrior, HeteroscedasticGaussianLikelihood, Objective, Prediction, Vprop
from vprop.baselines import BBVI, ExtendedKalmanFilter, MCDropout, OnlineNaturalGradient, exact_vi_logistic
from vprop.integrations.huggingface import num_targets
from vprop.posterior import DiagonalPosterior, FullPosterior

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
HUGE = 10**400


def make_posterior(mean=0.0, variance=1.0, prior_mean=0.0, prior_precision=1.0):
    model = nn.Linear(3, 2, bias=False)
    mean, variance = ({"weight": torch.full((2, 3), value)} for value in (mean, variance))
    prior = GaussianPrior({"weight": torch.tensor(prior_mean)}, {"weight": torch.tensor(prior_precision)})
    return DiagonalPosterior(model, mean, variance, prior, ess=10.0)


POSTERIOR = make_posterior()
MODEL = nn.Linear(3, 2)
OPTIMIZER = Vprop(MODEL.parameters(), num_data=10)
BATCHES = [(X, Y)]


# -- seeds and numbers of samples --------------------------------------------------------------------------------

SEEDED = {
    "sample": lambda seed: POSTERIOR.sample(seed=seed),
    "predict": lambda seed: POSTERIOR.predict(X, 1, seed=seed),
    "elbo": lambda seed: POSTERIOR.elbo(BATCHES, 1, loss_fn=F.cross_entropy, seed=seed),
    "elbo_estimate": lambda seed: POSTERIOR.elbo_estimate(BATCHES, 1, loss_fn=F.cross_entropy, seed=seed),
    "dropout": lambda seed: MCDropout(nn.Sequential(nn.Linear(3, 2), nn.Dropout())).predict(X, 1, seed),
    "posterior": lambda seed: FullPosterior(
        nn.Linear(1, 1, bias=False), {"weight": torch.zeros(1, 1)}, torch.eye(1), POSTERIOR.prior, ess=1.0, seed=seed
    ),
    "optimizer": lambda seed: Vprop(MODEL.parameters(), num_data=10, seed=seed),
}


@pytest.mark.parametrize("call", SEEDED.values(), ids=SEEDED)
@pytest.mark.parametrize("seed", [None, 2**64, -1, HUGE, 1.5, "0", True, torch.Generator()], ids=lambda s: str(s)[:12])
def test_what_is_no_seed(call, seed):
    if call is SEEDED["sample"] and seed is None:
        return  # a fresh draw
    with pytest.raises(ValueError, match=r"Invalid seed=.*: must be an integer in \[0, 2\*\*64\)\. Pass e\.g\. seed=0"):
        call(seed)


@pytest.mark.parametrize("call", SEEDED.values(), ids=SEEDED)
@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(3), np.uint64(2**63)], ids=str)
def test_seeds(call, seed):
    call(seed)


def test_a_seed_of_numpy_is_the_same_seed():
    ours, numpys = (POSTERIOR.sample(seed=seed)["weight"] for seed in (3, np.int32(3)))
    assert torch.equal(ours, numpys)


@pytest.mark.parametrize("count", [None, 0, -1, 1.0, "3", True, HUGE, 2**30], ids=lambda c: str(c)[:12])
def test_what_is_no_number_of_samples(count):
    pattern = r"Invalid num_samples=.*: must be an integer >= 1 \(and below 2\*\*30\)\. 32 is the default"
    with pytest.raises(ValueError, match=pattern):
        POSTERIOR.predict(X, count)
    with pytest.raises(ValueError, match=pattern):
        POSTERIOR.elbo(BATCHES, count, loss_fn=F.cross_entropy)


def test_a_noise_variance_of_classes():
    for noise in (0.5, 1.0):
        with pytest.raises(ValueError, match=r"Invalid noise_variance=.*: must be left out with likelihood='categoric"):
            POSTERIOR.predict(X, likelihood="categorical", noise_variance=noise)
    with pytest.raises(
        ValueError, match=r"Invalid noise_variance=0\.5: must be left out with likelihood='categorical'"
    ):
        OPTIMIZER.posterior(MODEL, likelihood="categorical", noise_variance=0.5)


def test_a_long_value_is_shortened():
    with pytest.raises(ValueError, match=r"Invalid seed=1000") as caught:
        POSTERIOR.sample(seed=HUGE)
    assert len(str(caught.value)) < 300


# -- models and losses -------------------------------------------------------------------------------------------

TAKE_A_MODEL = {
    "posterior(model)": lambda model: OPTIMIZER.posterior(model),
    "posterior(model) of VON": lambda model: vprop.VON(MODEL.parameters(), num_data=10).posterior(model),
    "posterior(model) of BBVI": lambda model: BBVI(MODEL.parameters(), num_data=10).posterior(model),
    "attach(model)": lambda model: OPTIMIZER.attach(model),
    "Objective(model, …)": lambda model: Objective(model, F.cross_entropy, X, Y),
    "lr_find(…, model, …)": lambda model: vprop.lr_find(OPTIMIZER, model, F.cross_entropy, BATCHES),
    "MCDropout(model)": lambda model: MCDropout(model),
    "ExtendedKalmanFilter(model)": lambda model: ExtendedKalmanFilter(
        model, prior_precision=1.0, likelihood="categorical"
    ),
    "OnlineNaturalGradient(model)": lambda model: OnlineNaturalGradient(
        model, prior_precision=1.0, likelihood="categorical"
    ),
    "num_targets(examples, model)": lambda model: num_targets([{"labels": 1}], model),
}


@pytest.mark.parametrize("where", TAKE_A_MODEL)
@pytest.mark.parametrize(
    ("model", "found", "remedy"),
    [
        (None, r"NoneType \(None\)", "Pass the module whose weights are trained"),
        ("model.pt", r"str \('model\.pt'\)", "Pass the module whose weights are trained"),
        (nn.Linear, "the class Linear", r"Pass an instance of it, Linear\(\.\.\.\)"),
        ([MODEL], r"list \(\[Linear", "Pass the module whose weights are trained"),
    ],
    ids=["None", "path", "class", "list"],
)
def test_what_is_no_model(where, model, found, remedy):
    name = where.split(" of ")[0].replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(TypeError, match=rf"{name}: got {found}.*, must be a torch\.nn\.Module\. {remedy}"):
        TAKE_A_MODEL[where](model)


TAKE_A_LOSS = {
    "Objective(model, loss_fn, …)": lambda loss_fn: Objective(MODEL, loss_fn, X, Y),
    "lr_find(…, loss_fn, …)": lambda loss_fn: vprop.lr_find(OPTIMIZER, MODEL, loss_fn, BATCHES),
    "elbo(loader, loss_fn=...)": lambda loss_fn: POSTERIOR.elbo(BATCHES, loss_fn=loss_fn),
}


@pytest.mark.parametrize("where", TAKE_A_LOSS)
@pytest.mark.parametrize(
    ("loss_fn", "pattern"),
    [
        ("mse", r"got loss_fn='mse', must be a function .* Pass e\.g\. torch\.nn\.functional"),
        (
            nn.CrossEntropyLoss,
            r"got loss_fn=the class CrossEntropyLoss, must be .* an instance of it, CrossEntropyLoss",
        ),
    ],
)
def test_what_is_no_loss(where, loss_fn, pattern):
    with pytest.raises(TypeError, match=pattern):
        TAKE_A_LOSS[where](loss_fn)


def test_losses_that_are_no_mean():
    with pytest.raises(ValueError, match=r"loss_fn returned a tensor of shape \(4,\), .* reduction='mean'"):
        Objective(MODEL, nn.CrossEntropyLoss(reduction="none"), X, Y)()
    with pytest.raises(TypeError, match=r"loss_fn returned float, must return a tensor\. .*\.item\(\)"):
        Objective(MODEL, lambda output, y: 1.0, X, Y)()


@pytest.mark.parametrize("y", [[], {}, ()])
def test_targets_without_examples(y):
    with pytest.raises(TypeError, match="Cannot tell the batch size from empty targets"):
        _ = Objective(MODEL, F.cross_entropy, X, y).batch_size


# -- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [None, "0", 1.0, MODEL, True, False], ids=lambda s: str(s)[:8])
def test_what_is_no_sample(sample):
    with (
        pytest.raises(ValueError, match=r"Invalid sample=.*: must be the number of a sample\. .*train=False"),
        OPTIMIZER.sampled_params(sample),
    ):
        pass


def test_flags_must_be_true_or_false():
    with (
        pytest.raises(ValueError, match=r"Invalid train='no': must be True or False"),
        OPTIMIZER.sampled_params(train="no"),
    ):
        pass
    with pytest.raises(ValueError, match=r"Invalid learnable='no': must be True or False"):
        GaussianLikelihood(1.0, learnable="no")


# -- posteriors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [None, MODEL, lambda: 1.0, 3], ids=["None", "model", "closure", "number"])
def test_what_is_no_objective(objective):
    with pytest.raises(TypeError, match=r"elbo\(objective\): got .*, must be a vprop\.Objective or a loader"):
        POSTERIOR.elbo(objective)


@pytest.mark.parametrize("batch", [(X, Y, Y), X, {"x": X}], ids=["three", "tensor", "dict"])
def test_what_is_no_batch(batch):
    with pytest.raises(TypeError, match=r"elbo\(loader\): got a batch of type .*, must be a pair \(x, y\)"):
        POSTERIOR.elbo([batch], loss_fn=F.cross_entropy)


def test_what_is_no_weights():
    with pytest.raises(TypeError, match=r"log_prob\(weights\): got NoneType, must be a dict of tensors"):
        POSTERIOR.log_prob(None)
    with pytest.raises(ValueError, match=r"log_prob\(weights\): 'weight' has shape str, must have \(2, 3\)"):
        POSTERIOR.log_prob({"weight": "0.5"})


@pytest.mark.parametrize("samples", [None, [1.0], torch.tensor(1.0), torch.zeros(0, 3)], ids=str)
def test_what_is_no_prediction(samples):
    with pytest.raises(ValueError, match=r"Invalid samples: is .*, must be a tensor with at least one sample"):
        Prediction(samples)


@pytest.mark.parametrize("posteriors", [None, 3, "a.safetensors"])
def test_what_is_no_list_of_posteriors(posteriors):
    with pytest.raises(TypeError, match=r"merge\(posteriors\): got .*, must be a list of posteriors\. Make each with"):
        vprop.merge(posteriors)


def test_what_is_no_posterior():
    with pytest.raises(TypeError, match=r"merge\(posteriors\): number 1 is a NoneType, must be"):
        vprop.merge([POSTERIOR, None])


@pytest.mark.parametrize(
    ("bad", "pattern"),
    [
        (
            {"mean": torch.nan},
            r"the mean of 'weight' in number 1 has entries that are NaN or infinite, must be finite\.",
        ),
        ({"variance": 0.0}, r"the variance of 'weight' in number 1 .* not positive, must be finite and > 0\. Leave"),
        ({"variance": torch.inf}, r"the variance of 'weight' in number 1"),
        ({"variance": torch.nan}, r"the variance of 'weight' in number 1"),
        ({"prior_mean": torch.nan}, r"the prior mean of 'weight' in number 1"),
        ({"prior_precision": torch.inf}, r"the prior of number 1: its precision of 'weight' .* finite and >= 0"),
        ({"prior_precision": -1.0}, r"the prior of number 1: its precision of 'weight'"),
    ],
    ids=str,
)
def test_shards_that_would_ruin_the_whole(bad, pattern):
    with pytest.raises(ValueError, match=pattern):
        vprop.merge([make_posterior(), make_posterior(**bad)])


@pytest.mark.parametrize(
    ("mean", "precision", "pattern"),
    [
        (None, None, r"its mean of 'weight' has shape None"),
        ({"weight": "a"}, {"weight": 1.0}, r"its mean of 'weight' has shape None"),
        ({"weight": torch.nan}, {"weight": 1.0}, r"its mean of 'weight' has entries that are NaN or infinite"),
        ({"weight": 0.0}, {"weight": torch.inf}, r"its precision of 'weight' has entries that are NaN or infinite"),
        (
            {"weight": 0.0},
            {"weight": -1.0},
            r"its precision of 'weight' has entries that are NaN, infinite or negative",
        ),
    ],
)
def test_what_is_no_prior_of_the_whole(mean, precision, pattern):
    with pytest.raises(ValueError, match=f"Invalid prior: {pattern}"):
        vprop.merge([POSTERIOR, POSTERIOR], prior=GaussianPrior(mean, precision))


# -- likelihoods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variance", [None, "a", HUGE, 1j, True, torch.ones((), device="meta"), {"a": 1}], ids=lambda v: str(v)[:12]
)
def test_what_is_no_variance(variance):
    pattern = r"Invalid noise_variance=.*: must be a positive number, or a tensor of them\. .* 1\.0 is the default"
    with pytest.raises(ValueError, match=pattern):
        GaussianLikelihood(variance)
    if variance is not None:
        with pytest.raises(ValueError, match=pattern):
            POSTERIOR.predict(X, 1, likelihood="gaussian", noise_variance=variance)


@pytest.mark.parametrize("variance", [torch.inf, torch.nan, -1.0])
def test_variances_that_are_out_of_range(variance):
    with pytest.raises(ValueError, match=r"Invalid noise_variance=.*: must be finite and >= 0\. It is the variance"):
        Prediction(X, "gaussian", variance)


@pytest.mark.parametrize("shape", ["a", None, (-1,), (1.5,), 0, (2, 3), 1.5], ids=str)
def test_what_is_no_shape(shape):
    with pytest.raises(ValueError, match=r"Invalid shape=.*: must be \(\) or \(d,\) with d >= 1"):
        GaussianLikelihood(1.0, shape=shape)


def test_outputs_and_targets_that_are_no_tensors():
    with pytest.raises(TypeError, match=r"Invalid output: is a NoneType, must be a torch\.Tensor\."):
        GaussianLikelihood()(None, X)
    with pytest.raises(TypeError, match=r"Invalid y: is a list, must be a torch\.Tensor\."):
        GaussianLikelihood()(X, [1.0])
    with pytest.raises(TypeError, match=r"Invalid output: is a dict, must be a torch\.Tensor\. .*pick the tensor out"):
        HeteroscedasticGaussianLikelihood()({"logits": X}, X)


# -- lr_find -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", [None, torch.optim.Adam(MODEL.parameters()), Vprop], ids=["None", "Adam", "class"]
)
def test_lr_find_is_for_our_optimizers(optimizer):
    with pytest.raises(
        TypeError, match=r"lr_find\(optimizer, …\): got .*, must be an optimizer of vprop\. Pass e\.g\."
    ):
        vprop.lr_find(optimizer, MODEL, F.cross_entropy, BATCHES)


def test_lr_find_of_another_model():
    with pytest.raises(ValueError, match=r"lr_find\(optimizer, model, …\): 2 of the optimizer's parameters are not"):
        vprop.lr_find(OPTIMIZER, nn.Linear(3, 2), F.cross_entropy, BATCHES)


@pytest.mark.parametrize("loader", [None, 3, "train"])
def test_what_is_no_loader(loader):
    with pytest.raises(TypeError, match=r"lr_find\(…, loader\): got .*, must be an iterable of \(x, y\) batches"):
        vprop.lr_find(OPTIMIZER, MODEL, F.cross_entropy, loader)


@pytest.mark.parametrize("lrs", [0.1, "0.1", [], [HUGE], [1e39], [torch.nan], [None]], ids=lambda v: str(v)[:12])
def test_what_is_no_list_of_step_sizes(lrs):
    with pytest.raises(ValueError, match=r"Invalid lrs=.*: must be finite numbers > 0"):
        vprop.lr_find(OPTIMIZER, MODEL, F.cross_entropy, BATCHES, lrs=lrs)


def test_more_steps_than_a_trial_has():
    with pytest.raises(ValueError, match=r"Invalid steps=1000.*: must be an integer >= 10 \(and <= 1000000\)"):
        vprop.lr_find(OPTIMIZER, MODEL, F.cross_entropy, BATCHES, steps=HUGE)


# -- baselines ---------------------------------------------------------------------------------------------------


def test_exact_inference():
    with pytest.raises(TypeError, match=r"Invalid X: is a NoneType, must be a tensor, an array or a list of numbers"):
        exact_vi_logistic(None, Y, 1.0)
    with pytest.raises(TypeError, match=r"Invalid y: is a str, must be"):
        exact_vi_logistic(X, "labels", 1.0)
    with pytest.raises(ValueError, match=r"Invalid prior_precision=1000.*: must be a finite number > 0"):
        exact_vi_logistic(X, Y, HUGE)
    with pytest.raises(ValueError, match=r"Invalid lr_std=1000.*: must be None or a finite number >= 0"):
        BBVI(MODEL.parameters(), num_data=10, lr_std=HUGE)


# -- integrations and metrics ------------------------------------------------------------------------------------


def test_what_is_no_training_set():
    with pytest.raises(TypeError, match=r"num_targets\(examples, model\): got NoneType, must be the training set"):
        num_targets(None, MODEL)


@pytest.mark.parametrize("framework", ["lightning", "huggingface"])
def test_seeds_of_callbacks(framework):
    module = importlib.import_module(f"vprop.integrations.{framework}")
    with pytest.raises(ValueError, match=r"Invalid seed=18446744073709551616: must be an integer in"):
        module.PosteriorCallback(seed=2**64)


def test_numbers_of_estimators():
    from vprop.integrations.sklearn import BayesianLogisticRegression

    with pytest.raises(ValueError, match=r"Invalid prior_precision=1000.*: must be .*a finite number > 0"):
        BayesianLogisticRegression(prior_precision=HUGE).fit(X.numpy(), Y.numpy())


def test_tensors_without_values_have_no_score():
    probs = torch.full((4, 3), 1 / 3)
    with pytest.raises(ValueError, match=r"Invalid probs: is on the meta device, must be a dense tensor with values"):
        vprop.metrics.nll(probs.to("meta"), Y)
    with pytest.raises(ValueError, match=r"Invalid probs: has layout torch\.sparse_coo, must be a dense tensor"):
        vprop.metrics.brier(probs.to_sparse(), Y)
    with pytest.raises(ValueError, match=r"Invalid bins=1000.*: must be an integer >= 1 \(and <= 1000000\)"):
        vprop.metrics.expected_calibration_error(probs, Y, bins=HUGE)
