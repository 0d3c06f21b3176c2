"""A model that runs with other weights than its own, without anything of the model being changed.

``torch.func.functional_call`` puts the weights into the module and takes them out afterwards, so that two threads that
ask the same model at once see each other's weights. A replica is a second tree of modules instead
(:mod:`vprop._module_copies`), which shares code and data with the model, and has a place of its own for every parameter
and buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vprop._module_copies import ModuleCopies

Place = tuple[Any, Any]
"""A list or dict of a copied module's, and an index or a key in it."""


class Replica:
    """A stand-in for ``model`` that is called like it, after ``load`` has given it weights.

    Tensors that are not loaded are the model's own. Buffers are copies, so that a model which writes to them in its
    forward (BatchNorm in training mode) changes the replica only.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> replica = Replica(model)
    >>> replica.load({"weight": torch.tensor([[1.0, 2.0]])})
    >>> replica(torch.ones(3, 2)).flatten().tolist()
    [3.0, 3.0, 3.0]
    """

    def __init__(self, model: nn.Module) -> None:
        _refuse_scripts(model)
        copies = ModuleCopies(model)
        self._root = copies.of[model]
        self._names = {name: id(tensor) for name, tensor in _named_tensors(model)}
        self._originals = {
            id(tensor): tensor for _, tensor in _named_tensors(model)
        }  # kept, so that no id is used again
        self._places: dict[int, list[Place]] = {number: [] for number in self._originals}
        for container in copies.own_containers():
            for key, value in container.items() if isinstance(container, dict) else enumerate(container):
                if id(value) in self._places:
                    self._places[id(value)].append((container, key))
        self._substitutes: dict[int, Tensor] = {}
        self._has_strays: bool | None = None
        """Whether the model reaches a tensor of its own past the modules (a closure, an object that is no module);
        not known before the first call."""
        self.load({name: buffer.detach().clone() for name, buffer in model.named_buffers()})

    def eval(self) -> Replica:
        """Put the replica into evaluation mode; the model stays in its own."""
        if any(module.training for module in self._root.modules()):
            self._root.eval()
        return self

    def make_switchable(self) -> None:
        """Let modules write to their parameters when the mode changes, and put them into the mode to begin with.

        Some do: LoRA layers that add the adapter to the weight in evaluation mode, and take it out for training.
        """
        owned = {id(p) for module in self._root.modules() if switches_by_itself(module) for p in module.parameters()}
        names = [name for name, number in self._names.items() if number in owned]
        self.load({name: self._originals[self._names[name]].detach().clone() for name in names})
        self._root.train()

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take these weights and buffers, by their names in the model; all places of a tied tensor get it."""
        unknown = [name for name in weights if name not in self._names]
        if unknown:
            raise ValueError(
                f"These weights are not the model's: it has no parameter or buffer {unknown[0]!r}. Build the "
                "model as it was when they were made."
            )
        for name, weight in weights.items():
            original = self._names[name]
            self._substitutes[original] = weight
            for tensors, key in self._places[original]:
                tensors[key] = weight

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, hooks included."""
        if self._has_strays is False:
            return self._root(*args, **kwargs)
        substitution = _Substitution(self._substitutes)
        with substitution:
            result = self._root(*args, **kwargs)
        self._has_strays = substitution.was_needed
        return result

    def parameters(self) -> Iterator[Tensor]:
        """The weights that it has now."""
        return self._root.parameters()

    def modules(self) -> Iterator[nn.Module]:
        """The stand-ins for all modules of the model."""
        return self._root.modules()

    def module(self, name: str) -> nn.Module:
        """The stand-in for a module of the model, to put hooks on."""
        return self._root.get_submodule(name)

    def call_module(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The forward of one module of the model, with the weights that are loaded."""
        with _Substitution(self._substitutes) if self._has_strays is not False else nullcontext():
            return self._root.get_submodule(name)(*args, **kwargs)


class _Substitution(TorchFunctionMode):
    """Puts the replica's tensors into calls of torch that were given the model's. Only this thread sees it."""

    def __init__(self, substitutes: dict[int, Tensor]) -> None:
        super().__init__()
        self._substitutes = substitutes
        self.was_needed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple([self._replaced(value) for value in args])
        kwargs = {name: self._replaced(value) for name, value in kwargs.items()} if kwargs else {}
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            substitute = self._substitutes.get(id(value))
            if substitute is None or substitute is value:
                return value
            self.was_needed = True
            return substitute
        if type(value) in (list, tuple):
            return type(value)([self._replaced(item) for item in value])
        return value


def evaluating_replicas(
    model: nn.Module, buffers: Mapping[str, Tensor], draws: Iterable[Mapping[str, Tensor]]
) -> Iterator[Replica]:
    """The model in evaluation mode with one draw of the weights after the other: call each before the next."""
    anew = any(switches_by_itself(module) for module in model.modules())
    replica = None
    for weights in draws:
        if replica is None or anew:
            replica = Replica(model)
            if anew:
                replica.make_switchable()
            replica.load({name: buffer.clone() for name, buffer in buffers.items()} | dict(weights))
            replica.eval()
        else:
            replica.load(weights)
        yield replica


def switches_by_itself(module: nn.Module) -> bool:
    """Whether more than a flag may change when the module is put into another mode."""
    kind = type(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names: a tied one has several."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _refuse_scripts(model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError(
            f"{type(model).__name__} is, or has in it, a module compiled by torch.jit, which runs with its own weights "
            "only. Use the module that it was compiled from."
        )
