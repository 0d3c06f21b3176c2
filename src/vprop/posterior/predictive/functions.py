"""The model as a function of its weights: all of it, or its head alone after the body has run once.

A function is made for each prediction, from a replica of the model: nothing of the model is changed, and the replica is
of one thread only. ``prepare`` turns an input into the arguments of what is called many times, ``__call__`` calls that
with weights.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from vprop import replica
from vprop.calling import Seen, Untouched, copied, model_arguments
from vprop.posterior.predictive import masks as _masks
from vprop.posterior.predictive.dropout import dropping
from vprop.posterior.predictive.inputs import described, leaves, mapped
from vprop.posterior.predictive.masks import Masks
from vprop.replica import Replica, evaluating_replicas, switches_by_itself

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

Weights = Mapping[str, Tensor]


class Prepared(NamedTuple):
    """Arguments for what is called under all weights."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tail: tuple[int, ...] | None = None
    """The shape of the model's output after its first dimension, where it is the head's output in another shape."""


class ModelFunction(ABC):
    """What maps weights to outputs, for inputs that have been prepared."""

    def __init__(self, posterior: Posterior) -> None:
        self._posterior = posterior
        self.anew = any(switches_by_itself(module) for module in posterior.model.modules())
        """Whether a replica can be given weights once only, because the model changes them by itself (LoRA)."""
        self._replica: Replica | None = None

    @abstractmethod
    def prepare(self, x: Any) -> Prepared:
        """Do once what does not depend on the weights."""

    @abstractmethod
    def __call__(self, weights: Weights, prepared: Prepared, masks: Masks | None = None) -> Tensor:
        """The outputs under these weights, with masks of dropout if there are any."""

    def _fresh(self) -> Replica:
        """A replica in evaluation mode with the posterior's buffers, at the mean."""
        q = self._posterior
        mean = q._in_model_dtypes(q.mean)
        return next(evaluating_replicas(q.model, q._fixed(), [mean]))


class WholeModel(ModelFunction):
    """All of the model is called for each draw of the weights."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__(posterior)
        self._call = Untouched()

    def prepare(self, x: Any) -> Prepared:
        """The arguments that the input stands for."""
        if not self.anew:
            self._replica = self._fresh()  # for each batch, so that none sees what another left in the buffers
        self._call = Untouched()  # for each batch: it may write into some and not into others
        return Prepared(*model_arguments(x))

    def __call__(self, weights: Weights, prepared: Prepared, masks: Masks | None = None) -> Tensor:
        """The model's output."""
        if self.anew:
            q = self._posterior
            own = next(evaluating_replicas(q.model, q._fixed(), [weights]))
        else:
            assert self._replica is not None
            own = self._replica
            own.load(weights)
        with dropping(own, masks):
            return logits_of(self._call(own, prepared.args, prepared.kwargs))


class HeadOnly(ModelFunction):
    """The body of the model is called once, and its last module for each draw of that one's weights."""

    def __init__(self, posterior: Posterior, head: str) -> None:
        super().__init__(posterior)
        self._head = head
        self._changes_input = False

    def prepare(self, x: Any) -> Prepared:
        """Run the model once, at the mean, and keep what its head was called with."""
        own = self._replica = self._fresh()
        module, inputs, outputs = own.module(self._head), list[Any](), list[Seen]()

        def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.append((copied((args, kwargs)), Seen(list(leaves((args, kwargs))))))

        def keep_output(module: nn.Module, args: Any, output: Any) -> None:
            self._changes_input = inputs[-1][1].is_changed()
            outputs.append(Seen([output, getattr(output, "logits", output)]))

        # Before all other hooks and after them: the module is called again with what was given to it.
        before = module.register_forward_pre_hook(keep_input, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(keep_output)
        try:
            args, kwargs = copied(model_arguments(x))
            result = logits_of(own(*args, **kwargs))
        finally:
            before.remove()
            after.remove()
        if len(outputs) != 1:
            how = "not called" if not outputs else f"called {len(outputs)} times"
            raise ValueError(
                f"last_layer({self._head!r}): this module was {how} in the model's forward, must be called once, at "
                "the end. Name another one, or predict with the whole model."
            )
        (args, kwargs), _ = inputs[0]
        return Prepared(args, kwargs, self._tail(result, outputs[0]))

    def _tail(self, result: Tensor, seen: Seen) -> tuple[int, ...] | None:
        """How the model's output follows from the head's: it is the same, or the same numbers in another shape."""
        output, same = seen.values[0], any(result is value for value in seen.values)
        changed = seen.is_changed()
        if same and not changed:
            return None
        rows = isinstance(output, Tensor) and result.dim() and output.dim() and len(result) == len(output)
        if rows and not changed:
            together = result.numel() == output.numel() and result.is_contiguous() and output.is_contiguous()
            if together and result.data_ptr() == output.data_ptr():
                return tuple(result.shape[1:])
        raise ValueError(
            f"last_layer({self._head!r}): the model's output is not that of this module: something is done with it "
            "afterwards. Name the module that makes the output, or predict with the whole model."
        )

    def __call__(self, weights: Weights, prepared: Prepared, masks: Masks | None = None) -> Tensor:
        """The head's output, in the shape of the model's; it has no masks."""
        assert self._replica is not None
        self._replica.load(weights)
        args, kwargs = prepared.args, prepared.kwargs
        if self._changes_input:
            args, kwargs = copied((args, kwargs))
        output = logits_of(self._replica.call_module(self._head, *args, **kwargs))
        return output if prepared.tail is None else output.reshape(len(output), *prepared.tail)


def function_of(posterior: Posterior) -> ModelFunction:
    """What a posterior's weights are put into: its head, if it is one of a head only."""
    whole = WholeModel(posterior)
    return whole if posterior.head is None or whole.anew else HeadOnly(posterior, posterior.head)


def logits_of(output: Any) -> Tensor:
    """The tensor in a model's output."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            "predict needs a model that returns a tensor, or an output with .logits; this one returns "
            f"{type(output).__name__}. Wrap it in a module whose forward picks the tensor out."
        )
    return logits


def first_rows(prepared: Prepared, rows: int, start: int, stop: int) -> Prepared:
    """Some of the examples: a part of every tensor that has as many rows as there are examples."""

    def cut(value: Any) -> Any:
        is_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        return value[start:stop] if is_rows else value

    return Prepared(mapped(cut, prepared.args), mapped(cut, prepared.kwargs), prepared.tail)


# -- errors of torch ---------------------------------------------------------------------------------------------------

_TORCH = str(Path(torch.__file__).parent)
_PASSED_THROUGH = (replica.__file__, _masks.__file__, str(Path(_TORCH) / "overrides.py"))
"""Files through which calls of torch go without being the ones that were made."""


@contextmanager
def told_with_input(x: Any, model: nn.Module | Replica, where: str = "predict(x)") -> Iterator[None]:
    """Add to an error that torch raises (shapes, precisions, devices) what the model was called with.

    Errors that the model raises itself, and those of its own arithmetic, pass as they are.
    """
    try:
        yield
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        if type(error) not in (RuntimeError, TypeError, IndexError, ValueError) or not _is_of_torch(error):
            raise
        weights = next(model.parameters(), None)
        own = "" if weights is None else f" (its weights are {str(weights.dtype)[6:]} on {weights.device})"
        raise type(error)(
            f"{where}: the model{own} cannot be called with {described(x)}. torch says: {error}"
        ) from error


def _is_of_torch(error: BaseException) -> bool:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [file for file in files if file not in _PASSED_THROUGH]
    return bool(own) and own[-1].startswith(_TORCH)
