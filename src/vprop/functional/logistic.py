r"""Bayesian logistic regression with a Gaussian q(w): expectations without sampling.

A logit z = xᵀw is Gaussian under q, z ~ N(m, s²), so every expectation over the weights is one over a single number.
With f the softplus f(z) = log(1 + eᶻ), whose derivatives are f' = σ(z), f'' = σ'(z) and f''' = σ''(z):

    log p(y|x,w)      = y·z − f(z)                         for y in {0, 1}
    E[log p(y|x,w)]   = y·m − E[f(z)]
    p(y=1|x)          = E[σ(z)],   p(y=0|x) = E[σ(−z)]
    ∂E[g(z)]/∂m       = E[g'(z)],  ∂E[g(z)]/∂s = s·E[g''(z)]          (Bonnet, Price)

Two rules cover every s, to about 1e-12:

- s ≤ 1.2: the trapezoid rule in ε = (z−m)/s. Its error falls like exp(−2π²/(s·h)), the nearest poles being at
  Im z = ±π, so a step h of 0.45 is enough; beyond |ε| = 8.1 the Gaussian has vanished.
- s > 1.2: f(z) = max(z,0) + log(1+e^−|z|), σ(z) = [z>0] − sign(z)·σ(−|z|). The first parts have closed forms.
  The second decay like e^−|z|, so they are integrals over 0 < |z| < 40, smooth on each side of the kink and times
  a smooth density: Gauss–Legendre, with nodes and weights that depend on neither m nor s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

_LARGEST_NARROW_STD = 1.2
_TRAPEZOID_STEP, _TRAPEZOID_NODES = 0.45, 37
_HALF_LINE, _LEGENDRE_NODES = 40.0, 48
_SQRT_2PI = math.sqrt(2 * math.pi)

Values = list[Tensor]


# -- expectations over one logit -----------------------------------------------------------------------------


def expected_softplus(mean: Tensor, std: Tensor) -> Tensor:
    """E[log(1 + exp(m + s·ε))], ε ~ N(0, 1), element by element, in float64. Differentiable in both.

    Without variance log 2; with a very large one that of max(z, 0), s/√2π.

    >>> expected_softplus(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1000.0]))
    tensor([  0.6931, 398.9429], dtype=torch.float64)
    """
    mean, std = _float64(mean, std)
    return _Expectation.apply(mean, std, 0)


def expected_sigmoid(mean: Tensor, std: Tensor) -> Tensor:
    """E[σ(m + s·ε)], ε ~ N(0, 1), element by element, in float64. Differentiable in both.

    The posterior predictive probability of label 1. Small values keep their digits; for 1 − E[σ(z)] use −m.

    >>> expected_sigmoid(torch.tensor([0.0, 5.0, -100.0]), torch.tensor([9.0, 0.0, 0.0]))
    tensor([5.0000e-01, 9.9331e-01, 3.7201e-44], dtype=torch.float64)
    """
    mean, std = _float64(mean, std)
    return _Expectation.apply(mean, std, 1)


def expected_slope(mean: Tensor, std: Tensor) -> Tensor:
    """E[σ'(m + s·ε)], in float64: the expected curvature −∂²log p/∂z² of an example. Differentiable in both.

    >>> expected_slope(torch.tensor([0.0]), torch.tensor([0.0]))
    tensor([0.2500], dtype=torch.float64)
    """
    mean, std = _float64(mean, std)
    return _Expectation.apply(mean, std, 2)


@torch.no_grad()
def log_expected_sigmoid(mean: Tensor, std: Tensor) -> Tensor:
    """log E[σ(m + s·ε)], also where the expectation underflows. Carries no gradient.

    Below m = −s²/2 the identity E[σ(z)] = e^(m+s²/2)·E[σ(z')], z' ~ N(−m−s², s²), leads to a z' above it. There,
    for large s and m < 0, the factor e^(−t²/2), t = m/s, is taken out of density and tail, which leaves nothing to
    underflow: the tail P(z>0) becomes ½·erfcx(−t/√2).

    >>> log_expected_sigmoid(torch.tensor([-1000.0]), torch.tensor([1.0]))
    tensor([-999.5000], dtype=torch.float64)
    """
    mean, std = _float64(mean, std)
    shift = mean + 0.5 * std.square()
    mean = torch.where(shift < 0, -mean - std.square(), mean)
    return shift.clamp_max(0) + _by_width(mean, std, _narrow_log_sigmoid, _wide_log_sigmoid)[0]


class _Expectation(torch.autograd.Function):
    """E[f⁽ᵏ⁾(z)] for k = ``order``, with the gradients of Bonnet and Price from the same nodes."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, std: Tensor, order: int) -> Tensor:
        orders = ([] if order == 1 else [order]) + ([order + 1, order + 2] if any(ctx.needs_input_grad) else [])
        values = _expectations(mean, std, orders) if orders else []
        value = log_expected_sigmoid(mean, std).exp() if order == 1 else values.pop(0)
        ctx.order = order
        ctx.save_for_backward(mean, std, *values)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        mean, std, *values = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: someone will differentiate again
            values = [_Expectation.apply(mean, std, ctx.order + k) for k in (1, 2)]
        return grad * values[0], grad * std * values[1], None


def _expectations(mean: Tensor, std: Tensor, orders: Sequence[int]) -> Values:
    """E[f⁽ᵏ⁾(z)] for each k in ``orders``."""
    return _by_width(mean, std, lambda m, s: _narrow_rule(m, s, orders), lambda m, s: _wide_rule(m, s, orders))


def _by_width(
    mean: Tensor, std: Tensor, narrow: Callable[[Tensor, Tensor], Values], wide: Callable[[Tensor, Tensor], Values]
) -> Values:
    """Apply ``wide`` to the elements with large s and ``narrow`` to the others."""
    shape, mean, std = mean.shape, mean.reshape(-1), std.reshape(-1)
    is_wide = std > _LARGEST_NARROW_STD
    count = int(is_wide.sum())
    if count == 0 or count == len(std):
        return [value.view(shape) for value in (wide if count else narrow)(mean, std)]
    values = []
    for small, large in zip(narrow(mean[~is_wide], std[~is_wide]), wide(mean[is_wide], std[is_wide]), strict=True):
        value = torch.empty_like(mean)
        value[~is_wide], value[is_wide] = small, large
        values.append(value.view(shape))
    return values


def _narrow_rule(mean: Tensor, std: Tensor, orders: Sequence[int]) -> Values:
    """By the trapezoid rule in ε. Vectors in, vectors out."""
    nodes, weights = (tensor.to(mean.device) for tensor in _trapezoid())
    logits = torch.addcmul(mean[:, None], std[:, None], nodes)
    return [value @ weights for value in _softplus_derivatives(logits, orders)]


def _wide_rule(mean: Tensor, std: Tensor, orders: Sequence[int]) -> Values:
    """Closed form for the ramp or the step, Gauss–Legendre on both sides of 0 for the rest."""
    t = mean / std
    tail = 0.5 * torch.erfc(-t / math.sqrt(2))
    values = _smooth_part(mean, std, 0.0, orders)
    for i, k in enumerate(orders):
        if k == 0:
            values[i] = values[i] + mean * tail + std * (-0.5 * t.square()).exp() / _SQRT_2PI
        elif k == 1:
            values[i] = values[i] + tail
    return values


def _narrow_log_sigmoid(mean: Tensor, std: Tensor) -> Values:
    return [_narrow_rule(mean, std, [1])[0].log()]


def _wide_log_sigmoid(mean: Tensor, std: Tensor) -> Values:
    t = mean / std
    log_scale = -0.5 * t.clamp_max(0).square()
    tail = torch.where(t < 0, torch.special.erfcx(-t / math.sqrt(2)), torch.erfc(-t / math.sqrt(2))) / 2
    return [log_scale + (tail + _smooth_part(mean, std, -log_scale, [1])[0]).log()]


def _smooth_part(mean: Tensor, std: Tensor, log_factor: float | Tensor, orders: Sequence[int]) -> Values:
    """∫ gₖ(z)·N(z; m, s²) dz · exp(log_factor) for each k, with the gₖ of :func:`_both_half_lines`."""
    rules = [_both_half_lines(k) for k in orders]
    basis = rules[0][0].to(mean.device)
    weights = torch.stack([column for _, column in rules], 1).to(mean.device)
    # −(z−m)²/2s² as a product of matrices: a third of the passes over memory
    scaled = mean / std
    features = torch.stack([std.square().reciprocal(), scaled / std, log_factor - 0.5 * scaled.square()], 1)
    densities = (features @ basis).clamp_min_(-300).exp_()  # smaller ones would be subnormal, and slow
    return list((densities @ weights / (std * _SQRT_2PI)[:, None]).unbind(1))


def _softplus_derivatives(logits: Tensor, orders: Sequence[int]) -> Values:
    """f⁽ᵏ⁾ for each k in ``orders``: softplus, then σ and its derivatives, which are polynomials in σ."""
    probs = torch.sigmoid(logits) if any(orders) else logits
    values = []
    for k in orders:
        if k == 0:
            values.append(softplus(logits, threshold=50.0))  # the default of 20 costs all digits after the ninth
        elif k == 1:
            values.append(probs)
        else:
            *lower, highest = _polynomial(k)
            value = torch.full_like(probs, highest)
            for coefficient in reversed(lower):
                value = value.mul_(probs).add_(coefficient)
            values.append(value)
    return values


@functools.cache
def _polynomial(order: int) -> list[float]:
    """Coefficients of f⁽ᵏ⁾ as a polynomial in p = σ(z), lowest power first, from dp/dz = p − p².

    >>> _polynomial(2), _polynomial(3)
    ([0.0, 1.0, -1.0], [0.0, 1.0, -3.0, 2.0])
    """
    if order == 1:
        return [0.0, 1.0]
    below = _polynomial(order - 1)
    slopes = [k * c for k, c in enumerate(below)]  # of p·(d/dp)
    return [a - b for a, b in zip([*slopes, 0.0], [0.0, *slopes], strict=True)]


@functools.cache
@torch.inference_mode(False)  # the cache outlives the mode of whoever calls first
def _trapezoid() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the standard normal."""
    counts = torch.arange(_TRAPEZOID_NODES, dtype=torch.float64, device="cpu")
    nodes = _TRAPEZOID_STEP * (counts - (_TRAPEZOID_NODES - 1) / 2)
    return nodes, (-0.5 * nodes.square()).softmax(0)


@functools.cache
@torch.inference_mode(False)
def _both_half_lines(order: int) -> tuple[Tensor, Tensor]:
    """For the nodes ±z: the rows −z²/2, z and 1 of the exponent, and the weights times gₖ(z).

    gₖ(z) = (−sign z)ᵏ·f⁽ᵏ⁾(−|z|): what is left of f⁽ᵏ⁾ without its ramp (k = 0) or step (k = 1).
    """
    half, half_weights = _gauss_legendre(_LEGENDRE_NODES)
    nodes, weights = _HALF_LINE * torch.cat([-half, half]), _HALF_LINE * half_weights.repeat(2)
    decaying = _softplus_derivatives(-nodes.abs(), [order])[0]
    basis = torch.stack([-0.5 * nodes.square(), nodes, torch.ones_like(nodes)])
    return basis, weights * (-nodes.sign()) ** order * decaying


def _gauss_legendre(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]: eigenvalues and eigenvectors of the recurrence matrix (Golub and Welsch)."""
    k = torch.arange(1, count, dtype=torch.float64, device="cpu")
    nodes, vectors = torch.linalg.eigh(torch.diag(k / (4 * k.square() - 1).sqrt(), -1))
    return (1 + nodes) / 2, vectors[0].square()


def _float64(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    wide_mean, wide_std = torch.broadcast_tensors(mean.to(torch.float64), std.to(torch.float64))
    return wide_mean, wide_std


# -- logistic regression -------------------------------------------------------------------------------------


def logit_moments(X: Tensor, mean: Tensor, variance_or_covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of z = Xw for w ~ N(mean, variance): Xμ and √diag(XΣXᵀ), in float64.

    A vector is the diagonal of Σ, a matrix all of it.

    >>> logit_moments(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 0.5]), torch.tensor([5.0, 1.0]))
    (tensor([4.], dtype=torch.float64), tensor([3.], dtype=torch.float64))
    """
    X, spread = X.to(torch.float64), variance_or_covariance.to(torch.float64)
    variance = X.square() @ spread if spread.dim() == 1 else (X @ spread).mul(X).sum(-1)
    return X @ mean.to(torch.float64), safe_sqrt(variance)


def safe_sqrt(x: Tensor) -> Tensor:
    """√x where x > 0, else 0 with gradient 0: a row of zeros has a logit without variance."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, torch.ones_like(x)).sqrt(), torch.zeros_like(x))


def expected_log_likelihood(y: Tensor, mean_logit: Tensor, std_logit: Tensor) -> Tensor:
    """Σᵢ E[log p(yᵢ|zᵢ)] = Σᵢ yᵢmᵢ − E[softplus(zᵢ)], for y in {0, 1}."""
    return (y.to(torch.float64) * mean_logit - expected_softplus(mean_logit, std_logit)).sum()


def gaussian_kl(
    mean: Tensor,
    variance: Tensor,
    log_det: Tensor,
    prior_precision: float | Tensor,
    prior_mean: float | Tensor = 0.0,
) -> Tensor:
    """KL(N(μ,Σ) || N(m₀,1/λ)) = ½( Σⱼ[λⱼ(Σⱼⱼ + (μⱼ−m₀ⱼ)²) − 1 − log λⱼ] − log|Σ| ).

    ``variance`` is the diagonal of Σ and ``log_det`` is log|Σ|, so that whoever has a factor of Σ need not form it.
    """
    precision = torch.as_tensor(prior_precision, dtype=torch.float64, device=mean.device).expand_as(mean)
    terms = precision * (variance + (mean - prior_mean).square()) - 1 - precision.log()
    return 0.5 * (terms.sum() - log_det)


def elbo(
    X: Tensor,
    y: Tensor,
    mean: Tensor,
    variance_or_covariance: Tensor,
    prior_precision: float | Tensor,
    prior_mean: float | Tensor = 0.0,
) -> Tensor:
    """Σᵢ E_q[log p(yᵢ|xᵢ,w)] − KL(q || N(m₀, 1/λ)), for y in {0, 1} and q = N(mean, variance or covariance).

    At q = prior the KL is 0 and, for x = 0, each label costs log 2:

    >>> elbo(torch.zeros(3, 2), torch.tensor([0, 1, 1]), torch.zeros(2), torch.full((2,), 0.5), prior_precision=2.0)
    tensor(-2.0794, dtype=torch.float64)
    """
    _check_labels(y)
    mean, spread = mean.to(torch.float64), variance_or_covariance.to(torch.float64)
    if spread.dim() == 1:
        variance, log_det = spread, spread.log().sum()
    else:
        variance, log_det = spread.diagonal(), 2 * torch.linalg.cholesky(spread).diagonal().log().sum()
    fit = expected_log_likelihood(y, *logit_moments(X, mean, spread))
    return fit - gaussian_kl(mean, variance, log_det, prior_precision, prior_mean)


def predictive_log_loss(X: Tensor, y: Tensor, mean: Tensor, variance_or_covariance: Tensor) -> Tensor:
    """Mean over rows of −log E_q[p(y|x,w)], in nats, for y in {0, 1}. Carries no gradient.

    >>> predictive_log_loss(torch.ones(2, 1), torch.tensor([1, 0]), torch.tensor([2000.0]), torch.tensor([1.0]))
    tensor(999.7500, dtype=torch.float64)
    """
    _check_labels(y)
    mean_logit, std_logit = logit_moments(X, mean, variance_or_covariance)
    sign = 2 * y.to(torch.float64) - 1
    return -log_expected_sigmoid(sign * mean_logit, std_logit).mean()


def _check_labels(y: Tensor) -> None:
    if not bool(((y == 0) | (y == 1)).all()):
        raise ValueError(
            f"Invalid y: has values {y.unique().tolist()[:4]}, must be 0 or 1. Turn labels -1 and +1 into 0 and 1 with "
            "(y + 1) / 2."
        )
