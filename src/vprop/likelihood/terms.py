"""How many terms a loss is a mean over, seen while it is computed.

torch's losses are Σᵢ wᵢℓᵢ / Σᵢ wᵢ over the targets of a batch: wᵢ = 0 for a target that is ignored, the weight of its
class where classes have weights, and 1 otherwise. So the loss of two batches together is the mean of their losses with
their Σw as weights, which the lengths of the batches are not, and a batch with Σw = 0 has none (torch says NaN). Which
call of torch's it is, in a module, a partial or a lambda, is seen by watching it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction
from torch.overrides import TorchFunctionMode


class LossCall(NamedTuple):
    """A call of one of torch's losses: its arguments by name, and what it returned."""

    function: Callable[..., Tensor]
    arguments: dict[str, Any]
    result: Tensor
    changes: int | None = None
    """How often the result had been changed in place when it was returned; ``None`` where torch does not count."""

    @property
    def was_changed(self) -> bool:
        """Whether the result was changed in place since (``loss /= count``), and is what the call returned no more."""
        return _changes(self.result) != self.changes

    def option(self, name: str) -> Any:
        """An argument by its name, ``None`` where it was left out."""
        return self.reduction if name == "reduction" else self.arguments.get(name)

    @property
    def reduction(self) -> str:
        """``"mean"``, ``"sum"`` or ``"none"``, also where it was said in the way of old."""
        size_average, reduce = self.arguments.get("size_average"), self.arguments.get("reduce")
        if size_average is not None or reduce is not None:
            return _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
        return self.arguments.get("reduction", "mean")

    def terms(self) -> Tensor:
        """Σw of the targets, a scalar: what a mean of them is divided by."""
        return _TERMS[self.function](self.arguments)


def options_beyond_a_log_likelihood(value_of: Callable[[str], Any]) -> list[str]:
    """The options of one of torch's losses, as ``name=value``, with which it is no mean negative log-likelihood.

    ``value_of`` gives the value of an option by its name, ``None`` for one that there is not. A class that is ignored
    is one that the model can predict; −100 is none.

    >>> options_beyond_a_log_likelihood({"reduction": "sum", "ignore_index": -100}.get)
    ["reduction='sum'"]
    """
    found = [f"{name}=..." for name in ("weight", "pos_weight") if value_of(name) is not None]
    if value_of("reduction") not in (None, "mean"):
        found.append(f"reduction={value_of('reduction')!r}")
    if value_of("label_smoothing"):
        found.append(f"label_smoothing={value_of('label_smoothing')}")
    ignored = value_of("ignore_index")
    if ignored is not None and ignored >= 0:
        found.append(f"ignore_index={ignored}")
    return found


class LossWatch(TorchFunctionMode):
    """Sees which of torch's losses are called while it is entered.

    >>> labels = torch.tensor([0, 2, -100])
    >>> with LossWatch() as watch:
    ...     loss = (lambda output, y: F.cross_entropy(output, y))(torch.zeros(3, 4), labels)
    >>> int(watch.terms_of(loss))
    2
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[LossCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TERMS:
            arguments = signature(func).bind(*args, **(kwargs or {})).arguments
            self._calls.append(LossCall(func, arguments, result, _changes(result)))
        return result

    def call_of(self, loss: Tensor) -> LossCall | None:
        """The call that returned ``loss``; otherwise the only one that is a mean (``loss`` may be more than that)."""
        for call in self._calls:
            if call.result is loss:
                return call
        means = [call for call in self._calls if call.reduction == "mean"]
        return means[0] if len(means) == 1 else None

    def terms_of(self, loss: Tensor) -> Tensor | None:
        """Σw of what ``loss`` is a mean over; ``None`` where nothing is seen of that."""
        call = self.call_of(loss)
        return call.terms() if call is not None and call.reduction == "mean" else None

    def is_sum(self, loss: Tensor) -> bool:
        """Whether ``loss`` is a sum over its targets."""
        call = self.call_of(loss)
        return call is not None and call.reduction == "sum" and not call.was_changed


def _changes(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _of_classes(arguments: dict[str, Any]) -> Tensor:
    """Class numbers have the weights of their classes; of probabilities torch takes the plain mean over positions."""
    scores, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
    if target.is_floating_point():
        classes = scores.shape[min(1, scores.dim() - 1)]
        return torch.tensor(scores.numel() // classes, device=scores.device)
    counted = target != arguments.get("ignore_index", -100)
    if weight is None:
        return counted.sum()
    return (weight[torch.where(counted, target, 0)] * counted).sum()


def _of_elements(arguments: dict[str, Any]) -> Tensor:
    """Every element is a term, whatever factor it has."""
    scores, target = arguments["input"], arguments["target"]
    return torch.tensor(torch.broadcast_shapes(scores.shape, target.shape).numel(), device=scores.device)


def _of_weighted_elements(arguments: dict[str, Any]) -> Tensor:
    """These divide by the sum of their weights, if there are any."""
    weight = arguments.get("weight")
    return _of_elements(arguments) if weight is None else weight.sum()


_TERMS: dict[Any, Callable[[dict[str, Any]], Tensor]] = {
    F.cross_entropy: _of_classes,
    F.nll_loss: _of_classes,
    F.mse_loss: _of_weighted_elements,
    F.l1_loss: _of_weighted_elements,
    F.smooth_l1_loss: _of_elements,
    F.huber_loss: _of_elements,
    F.binary_cross_entropy: _of_elements,
    F.binary_cross_entropy_with_logits: _of_elements,
    F.gaussian_nll_loss: _of_elements,
    F.poisson_nll_loss: _of_elements,
}
