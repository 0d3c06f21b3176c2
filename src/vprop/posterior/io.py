"""Posteriors as safetensors files: tensors named ``mean/<parameter>``, …, and the rest as metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vprop.posterior.prior import GaussianPrior
from vprop.wrappers import unwrapped

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

_FORMAT = "vprop-posterior-1"


def save(posterior: Posterior, path: str | Path, *, structure: str, extra: dict[str, dict[str, Tensor]]) -> None:
    """Write ``posterior`` with the tensors that its structure adds (``extra``: section → name → tensor)."""
    sections = {
        "mean": posterior.mean,
        "prior_mean": posterior.prior.mean,
        "prior_precision": posterior.prior.precision,
        "buffer": posterior.buffers,
        **extra,
    }
    tensors = {f"{section}/{name}": t.contiguous() for section, ts in sections.items() for name, t in ts.items()}
    settings: dict[str, Any] = {
        "structure": structure,
        "ess": posterior.ess,
        "seed": posterior.seed,
        "likelihood": posterior.likelihood,
        "order": list(posterior.mean),
    }
    if isinstance(posterior.noise_variance, Tensor):
        tensors["setting/noise_variance"] = posterior.noise_variance.detach().contiguous()
    else:
        settings["noise_variance"] = posterior.noise_variance
    _safetensors().torch.save_file(tensors, str(path), metadata={"format": _FORMAT, "settings": json.dumps(settings)})


def load_posterior(path: str | Path, model: nn.Module) -> Posterior:
    """A posterior that ``posterior.save`` wrote, over the parameters of ``model``.

    Its tensors go to the devices of the model's parameters; the model's own weights are not changed.
    """
    from vprop.posterior.diagonal import DiagonalPosterior  # the structures import this module
    from vprop.posterior.full import FullPosterior

    sections, settings = _read(path)
    model = unwrapped(model)
    parameters = dict(model.named_parameters())
    _check_fit(sections["mean"], parameters, path)
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
    if structure != "diagonal":
        raise ValueError(
            f"{path}: unknown structure {structure!r}: this version reads 'diagonal' and 'full'. Update vprop."
        )
    mean = {name: sections["mean"][name] for name in order}
    return DiagonalPosterior(model, mean, sections["variance"], prior, **rest)


def _read(path: str | Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    sections: dict[str, dict[str, Tensor]] = {
        "mean": {},
        "variance": {},
        "prior_mean": {},
        "prior_precision": {},
    }
    with _safetensors().safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path}: not a posterior of this library (format {metadata.get('format')!r}, must be {_FORMAT!r}). "
                "Write it with posterior.save(path)."
            )
        settings = json.loads(metadata["settings"])
        for key in file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
            section, name = key.split("/", 1)
            sections.setdefault(section, {})[name] = file.get_tensor(key)
    settings.update(sections.pop("setting", {}))
    return sections, settings


def _check_fit(mean: dict[str, Tensor], parameters: dict[str, nn.Parameter], path: str | Path) -> None:
    for name, tensor in sorted(mean.items()):
        if name not in parameters or parameters[name].shape != tensor.shape:
            found: Any = tuple(parameters[name].shape) if name in parameters else "no such parameter"
            raise ValueError(
                f"{path} does not fit this model: it has {name!r} of shape {tuple(tensor.shape)}, the model has "
                f"{found}. Build the model as it was when the posterior was saved."
            )


def _safetensors() -> Any:
    """The package, which is optional."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            'Saving and loading a posterior needs safetensors: pip install "vprop[safetensors]".'
        ) from error
    return safetensors
