"""Draws that are made and run together are those that are made and run one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness import make_batch, make_model, train
from tests.test_replica import MODELS, build
from vprop import IVON, VONG, Vprop, noise
from vprop.posterior.predictive import sampling

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


CANNOT = ("recurrent",)
"""Models with operations that vmap has no way to run."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("constructor", [Vprop, IVON, VONG])
def test_stacked_draws(constructor, dtype):
    if constructor is VONG and dtype == torch.bfloat16:
        dtype = torch.float32
    model, optimizer = train(constructor, steps=2, num_data=100, model=make_model(dtype))
    posterior = optimizer.posterior(model)
    stacked = posterior._stacked_draws(7, 2, 6)
    for i, sample in enumerate(range(2, 6)):
        for name, weight in posterior._in_model_dtypes(posterior._draw(7, sample)).items():
            assert torch.equal(stacked[name][i], weight), name
            assert stacked[name].dtype == dtype


@pytest.mark.parametrize("portable", [False, True])
def test_noise_of_several_samples(portable, monkeypatch):
    if portable:
        monkeypatch.setattr(noise, "_kernel_for", lambda *_: None)
    for shape in [(3, 5), (1,), (4,), ()]:
        draw = noise.Draw(3, parameter=2, step=9, stream=noise.Stream.POSTERIOR)
        together = noise.normals_of_samples(torch.zeros(shape), draw, range(5, 9))
        for i, sample in enumerate(range(5, 9)):
            alone = noise.normal(0, max(1, torch.Size(shape).numel()), draw._replace(sample=sample))
            assert torch.equal(together[i].flatten(), alone)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, about layers that it runs one by one
@pytest.mark.parametrize("name", MODELS)
def test_vmap_gives_what_a_loop_gives(name):
    """Models that vmap cannot run are run in a loop, unless vmap is insisted on."""
    model = build(name)
    posterior = Vprop(model.parameters(), num_data=10).posterior(model)
    loop = posterior.predict(X, 5, seed=1, vmap=False).samples
    assert torch.equal(posterior.predict(X, 5, seed=1).samples, loop), "one batch on a CPU is a loop"
    torch.testing.assert_close(posterior.predict(iter([X]), 5, seed=1).samples, loop, rtol=1e-12, atol=1e-13)
    if name in CANNOT:
        with pytest.raises(RuntimeError, match=r"torch\.func\.vmap cannot run this model"):
            posterior.predict(X, 5, seed=1, vmap=True)
    else:
        together = posterior.predict(X, 5, seed=1, vmap=True).samples
        torch.testing.assert_close(together, loop, rtol=1e-12, atol=1e-13)


@pytest.fixture
def count(monkeypatch):
    """How many draws are run together, in each call of the model."""
    sizes = []
    own = torch.func.vmap

    def vmap(function):
        return lambda draws: sizes.append(len(next(iter(draws.values())))) or own(function)(draws)

    monkeypatch.setattr(torch.func, "vmap", vmap)
    return sizes


def test_where_many_are_run_at_once(count):
    model, optimizer = train(Vprop, steps=1, num_data=100)
    posterior, (x, _) = optimizer.posterior(model), make_batch()
    posterior.predict(x, 8)
    assert count == [], "not for one batch on a CPU"
    posterior.predict(x, 8, batch_size=6)
    assert count == [8, 8]
    count.clear()
    posterior.predict(x, 8, batch_size=6, vmap=False)
    assert count == []
    rows = sampling._LARGEST_VMAP["cpu"] // posterior.num_parameters + 1
    posterior.predict(iter([torch.randn(rows, 4)]), 2)
    assert count == [], "not where a loop keeps the machine busy"
    posterior.predict(iter([torch.randn(rows - 1, 4)]), 2)
    assert count == [2]


def test_where_they_are_not(count):
    """Convolutions are not always faster with a filter for each draw; hooks would see batched tensors."""
    x = torch.randn(4, 1, 5, 5)
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 2))
    hooked = nn.Sequential(nn.Flatten(), nn.Linear(25, 2))
    hooked[1].register_forward_hook(lambda module, args, output: None)
    for model in (convolution, hooked):
        posterior = Vprop(model.parameters(), num_data=10).posterior(model)
        posterior.predict(iter([x]), 4)
        assert count == []
        torch.testing.assert_close(
            posterior.predict(x, 4, vmap=True).samples,
            posterior.predict(x, 4, vmap=False).samples,
            rtol=1e-4,
            atol=1e-5,
        )
        count.clear()


def test_a_model_that_vmap_cannot_run(count):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, x):
            out = self.inner(x)
            return out if float(out.sum()) < 1e9 else -out

    model, (x, _) = Looks(), make_batch()
    posterior = Vprop(model.parameters(), num_data=10).posterior(model)
    expected = posterior.predict(x, 4).samples
    assert torch.allclose(posterior.predict(x, 4, batch_size=6).samples, expected, atol=1e-6)
    assert count == [4], "it is tried once"
    with pytest.raises(RuntimeError, match=r"predict\(vmap=True\): torch\.func\.vmap cannot run this model: .* Leave"):
        posterior.predict(x, 4, vmap=True)


def test_random_numbers_in_a_forward_are_not_shared_by_draws(count):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, x):
            return self.inner(x) + torch.randn(3)

    model, (x, _) = Noisy(), make_batch()
    posterior = Vprop(model.parameters(), num_data=10, prior_precision=1e12).posterior(model)
    with torch.random.fork_rng():
        samples = posterior.predict(iter([x]), 4).samples
    assert samples.std(0).min() > 1e-2, "vmap refuses them, and the loop draws them anew"
