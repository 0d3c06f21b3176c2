r"""Exact Gaussian variational inference for logistic regression: the ground truth that optimizers are held against.

The ELBO needs no sampling (:mod:`vprop.functional.logistic`), and as a function of the mean and of a factor of the
covariance it is smooth, so L-BFGS finds its maximum. What makes this quick is the choice of coordinates. With a
first guess m of the mean, the curvature H = λI + Xᵀ·diag(c)·X there and C·Cᵀ = H⁻¹:

    mean       = m + C·u
    diagonal:    standard deviation = diag(H)^(−½)·exp(r/√2)
    full:        factor of the covariance = C·T, T lower triangular with diagonal exp(r/√2)

The first guess is the Laplace approximation: m the mode of the posterior, c = σ'(Xm). Should L-BFGS stall there, it
starts again, its memory empty, from the mean of the q it has reached and c = E_q[σ'(Xw)]. At the maximum of the ELBO
1/variance = diag(H), or covariance⁻¹ = H, so that u = 0, r = 0, T = I, and the Hessian of −ELBO is close to I: the √2
makes it I for a quadratic log-likelihood and the full structure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vprop.checks import invalid, is_finite, is_number
from vprop.functional import logistic
from vprop.precision import as_tensor

Structure = Literal["diagonal", "full"]

_ROUNDS = 10


@dataclass(frozen=True)
class ExactVI:
    """The Gaussian q(w) that maximises the ELBO, in float64."""

    mean: Tensor
    """(D,)"""
    variance: Tensor
    """(D,): the diagonal of the covariance."""
    covariance: Tensor
    """(D, D): a diagonal matrix for the diagonal structure."""
    elbo: float
    gradient_norm: float
    """‖∇ELBO‖ in the coordinates above, where half its square is about what is missing to the maximum."""
    iterations: int
    structure: Structure

    def __repr__(self) -> str:
        return (
            f"ExactVI({self.structure}, {len(self.mean)} weights, elbo={self.elbo:.6f}, "
            f"gradient_norm={self.gradient_norm:.1e}, iterations={self.iterations})"
        )


@torch.enable_grad()
def exact_vi_logistic(
    X: Tensor,
    y: Tensor,
    prior_precision: float,
    structure: Structure = "diagonal",
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> ExactVI:
    """Maximise the exact ELBO of Bayesian logistic regression with prior N(0, I/λ).

    ``X`` is (N, D), without an intercept: add a column of ones for one. ``y`` holds N labels, 0 and 1, −1 and +1 or
    booleans. Raises ``RuntimeError`` if the norm of the gradient is not down to ``tolerance`` within
    ``max_iterations`` iterations of L-BFGS.

    >>> X, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0, 0])
    >>> round(exact_vi_logistic(X, y, prior_precision=1.0).elbo, 6)
    -2.089039
    """
    X, labels = _check(X, y, prior_precision, structure, tolerance, max_iterations)
    precision = float(prior_precision)
    kind = _Diagonal if structure == "diagonal" else _Full
    problem, norm, iterations = kind(X, labels, precision, *_laplace(X, labels, precision)), math.inf, 0
    for _ in range(_ROUNDS):
        iterations += _maximise(problem, tolerance, max_iterations - iterations)
        norm = problem.gradient_norm()
        if norm <= tolerance or iterations >= max_iterations:
            break
        problem = kind(X, labels, precision, *problem.curvature())
    if not norm <= tolerance:
        raise RuntimeError(
            f"exact_vi_logistic did not converge: the norm of the gradient is {norm:.1e} after {iterations} "
            f"iterations, must be <= tolerance={tolerance:g}. Raise max_iterations={max_iterations} or tolerance; "
            "scaling the columns of X to about 1, or a larger prior_precision, makes the problem easier."
        )
    with torch.no_grad():
        mean, covariance = problem.mean(), problem.covariance()
        variance = covariance.diagonal().clone()
        elbo = logistic.elbo(X, labels, mean, variance if structure == "diagonal" else covariance, precision)
    return ExactVI(mean, variance, covariance, float(elbo), norm, iterations, structure)


class _Problem:
    """The negative ELBO in whitened coordinates: ``shift`` is u, ``scale`` is r (and T, for the full structure)."""

    scale: Tensor

    def __init__(self, X: Tensor, y: Tensor, prior_precision: float, center: Tensor, slopes: Tensor) -> None:
        self.y, self.prior_precision, self.center = y, prior_precision, center
        self.hessian = _hessian(X, slopes, prior_precision)
        identity = torch.eye(len(center), dtype=torch.float64, device=X.device)
        self.root = torch.linalg.solve_triangular(torch.linalg.cholesky(self.hessian).T, identity, upper=True)
        self.center_logits, self.white_X = X @ center, X @ self.root
        self.shift = torch.zeros_like(center, requires_grad=True)

    def mean(self) -> Tensor:
        return self.center + self.root @ self.shift

    def covariance(self) -> Tensor:
        raise NotImplementedError

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The variances of the weights, the log-determinant of their covariance, the variances of the logits."""
        raise NotImplementedError

    def neg_elbo(self) -> Tensor:
        variance, log_det, logit_variance = self.moments()
        fit = logistic.expected_log_likelihood(self.y, self._mean_logits(), logistic.safe_sqrt(logit_variance))
        return logistic.gaussian_kl(self.mean(), variance, log_det, self.prior_precision) - fit

    def gradient_norm(self) -> float:
        return float(torch.cat([g.flatten() for g in torch.autograd.grad(self.neg_elbo(), self.parameters())]).norm())

    @torch.no_grad()
    def curvature(self) -> tuple[Tensor, Tensor]:
        """The mean, and E_q[σ'] for each example: the first guess of another round."""
        return self.mean(), logistic.expected_slope(self._mean_logits(), logistic.safe_sqrt(self.moments()[2]))

    def parameters(self) -> list[Tensor]:
        return [self.shift, self.scale]

    def _mean_logits(self) -> Tensor:
        return self.center_logits + self.white_X @ self.shift


class _Diagonal(_Problem):
    def __init__(self, X: Tensor, y: Tensor, prior_precision: float, center: Tensor, slopes: Tensor) -> None:
        super().__init__(X, y, prior_precision, center, slopes)
        self.square_X = X.square()
        self.scale = torch.zeros_like(center, requires_grad=True)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        variance = (math.sqrt(2) * self.scale).exp() / self.hessian.diagonal()
        return variance, variance.log().sum(), self.square_X @ variance

    def covariance(self) -> Tensor:
        return self.moments()[0].diag()


class _Full(_Problem):
    def __init__(self, X: Tensor, y: Tensor, prior_precision: float, center: Tensor, slopes: Tensor) -> None:
        super().__init__(X, y, prior_precision, center, slopes)
        self.scale = torch.zeros_like(self.hessian, requires_grad=True)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        triangle = self._triangle()
        log_det = 2 * self.root.diagonal().log().sum() + math.sqrt(2) * self.scale.diagonal().sum()
        return _row_squares(self.root @ triangle), log_det, _row_squares(self.white_X @ triangle)

    def covariance(self) -> Tensor:
        factor = self.root @ self._triangle()
        return factor @ factor.T

    def _triangle(self) -> Tensor:
        return self.scale.tril(-1) + (self.scale.diagonal() / math.sqrt(2)).exp().diag()


def _row_squares(matrix: Tensor) -> Tensor:
    return matrix.square().sum(1)


def _hessian(X: Tensor, slopes: Tensor, prior_precision: float) -> Tensor:
    """λI + Xᵀ·diag(slopes)·X."""
    return (X.T * slopes) @ X + prior_precision * torch.eye(X.shape[1], dtype=X.dtype, device=X.device)


def _laplace(X: Tensor, y: Tensor, prior_precision: float, max_iterations: int = 100) -> tuple[Tensor, Tensor]:
    """The mode of the posterior by damped Newton steps, and σ' at its logits. Only a first guess: need not be exact."""

    def neg_log_joint(weights: Tensor) -> float:
        logits = X @ weights
        return float((softplus(logits) - y * logits).sum() + 0.5 * prior_precision * weights.square().sum())

    mode = X.new_zeros(X.shape[1])
    for _ in range(max_iterations):
        probs = torch.sigmoid(X @ mode)
        slopes = probs - probs.square()
        gradient = X.T @ (probs - y) + prior_precision * mode
        root = torch.linalg.cholesky(_hessian(X, slopes, prior_precision))
        direction = torch.cholesky_solve(gradient[:, None], root)[:, 0]
        decrement, value, step = float(gradient @ direction), neg_log_joint(mode), 1.0
        if decrement < 1e-12 * (1 + abs(value)):
            break
        while step > 1e-6 and neg_log_joint(mode - step * direction) > value - 0.1 * step * decrement:
            step /= 2
        mode = mode - step * direction
    return mode, slopes


def _maximise(problem: _Problem, tolerance: float, max_iterations: int) -> int:
    """Run L-BFGS until the gradient is small or stops getting smaller; returns the number of iterations.

    A line search compares values of the ELBO, whose rounding hides the last steps when the ELBO is large. So it is
    followed by steps without, which use what has been learned of the curvature, as long as the gradient falls.
    """
    parameters = problem.parameters()
    rounding = torch.finfo(torch.float64).eps * (1 + abs(float(problem.neg_elbo().detach())))
    optimizer = torch.optim.LBFGS(
        parameters,
        history_size=50,
        tolerance_grad=tolerance / math.sqrt(sum(p.numel() for p in parameters)),
    )
    iterations = _lbfgs(optimizer, problem, "strong_wolfe", min(200, max_iterations), smallest_change=rounding)
    best, norm, idle = _copies(parameters), problem.gradient_norm(), 0
    while norm > tolerance and iterations < max_iterations and idle < 5:
        iterations += _lbfgs(optimizer, problem, None, 1, smallest_change=0.0)
        norm_now = problem.gradient_norm()
        if norm_now < norm:
            best, norm, idle = _copies(parameters), norm_now, 0
        else:
            idle += 1
    with torch.no_grad():
        torch._foreach_copy_(parameters, best)
    return iterations


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _lbfgs(
    optimizer: torch.optim.LBFGS,
    problem: _Problem,
    line_search: str | None,
    max_iterations: int,
    smallest_change: float,
) -> int:
    """Some iterations; returns how many."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = problem.neg_elbo()
        loss.backward()
        return float(loss.detach())

    state = optimizer.state[problem.parameters()[0]]
    before = state.get("n_iter", 0)
    optimizer.param_groups[0].update(
        line_search_fn=line_search,
        max_iter=max_iterations,
        max_eval=4 * max_iterations,
        tolerance_change=smallest_change,
    )
    optimizer.step(closure)
    return int(state["n_iter"]) - before


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        return as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Invalid {name}: is a {type(value).__name__}, must be a tensor, an array or a list of numbers. Convert it "
            "with torch.as_tensor, which says: " + str(error)
        ) from error


def _check(
    X: Tensor, y: Tensor, prior_precision: Any, structure: Any, tolerance: Any, max_iterations: Any
) -> tuple[Tensor, Tensor]:
    """Refuse what cannot work; returns X and the labels, 0 and 1, in float64."""
    if structure not in get_args(Structure):
        raise invalid("structure", structure, "'diagonal' or 'full'", "'full' keeps the correlations of the weights.")
    for name, value in (("prior_precision", prior_precision), ("tolerance", tolerance)):
        if not is_finite(value) or value <= 0:
            remedy = "1 is a good first try." if name == "prior_precision" else "1e-6 is the default."
            raise invalid(name, value, "a finite number > 0", remedy)
    if not is_number(max_iterations, whole=True) or max_iterations < 1:
        raise invalid("max_iterations", max_iterations, "an integer >= 1", "1000 is the default.")
    X, y = _as_tensor("X", X), _as_tensor("y", y)
    if X.dim() != 2 or 0 in X.shape:
        raise ValueError(
            f"Invalid X: has shape {tuple(X.shape)}, must be (examples, features), neither of them 0. For a single "
            "feature pass X[:, None]."
        )
    if y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.shape != X.shape[:1]:
        raise ValueError(
            f"Invalid y: has shape {tuple(y.shape)}, must be ({len(X)},). Pass one label for each row of X."
        )
    X, labels = X.detach().to(torch.float64), y.detach().to(device=X.device, dtype=torch.float64)
    if not bool(torch.isfinite(X).all()):
        raise ValueError(
            f"Invalid X: {int((~torch.isfinite(X)).sum())} entries are NaN or infinite, must be finite everywhere. "
            "Drop or fill in missing values first."
        )
    if bool((labels.abs() == 1).all()):
        labels = (labels + 1) / 2
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            f"Invalid y: has values {labels.unique().tolist()[:4]}, must be 0 and 1, -1 and +1, or booleans. Recode "
            "them; there can be two classes only."
        )
    return X, labels
