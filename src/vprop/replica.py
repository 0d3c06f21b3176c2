"""A model that runs with other weights than its own, without anything of the model being changed.

``torch.func.functional_call`` puts the weights into the module and takes them out afterwards, so that two threads that
ask the same model at once see each other's weights. A replica is a second tree of modules instead: it shares code,
hooks and all that is not a tensor with the model, and has a place of its own for every parameter and buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Place = tuple[dict[str, Any], str]
"""A dict of a module's tensors, and a key in it."""

_LARGEST_CONTAINER = 1000
"""Lists and dicts of more entries are not looked through for modules: they hold data."""
_KEPT = frozenset({"_parameters", "_buffers", "_modules"})


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
        copies = _copies_of(model)
        self._root = copies[model]
        self._names = {name: id(tensor) for name, tensor in _named_tensors(model)}
        self._originals = {
            id(tensor): tensor for _, tensor in _named_tensors(model)
        }  # kept, so that no id is used again
        self._places: dict[int, list[Place]] = {}
        for module, copy in copies.items():
            for own, copied in ((module._parameters, copy._parameters), (module._buffers, copy._buffers)):
                for name, tensor in list(own.items()):
                    if tensor is not None:
                        self._places.setdefault(id(tensor), []).append((copied, name))
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


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names: a tied one has several."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _copies_of(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """A copy of each module of the model, with children and dicts of tensors of its own."""
    copies: dict[nn.Module, nn.Module] = {}
    compiled = []
    for module in model.modules():
        if "_orig_mod" in module._modules:
            compiled.append(module)
            continue
        # How DataParallel makes the modules of its threads: a module that needs more care says so there.
        copy = module._replicate_for_data_parallel()
        copy.__dict__.pop("_is_replica", None)
        copy.__dict__.pop("_compiled_call_impl", None)  # made by module.compile(): it would call the original
        copy._parameters, copy._buffers = dict(module._parameters), dict(module._buffers)
        copies[module] = copy
    for module in reversed(compiled):  # compiled code would call the original as well
        copies[module] = copies[module._orig_mod]  # type: ignore[index]
    for copy in set(copies.values()):
        copy._modules = {name: copies.get(child, child) for name, child in copy._modules.items()}  # type: ignore[arg-type]
        for name, value in list(copy.__dict__.items()):
            if name not in _KEPT and not name.endswith("_hooks"):
                replaced = _with_copies(value, copies)
                if replaced is not value:
                    copy.__dict__[name] = replaced
    return copies


def _with_copies(value: Any, copies: dict[nn.Module, nn.Module], depth: int = 3) -> Any:
    """What an attribute holds, with the copies of modules in place of the modules; itself, if there are none in it."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, MethodType):
        owner = copies.get(value.__self__) if isinstance(value.__self__, nn.Module) else None
        return value if owner is None else MethodType(value.__func__, owner)
    if type(value) is partial:
        parts = (value.func, value.args, value.keywords)
        function, arguments, keywords = changed = tuple(_with_copies(part, copies, depth) for part in parts)
        if _all_same(changed, parts):
            return value
        rebuilt = partial(function, *arguments, **keywords)
        rebuilt.__dict__.update(value.__dict__)
        return rebuilt
    if type(value) not in (list, tuple, dict) or len(value) > _LARGEST_CONTAINER or depth == 0:
        return value
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    new = [_with_copies(entry, copies, depth - 1) for entry in entries]
    if _all_same(new, entries):
        return value
    return dict(zip(value, new, strict=True)) if isinstance(value, dict) else type(value)(new)


def _all_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def _refuse_scripts(model: nn.Module) -> None:
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError(
            f"{type(model).__name__} is, or has in it, a module compiled by torch.jit, which runs with its own weights "
            "only. Use the module that it was compiled from."
        )
