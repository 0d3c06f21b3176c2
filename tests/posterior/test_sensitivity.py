"""Leave-one-out from the posterior: against closed forms, against training again, and its scaling."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from tests.posterior import exact_regression as exact
from vprop.posterior import DiagonalPosterior, GaussianPrior

# -- exact where it can be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("outputs", [1, 2])
def test_ridge_regression_is_left_out_exactly(temperature, outputs):
    x, y = exact.make_rows(outputs=outputs)
    posterior = exact.make_posterior(x, y, temperature)
    result = posterior.sensitivity((x, y))
    _, precision = exact.normal_equations(x, y, temperature)
    for i in range(exact.ROWS):
        rest = torch.arange(exact.ROWS) != i
        before, _ = exact.normal_equations(x, y, temperature)
        after, _ = exact.normal_equations(x[rest], y[rest], temperature)
        change = after - before
        torch.testing.assert_close(result.prediction_change[i], x[i] @ change, rtol=1e-9, atol=1e-12)
        distance = math.sqrt(float(torch.einsum("wo,wv,vo->", change, precision, change)))
        assert float(result.weight_change[i]) == pytest.approx(distance, rel=1e-9)
        losses = [0.5 * (((x[i] @ mean - y[i]) ** 2) / exact.NOISE).sum() for mean in (before, after)]
        assert float(result.loss_change[i]) == pytest.approx(float(losses[1] - losses[0]), rel=1e-8, abs=1e-12)


def test_the_hat_matrix():
    x, y = exact.make_rows()
    result = exact.make_posterior(x, y).sensitivity((x, y))
    _, precision = exact.normal_equations(x, y)
    hat = (x @ torch.linalg.solve(precision, x.T) / exact.NOISE).diagonal()
    torch.testing.assert_close(result.leverage, hat, rtol=1e-9, atol=0.0)
    mean, _ = exact.normal_equations(x, y)
    residual = (y - x @ mean)[:, 0]
    left_out = residual - result.prediction_change[:, 0]
    torch.testing.assert_close(left_out, residual / (1 - hat), rtol=1e-9, atol=1e-12)


def test_outputs_elsewhere():
    x, y = exact.make_rows(outputs=2)
    new = torch.randn(5, exact.COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    result = exact.make_posterior(x, y).sensitivity((x, y), at=new)
    rest = torch.arange(exact.ROWS) != 4
    change = exact.normal_equations(x[rest], y[rest])[0] - exact.normal_equations(x, y)[0]
    assert result.changes_at.shape == (exact.ROWS, 5, 2)
    torch.testing.assert_close(result.changes_at[4], new @ change, rtol=1e-9, atol=1e-12)
    own = exact.make_posterior(x, y).sensitivity((x, y), at=x)
    torch.testing.assert_close(own.changes_at.diagonal(dim1=0, dim2=1).mT, own.prediction_change)


def test_a_diagonal_posterior_is_first_order():
    """σ²∇ℓ/τ by hand, at a temperature."""
    x, y = exact.make_rows()
    model = nn.Linear(exact.COLUMNS, 1, bias=False).double()
    mean = torch.tensor([[0.3, -0.2, 0.1]], dtype=torch.float64)
    variance = torch.tensor([[0.01, 0.02, 0.03]], dtype=torch.float64)
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    posterior = DiagonalPosterior(
        model, {"weight": mean}, {"weight": variance}, prior, ess=24.0, temperature=0.5, likelihood="gaussian"
    )
    result = posterior.sensitivity((x, y))
    error = x @ mean.T - y  # of unit noise
    change = variance * (error * x) / 0.5
    torch.testing.assert_close(result.prediction_change, (change * x).sum(1, keepdim=True))
    torch.testing.assert_close(result.weight_change, (change.square() / variance).sum(1).sqrt())
    assert result.leverage is None
    by_gradient = posterior.sensitivity((x, y), method="gradient")
    torch.testing.assert_close(by_gradient.weight_change, result.weight_change)
    torch.testing.assert_close(by_gradient.loss_change, (error * x * change).sum(1))
    assert by_gradient.prediction_change is None


# -- logistic regression, against training again -------------------------------------------------------------------


def minimizer(x, y, weights=None, precision=1.0):
    """The minimum of Σᵢℓᵢ + ½λθ², and the Hessian there, by Newton's method."""
    theta = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(30):
        p = (x @ theta).sigmoid()
        gradient = x.T @ (p - y) + precision * theta
        hess = (x.T * (p * (1 - p))) @ x + precision * torch.eye(x.shape[1], dtype=torch.float64)
        theta = theta - torch.linalg.solve(hess, gradient)
    return theta, hess


def test_logistic_regression_against_training_again():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, dtype=torch.float64, generator=random)
    y = (torch.rand(80, dtype=torch.float64, generator=random) < (2 * x[:, 0] - x[:, 1]).sigmoid()).double()
    theta, hess = minimizer(x, y)
    model = nn.Linear(4, 1, bias=False).double()
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    posterior = vprop.posterior.FullPosterior(
        model, {"weight": theta[None].clone()}, hess, prior, ess=80.0, likelihood="bernoulli"
    )
    result = posterior.sensitivity(DataLoader(TensorDataset(x, y[:, None]), batch_size=32))
    again = []
    for i in range(80):
        rest = torch.arange(80) != i
        again.append(minimizer(x[rest], y[rest])[0] @ x[i] - theta @ x[i])
    again = torch.stack(again)
    ranks = [v.argsort().argsort().double() for v in (result.prediction_change[:, 0], again)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.99
    # One step of Newton's from the old optimum: the error is of second order in the change.
    assert float((result.prediction_change[:, 0] - again).abs().max()) < 0.15 * float(again.abs().max())


# -- the same however it is asked -----------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def classifier(request):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).to(request.param)
        x, y = torch.randn(20, 4, dtype=request.param), torch.randint(3, (20,))
    optimizer = vprop.VOGN(model.parameters(), lr=0.1, num_data=20)
    for _ in range(20):
        optimizer.step(vprop.Objective(model, F.cross_entropy, x, y))
    return optimizer.posterior(model, likelihood="categorical"), x, y


def assert_same(one, other, **tolerances):
    for name in ("weight_change", "loss_change", "loss", "prediction_change"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), **tolerances)


def test_loaders_tensors_arrays_and_objectives(classifier):
    posterior, x, y = classifier
    weights = copy.deepcopy(posterior.model.state_dict())
    whole = posterior.sensitivity((x, y))
    close = {"rtol": 1e-4, "atol": 1e-6}
    assert_same(posterior.sensitivity(DataLoader(TensorDataset(x, y), batch_size=7)), whole, **close)
    assert_same(posterior.sensitivity([(x[:3], y[:3]), (x[3:], y[3:])]), whole, **close)
    assert_same(posterior.sensitivity((x.numpy().astype(np.float64), y.numpy())), whole, **close)
    backwards = (x.flip(0).numpy()[::-1], y.flip(0).numpy()[::-1])  # arrays that torch takes no view of
    assert_same(posterior.sensitivity(backwards), whole, **close)
    assert_same(posterior.sensitivity((x, y), chunk_size=1), whole, **close)
    objective = vprop.Objective(posterior.model, F.cross_entropy, x, y)
    assert_same(posterior.sensitivity(objective), whole, **close)
    assert posterior.model.training  # evaluated without dropout, and left as it was
    assert all(torch.equal(weights[name], value) for name, value in posterior.model.state_dict().items())
    part = posterior.sensitivity((x[5:9], y[5:9]))  # some of the data count as much as they do among all
    torch.testing.assert_close(part.weight_change, whole.weight_change[5:9], **close)


def test_the_gradient_method_is_the_first_order_of_the_other(classifier):
    posterior, x, y = classifier
    gradient = posterior.sensitivity((x, y), method="gradient")
    outputs = posterior.sensitivity((x, y), method="outputs")
    torch.testing.assert_close(gradient.weight_change, outputs.weight_change, rtol=1e-4, atol=1e-7)


def test_the_gradient_method_of_a_full_posterior_has_no_leverage():
    x, y = exact.make_rows()
    posterior = exact.make_posterior(x, y, 0.5)
    result = posterior.sensitivity((x, y), method="gradient")
    mean, precision = exact.normal_equations(x, y, 0.5)
    gradients = (x @ mean - y) / exact.NOISE * x
    squares = (gradients @ torch.linalg.inv(precision) * gradients).sum(1)
    torch.testing.assert_close(result.weight_change, squares.sqrt() / 0.5)
    torch.testing.assert_close(result.loss_change, squares / 0.5)
    assert result.leverage is None


def test_num_data_and_temperature_scale_it(classifier):
    posterior, x, y = classifier
    one = posterior.sensitivity((x, y)).weight_change
    twice = posterior.sensitivity((x, y), num_data=posterior.ess / 2).weight_change
    torch.testing.assert_close(twice, 2 * one, rtol=1e-5, atol=0.0)
    hot = copy.copy(posterior)
    hot.temperature = 4.0
    torch.testing.assert_close(hot.sensitivity((x, y)).weight_change, one / 4, rtol=1e-5, atol=0.0)


def test_the_optimizer_says_the_temperature(tmp_path):
    model = nn.Linear(2, 2)
    posterior = vprop.Vprop(model.parameters(), num_data=50, temperature=0.2).posterior(model)
    assert (posterior.ess, posterior.temperature) == (250.0, 0.2)
    posterior.save(tmp_path / "posterior.safetensors")
    assert vprop.load_posterior(tmp_path / "posterior.safetensors", model).temperature == 0.2


def test_weights_of_classes_and_ignored_labels():
    x, y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, -100, 1, 0])
    model = nn.Linear(2, 2)
    posterior = vprop.Vprop(model.parameters(), num_data=5).posterior(model)
    weights = torch.tensor([1.0, 4.0])
    weighted = posterior.sensitivity([(x[:2], y[:2]), (x[2:], y[2:])], loss_fn=nn.CrossEntropyLoss(weight=weights))
    plain = posterior.sensitivity((x, y), loss_fn=F.cross_entropy)
    counts = torch.tensor([1.0, 4.0, 1.0, 0.0, 4.0, 1.0]) / (11 / 5)  # their mean over the five is 1
    torch.testing.assert_close(weighted.weight_change.float(), counts * plain.weight_change.float())
    assert float(plain.weight_change[3]) == float(plain.loss[3]) == 0.0
    one_by_one = list(zip(x.split(1), y.split(1), strict=True))  # in each batch all examples weigh the same
    apart = posterior.sensitivity(one_by_one, loss_fn=nn.CrossEntropyLoss(weight=weights))
    torch.testing.assert_close(apart.weight_change, weighted.weight_change)
    assert posterior.forget(one_by_one[:2], loss_fn=nn.CrossEntropyLoss(weight=weights)).ess == pytest.approx(3)
    for batches in ([(x, y)], one_by_one):
        with pytest.raises(ValueError, match="can be read only once"):
            posterior.sensitivity(iter(batches), loss_fn=nn.CrossEntropyLoss(weight=weights))


class Named(nn.Module):
    """Returns a dictionary, and says how often it was called."""

    calls = 0

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        Named.calls += 1  # of replicas too
        return {"out": self.layer(x)}


@pytest.mark.parametrize("kind", ["int8", "uint16", "uint64", ">i4"])
def test_labels_of_all_integer_types(kind):
    """Class numbers of a data frame are int8; the bytes of the last are in the other order."""
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    layer = nn.Linear(3, 4)
    posterior = vprop.Vprop(layer.parameters(), num_data=80).posterior(layer, likelihood="categorical")
    pair = (x, y.numpy().astype(kind))
    for loss_fn in (None, F.cross_entropy):
        expected = posterior.sensitivity((x, y), loss_fn=loss_fn).weight_change
        assert torch.equal(posterior.sensitivity(pair, loss_fn=loss_fn).weight_change, expected)
    assert torch.equal(posterior.forget(pair).mean["weight"], posterior.forget((x, y)).mean["weight"])


def test_examples_of_a_model_that_returns_a_dictionary_run_together():
    x, y = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(50, 4)
    model = Named(nn.Linear(3, 4))
    posterior = vprop.Vprop(model.parameters(), num_data=50).posterior(model)
    Named.calls = 0
    posterior.sensitivity((x, y), loss_fn=lambda output, y: F.mse_loss(output["out"], y))
    assert 0 < Named.calls < 10


@pytest.mark.parametrize("loss", ["mean over outputs", "weights of classes"])
def test_outputs_in_a_dictionary_count_like_a_tensor(loss):
    generator = torch.Generator().manual_seed(0)
    x, layer = torch.randn(8, 3, generator=generator), nn.Linear(3, 4)
    if loss == "mean over outputs":
        y, loss_fn = torch.randn(8, 4, generator=generator), F.mse_loss
    else:
        y = torch.randint(0, 4, (8,), generator=generator)
        loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2, 1.0]))
    batches = list(zip(x.split(3), y.split(3), strict=True))
    changes = []
    for model, own in ((layer, loss_fn), (Named(layer), lambda output, y: loss_fn(output["out"], y))):
        posterior = vprop.Vprop(model.parameters(), num_data=8).posterior(model)
        changes.append(posterior.sensitivity(batches, loss_fn=own, method="gradient").weight_change)
        if loss == "mean over outputs":
            once = posterior.sensitivity(iter(batches), loss_fn=own, method="gradient")
            torch.testing.assert_close(once.weight_change, changes[-1])
    torch.testing.assert_close(*changes)


def test_a_mean_over_several_outputs_counts_once():
    """F.mse_loss divides by examples and outputs; an example still is one of num_data."""
    x, y = exact.make_rows(outputs=2)
    model = nn.Linear(3, 2).double()
    posterior = vprop.Vprop(model.parameters(), num_data=len(x)).posterior(model)
    mean = posterior.sensitivity((x, y), loss_fn=F.mse_loss)
    own = posterior.sensitivity((x, y), loss_fn=lambda output, y: (output - y).square().mean())
    torch.testing.assert_close(mean.weight_change, own.weight_change)


def test_models_that_vmap_cannot_run():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = Recurrent().double(), torch.randn(5, 6, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])
    posterior = vprop.Vprop(model.parameters(), num_data=5).posterior(model, likelihood="categorical")
    result = posterior.sensitivity((x, y))
    loss = F.cross_entropy(model(x[2:3]), y[2:3])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    squares = sum((g.square() * v).sum() for g, v in zip(gradients, posterior.variance.values(), strict=True))
    assert float(result.weight_change[2]) == pytest.approx(math.sqrt(float(squares)), rel=1e-6)


def test_the_result_names_examples():
    x, y = exact.make_rows()
    result = exact.make_posterior(x, y).sensitivity((x, y))
    assert len(result) == exact.ROWS
    assert result.indices.tolist() == result.weight_change.argsort(descending=True).tolist()
    assert result.top(2, by="loss").tolist() == result.loss.argsort(descending=True)[:2].tolist()
    torch.testing.assert_close(result.leave_one_out_loss, result.loss + result.loss_change)
    assert f"most of all example {int(result.indices[0])}" in repr(result)
    with pytest.raises(ValueError, match="Invalid count"):
        result.top(-1)
    with pytest.raises(ValueError, match="Invalid by"):
        result.top(1, by="prediction_change ")


# -- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input(classifier):
    posterior, x, y = classifier
    ask = posterior.sensitivity
    with pytest.raises(ValueError, match="there are no examples"):
        ask([])
    with pytest.raises(ValueError, match="there are no examples"):
        ask(DataLoader(TensorDataset(x[:0], y[:0])))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"there is a label {wrong}, must be from 0 to 2"):
            ask((x, torch.where(torch.arange(20) == 7, wrong, y)))
    with pytest.raises(ValueError, match="NaN or infinite for example 9"):
        ask((torch.where(torch.arange(20)[:, None] == 9, math.nan, x), y), chunk_size=4)
    with pytest.raises(ValueError, match="NaN or infinite for example 9"):
        ask((torch.where(torch.arange(20)[:, None] == 9, math.nan, x), y), chunk_size=4, method="gradient")
    other = nn.Linear(4, 3).to(x)
    with pytest.raises(ValueError, match="the objective's model is not the posterior's"):
        ask(vprop.Objective(other, F.cross_entropy, x, y))
    with pytest.raises(TypeError, match="must be a pair"):
        ask(x)
    with pytest.raises(TypeError, match="must be a pair"):
        ask(3)
    with pytest.raises(TypeError, match="got a batch of type"):
        ask([x])
    with pytest.raises(ValueError, match="Invalid method"):
        ask((x, y), method="hessian")
    with pytest.raises(ValueError, match="Invalid chunk_size"):
        ask((x, y), chunk_size=0)
    with pytest.raises(ValueError, match="Invalid num_data"):
        ask((x, y), num_data=0)
    with pytest.raises(ValueError, match="is a sum over the batch"):
        ask((x, y), loss_fn=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(TypeError, match="loss_fn"):
        ask((x, y), loss_fn=nn.CrossEntropyLoss)


def test_no_loss_is_known():
    model = nn.Linear(2, 1)
    posterior = vprop.Vprop(model.parameters(), num_data=5).posterior(model)
    with pytest.raises(ValueError, match="needs loss_fn: pass sensitivity"):
        posterior.sensitivity((torch.ones(2, 2), torch.ones(2, 1)))


def test_groups_that_differ():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "temperature": 0.5}]
    posterior = vprop.Vprop(groups, num_data=5).posterior(model, likelihood="gaussian")
    with pytest.raises(ValueError, match="needs one effective sample size"):
        posterior.sensitivity((torch.ones(2, 2), torch.ones(2, 1)))


def test_batchnorm_without_running_statistics():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    posterior = vprop.Vprop(model.parameters(), num_data=5).posterior(model, likelihood="categorical")
    with pytest.raises(ValueError, match="mixes"):
        posterior.sensitivity((torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)))
