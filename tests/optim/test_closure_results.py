"""What step(closure) returns: what the closure returns, averaged over the samples as far as it has a mean."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from tests.table import cases
from vprop import Vprop


class Result(NamedTuple):
    loss: torch.Tensor
    name: str


def results_of(make, what):
    """One step of an optimizer, and what its closure returned at each sample."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        seen.append(loss.detach())
        return what(loss, len(seen))

    return optimizer.step(closure), seen


def several(params, **arguments):
    return Vprop(params, num_data=50, mc_samples=2, **arguments)


@pytest.mark.parametrize("case", cases(any_loop=True))
class TestEveryOptimizer:
    def test_a_loss(self, case):
        result, seen = results_of(case, lambda loss, k: loss)
        torch.testing.assert_close(result, sum(seen) / len(seen))
        assert not result.requires_grad

    def test_a_loss_and_a_number_as_a_tuple(self, case):
        result, seen = results_of(case, lambda loss, k: (loss, float(k)))
        assert isinstance(result, tuple)
        torch.testing.assert_close(result[0].detach(), sum(seen) / len(seen))
        assert result[1] == pytest.approx((1 + len(seen)) / 2)

    def test_nothing(self, case):
        assert results_of(case, lambda loss, k: None)[0] is None


def test_dicts_lists_and_named_tuples_keep_their_form():
    result, seen = results_of(several, lambda loss, k: {"loss": loss, "parts": [loss, k], "kind": "train"})
    mean = sum(seen) / 2
    assert result == {"loss": mean, "parts": [mean, 1.5], "kind": "train"}
    result, seen = results_of(several, lambda loss, k: Result(loss, "train"))
    assert isinstance(result, Result)
    assert result.name == "train"
    torch.testing.assert_close(result.loss, sum(seen) / 2)
    assert not result.loss.requires_grad


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda loss, k: f"sample {k}", "sample 2"),
        (lambda loss, k: (k, None), (1.5, None)),
        (lambda loss, k: [k] * k, [2, 2]),
        (lambda loss, k: {"first": k} if k == 1 else {"second": k}, {"second": 2}),
        (lambda loss, k: 1.0 if k == 1 else "two", "two"),
        (lambda loss, k: torch.ones(k).tolist(), [1.0, 1.0]),
    ],
)
def test_what_has_no_mean_is_the_last_samples(what, expected):
    assert results_of(several, what)[0] == expected


def test_tensors_of_different_shapes_are_not_broadcast():
    result, _ = results_of(several, lambda loss, k: torch.full((k,), float(k)))
    assert torch.equal(result, torch.tensor([2.0, 2.0]))


def test_with_one_sample_the_very_object_is_returned():
    class Output:
        pass

    output = Output()
    assert results_of(lambda p: Vprop(p, num_data=50), lambda loss, k: output)[0] is output
    assert results_of(several, lambda loss, k: output)[0] is output
