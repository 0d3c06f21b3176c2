"""Posteriors as safetensors files: tensors named ``mean/<parameter>``, …, and the rest as metadata."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vprop.checks import check_model
from vprop.files import path_of
from vprop.likelihood.kinds import CLASSES
from vprop.posterior import _container, _registry
from vprop.posterior.calibrated import Scales
from vprop.posterior.prior import GaussianPrior
from vprop.wrappers import unwrapped

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


_BY_PARAMETER = ("mean", "prior_mean", "prior_precision")
"""The sections that every structure has."""
_INSIDE = Path("a part of a posterior")
"""What messages call the source of a posterior that is a part of another."""


def save(posterior: Posterior, path: str | Path) -> None:
    """Write ``posterior`` with the tensors that its structure adds."""
    target = path_of(path, "save(path)")
    structure = getattr(posterior, "structure", None)
    if structure is None:
        raise TypeError(
            f"save(path): {type(posterior).__name__} has no name for files. Give the class one: structure = '...'."
        )
    tensors, settings = parts_of(posterior)
    _container.write(target, tensors, {"settings": json.dumps(settings)})


def parts_of(posterior: Posterior) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a file has of a posterior: tensors by ``"section/name"``, and settings for JSON."""
    if posterior.constants:
        raise ValueError(
            "save(path): this posterior of a last layer has the rest of the model at the mean of another one, "
            "which a file has no place for. Save that one, load it, and call last_layer() again."
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
        "structure": posterior.structure,
        "ess": posterior.ess,
        "temperature": posterior.temperature,
        "seed": posterior.seed,
        "likelihood": posterior.likelihood,
        "order": list(posterior.mean),
        **posterior._settings(),
    }
    if posterior.scales != Scales():  # files of posteriors that were not calibrated stay as they were
        settings["scales"] = posterior.scales._asdict()
    if isinstance(posterior.noise_variance, Tensor):
        tensors["setting/noise_variance"] = posterior.noise_variance
    else:
        settings["noise_variance"] = posterior.noise_variance
    return tensors, settings


def load_posterior(path: str | Path, model: nn.Module) -> Posterior:
    """A posterior that ``posterior.save`` wrote, over the parameters of ``model``.

    Its tensors go to the devices of the model's parameters; the model's own weights are not changed. Where the model is
    on the meta device the tensors are on the CPU, and predictions are made there. A file that was damaged after it was
    written is refused (but for files of versions that wrote no checksum).
    """
    source = path_of(path, "load_posterior(path, model)")
    check_model(model, "load_posterior(path, model)")
    sections, settings = _read(source)
    model = unwrapped(model)
    _check_parameters(sections["mean"], dict(model.named_parameters()), source)
    _check_buffers(sections.get("buffer", {}), model, source)
    _check_numbers(sections, model, source)
    return made_of(sections, settings, model, source)


def made_of(
    sections: dict[str, dict[str, Tensor]], settings: dict[str, Any], model: nn.Module, path: Path = _INSIDE
) -> Posterior:
    """The posterior with these parts (:func:`parts_of`); also one that is a part of another."""
    parameters, mean, settings = dict(model.named_parameters()), sections["mean"], dict(settings)
    settings.update(sections.pop("setting", {}))
    # A file has no order; the noise of a parameter depends on its place among the model's.
    order = [name for name in parameters if name in mean] or list(mean)
    cls, saved_order = _class_of(settings.pop("structure"), path), settings.pop("order", order)
    device = next(iter(parameters.values())).device if order[0] not in parameters else parameters[order[0]].device
    _to_devices(sections, model, (*_BY_PARAMETER, "buffer", *cls.sections_by_parameter), device)
    mean = {name: mean[name] for name in saved_order}
    prior = GaussianPrior(sections["prior_mean"], sections["prior_precision"])
    if settings.get("likelihood") in CLASSES:
        settings.pop("noise_variance", None)  # files of before it was refused may have one, which meant nothing
    rest = settings | {"buffers": sections.get("buffer", {})}
    if "scales" in rest:
        rest["scales"] = _scales(rest["scales"], path)
    return cls._from_sections(model, mean, prior, sections, **rest)._in_order(order)


def _scales(saved: Any, path: Path) -> Scales:
    try:
        return Scales(**{name: float(value) for name, value in saved.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise _container.damaged(path, f"its scales are {saved!r} (a newer version of vprop may know them)") from error


def _to_devices(
    sections: dict[str, dict[str, Tensor]], model: nn.Module, by_name: Collection[str], other: torch.device
) -> None:
    """Put the tensors of the sections ``by_name`` where those of the model with their names are, the rest together.

    Of a model on the meta device, which holds no numbers, they stay where they are. Buffers are not computed with as
    weights are, but used as they are: they get the model's precision.
    """
    own = dict(chain(model.named_parameters(), model.named_buffers()))
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            like = own.get(name, tensor)
            device = like.device if section in by_name else other
            real = section == "buffer" and like.is_floating_point() and tensor.is_floating_point()
            tensors[name] = tensor.to(tensor.device if device.type == "meta" else device, like.dtype if real else None)


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
    sections = sections_of(tensors)
    try:
        settings = json.loads(metadata["settings"])
    except (KeyError, ValueError) as error:
        raise _container.damaged(path, "its settings cannot be read") from error
    _check_complete(sections, settings, path)
    return sections, settings


def sections_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by ``"section/name"`` as tensors by section and by name."""
    sections: dict[str, dict[str, Tensor]] = {name: {} for name in _BY_PARAMETER}
    for key, tensor in tensors.items():
        section, _, name = key.partition("/")
        sections.setdefault(section, {})[name] = tensor
    return sections


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


def _check_numbers(sections: dict[str, dict[str, Tensor]], model: nn.Module, path: Path) -> None:
    """Refuse a model on the meta device of which the file does not have everything."""
    for kind, section, tensors in (
        ("parameter", "mean", model.named_parameters()),
        ("buffer", "buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if tensor.is_meta and name not in sections.get(section, {}):
                raise ValueError(
                    f"{path} does not have the {kind} {name!r}, and the model has it on the meta device, without "
                    "numbers. Give the model its own (model.to_empty(device='cpu'), then load_state_dict) before "
                    "load_posterior."
                )


def _other_model(path: Path, what: str) -> ValueError:
    return ValueError(
        f"{path} does not fit this model: {what}. Build the model as it was when the posterior was saved."
    )
