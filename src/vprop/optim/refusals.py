"""What an optimizer refuses while training, in words: steps and samples that would be wrong without a sign of it."""

from __future__ import annotations

from typing import Any

from vprop.checks import invalid, is_number
from vprop.objective import Objective


def refuse_no_closure(closure: Any) -> None:
    """An error: ``closure`` cannot be called, or GradScaler is at work."""
    if not callable(closure):
        raise TypeError(
            f"step(closure): got {type(closure).__name__}, must be a function that clears the gradients, computes "
            "the loss, calls backward() and returns it, or a vprop.Objective. With gradients from a "
            "`with optimizer.sampled_params():` block or of an attached model, call step() without an argument."
        )
    raise RuntimeError(
        "A closure cannot be scaled: GradScaler unscales gradients before step(), and the closure makes new "
        "ones. Use `with optimizer.sampled_params():` or optimizer.attach(model), then scaler.step(optimizer)."
    )


def require_objective(optimizer: str) -> None:
    """An error: the curvature needs more than a closure gives."""
    raise RuntimeError(
        f"{optimizer} takes its curvature from more than a gradient, so step() must be given an "
        "objective: optimizer.step(vprop.Objective(model, loss_fn, x, y)), with loss_fn(model(x), y) the mean "
        "loss."
    )


def refuse_sum(objective: Objective, num_data: float) -> None:
    """Refuse a loss that says it is a sum: it would count ``num_data`` times. A sum over all data has num_data=1."""
    if not objective.loss_is_sum or num_data <= 1:
        return
    raise ValueError(
        f'Invalid loss_fn: it is a sum over the batch (reduction="sum"), must be a mean, as PyTorch\'s losses are by '
        f'default: num_data={num_data:g} says how many examples the mean stands for. Use reduction="mean".'
    )


def refuse_scaling(samples: int, own_noise: bool) -> None:
    """An error where GradScaler would unscale less than the optimizer reads."""
    if samples > 1:
        raise RuntimeError(
            f"GradScaler with mc_samples={samples}: it unscales the last sample's gradients only. Use "
            "mc_samples=1 with the scaler, or bfloat16 autocast, which needs none."
        )
    if own_noise:
        raise RuntimeError(
            'GradScaler with noise="per_rank": the gradients that each rank makes its curvature of are still '
            'scaled. Use bfloat16 autocast, which needs no scaler, or noise="shared".'
        )


def require_samples(count: int, drawn: int, attached: bool) -> None:
    """Refuse a step whose gradients were not taken at the samples they should be taken at."""
    if count > 0 and drawn == 0 and attached:
        raise RuntimeError(
            "step() without a sample: a model is attached, but it made no forward in training mode since the last "
            "step, so the gradients belong to the mean. Call model.train() (layers that are to stay in evaluation "
            "mode can be put there one by one), and call the module that was attached, not its parts; for "
            "gradients at the mean use mc_samples=0."
        )
    if count > 0 and drawn == 0:
        raise RuntimeError(
            f"step() without a sample: mc_samples={count}, but no weights were drawn since the last step, so the "
            "gradients belong to the mean. Pass a closure, run forward and backward inside "
            "`with optimizer.sampled_params():`, or call optimizer.attach(model); to the Trainer of "
            "Lightning or of Hugging Face add the PosteriorCallback() of vprop.integrations.lightning or of "
            "vprop.integrations.huggingface; for gradients at the mean use mc_samples=0."
        )
    if drawn < count:
        raise RuntimeError(
            f"step() after {drawn} of mc_samples={count} samples. Run forward and backward in "
            f"`with optimizer.sampled_params(k):` for k = 0…{count - 1}, or pass a closure."
        )


def require_sample_number(sample: Any) -> None:
    """Refuse what is no number of a sample; NumPy's will do."""
    if not is_number(sample, whole=True):
        raise invalid("sample", sample, "the number of a sample", "Leave it out, or see train=False to evaluate.")


def require_due(sample: int, expected: int, count: int) -> None:
    """Refuse a sample out of turn."""
    if not 0 <= sample < max(1, count):
        allowed = f"in 0…{max(1, count) - 1} with mc_samples={count}"
        raise invalid("sample", sample, allowed, "Raise mc_samples for more samples.")
    if sample != expected:
        raise RuntimeError(
            f"sampled_params({sample}): sample {expected} of this step is due. Draw the samples of a step in "
            "order, and all micro-batches of one sample before the next sample; to start the step over, call "
            "optimizer.discard_samples()."
        )


def require_gradient(sample: int | None) -> None:
    """An error: a sample ends without a gradient."""
    raise RuntimeError(
        f"Sample {sample} has no gradient. Call backward() inside its block, and between two "
        "samples clear gradients with optimizer.zero_grad(), which keeps the sample's (model.zero_grad() "
        "throws it away)."
    )


def refuse_sharded_evaluation(what: str) -> None:
    """An error: an evaluation with gradients of a sharded model while a backward through its sample is due."""
    raise RuntimeError(
        f"{what} between a forward in training mode and its backward: the weights hold the sample that the "
        "backward needs. Where parameters are spread over ranks, call it inside `with torch.no_grad():`, or "
        "after backward()."
    )


def refuse_capture() -> None:
    """An error: what torch.jit.trace or torch.export would write down has a sample in it."""
    raise RuntimeError(
        "torch.jit.trace and torch.export cannot take down a model that is attached to an optimizer while it trains: "
        "its weights are a sample, or would become one. Detach it first, with what optimizer.attach(model) returned: "
        "handle.remove(). Or do it after optimizer.step(), in evaluation mode: model.eval()."
    )


REPEATED_BLOCK = (
    "`with optimizer.sampled_params():` gives the same sample until step(), so this block sees the weights "
    "of the last one, in which there was no backward. For evaluation use "
    "`with optimizer.sampled_params(train=False):`, a fresh sample each time, or optimizer.posterior(model)"
    ".predict(x)."
)
"""The warning for evaluation in blocks that are meant for training."""


def refuse_foreign(count: int) -> None:
    """An error: a model is to be attached that does not have all parameters of the optimizer."""
    raise ValueError(
        f"attach(model): {count} of the optimizer's parameters are not parameters of this model. Attach the "
        "module the optimizer was built from (not a copy), or one that contains all of them. weight_norm and "
        "the like replace parameters: build the optimizer after them."
    )
