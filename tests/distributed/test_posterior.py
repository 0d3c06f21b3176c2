"""The posterior of a model that runs on several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vprop
from tests.distributed.runs import assert_equal, fsdp, go_on, start
from tests.harness import make_batch, make_model
from vprop.parallel.sharding import full_tensor


def posterior_after_training(strategy: str | None, evaluate_first: bool = False) -> dict[str, Tensor]:
    model, optimizer = start(strategy, "Vprop", {"prior_precision": 2.0})
    go_on(model, optimizer, strategy, "closure")
    if evaluate_first:  # after which FSDP's root holds whole parameters in place of the optimizer's
        with torch.no_grad():
            model.eval()(make_batch(4, torch.float64)[0])
    posterior = optimizer.posterior(model)
    mean, variance, prior = posterior.mean, posterior.variance, posterior.as_prior()
    tensors = {f"mean {name}": value for name, value in mean.items()}
    tensors |= {f"variance {name}": value for name, value in variance.items()}
    tensors |= {f"prior {i}": value for i, value in enumerate(prior["prior_mean"])}
    return tensors | {"kl": posterior.kl()}


@pytest.mark.parametrize("evaluate_first", [False, True])
@pytest.mark.parametrize(("strategy", "count"), [("ddp", 2), ("fsdp", 2), ("tensor parallel", 4)])
def test_it_is_whole_and_has_the_names_of_the_model(ranks, strategy, count, evaluate_first) -> None:
    alone = posterior_after_training(None)
    for together in ranks(count)(posterior_after_training, strategy, evaluate_first):
        assert_equal(together, alone, rtol=1e-9, atol=1e-12)


def saved_and_loaded(path: str) -> Tensor:
    """From a sharded model to a file, and from there to a plain one."""
    model, optimizer = start("fsdp", "Vprop", {})
    go_on(model, optimizer, "fsdp", "closure")
    posterior = optimizer.posterior(model, likelihood="categorical")  # on every rank: they bring it together
    if torch.distributed.get_rank() == 0:
        posterior.save(path)
    torch.distributed.barrier()
    return vprop.load_posterior(path, make_model(torch.float64)).predict(make_batch(6, torch.float64)[0], 8).probs


def test_predictions_of_a_sharded_model_go_through_a_file(ranks, tmp_path) -> None:
    model, optimizer = start(None, "Vprop", {})
    go_on(model, optimizer, None, "closure")
    expected = optimizer.posterior(model, likelihood="categorical").predict(make_batch(6, torch.float64)[0], 8).probs
    for probs in ranks(2)(saved_and_loaded, str(tmp_path / "posterior.safetensors")):
        torch.testing.assert_close(probs, expected, rtol=1e-7, atol=1e-9)


def carried_over(strategy: str | None) -> dict[str, Tensor]:
    """A second task whose prior is the posterior of the first."""
    model, optimizer = start(strategy, "Vprop", {})
    go_on(model, optimizer, strategy, "closure", steps=2)
    second = vprop.Vprop(model.parameters(), lr=0.1, num_data=50, **optimizer.posterior(model).as_prior())
    go_on(model, second, strategy, "closure", steps=2, first_step=5)
    return second.posterior(model).mean


def test_a_posterior_can_be_the_prior_of_the_next_task(ranks) -> None:
    alone = carried_over(None)
    for together in ranks(2)(carried_over, "fsdp"):
        assert_equal(together, alone, rtol=1e-9, atol=1e-12)


def predict_sharded(what: str) -> None:
    model, optimizer = start("fsdp", "Vprop", {})
    x, y = make_batch(6, torch.float64)
    posterior = optimizer.posterior(model)
    if what == "predict":
        posterior.predict(x)
    else:
        posterior.elbo(vprop.Objective(model, F.cross_entropy, x, y))


@pytest.mark.parametrize("what", ["predict", "elbo"])
def test_a_sharded_model_cannot_run_with_other_weights_and_says_so(ranks, what) -> None:
    """It would run with its own, and every prediction would be that of the mean."""
    for error in ranks(2).errors(predict_sharded, what):
        assert error is not None
        assert f"{what}() of a model whose parameters are spread over ranks" in error[1]
        assert "with optimizer.sampled_params(train=False): model(x)" in error[1]


def attach_before_sharding() -> None:
    model = make_model()
    optimizer = vprop.Vprop(model.parameters(), num_data=10)
    optimizer.attach(fsdp(model))


def test_an_optimizer_from_before_sharding_is_refused(ranks) -> None:
    for error in ranks(2).errors(attach_before_sharding):
        assert error is not None
        assert "4 of the optimizer's parameters are not parameters of this model" in error[1]


def test_noise_must_be_one_of_two() -> None:
    with pytest.raises(
        ValueError, match=r"Invalid noise='own': must be \"shared\" or \"per_rank\"\. Shared: the ranks"
    ):
        vprop.Vprop([torch.nn.Parameter(torch.zeros(2))], num_data=10, noise="own")


def diagnosis(strategy: str | None) -> str:
    model, optimizer = start(strategy, "IVON", {})
    go_on(model, optimizer, strategy, "closure")
    return str(optimizer.diagnose())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor parallel"])
def test_a_diagnosis_looks_at_all_weights(ranks, strategy) -> None:
    alone = diagnosis(None)
    assert "curvature at hess_init" in alone
    for together in ranks(2)(diagnosis, strategy):
        assert together == alone


def marginals(strategy: str | None, evaluate_first: bool = False) -> dict[str, Tensor]:
    model, optimizer = start(strategy, "IVON", {})
    go_on(model, optimizer, strategy, "closure")
    if evaluate_first:
        with torch.no_grad():
            model.eval()(make_batch(4, torch.float64)[0])
    found = {}
    for number, marginal in enumerate(optimizer.marginals()):
        assert type(marginal.mean) is type(marginal.variance) is type(marginal.parameter.data)
        for name in ("mean", "variance", "hess"):
            found[f"{name} {number}"] = full_tensor(getattr(marginal, name))
    return found


@pytest.mark.parametrize("evaluate_first", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor parallel"])
def test_marginals_are_sharded_like_their_parameters(ranks, strategy, evaluate_first) -> None:
    alone = marginals(None)
    for together in ranks(2)(marginals, strategy, evaluate_first):
        assert_equal(together, alone, rtol=1e-9, atol=1e-12)
