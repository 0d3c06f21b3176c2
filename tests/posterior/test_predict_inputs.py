"""What predict takes: tensors, arrays and loaders give the same prediction; all else an error in words."""

from __future__ import annotations

import io
import sys
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vprop
from tests.harness import make_batch, make_model, train
from vprop import VONG, Objective, Vprop
from vprop.posterior import DiagonalPosterior, PredictionSummary
from vprop.posterior.predictive import progress, sampling

X, Y = make_batch(50)


@pytest.fixture(scope="module")
def posterior():
    model, optimizer = train(Vprop, steps=3, num_data=200)
    return optimizer.posterior(model, likelihood="categorical")


class Loader:
    """Something with batches that is none of torch's classes."""

    def __iter__(self):
        yield from zip(X.split(8), Y.split(8), strict=True)


WAYS = {
    "loader of pairs": lambda: DataLoader(TensorDataset(X, Y), batch_size=8),
    "loader of inputs in lists": lambda: DataLoader(TensorDataset(X), batch_size=8),
    "loader of inputs": lambda: DataLoader(X, batch_size=8),
    "generator": lambda: (batch for batch in X.split(8)),
    "class of the user": Loader,
    "arrays": lambda: iter(X.double().numpy()[i : i + 8] for i in range(0, 50, 8)),
    "objectives": lambda: iter([Objective(make_model(), nn.functional.cross_entropy, X, Y)]),
    "one batch": lambda: iter([X]),
}


@pytest.mark.parametrize("constructor", [Vprop, VONG])
@pytest.mark.parametrize("way", WAYS)
def test_a_loader_gives_what_the_tensor_gives(way, constructor):
    """All batches meet the same weights; what differs is the rounding of smaller multiplications."""
    model, optimizer = train(constructor, steps=2, num_data=200)
    posterior = optimizer.posterior(model, likelihood="categorical")
    whole, parts = posterior.predict(X, 5, seed=3), posterior.predict(WAYS[way](), 5, seed=3)
    assert parts.samples.shape == (5, 50, 3)
    torch.testing.assert_close(parts.samples, whole.samples, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.probs, whole.probs)


def test_in_float64_batches_make_no_difference():
    model, optimizer = train(Vprop, steps=2, num_data=200, model=make_model(torch.float64))
    posterior = optimizer.posterior(model)
    x = X.double()
    expected = posterior.predict(x, 4).samples
    for size in (1, 7, 50, 1000):
        torch.testing.assert_close(posterior.predict(x, 4, batch_size=size).samples, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 28])
def test_draws_that_are_made_again_are_the_same(posterior, monkeypatch, kept_bytes):
    monkeypatch.setattr(sampling, "_KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(sampling, "_DRAWN_AT_ONCE", 2 * posterior.num_parameters)
    expected = posterior.predict(X, 5).samples
    torch.testing.assert_close(posterior.predict(X, 5, batch_size=9).samples, expected, rtol=1e-5, atol=1e-6)


def test_arrays(posterior):
    expected = posterior.predict(X, 3).samples
    other_bytes = X.numpy().astype(">f4")
    for array in (X.numpy(), X.double().numpy(), X.flip(0).numpy()[::-1], other_bytes, pd.DataFrame(X.numpy())):
        assert torch.equal(posterior.predict(array, 3).samples, expected)
        torch.testing.assert_close(posterior.predict(array, 3, batch_size=20).samples, expected, rtol=1e-5, atol=1e-6)
    fixed = X.numpy().copy()
    fixed.setflags(write=False)
    assert torch.equal(posterior.predict(fixed, 3).samples, expected)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, features, scale=1.0):
        return scale * self.inner(features)


def test_tuples_and_dicts_are_cut_row_by_row():
    model = TwoInputs()
    posterior = Vprop(model.parameters(), num_data=10).posterior(model)
    scale = torch.arange(50.0)[:, None]
    expected = posterior.predict({"features": X, "scale": scale}, 2).samples
    for x in ({"features": X, "scale": scale}, (X, scale), [X, scale.numpy()]):
        assert torch.allclose(posterior.predict(x, 2, batch_size=8).samples, expected, atol=1e-5)
    loader = iter([(((X[:20]), scale[:20]), Y[:20]), ((X[20:], scale[20:]), Y[20:])])
    assert torch.allclose(posterior.predict(loader, 2).samples, expected, atol=1e-5)
    constant = posterior.predict({"features": X, "scale": 2.0}, 2, batch_size=8).samples
    assert torch.allclose(constant, 2 * posterior.predict(X, 2).samples, atol=1e-5)
    with pytest.raises(ValueError, match=r"cannot tell the examples of x apart: got tensors of lengths \[49, 50\]"):
        posterior.predict((X, scale[1:]), batch_size=8)


def test_labels_are_ignored(posterior):
    outside = torch.full((50,), 1000)
    for labels in (outside, torch.full((50,), torch.nan), ["?"] * 50):
        pairs = iter([(X, labels)])
        assert torch.allclose(posterior.predict(pairs, 2).samples, posterior.predict(X, 2).samples, atol=1e-6)
    model = TwoInputs()  # its forward has no labels, as the forward of a Hugging Face model has
    named = Vprop(model.parameters(), num_data=10).posterior(model)
    with_labels = iter([{"features": X, "labels": outside}])
    assert torch.equal(named.predict(with_labels, 2, vmap=False).samples, named.predict({"features": X}, 2).samples)

    class TakesLabels(TwoInputs):
        def forward(self, features, labels):
            return labels[:, None] * self.inner(features)

    model = TakesLabels()
    taking = Vprop(model.parameters(), num_data=10).posterior(model)
    assert taking.predict(iter([{"features": X, "labels": outside}]), 2).samples.abs().max() > 100


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "names"),
    [
        ("categorical", ["probs", "entropy", "mutual_information", "std", "confidence"]),
        ("bernoulli", ["probs", "entropy", "mutual_information", "std", "confidence"]),
        ("gaussian", ["mean", "epistemic_variance", "aleatoric_variance", "variance", "std"]),
    ],
)
@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
def test_a_summary_has_the_same_numbers(posterior, likelihood, names, method):
    arguments = {"likelihood": likelihood, "method": method}
    expected = posterior.predict(X, 6, **arguments)
    summary = posterior.predict(X, 6, keep="summary", batch_size=8, **arguments)
    assert isinstance(summary, PredictionSummary)
    for name in names:
        if method == "linearized" and likelihood == "categorical" and name in ("mutual_information", "std"):
            continue  # from logits drawn for each batch
        torch.testing.assert_close(getattr(summary, name), getattr(expected, name), rtol=1e-4, atol=1e-6)
    with pytest.raises(AttributeError, match=r'made with keep="summary": it has no samples'):
        _ = summary.samples
    other = "mean" if likelihood != "gaussian" else "probs"
    with pytest.raises(AttributeError, match=f"This prediction has likelihood='{likelihood}'"):
        getattr(summary, other)


def test_what_a_summary_cannot_say(posterior):
    with pytest.raises(AttributeError, match=r"Quantiles of probabilities need samples"):
        posterior.predict(X, keep="summary").quantile(0.5)
    silent = DiagonalPosterior(posterior.model, posterior.mean, posterior.variance, posterior.prior, ess=1.0)
    with pytest.raises(ValueError, match=r'keep="summary" needs a likelihood'):
        silent.predict(X, keep="summary")


def test_memory_is_bounded_by_the_batch():
    """Of 2000 examples with 500 classes 40 MB of samples would be made; a summary of a batch of 20 has 0.4 MB."""
    model = nn.Linear(2, 500)
    posterior = Vprop(model.parameters(), num_data=10).posterior(model, likelihood="categorical")
    most = 0

    def watch(module, args, output):
        nonlocal most
        most = max(most, output.numel())

    model.register_forward_hook(watch)
    batches = (torch.randn(20, 2) for _ in range(100))
    summary = posterior.predict(batches, 10, keep="summary")
    assert summary.probs.shape == (2000, 500)
    assert most == 20 * 500
    kept = sum(value.untyped_storage().nbytes() for value in summary._values.values())
    assert kept < 2000 * 500 * 4 * 2.01  # probabilities and their spread


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("text", r"got str \('text'\), must be a tensor, a NumPy array, a DataLoader .* tokenizer"),
        (None, r"got NoneType \(None\), must be a tensor"),
        (3.5, r"got float \(3\.5\), must be a tensor"),
        (True, r"got bool \(True\)"),
        ({1, 2}, r"got set"),
        ([[1.0, 2], [3, 4]], r"got a list of numbers, must be a tensor, .* Make a tensor of it: torch\.tensor\(x\)"),
        ((), r"got an empty tuple, must be a tensor"),
        ({}, r"got an empty dict, must be a tensor"),
        (TensorDataset(X), r"got TensorDataset, .* Make batches of it: torch\.utils\.data\.DataLoader\(dataset, "),
        (make_model(), r"got the module Sequential, .* The posterior knows its model"),
        (np.array(["a", "b"]), r"got a <U1 array of shape \(2,\), must be an array of numbers.*astype"),
        (iter(["text"]), r"got str \('text'\), must be a tensor"),
        (iter([(None, 1)]), r"got NoneType \(None\), must be a tensor"),
        (iter([(X, X, Y)]), r"predict\(loader\): got a batch of 3 things, must be x, \(x,\), a pair \(x, y\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_no_model_takes_is_refused_in_words(posterior, x, message):
    with pytest.raises(TypeError, match=message):
        posterior.predict(x)


def test_an_empty_loader(posterior):
    used_up = iter(X.split(8))
    list(used_up)
    for loader in (DataLoader(TensorDataset(X, Y), batch_size=64, drop_last=True), iter([]), used_up):
        for method in ("monte_carlo", "linearized"):
            with pytest.raises(ValueError, match=r"predict\(loader\): got no batches\. Pass a loader with data in it"):
                posterior.predict(loader, method=method)
    assert posterior.predict(X[:0], 3).samples.shape == (3, 0, 3)
    assert posterior.predict(X[:0], 3, batch_size=4, keep="summary").probs.shape == (0, 3)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            X.double(),
            r"\(its weights are float32 on cpu\) cannot be called with a float64 tensor of shape \(50, 4\) on ",
        ),
        (
            X[:, :3],
            r"cannot be called with a float32 tensor of shape \(50, 3\) on cpu\. torch says: mat1 and mat2 shapes",
        ),
        (torch.ones(2, 4, dtype=torch.int64), r"cannot be called with a int64 tensor of shape \(2, 4\)"),
    ],
    ids=["float64", "shape", "integers"],
)
@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
def test_a_tensor_that_does_not_fit_is_named(posterior, x, message, method):
    with pytest.raises(RuntimeError, match=message) as caught:
        posterior.predict(x, method=method)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(
        TypeError, match=r"cannot be called with \(a float32 tensor .* torch says: .*positional argument"
    ):
        posterior.predict((X, X))
    with pytest.raises(TypeError, match=r"on cpu, … 50 in all\)\. torch says: .*positional argument"):
        posterior.predict(list(X))


@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
def test_errors_of_the_model_itself_pass_as_they_are(method):
    class Picky(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.inner, self.error = make_model(), error

        def forward(self, x):
            raise self.error

    for error in (
        ValueError("five columns, please"),
        RuntimeError("no"),
        KeyError("x"),
        torch.OutOfMemoryError("full"),
    ):
        model = Picky(error)
        posterior = Vprop(model.parameters(), num_data=10).posterior(model)
        for x in (X, iter([X])):
            with pytest.raises(type(error)) as caught:
                posterior.predict(x, method=method)
            assert caught.value is error


def test_outputs_that_do_not_fit_together():
    class Flattening(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.scale * x

    model = Flattening()
    posterior = Vprop(model.parameters(), num_data=10).posterior(model)
    with pytest.raises(ValueError, match=r"outputs for several batches do not fit together: .* \(2, 3\), \(2, 5\)\."):
        posterior.predict(iter([torch.ones(2, 3), torch.ones(2, 5)]), 3)
    model.forward = lambda x: (model.scale * x).sum()
    with pytest.raises(ValueError, match=r"must return an output for each example"):
        posterior.predict(torch.ones(2, 3), method="linearized")


@pytest.mark.parametrize("method", ["monte_carlo", "linearized"])
@pytest.mark.parametrize("keep", ["samples", "summary"])
def test_nan_outputs_are_warned_of(posterior, method, keep):
    x = X.clone()
    x[[3, 7], 1] = torch.nan
    for data in (x, DataLoader(TensorDataset(x, Y), batch_size=8)):
        with pytest.warns(
            RuntimeWarning, match=r"outputs are NaN for 2 of 50 examples, and so is .*\(x\.isnan\(\)"
        ) as seen:
            prediction = posterior.predict(data, 3, method=method, keep=keep)
        assert seen[0].filename == __file__
        wrong = prediction.probs.isnan().any(-1)
        assert wrong.nonzero().flatten().tolist() == [3, 7]


def test_a_posterior_of_another_model(posterior, tmp_path):
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    arguments = (posterior.mean, posterior.variance, posterior.prior)
    with pytest.raises(
        ValueError, match=r"not one of its model, Sequential: '0.weight', of shape \(8, 4\), has shape "
    ):
        DiagonalPosterior(other, *arguments, ess=1.0).predict(X)
    with pytest.raises(ValueError, match=r"not one of its model, Linear: '0.weight', of shape \(8, 4\), is not in it"):
        DiagonalPosterior(nn.Linear(4, 3), *arguments, ess=1.0).predict(X)
    posterior.save(tmp_path / "posterior.safetensors")
    with pytest.raises(ValueError, match=r"does not fit this model: it has .0.bias. of shape .8,., the model has"):
        vprop.load_posterior(tmp_path / "posterior.safetensors", other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "laplace"}, r"Invalid method='laplace': must be 'monte_carlo' or 'linearized'"),
        ({"keep": "all"}, r"Invalid keep='all': must be 'samples' or 'summary'"),
        ({"batch_size": 0}, r"Invalid batch_size=0: must be an integer >= 1"),
        ({"batch_size": 2.5}, r"Invalid batch_size=2\.5: must be an integer >= 1"),
        ({"vmap": "yes"}, r"Invalid vmap='yes': must be True or False"),
        ({"progress": 1}, r"Invalid progress=1: must be True or False"),
    ],
)
def test_bad_arguments(posterior, arguments, message):
    with pytest.raises(ValueError, match=message):
        posterior.predict(X, **arguments)


def test_a_loader_has_its_own_batch_size(posterior):
    with pytest.raises(ValueError, match=r"Invalid batch_size=4: must be None for a loader, which has its own"):
        posterior.predict(DataLoader(X), batch_size=4)


# -- the bar -----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("package", ["tqdm", "rich", None])
def test_a_bar_where_it_is_wanted(posterior, monkeypatch, package):
    found = progress.find_spec
    monkeypatch.setattr(progress, "find_spec", lambda name: found(name) if name == package else None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    expected = posterior.predict(X, 4, batch_size=8, progress=False).samples
    assert sys.stderr.getvalue() == ""
    assert torch.equal(posterior.predict(X, 4, batch_size=8, progress=True).samples, expected)
    assert ("predict" in sys.stderr.getvalue()) == (package is not None)


def test_no_bar_for_short_work_or_without_a_terminal(posterior, monkeypatch, capsys):
    posterior.predict(DataLoader(X, batch_size=8))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    posterior.predict(DataLoader(X, batch_size=8))
    assert "predict" not in sys.stderr.getvalue()


def test_a_batch_is_done_before_the_next_is_asked_for():
    model = make_model()
    posterior, events = Vprop(model.parameters(), num_data=10).posterior(model), []
    model.register_forward_hook(lambda module, args, output: events.append("run"))

    def batches():
        for part in X.split(25):
            events.append("read")
            yield part

    assert posterior.predict(batches(), 2).samples.shape == (2, 50, 3)
    assert events == ["read", "run", "run"] * 2


@pytest.mark.parametrize("arguments", [{}, {"method": "linearized"}, {"keep": "summary"}, {"vmap": True}], ids=repr)
def test_another_default_device_changes_nothing(posterior, arguments):
    """Tensors without a device of their own would hold nothing there."""

    def answers():
        found = []
        for q in (posterior, posterior.last_layer()):
            prediction = q.predict(X.numpy(), 4, batch_size=20, **arguments)
            found += [prediction.probs, prediction.mutual_information, prediction.std, prediction.confidence]
            prediction = q.predict(X, 4, likelihood="gaussian", noise_variance=0.3, **arguments)
            found += [prediction.mean, prediction.variance, *prediction.interval(0.8)]
        return found

    expected = answers()
    with torch.device("meta"):
        found = answers()
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference)


# -- inputs that are tuples and more ---------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class OfPairs(nn.Module):
    """Takes a pair as its first argument, and asks it by its names."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, pair):
        return self.layer(pair.left - pair.right)


class OfPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.layer = nn.RNN(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, packed):
        return self.layer(self.rnn(packed)[1][-1])


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_named_tuple_stays_one(batch_size):
    model, x = OfPairs(), Pair(torch.ones(5, 2), torch.zeros(5, 2))
    posterior = Vprop(model.parameters(), num_data=10).posterior(model, likelihood="gaussian")
    plain = Vprop(model.layer.parameters(), num_data=10).posterior(model.layer, likelihood="gaussian")
    found = posterior.predict((x,), 4, batch_size=batch_size).samples
    torch.testing.assert_close(found, plain.predict(torch.ones(5, 2), 4).samples)


def test_a_packed_sequence_stays_one():
    model, lengths = OfPacked(), [3, 2, 1]
    x = torch.randn(3, 3, 2, generator=torch.Generator().manual_seed(0))
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
    posterior = Vprop(model.parameters(), num_data=10).posterior(model, likelihood="gaussian")
    with torch.no_grad():
        expected = torch.stack([sampled(packed) for sampled in posterior.sampled_models(4)])
    for given in (packed, (packed,), iter([packed]), iter([(packed, torch.zeros(3, 1))])):
        torch.testing.assert_close(posterior.predict(given, 4).samples, expected)
    with pytest.raises(ValueError, match="cannot tell the examples of x apart: got a PackedSequence of a float32"):
        posterior.predict(packed, 4, batch_size=2)
    fit = vprop.calibration.fit_noise_scale(posterior, packed, expected[0] + torch.tensor([[3.0], [-3.0], [3.0]]))
    assert fit.posterior.noise_variance > 1
    loss = Objective(model, nn.functional.mse_loss, packed, torch.zeros(3, 1))()
    torch.testing.assert_close(loss, model(packed).square().mean())


class Halving(nn.Module):
    """Writes into its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    def forward(self, x):
        return self.layers(x.mul_(0.5))


@pytest.mark.parametrize("way", ["predict", "linearized", "batch_norm", "elbo", "sensitivity"])
def test_every_draw_sees_the_inputs_as_they_were_given(way):
    writing = Halving()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 2

    def answer(model, x):
        q = vprop.Vprop(model.parameters(), num_data=6).posterior(model, likelihood="categorical")
        return {
            "predict": lambda: q.predict(x, 3).samples,
            "linearized": lambda: q.predict(x, method="linearized").output_covariance,
            "batch_norm": lambda: q.predict(x.clone(), 3, batch_norm=x).samples,
            "elbo": lambda: q.elbo([(x, y)], 3, loss_fn=nn.functional.cross_entropy),
            "sensitivity": lambda: q.sensitivity((x, y)).loss_change,
        }[way]()

    given = x.clone()
    torch.testing.assert_close(answer(writing, given), answer(writing.layers, x * 0.5))
    assert torch.equal(given, x)
