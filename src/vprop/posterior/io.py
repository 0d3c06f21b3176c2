"""Posteriors as safetensors files: tensors named ``mean/<parameter>``, …, and the rest as metadata."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vprop.checks import check_model
from vprop.files import path_of
from vprop.posterior import _container, _registry
from vprop.posterior.prior import GaussianPrior
from vprop.wrappers import unwrapped

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


_BY_PARAMETER = ("mean", "prior_mean", "prior_precision")
"""The sections that every structure has."""


def save(posterior: Posterior, path: str | Path) -> None:
    """Write ``posterior`` with the tensors that its structure adds."""
    target = path_of(path, "save(path)")
    structure = getattr(posterior, "structure", None)
    if structure is None:
        raise TypeError(
            f"save(path): {type(posterior).__name__} has no name for files. Give the class one: structure = '...'."
        )
    sections = {
        "mean": posterior.mean,
        "prior_mean": posterior.prior.mean,
        "prior_precision": posterior.prior.precision,
        "buffer": posterior.buffers,
        **posterior._sections(),
    }
    tensors = {f"{section}/{name}": t for section, ts in sections.items() for name, t in ts.items()}
    settings: dict[str, Any] = {
        "structure": structure,
        "ess": posterior.ess,
        "seed": posterior.seed,
        "likelihood": posterior.likelihood,
        "order": list(posterior.mean),
    }
    if isinstance(posterior.noise_variance, Tensor):
        tensors["setting/noise_variance"] = posterior.noise_variance
    else:
        settings["noise_variance"] = posterior.noise_variance
    _container.write(target, tensors, {"settings": json.dumps(settings)})


def load_posterior(path: str | Path, model: nn.Module) -> Posterior:
    """A posterior that ``posterior.save`` wrote, over the parameters of ``model``.

    Its tensors go to the devices of the model's parameters; the model's own weights are not changed. A file that was
    damaged after it was written is refused (but for files of versions that wrote no checksum).
    """
    source = path_of(path, "load_posterior(path, model)")
    check_model(model, "load_posterior(path, model)")
    sections, settings = _read(source)
    model = unwrapped(model)
    parameters = dict(model.named_parameters())
    _check_parameters(sections["mean"], parameters, source)
    _check_buffers(sections.get("buffer", {}), model, source)
    # A file has no order; the noise of a parameter depends on its place among the model's.
    order = [name for name in parameters if name in sections["mean"]]
    cls, saved_order = _class_of(settings.pop("structure"), source), settings.pop("order", order)
    _to_devices(sections, model, (*_BY_PARAMETER, "buffer", *cls.sections_by_parameter), parameters[order[0]].device)
    mean = {name: sections["mean"][name] for name in saved_order}
    prior = GaussianPrior(sections["prior_mean"], sections["prior_precision"])
    rest = settings | {"buffers": sections.get("buffer", {})}
    return cls._from_sections(model, mean, prior, sections, **rest)._in_order(order)


def _to_devices(
    sections: dict[str, dict[str, Tensor]], model: nn.Module, by_name: Collection[str], other: torch.device
) -> None:
    """Put the tensors of the sections ``by_name`` where those of the model with their names are, the rest together."""
    devices = {name: tensor.device for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(devices.get(name, tensor.device) if section in by_name else other)


def _class_of(structure: str, path: Path) -> type[Posterior]:
    found = _registry.find(structure)
    if found is None:
        names = [repr(cls.structure) for cls in _registry.registered()]
        known = " and ".join([", ".join(names[:-1]), names[-1]])
        raise ValueError(
            f"{path}: unknown structure {structure!r}: this version reads {known}. Update vprop; or, if the structure "
            "is defined elsewhere, import the module with its posterior class before you load the file."
        )
    return found


def _read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by section and name, and the settings."""
    tensors, metadata = _container.read(path, {"settings"})
    sections: dict[str, dict[str, Tensor]] = {name: {} for name in _BY_PARAMETER}
    for key, tensor in tensors.items():
        section, _, name = key.partition("/")
        sections.setdefault(section, {})[name] = tensor
    try:
        settings = json.loads(metadata["settings"])
    except (KeyError, ValueError) as error:
        raise _container.damaged(path, "its settings cannot be read") from error
    _check_complete(sections, settings, path)
    settings.update(sections.pop("setting", {}))
    return sections, settings


def _check_complete(sections: dict[str, dict[str, Tensor]], settings: Any, path: Path) -> None:
    """Refuse a file that lacks something, which a damaged one of an old version, without a checksum, can do."""
    structure = settings.get("structure") if isinstance(settings, dict) else None
    if not isinstance(structure, str) or not {"ess", "seed", "likelihood"} <= set(settings):
        raise _container.damaged(path, "its settings are not complete")
    cls, names = _class_of(structure, path), set(sections["mean"])
    by_parameter = [*_BY_PARAMETER[1:], *cls.sections_by_parameter]
    lacking = [section for section in by_parameter if set(sections.get(section, {})) != names]
    for tensor in cls.needed_tensors:
        section, _, name = tensor.partition("/")
        if name not in sections.get(section, {}):
            lacking.append(tensor)
    if lacking or not names:
        raise _container.damaged(path, f"it lacks tensors of {lacking or ['mean']}")
    order = settings.get("order", list(names))
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(names):
        raise _container.damaged(path, "its order is not that of its parameters")


def _check_parameters(mean: dict[str, Tensor], parameters: dict[str, nn.Parameter], path: Path) -> None:
    for name, tensor in sorted(mean.items()):
        if name not in parameters or parameters[name].shape != tensor.shape:
            found = tuple(parameters[name].shape) if name in parameters else "no such parameter"
            raise _other_model(path, f"it has {name!r} of shape {tuple(tensor.shape)}, the model has {found}")


def _check_buffers(saved: dict[str, Tensor], model: nn.Module, path: Path) -> None:
    """Running statistics must fit as weights do: without those of its BatchNorm a posterior predicts something else.

    What a module does not keep in its state_dict (a mask, a cache) may be there or not, in any size.
    """
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    shapes = {name: tuple(buffer.shape) for name, buffer in model.named_buffers(remove_duplicate=False)}
    for name, tensor in sorted(saved.items()):
        if name not in passing and shapes.get(name) != tuple(tensor.shape):
            found = shapes.get(name, "no such buffer")
            raise _other_model(
                path, f"it has the buffer {name!r} of shape {tuple(tensor.shape)}, the model has {found}"
            )
    for name, _ in model.named_buffers():
        if name not in passing and name not in saved:
            raise _other_model(path, f"the model has a buffer {name!r} of shape {shapes[name]}, the file has none")


def _other_model(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} does not fit this model: {what}. Build the model as it was when the posterior was saved."
    )
