"""A prediction from beginning to end: batches in, what is kept of each, one prediction out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from vprop.checks import check_flag, check_num_samples, check_seed, invalid
from vprop.likelihood import LikelihoodLike
from vprop.likelihood.kinds import refuse_noise_of_classes
from vprop.posterior.calibrated import scaled_moments, scaled_outputs
from vprop.posterior.linearized import LinearizedPrediction
from vprop.posterior.prediction import Prediction
from vprop.posterior.predictive import batch_norm, dropout
from vprop.posterior.predictive.inputs import Batches, batches_of
from vprop.posterior.predictive.jacobians import LinearizedOutputs
from vprop.posterior.predictive.progress import bar
from vprop.posterior.predictive.sampling import SampledOutputs
from vprop.posterior.summary import PredictionSummary
from vprop.precision import as_tensor
from vprop.wrappers import refuse_sharded

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

Method = Literal["monte_carlo", "linearized"]
Keep = Literal["samples", "summary"]


class Settings(NamedTuple):
    """The arguments of ``predict`` that say how; see there."""

    num_samples: int
    seed: int
    method: Method
    keep: Keep
    batch_size: int | None
    vmap: bool | None
    progress: bool | None
    batch_norm: Any = None
    dropout: bool = False

    def checked(self) -> Settings:
        """The same, or an error that names what is wrong."""
        if self.method not in ("monte_carlo", "linearized"):
            raise invalid(
                "method", self.method, "'monte_carlo' or 'linearized'", "The first draws weights, the second none."
            )
        if self.keep not in ("samples", "summary"):
            remedy = "'summary' keeps probabilities, or means and variances."
            raise invalid("keep", self.keep, "'samples' or 'summary'", remedy)
        for name, flag in (("vmap", self.vmap), ("progress", self.progress)):
            if flag is not None:
                check_flag(name, flag)
        check_flag("dropout", self.dropout)
        if self.batch_norm is not None:
            self._refuse_with(batch_norm.WHERE, "could have statistics of their own", "statistics are estimated under")
        if self.dropout:
            self._refuse_with(dropout.WHERE, "masks could be drawn with", "masks are drawn for")
        return self._replace(num_samples=check_num_samples(self.num_samples), seed=check_seed(self.seed))

    def _refuse_with(self, where: str, what_weights: str, what_is_done: str) -> None:
        """Refuse what does not go together with the argument ``where``."""
        if self.method == "linearized":
            raise ValueError(
                f"{where}: method='linearized' draws no weights that {what_weights}. Leave it out, or use the default, "
                "method='monte_carlo'."
            )
        if self.vmap:
            raise ValueError(
                f"{where}: vmap=True runs all draws at once, and {what_is_done} one draw at a time. Leave one of the "
                "two out."
            )


def predict(
    posterior: Posterior,
    x: Any,
    settings: Settings,
    likelihood: LikelihoodLike | None,
    noise_variance: float | Tensor | None,
) -> Prediction:
    """What ``posterior.predict`` does."""
    settings = settings.checked()
    refuse_sharded(posterior.model, "predict()")
    _refuse_another_model(posterior)
    likelihood = posterior.likelihood if likelihood is None else likelihood
    own_noise = noise_variance is None and likelihood == "gaussian"
    if noise_variance is not None:
        refuse_noise_of_classes(likelihood, noise_variance)
    elif own_noise:
        noise_variance = posterior.noise_variance
    batches = batches_of(x, settings.batch_size, posterior.model)
    how: Any = {"own_noise": own_noise, "several": not batches.whole}
    predicted = _of_a_batch(posterior, settings, likelihood, noise_variance, **how)
    parts = []
    total = None if batches.count is None or settings.method != "monte_carlo" else batches.count * settings.num_samples
    with bar(total, settings.progress) as report:
        for batch in batches.inputs:
            prediction = predicted(batch, report)
            if settings.keep == "summary":
                prediction = PredictionSummary.of(prediction)
            parts.append(prediction if batches.whole else prediction._on_cpu())
    return _whole(parts, batches)


def _of_a_batch(
    posterior: Posterior,
    settings: Settings,
    likelihood: LikelihoodLike | None,
    noise_variance: float | Tensor | None,
    *,
    own_noise: bool,
    several: bool,
) -> Callable[[Any, Callable[[int], None]], Prediction]:
    """What makes the prediction for a batch: the same weights, or the same linearisation, for all of them."""
    scales = posterior.scales
    if settings.method == "linearized":
        moments = LinearizedOutputs(posterior)
        seen = 0

        def linearized(x: Any, report: Callable[[int], None]) -> Prediction:
            nonlocal seen
            mean, covariance = scaled_moments(*moments(x, report), likelihood, scales)
            how: Any = {"num_samples": settings.num_samples, "seed": settings.seed, "first": seen}
            seen += len(mean)
            return LinearizedPrediction(mean, covariance, likelihood, noise_variance, **how)

        return linearized
    shares = [(own, samples) for own, samples in posterior._shared_out(settings.num_samples, settings.seed) if samples]
    posteriors = [own for own, _ in shares]
    masks = dropout.masks_of(posteriors, settings.seed, settings.dropout)
    statistics = batch_norm.statistics_of(posteriors, settings.batch_norm, masks=masks)
    how: Any = {"vmap": settings.vmap, "several": several, "masks": masks}
    parts = [
        SampledOutputs(own, samples, settings.seed, statistics=of_draws, **how)
        for (own, samples), of_draws in zip(shares, statistics, strict=True)
    ]

    noises = _noises(posterior, shares) if own_noise else None

    def predicted(x: Any, report: Callable[[int], None]) -> Prediction:
        outputs = torch.cat([part(x, report) for part in parts])
        prediction = Prediction(scaled_outputs(outputs, likelihood, scales), likelihood, noise_variance)
        prediction._noises = noises
        return prediction

    return predicted


def _noises(posterior: Posterior, shares: list[tuple[Posterior, range]]) -> Tensor | None:
    """The noise around each draw's outputs; ``None`` where it is that of the posterior around all."""
    each = [as_tensor(noise).double().cpu() for noise in posterior._noise_variances([own for own, _ in shares])]
    of_all = as_tensor(posterior.noise_variance).double().cpu()
    if all(torch.equal(noise, of_all) for noise in each):
        return None
    together = torch.broadcast_tensors(*each)
    return torch.cat(
        [noise.expand(len(draws), *noise.shape) for noise, (_, draws) in zip(together, shares, strict=True)]
    )


def _whole(parts: list[Prediction], batches: Batches) -> Prediction:
    if not parts:
        raise ValueError(
            "predict(loader): got no batches. Pass a loader with data in it; an iterator can be read once only, and a "
            "DataLoader with drop_last=True has none if the data are fewer than its batch_size."
        )
    prediction = parts[0] if batches.whole else type(parts[0])._joined(parts)
    _warn_of_nan(prediction._raw())
    return prediction


def _warn_of_nan(outputs: Tensor) -> None:
    """NaN is no error, because one bad example should not cost the others; but it should not pass in silence."""
    if not bool(outputs.isnan().any()):
        return
    nan = outputs.isnan().any(0)
    examples = nan.flatten(1).any(1) if nan.dim() > 1 else nan.reshape(-1)
    warnings.warn(
        f"predict(): the model's outputs are NaN for {int(examples.sum())} of {examples.numel()} examples, and so is "
        "what follows from them. Look for NaN in these inputs (x.isnan()), in the weights (posterior.mean), and for "
        "variances that are too large for the model.",
        RuntimeWarning,
        stacklevel=6,
    )


def _refuse_another_model(posterior: Posterior) -> None:
    """Refuse weights that are not those of the model: another one's, or those of a layer that was replaced since."""
    own = {name: p.shape for name, p in posterior.model.named_parameters(remove_duplicate=False)}
    for name, mean in posterior.mean.items():
        if own.get(name) != mean.shape:
            found = f"has shape {tuple(own[name])} in it" if name in own else "is not in it"
            raise ValueError(
                f"predict(): this posterior is not one of its model, {type(posterior.model).__name__}: {name!r}, of "
                f"shape {tuple(mean.shape)}, {found}. Build the model as it was when the posterior was made."
            )
