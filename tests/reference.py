"""Naive float64 numpy transcription of "Vprop: Variational Inference using RMSprop" (Khan et al., 2017).

In the paper's notation, with f(θ) the negative log-likelihood SUMMED over the data, the prior N(m0, I/λ),
q = N(μ, 1/(s+λ)), steps α (`lr`) and β (1 − `betas[1]`):

    Vprop-1:  θ = μ + ε/sqrt(s+λ),  g = ∇f(θ)
              s ← (1−β) s + β g²
              μ ← μ − α (g + λ(μ−m0)) / (s+λ)                           (with the new s)
    Vprop-K:  g → (1/K) Σₖ gₖ in the line for μ,  g² → (1/K) Σₖ gₖ² in the line for s
    Vprop-0:  θ = μ, otherwise as Vprop-1

Beyond the paper:

    momentum:              m ← β₁m + (1−β₁)g,  g → m/(1−β₁ᵗ) in the line for μ (the prior term stays outside)
    antithetic:            samples 2j and 2j+1 use +εⱼ and −εⱼ
    centered, antithetic:  g² → mean over the complete pairs of ((g₊−g₋)/2)²
    centered:              g² → unbiased sample variance of g₁ … g_K
    clip_radius:           bounds each element of (g + λ(μ−m0))/(s+λ), before α

The library works with the mean loss ℓ, ĝ = ∇ℓ and h ← (1−β)h + βĥ, ĥ = ess·ĝ². It is the same method:
"""

import numpy as np

# Let ess = N/τ, f = ess·ℓ, s = ess·h, δ = λ/ess. Then ∇f = ess·ĝ and s+λ = ess·(h+δ), so σ² = 1/(ess·(h+δ)).
# The target of s is (∇f)² = ess²·ĝ² = ess·(ess·ĝ²) = ess·ĥ: the update of s is ess times that of h.
# The step (∇f + λ(μ−m0))/(s+λ) = ess(ĝ + δ(μ−m0))/(ess(h+δ)) = (ĝ + δ(μ−m0))/(h+δ): ess cancels.


class NaiveVprop:
    """Vprop-0, Vprop-1 and Vprop-K, one parameter vector, as written at the top of this file."""

    def __init__(self, mean, *, num_data, prior_precision=1.0, prior_mean=0.0, temperature=1.0, lr,
                 betas=(0.0, 0.999), mc_samples=1, antithetic=False, centered=False, hess_init=1.0,
                 clip_radius=float("inf")):  # fmt: skip
        if centered and mc_samples < 2:
            raise ValueError("centered needs mc_samples >= 2")
        self.mean = np.array(mean, dtype=np.float64)
        self.ess = num_data / temperature
        self.s = self.ess * hess_init * np.ones_like(self.mean)
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.alpha = lr
        self.beta1 = betas[0]
        self.beta = 1.0 - betas[1]
        self.mc_samples = mc_samples
        self.antithetic = antithetic
        self.centered = centered
        self.clip_radius = clip_radius
        self.momentum = np.zeros_like(self.mean)
        self.t = 0

    @property
    def hess(self):
        return self.s / self.ess

    @property
    def variance(self):
        return 1.0 / (self.s + self.prior_precision)

    def step(self, grad_mean_loss, noises):
        """One update. `noises` holds one vector per independent draw (K, or ceil(K/2) when antithetic)."""
        gradients = []
        if self.mc_samples == 0:
            gradients.append(self.ess * grad_mean_loss(self.mean.copy()))
        for k in range(self.mc_samples):
            if not self.antithetic:
                epsilon = noises[k]
            elif k % 2 == 0:
                epsilon = noises[k // 2]
            else:
                epsilon = -noises[k // 2]
            theta = self.mean + epsilon / np.sqrt(self.s + self.prior_precision)
            gradients.append(self.ess * grad_mean_loss(theta))

        g = sum(gradients) / len(gradients)
        if self.centered and self.antithetic:
            pairs = len(gradients) // 2
            target = sum(((gradients[2 * j] - gradients[2 * j + 1]) / 2) ** 2 for j in range(pairs)) / pairs
        elif self.centered:
            target = sum((g_k - g) ** 2 for g_k in gradients) / (len(gradients) - 1)
        else:
            target = sum(g_k**2 for g_k in gradients) / len(gradients)

        self.t += 1
        self.momentum = self.beta1 * self.momentum + (1.0 - self.beta1) * g
        g = self.momentum / (1.0 - self.beta1**self.t)

        self.s = (1.0 - self.beta) * self.s + self.beta * target
        g = g + self.prior_precision * (self.mean - self.prior_mean)
        direction = g / (self.s + self.prior_precision)
        self.mean = self.mean - self.alpha * np.clip(direction, -self.clip_radius, self.clip_radius)


def conjugate_regression_posterior(X, y, noise_variance, prior_precision, prior_mean=0.0):
    """Exact mean and covariance of p(w | X, y), for y ~ N(Xw, noise_variance) and w ~ N(m0, 1/λ)."""
    prior_precision = prior_precision * np.ones(X.shape[1])
    covariance = np.linalg.inv(X.T @ X / noise_variance + np.diag(prior_precision))
    return covariance @ (X.T @ y / noise_variance + prior_precision * prior_mean), covariance


def mean_field_optimum(X, y, noise_variance, prior_precision, prior_mean=0.0):
    """Mean and variance of the diagonal Gaussian q that minimises KL(q || p(w | X, y))."""
    mean, covariance = conjugate_regression_posterior(X, y, noise_variance, prior_precision, prior_mean)
    return mean, 1.0 / np.diag(np.linalg.inv(covariance))


def conjugate_elbo(mean, variance, X, y, noise_variance, prior_precision, prior_mean=0.0, num_data=None,
                   temperature=1.0):  # fmt: skip
    """ess · (mean over the rows of E_q[log p(y | x, w)]) − KL(q || prior), q = N(mean, variance)."""
    ess = (len(y) if num_data is None else num_data) / temperature
    # E_q[(y − xᵀw)²] = (y − xᵀμ)² + Σⱼ xⱼ²σⱼ²
    expected_square = (y - X @ mean) ** 2 + X**2 @ variance
    log_likelihood = -0.5 * np.log(2 * np.pi * noise_variance) - 0.5 * expected_square / noise_variance
    ratio = prior_precision * variance
    kl = 0.5 * np.sum(ratio + prior_precision * (mean - prior_mean) ** 2 - 1.0 - np.log(ratio))
    return ess * np.mean(log_likelihood) - kl
