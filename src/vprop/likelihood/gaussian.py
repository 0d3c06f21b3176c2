"""Losses for regression that are true negative log-likelihoods, with noise that is learned beside the weights.

−log N(y; f, v) = ½[(y−f)²/v + log 2πv], summed over the dimensions of an output and averaged over examples. Its
expectation under the posterior, minimized in v by an ordinary optimizer, is the ELBO maximized in v: type-II maximum
likelihood. With a posterior that is exact that is the maximum of the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vprop.checks import check_flag, is_number, shown
from vprop.likelihood.kinds import Likelihood, LikelihoodModule, variance_tensor

LOG_VARIANCE_LIMIT = 30.0
"""Variances are computed between e⁻³⁰ ≈ 1e−13 and e³⁰ ≈ 1e13, where float32 has room for what is divided by them."""


class GaussianLikelihood(LikelihoodModule):
    """−log N(y; f, v) with one noise variance v, or one for each dimension of the output.

        loss = mean over examples of Σⱼ ½[(yⱼ−fⱼ)²/vⱼ + log 2πvⱼ]

    A loss for every optimizer and for :class:`vprop.Objective`. What is learned is log v, by an ordinary optimizer
    beside the variational one: ``torch.optim.Adam(likelihood.parameters(), lr=0.01)``. Its gradient is summed over the
    samples of a step, like that of any tensor which nobody clears in between. log v counts as ±30 beyond ±30, with
    the gradient that it has there, so that neither a perfect fit nor a diverging one ends in NaN.

    Args:
        noise_variance: v to start from, a number, or a tensor with one for each dimension.
        shape: ``()`` for one variance, ``(d,)`` for one for each of the last dimension's d elements.
        learnable: ``False`` keeps v as it is, in a buffer.

    >>> import torch
    >>> likelihood = GaussianLikelihood(0.25, shape=(2,))
    >>> likelihood.noise_variance.tolist()
    [0.25, 0.25]
    >>> output, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.5, 2.0]])
    >>> normal = torch.distributions.Normal(output, 0.5)
    >>> bool((likelihood(output, y) + normal.log_prob(y).sum()).abs() < 1e-6)
    True
    """

    likelihood: ClassVar[Likelihood] = "gaussian"
    log_noise_variance: Tensor

    def __init__(
        self,
        noise_variance: float | Tensor = 1.0,
        *,
        shape: int | Sequence[int] = (),
        learnable: bool = True,
    ) -> None:
        super().__init__()
        check_flag("learnable", learnable)
        log_variance = _checked_variance(noise_variance, _checked_shape(shape)).log()
        if learnable:
            self.log_noise_variance = nn.Parameter(log_variance)
        else:
            self.register_buffer("log_noise_variance", log_variance)

    @property
    def noise_variance(self) -> Tensor:
        """v, with its graph; at least in float32, as its logarithm is in the loss."""
        return _limited(_wide(self.log_noise_variance)).exp()

    @torch.no_grad()
    def current_noise(self) -> float | Tensor:
        """v as it is now: a number, or a vector without a graph."""
        variance = self.noise_variance
        return float(variance) if variance.dim() == 0 else variance

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean over the first dimension of −log N(y; output, v)."""
        _require_tensor("output", output)
        _check_target(output, y, tuple(output.shape))
        size = len(self.log_noise_variance) if self.log_noise_variance.dim() else None
        if size is not None and (output.dim() < 2 or output.shape[-1] != size):
            raise ValueError(
                f"Invalid output: has shape {tuple(output.shape)}, must be (examples, …, {size}) because there is a "
                "noise variance for each element of the last dimension. Make the likelihood with shape=(d,) for "
                "outputs of d dimensions, or shape=() for one variance."
            )
        return _mean_negative_log_density(_wide(output), y, _limited(_wide(self.log_noise_variance)))

    def extra_repr(self) -> str:
        """The variance as it is now."""
        noise = self.current_noise()
        value = [round(v, 4) for v in noise.tolist()] if isinstance(noise, Tensor) else round(noise, 4)
        return f"noise_variance={value}, learnable={isinstance(self.log_noise_variance, nn.Parameter)}"


class HeteroscedasticGaussianLikelihood(LikelihoodModule):
    """−log N(y; f, v) where the model says both: the last dimension of its output is d means, then d log-variances.

        loss = mean over examples of Σⱼ ½[(yⱼ−fⱼ)²·exp(−sⱼ) + sⱼ + log 2π],   output = (f, s), s = log v

    The weights that make s have a posterior like all others; nothing is left for another optimizer. s counts as ±30
    beyond ±30, with the gradient that it has there: the loss stays finite, and s finds its way back.

    >>> import torch
    >>> likelihood = HeteroscedasticGaussianLikelihood()
    >>> mean, variance = likelihood.split(torch.tensor([[1.0, 2.0, 0.0, -2.0]]))
    >>> mean.tolist(), [round(float(v), 4) for v in variance[0]]
    ([[1.0, 2.0]], [1.0, 0.1353])
    """

    likelihood: ClassVar[Likelihood] = "heteroscedastic"

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, each with half of the output's last dimension."""
        mean, log_variance = split_heteroscedastic(output)
        return mean, log_variance.exp()

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        """Mean over the first dimension of −log N(y; f, exp s)."""
        mean, log_variance = split_heteroscedastic(output)
        _check_target(output, y, tuple(mean.shape))
        return _mean_negative_log_density(mean, y, log_variance)


def split_heteroscedastic(output: Tensor) -> tuple[Tensor, Tensor]:
    """Means and log-variances (within ±30), at least in float32, from outputs of kind "heteroscedastic".

    >>> import torch
    >>> split_heteroscedastic(torch.tensor([[1.0, 2.0, 0.0, -400.0]]))
    (tensor([[1., 2.]]), tensor([[  0., -30.]]))
    """
    _require_tensor("output", output)
    if output.dim() == 0 or output.shape[-1] % 2 or output.shape[-1] == 0:
        raise ValueError(
            f"Invalid output: has shape {tuple(output.shape)}, must have an even last dimension: d means, then d "
            "log-variances. Give the model's last layer 2·d outputs for targets of d dimensions."
        )
    mean, log_variance = _wide(output).chunk(2, dim=-1)
    return mean, _limited(log_variance)


def _require_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        remedy = "Of a model's output that holds more than a tensor, pick the tensor out."
        raise TypeError(f"Invalid {name}: is a {type(value).__name__}, must be a torch.Tensor. {remedy}")


def _limited(log_variance: Tensor) -> Tensor:
    """Within ±30, with the gradient of the identity.

    A plain clamp has gradient 0 outside: what gets there stays there. This one has the slope of the loss at the limit.
    """
    value = log_variance.detach().clamp(-LOG_VARIANCE_LIMIT, LOG_VARIANCE_LIMIT)
    return value + (log_variance - log_variance.detach())


def _wide(values: Tensor) -> Tensor:
    """Half precision in float32, where squares and exponentials have room."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _mean_negative_log_density(mean: Tensor, y: Tensor, log_variance: Tensor) -> Tensor:
    terms = (y - mean).square() * (-log_variance).exp() + (log_variance + math.log(2 * math.pi))
    return 0.5 * terms.sum() / len(mean)


def _check_target(output: Tensor, y: Tensor, expected: tuple[int, ...]) -> None:
    """Refuse targets that would be broadcast: (n,) against (n, 1) is a loss over n² wrong pairs."""
    _require_tensor("y", y)
    if output.dim() == 0:
        raise ValueError(
            "Invalid output: has shape (), must have the examples as its first dimension. Use output.unsqueeze(0) for "
            "a single example."
        )
    if tuple(y.shape) != expected:
        raise ValueError(
            f"Invalid y: has shape {tuple(y.shape)}, must have {expected} for an output of shape "
            f"{tuple(output.shape)}. Use y.unsqueeze(-1), or model(x).squeeze(-1), where a dimension of 1 is missing."
        )


def _checked_shape(shape: Any) -> tuple[int, ...]:
    """``()`` or ``(d,)``."""
    sizes = (shape,) if is_number(shape) else shape
    sized = isinstance(sizes, tuple | list) and len(sizes) <= 1
    if not sized or not all(is_number(size, whole=True) and size >= 1 for size in sizes):
        raise ValueError(
            f"Invalid shape={shown(sizes)}: must be () or (d,) with d >= 1. Noise can differ between the elements of "
            "the output's last dimension."
        )
    return tuple(int(size) for size in sizes)


def _checked_variance(noise_variance: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of the initial variance in its shape."""
    variance = variance_tensor(noise_variance)
    if not variance.is_floating_point():
        variance = variance.to(torch.get_default_dtype())
    if variance.dim() > 1 or (variance.dim() == 1 and shape not in ((), tuple(variance.shape))):
        raise ValueError(
            f"Invalid noise_variance of shape {tuple(variance.shape)}: must be a number or have shape={shape!r}. "
            "Pass one variance, or one for each element of the output's last dimension."
        )
    if not bool((variance > 0).all()):
        raise ValueError(
            f"Invalid noise_variance={noise_variance!r}: must be > 0. It is the variance, not its logarithm, of an "
            "observation around its mean: 1.0 is the default."
        )
    lowest, highest = math.exp(-LOG_VARIANCE_LIMIT), math.exp(LOG_VARIANCE_LIMIT)
    if not bool(((variance >= lowest) & (variance <= highest)).all()):
        raise ValueError(
            f"Invalid noise_variance={noise_variance!r}: must be between 1e-13 and 1e13. Rescale the targets "
            "(to variance 1, say) if their noise is smaller or larger than that."
        )
    if not isinstance(noise_variance, Tensor):
        variance = variance.to(torch.get_default_device())  # where modules put their parameters
    return variance.expand(shape if variance.dim() == 0 else variance.shape).clone()
