"""Posteriors as safetensors files: tensors named ``mean/<parameter>``, …, and the rest as metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vprop.checks import check_model
from vprop.files import path_of
from vprop.posterior import _container
from vprop.posterior.prior import GaussianPrior
from vprop.wrappers import unwrapped

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior


def save(posterior: Posterior, path: str | Path, *, structure: str, extra: dict[str, dict[str, Tensor]]) -> None:
    """Write ``posterior`` with the tensors that its structure adds (``extra``: section → name → tensor)."""
    target = path_of(path, "save(path)")
    sections = {
        "mean": posterior.mean,
        "prior_mean": posterior.prior.mean,
        "prior_precision": posterior.prior.precision,
        "buffer": posterior.buffers,
        **extra,
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
    from vprop.posterior.diagonal import DiagonalPosterior  # the structures import this module
    from vprop.posterior.full import FullPosterior

    source = path_of(path, "load_posterior(path, model)")
    check_model(model, "load_posterior(path, model)")
    sections, settings = _read(source)
    model = unwrapped(model)
    parameters = dict(model.named_parameters())
    _check_parameters(sections["mean"], parameters, source)
    _check_buffers(sections.get("buffer", {}), model, source)
    # A file has no order; the noise of a parameter depends on its place among the model's.
    order = [name for name in parameters if name in sections["mean"]]
    devices = {name: p.device for name, p in parameters.items()} | {n: b.device for n, b in model.named_buffers()}
    devices |= {"precision": parameters[order[0]].device, "prior_precision": parameters[order[0]].device}
    for section in sections.values():
        for name, tensor in section.items():
            section[name] = tensor.to(devices.get(name, tensor.device))
    structure, saved_order = settings.pop("structure"), settings.pop("order", order)
    matrices = sections.get("matrix", {})
    prior = GaussianPrior(sections["prior_mean"], sections["prior_precision"], matrices.get("prior_precision"))
    rest = settings | {"buffers": sections.get("buffer", {})}
    if structure == "full":
        mean = {name: sections["mean"][name] for name in saved_order}
        return FullPosterior(model, mean, matrices["precision"], prior, **rest)._in_order(order)
    mean = {name: sections["mean"][name] for name in order}
    return DiagonalPosterior(model, mean, sections["variance"], prior, **rest)


def _read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by section and name, and the settings."""
    tensors, metadata = _container.read(path, {"settings"})
    sections: dict[str, dict[str, Tensor]] = {name: {} for name in ("mean", "prior_mean", "prior_precision")}
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
    if structure not in ("diagonal", "full"):
        raise ValueError(
            f"{path}: unknown structure {structure!r}: this version reads 'diagonal' and 'full'. Update vprop."
        )
    names = set(sections["mean"])
    per_parameter = ["prior_mean", "prior_precision", *(["variance"] if structure == "diagonal" else [])]
    lacking = [section for section in per_parameter if set(sections.get(section, {})) != names]
    if structure == "full" and "precision" not in sections.get("matrix", {}):
        lacking.append("matrix/precision")
    if lacking or not names:
        raise _container.damaged(path, f"it lacks tensors of {lacking or ['mean']}")


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
