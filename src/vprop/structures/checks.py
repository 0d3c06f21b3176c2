"""What structures refuse: groups they cannot keep a Gaussian over, and checkpoints of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from vprop.checks import invalid
from vprop.parallel.sharding import is_sharded
from vprop.precision import compute_dtype

REBUILD = (
    "Build model and optimizer as they were when it was saved: the same layers frozen, the same adapters, the same "
    "groups. For another model make a new optimizer; what was learned of its parameters can be its prior, "
    "posterior.as_prior()."
)


def refused(what: str, remedy: str) -> ValueError:
    """The one form of message for a checkpoint that cannot be loaded."""
    return ValueError(f"load_state_dict(): {what}. {remedy}")


def broken(what: str) -> ValueError:
    """For a checkpoint that no optimizer of ours has written."""
    return refused(what, "The optimizer is as it was; load an earlier checkpoint, or let the optimizer start afresh.")


def other_shape(name: str, shape: tuple[int, ...], p: Tensor) -> ValueError:
    """For a checkpoint of other parameters."""
    return refused(f"{name} has shape {shape} in the checkpoint and {tuple(p.shape)} here", REBUILD)


def refuse_sharded_parameters(group: dict[str, Any], optimizer: str) -> None:
    """Refuse parameters that are spread over ranks, for optimizers that need them whole."""
    if any(is_sharded(p) for p in group["params"]):
        raise ValueError(
            f"{optimizer} needs whole parameters, but these are spread over ranks (FSDP, tensor parallel). Use "
            'DistributedDataParallel, or a diagonal: Vprop, Vario and IVON with structure="diagonal", Vadam.'
        )


def check_shared(groups: Sequence[dict[str, Any]], names: Iterable[str]) -> None:
    """Refuse groups that cannot have one covariance over all of them: these hyperparameters must be the same in all."""
    for name in names:
        values = [group.get(name) for group in groups]
        if any(value != values[0] for value in values):
            raise invalid(
                name,
                values,
                "the same in all parameter groups of a full covariance",
                "One matrix covers all groups; lr, the prior and clip_radius may differ.",
            )
    if len(groups) > 1 and any(isinstance(group["prior_precision"], Tensor) for group in groups):
        raise ValueError(
            "Invalid prior_precision: a matrix covers all weights, so there can be one parameter group only. Put all "
            "parameters into one group."
        )
    kinds = {(p.device, compute_dtype(p)) for group in groups for p in group["params"] if p.requires_grad}
    if len(kinds) > 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for device, dtype in kinds))
        raise ValueError(
            f"One covariance over all parameters needs them on one device and in one precision, but there is {found}. "
            "Move the model, or use a diagonal optimizer (Vprop, CVI)."
        )


def check_size(name: str, params: Sequence[Tensor], limit: int) -> None:
    """Refuse a matrix that is larger than the user agreed to."""
    size = sum(p.numel() for p in params)
    if size > limit:
        gigabytes = 8 * size**2 / 1e9
        raise ValueError(
            f"{name} keeps one covariance over all parameters: {size:,} parameters make a matrix of {size:,} × "
            f"{size:,} numbers ({gigabytes:,.2f} GB, of which a step holds about five), more than "
            f"max_parameters={limit:,}. Pass max_parameters={size} if the memory is there; or use a diagonal optimizer "
            "(Vprop, CVI, VOGN); or pass only the parameters of the last layers."
        )
