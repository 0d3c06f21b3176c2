"""Second trees of modules: copies that share code and data with a model, and refer to each other where it does."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_LARGEST_CONTAINER = 1000
"""Lists and dicts of more entries are not looked through for modules: they hold data."""
_DEPTH = 3
"""How many containers and objects inside each other are looked through."""
_KEPT = frozenset({"_parameters", "_buffers", "_modules"})
_LOOKED_INTO = frozenset({tuple, list, dict, OrderedDict, defaultdict, set, deque})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})


class ModuleCopies:
    """A copy of each module of a model.

    A copy has attributes of its own, and lists and dicts of its own in them: what a forward writes there, or a hook
    that is a method or a closure of the model, is not written into the model. Functions and objects through which the
    model reaches its modules have copies that reach the copies; all else is shared.
    """

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[nn.Module, nn.Module] = {}
        self._done: dict[int, Any] = {}
        """What takes the place of containers, functions, cells and objects, by their ids."""
        self._alive: list[Any] = []  # so that no id is used again
        self._copy_modules(model)
        distinct = set(self.of.values())
        for copy in distinct:
            for name, value in copy.__dict__.items():
                if name not in _KEPT:
                    self._copy_containers(value, _DEPTH)
        self._own_containers = list(self._done.values())
        for container in filter(None, self._own_containers):  # most are empty
            self._replace_entries(container)
        for copy in distinct:
            children = {name: self.of.get(child, child) for name, child in copy._modules.items()}  # type: ignore[arg-type]
            others = {name: value for name, value in copy.__dict__.items() if name not in _KEPT}
            copy.__dict__.update({name: self._replaced(value, _DEPTH) for name, value in others.items()})
            copy.__dict__["_modules"] = children

    def own_containers(self) -> Iterator[Any]:
        """The lists and dicts that the copies have of their own, with the dicts of their attributes and tensors."""
        for copy in set(self.of.values()):
            yield from (copy.__dict__, copy._parameters, copy._buffers)
        yield from (container for container in self._own_containers if isinstance(container, list | dict))

    def _copy_modules(self, model: nn.Module) -> None:
        compiled = []
        for module in model.modules():
            if "_orig_mod" in module._modules:
                compiled.append(module)
                continue
            # How DataParallel makes the modules of its threads: a module that needs more care says so there.
            copy = module._replicate_for_data_parallel()
            copy.__dict__.pop("_is_replica", None)
            copy.__dict__.pop("_compiled_call_impl", None)  # made by module.compile(): it would call the original
            copy.__dict__.update(_parameters=dict(module._parameters), _buffers=dict(module._buffers))
            if parametrize.is_parametrized(module):
                copy.__class__ = _without_cache(copy)
            self.of[module] = copy
        for module in reversed(compiled):  # compiled code would call the original as well
            self.of[module] = self.of[module._orig_mod]  # type: ignore[index]

    # -- containers ------------------------------------------------------------------------------------------

    def _copy_containers(self, value: Any, depth: int) -> None:
        """Copies of the containers in an attribute, which still hold what the containers hold."""
        if type(value) not in _LOOKED_INTO or len(value) > _LARGEST_CONTAINER or depth == 0:
            return
        if type(value) is not tuple:
            if id(value) in self._done:
                return
            self._note(value, value.copy())
        for entry in tuple(value.values() if isinstance(value, dict) else value):
            self._copy_containers(entry, depth - 1)

    def _replace_entries(self, container: Any) -> None:
        if isinstance(container, dict):
            container.update({key: self._replaced(entry, _DEPTH) for key, entry in container.items()})
            return
        entries = [self._replaced(entry, _DEPTH) for entry in container]
        if isinstance(container, list):
            container[:] = entries
        else:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(entries)

    # -- what takes the place of a value ---------------------------------------------------------------------

    def _note(self, value: Any, copy: Any) -> Any:
        self._done[id(value)] = copy
        self._alive.append(value)
        return copy

    def _replaced(self, value: Any, depth: int) -> Any:
        """What takes the place of a value: itself, if neither a module nor a container of a module's is in it."""
        if isinstance(value, nn.Module):
            return self.of.get(value, value)
        if depth == 0 or type(value) in _PLAIN or isinstance(value, Tensor | type | ModuleType):
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        if isinstance(value, MethodType):
            owner = self._replaced(value.__self__, depth)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if type(value) is partial:
            return self._replaced_partial(value, depth)
        if type(value) in _LOOKED_INTO:
            return self._replaced_container(value, depth)
        self._note(value, value)  # should it be met again inside itself
        copy = self._replaced_function(value, depth) if type(value) is FunctionType else self._new_object(value, depth)
        if copy is value and depth < _DEPTH:
            del self._done[id(value)]  # from elsewhere one may see deeper into it
            return value
        return self._note(value, copy)

    def _replaced_partial(self, value: partial, depth: int) -> partial:
        parts = (value.func, value.args, value.keywords)
        function, arguments, keywords = changed = tuple(self._replaced(part, depth) for part in parts)
        if _all_same(changed, parts):
            return value
        rebuilt = partial(function, *arguments, **keywords)
        rebuilt.__dict__.update(value.__dict__)
        return rebuilt

    def _replaced_container(self, value: Any, depth: int) -> Any:
        """For containers that are no module's: they may be how results get out of a hook, and are shared."""
        if len(value) > _LARGEST_CONTAINER or not isinstance(value, list | tuple | dict):
            return value
        entries = list(value.values()) if isinstance(value, dict) else list(value)
        new = [self._replaced(entry, depth - 1) for entry in entries]
        if _all_same(new, entries):
            return value
        if not isinstance(value, dict):
            return type(value)(new)
        copy = value.copy()
        copy.update(zip(value, new, strict=True))
        return copy

    def _replaced_function(self, function: FunctionType, depth: int) -> FunctionType:
        cells, defaults, keywords = function.__closure__ or (), function.__defaults__, function.__kwdefaults__
        new_cells = tuple(self._replaced_cell(cell, depth) for cell in cells)
        new_defaults, new_keywords = self._replaced(defaults, depth), self._replaced(keywords, depth)
        if _all_same((*new_cells, new_defaults, new_keywords), (*cells, defaults, keywords)):
            return function
        closure = new_cells if cells else None
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, new_defaults, closure)
        copy.__kwdefaults__ = new_keywords
        copy.__dict__.update(function.__dict__)
        return copy

    def _replaced_cell(self, cell: CellType, depth: int) -> CellType:
        if id(cell) in self._done:
            return self._done[id(cell)]
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return cell
        new = self._replaced(content, depth - 1)
        return cell if new is content else self._note(cell, CellType(new))

    def _new_object(self, value: Any, depth: int) -> Any:
        """A copy of an object that holds modules, so that what it calls is in the mode, and writes to, the copies."""
        if not hasattr(value, "__dict__") or hasattr(type(value), "__del__"):
            return value
        attributes = dict(value.__dict__)
        new = {name: self._replaced(entry, depth - 1) for name, entry in attributes.items()}
        if _all_same(new.values(), attributes.values()):
            return value
        try:
            copy = object.__new__(type(value))
        except TypeError:  # it is not Python's alone
            return value
        copy.__dict__.update(new)
        return copy


def _without_cache(module: nn.Module) -> type[nn.Module]:
    """The class of a parametrized module, but that ``parametrize.cached()`` has no effect.

    All threads share torch's cache, and its keys are those of the module that was parametrized, not of the copy.
    """
    kind = type(module)
    names: Any = module.parametrizations
    computed = {name: property(partial(_parametrized, name=name), getattr(kind, name).fset) for name in names}
    return type(kind.__name__, (kind,), computed)


def _parametrized(module: Any, name: str) -> Tensor:
    return module.parametrizations[name]()


def _all_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))
