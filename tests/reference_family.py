"""Naive float64 numpy transcriptions of the relatives of Vprop: CVI, VON, VONG, VOGN, sampled Fisher, BBVI, IVON …

In the notation of the mean loss: ℓ(θ) is the mean over the batch of −log p(y | x, θ), ess = N/τ, the prior is
N(m0, 1/λ) and δ = λ/ess. All but BBVI are one natural-gradient step with different estimates Ĥ of E_q[∇²ℓ]:

    q = N(μ, P⁻¹),  P = ess (H+δ)
    θₖ = μ + L⁻ᵀεₖ,  P = LLᵀ                                            (with the old H; diagonal: μ + εₖ/sqrt(P))
    H ← β₂H + (1−β₂) Ĥ                                                  (then kept positive, see below)
    m ← β₁m + (1−β₁) (1/K) Σₖ ĝₖ,  m̂ = m/(1−β₁ᵗ)
    μ ← μ − lr clip[(H+δ)⁻¹ (m̂ + δ(μ−m0))]                              (with the new H)

    CVI            diagonal   Ĥ = mean over k of diag ∇²ℓ(θₖ)
    VON            full       Ĥ = mean over k of ∇²ℓ(θₖ)
    VONG           full       Ĥ = ess · mean over k of ĝₖĝₖᵀ
    VOGN           diagonal   Ĥ = mean over k and over the examples i of (∇ℓᵢ(θₖ))²
    sampled Fisher either     Ĥ = B · mean over k of g̃ₖ² (diagonal) or of g̃ₖg̃ₖᵀ (full), g̃ₖ = ∇ℓ(θₖ) of the batch of
                              size B, its labels drawn from the model

    K = 0:                 the only θ is μ
    antithetic:            samples 2j and 2j+1 use +εⱼ and −εⱼ
    centered, antithetic:  (VONG) ĝĝᵀ → mean over the complete pairs of ddᵀ, d = (ĝ₊−ĝ₋)/2
    centered:              (VONG) ĝĝᵀ → unbiased sample covariance of ĝ₁ … ĝ_K
    clip:                  each element within ±clip_radius, before lr
    kept positive:         diagonal: H ← max(H, 0). Full: if H + δI/1000 is not positive definite, the eigenvalues of H
                           are raised to at least 0

A vector λ is the diagonal of the prior's precision; where the structure is full, λ may be a matrix too. Whatever is
random comes from outside: `noises` holds one vector per independent draw (K, or ceil(K/2) when antithetic).
"""

import numpy as np


def sample_noises(mc_samples, antithetic, noises):
    """ε₁ … ε_K."""
    epsilons = []
    for k in range(mc_samples):
        if not antithetic:
            epsilons.append(noises[k])
        elif k % 2 == 0:
            epsilons.append(noises[k // 2])
        else:
            epsilons.append(-noises[k // 2])
    return epsilons


def as_matrix(value, size):
    """A number c as c·I, a vector v as diag(v), a matrix as it is."""
    if np.ndim(value) == 2:
        return np.array(value, dtype=np.float64)
    return np.diag(value * np.ones(size))


def average(values):
    return sum(values) / len(values)


class NaiveNaturalGradient:
    """What the methods share: the samples and the update, as written at the top of this file."""

    def __init__(self, mean, *, full, num_data, prior_precision=1.0, prior_mean=0.0, temperature=1.0, lr,
                 betas=(0.0, 0.999), mc_samples=1, antithetic=False, hess_init=1.0,
                 clip_radius=float("inf")):  # fmt: skip
        self.mean = np.array(mean, dtype=np.float64)
        self.full = full
        self.ess = num_data / temperature
        size = len(self.mean)
        if full:
            self.hess = as_matrix(hess_init, size)
            self.delta = as_matrix(prior_precision, size) / self.ess
        else:
            self.hess = hess_init * np.ones(size)
            self.delta = prior_precision * np.ones(size) / self.ess
        self.prior_mean = prior_mean
        self.lr = lr
        self.beta1, self.beta2 = betas
        self.mc_samples = mc_samples
        self.antithetic = antithetic
        self.clip_radius = clip_radius
        self.momentum = np.zeros(size)
        self.t = 0

    @property
    def precision(self):
        """P: a matrix (full) or its diagonal (diagonal)."""
        return self.ess * (self.hess + self.delta)

    @property
    def covariance(self):
        """P⁻¹: a matrix (full) or its diagonal (diagonal)."""
        return np.linalg.inv(self.precision) if self.full else 1.0 / self.precision

    def samples(self, noises):
        """θ₁ … θ_K, or [μ] when K = 0."""
        if self.mc_samples == 0:
            return [self.mean.copy()]
        thetas = []
        for epsilon in sample_noises(self.mc_samples, self.antithetic, noises):
            if self.full:
                L = np.linalg.cholesky(self.precision)
                thetas.append(self.mean + np.linalg.inv(L).T @ epsilon)
            else:
                thetas.append(self.mean + epsilon / np.sqrt(self.precision))
        return thetas

    def update(self, gradient, hess_estimate):
        self.hess = self.beta2 * self.hess + (1.0 - self.beta2) * hess_estimate
        if not self.full:
            self.hess = np.maximum(self.hess, 0.0)
        elif np.min(np.linalg.eigvalsh(self.hess + 1e-3 * self.delta)) <= 0.0:
            values, vectors = np.linalg.eigh(self.hess)
            self.hess = vectors @ np.diag(np.maximum(values, 0.0)) @ vectors.T

        self.t += 1
        self.momentum = self.beta1 * self.momentum + (1.0 - self.beta1) * gradient
        debiased = self.momentum / (1.0 - self.beta1**self.t)

        if self.full:
            direction = np.linalg.inv(self.hess + self.delta) @ (debiased + self.delta @ (self.mean - self.prior_mean))
        else:
            direction = (debiased + self.delta * (self.mean - self.prior_mean)) / (self.hess + self.delta)
        self.mean = self.mean - self.lr * np.clip(direction, -self.clip_radius, self.clip_radius)


class NaiveCVI(NaiveNaturalGradient):
    def __init__(self, mean, **settings):
        super().__init__(mean, full=False, **settings)

    def step(self, grad, hess_diag, noises):
        """grad(θ) = ∇ℓ(θ), hess_diag(θ) = diag ∇²ℓ(θ)."""
        thetas = self.samples(noises)
        self.update(average([grad(theta) for theta in thetas]), average([hess_diag(theta) for theta in thetas]))


class NaiveVON(NaiveNaturalGradient):
    def __init__(self, mean, **settings):
        super().__init__(mean, full=True, **settings)

    def step(self, grad, hess, noises):
        """grad(θ) = ∇ℓ(θ), hess(θ) = ∇²ℓ(θ)."""
        thetas = self.samples(noises)
        self.update(average([grad(theta) for theta in thetas]), average([hess(theta) for theta in thetas]))


class NaiveVONG(NaiveNaturalGradient):
    def __init__(self, mean, *, centered=False, **settings):
        super().__init__(mean, full=True, **settings)
        if centered and self.mc_samples < 2:
            raise ValueError("centered needs mc_samples >= 2")
        self.centered = centered

    def step(self, grad, noises):
        """grad(θ) = ∇ℓ(θ)."""
        gradients = [grad(theta) for theta in self.samples(noises)]
        g = average(gradients)
        if self.centered and self.antithetic:
            differences = [(gradients[2 * j] - gradients[2 * j + 1]) / 2 for j in range(len(gradients) // 2)]
            outer = average([np.outer(d, d) for d in differences])
        elif self.centered:
            outer = sum(np.outer(g_k - g, g_k - g) for g_k in gradients) / (len(gradients) - 1)
        else:
            outer = average([np.outer(g_k, g_k) for g_k in gradients])
        self.update(g, self.ess * outer)


class NaiveVOGN(NaiveNaturalGradient):
    def __init__(self, mean, **settings):
        super().__init__(mean, full=False, **settings)

    def step(self, per_example_grads, noises):
        """per_example_grads(θ): a row ∇ℓᵢ(θ) for each example of the batch, shape (B, D)."""
        rows = [per_example_grads(theta) for theta in self.samples(noises)]
        gradient = average([np.mean(r, axis=0) for r in rows])
        hess_estimate = average([np.mean(r**2, axis=0) for r in rows])
        self.update(gradient, hess_estimate)


class NaiveSampledFisher(NaiveNaturalGradient):
    def __init__(self, mean, *, full=False, **settings):
        super().__init__(mean, full=full, **settings)

    def step(self, grad, drawn_label_grads, noises, *, batch_size):
        """grad(θ) = ∇ℓ(θ), drawn_label_grads(θ, k) = the same with the k-th draw of labels from p(y | x, θ)."""
        thetas = self.samples(noises)
        gradient = average([grad(theta) for theta in thetas])
        drawn = [drawn_label_grads(theta, k) for k, theta in enumerate(thetas)]
        if self.full:
            hess_estimate = batch_size * average([np.outer(g, g) for g in drawn])
        else:
            hess_estimate = batch_size * average([g**2 for g in drawn])
        self.update(gradient, hess_estimate)


class NaiveBBVI:
    """Stochastic gradient on the mean μ and the standard deviation σ of q = N(μ, σ²).

    L = ess E[ℓ(μ+σε)] + KL(q || prior)
    G_μ = (ess (1/K) Σₖ ĝₖ    + λ(μ−m0)) / ess
    G_σ = (ess (1/K) Σₖ ĝₖ εₖ + λσ − 1/σ) / ess

    Each of the two takes its own step, x = μ with `lr` and x = σ with `lr_std`:

    sgd:      x ← x − lr G
    rmsprop:  v ← αv + (1−α)G²,  x ← x − lr G/(sqrt(v)+eps)
    adam:     m ← β₁m + (1−β₁)G,  v ← β₂v + (1−β₂)G²,  x ← x − lr (m/(1−β₁ᵗ)) / (sqrt(v/(1−β₂ᵗ))+eps)

    and the new σ is brought within [σ/2, 2σ] of the old one.
    """

    def __init__(self, mean, std, *, num_data, prior_precision=1.0, prior_mean=0.0, temperature=1.0, lr, lr_std=None,
                 method="sgd", alpha=0.99, betas=(0.9, 0.999), eps=1e-8, mc_samples=1,
                 antithetic=False):  # fmt: skip
        if mc_samples < 1:
            raise ValueError("BBVI needs mc_samples >= 1")
        if method not in ("sgd", "rmsprop", "adam"):
            raise ValueError(f"unknown method {method!r}")
        self.mean = np.array(mean, dtype=np.float64)
        self.std = std * np.ones_like(self.mean)
        self.ess = num_data / temperature
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.lr = lr
        self.lr_std = lr if lr_std is None else lr_std
        self.method = method
        self.alpha = alpha
        self.betas = betas
        self.eps = eps
        self.mc_samples = mc_samples
        self.antithetic = antithetic
        self.m = {"mean": np.zeros_like(self.mean), "std": np.zeros_like(self.mean)}
        self.v = {"mean": np.zeros_like(self.mean), "std": np.zeros_like(self.mean)}
        self.t = 0

    def gradients(self, grad, noises):
        """G_μ and G_σ."""
        epsilons = sample_noises(self.mc_samples, self.antithetic, noises)
        gradients = [grad(self.mean + self.std * epsilon) for epsilon in epsilons]
        grad_mean = self.ess * average(gradients)
        grad_std = self.ess * average([g * epsilon for g, epsilon in zip(gradients, epsilons, strict=True)])
        grad_mean = grad_mean + self.prior_precision * (self.mean - self.prior_mean)
        grad_std = grad_std + self.prior_precision * self.std - 1.0 / self.std
        return grad_mean / self.ess, grad_std / self.ess

    def direction(self, name, G):
        if self.method == "sgd":
            return G
        if self.method == "rmsprop":
            self.v[name] = self.alpha * self.v[name] + (1.0 - self.alpha) * G**2
            return G / (np.sqrt(self.v[name]) + self.eps)
        beta1, beta2 = self.betas
        self.m[name] = beta1 * self.m[name] + (1.0 - beta1) * G
        self.v[name] = beta2 * self.v[name] + (1.0 - beta2) * G**2
        m_hat = self.m[name] / (1.0 - beta1**self.t)
        v_hat = self.v[name] / (1.0 - beta2**self.t)
        return m_hat / (np.sqrt(v_hat) + self.eps)

    def step(self, grad, noises):
        """grad(θ) = ∇ℓ(θ)."""
        G_mean, G_std = self.gradients(grad, noises)
        self.t += 1
        self.mean = self.mean - self.lr * self.direction("mean", G_mean)
        std = self.std - self.lr_std * self.direction("std", G_std)
        self.std = np.clip(std, self.std / 2, 2 * self.std)


# Logistic regression: y in {0, 1}, z = Xθ, ℓ(θ) = mean over the rows of log(1 + exp(z)) − y z.


def sigmoid(z):
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def logistic_loss(theta, X, y):
    z = X @ theta
    return np.mean(np.logaddexp(0.0, z) - y * z)


def logistic_per_example_gradients(theta, X, y):
    """Shape (B, D)."""
    return (sigmoid(X @ theta) - y)[:, None] * X


def logistic_gradient(theta, X, y):
    return X.T @ (sigmoid(X @ theta) - y) / len(y)


def logistic_hessian(theta, X, y):
    p = sigmoid(X @ theta)
    return X.T @ np.diag(p * (1.0 - p)) @ X / len(y)


def logistic_hessian_diagonal(theta, X, y):
    return np.diag(logistic_hessian(theta, X, y))


# A two-layer tanh network: z = tanh(X W1ᵀ + b1) w2 + b2, the loss as for logistic regression with this z.
# θ holds W1 (hidden × inputs, row by row), b1, w2, b2: the order of Sequential(Linear, Tanh, Linear).parameters().


def mlp_size(inputs, hidden):
    return hidden * inputs + hidden + hidden + 1


def mlp_unpack(theta, inputs, hidden):
    W1, b1, w2, b2 = np.split(theta, np.cumsum([hidden * inputs, hidden, hidden]))
    return W1.reshape(hidden, inputs), b1, w2, b2[0]


def mlp_loss(theta, X, y, hidden):
    W1, b1, w2, b2 = mlp_unpack(theta, X.shape[1], hidden)
    z = np.tanh(X @ W1.T + b1) @ w2 + b2
    return np.mean(np.logaddexp(0.0, z) - y * z)


def mlp_per_example_gradients(theta, X, y, hidden):
    """Shape (B, D)."""
    W1, b1, w2, b2 = mlp_unpack(theta, X.shape[1], hidden)
    rows = []
    for x_i, y_i in zip(X, y, strict=True):
        a = np.tanh(W1 @ x_i + b1)
        dz = sigmoid(a @ w2 + b2) - y_i
        da = dz * w2 * (1.0 - a**2)
        rows.append(np.concatenate([np.outer(da, x_i).ravel(), da, dz * a, [dz]]))
    return np.array(rows)


def mlp_gradient(theta, X, y, hidden):
    return np.mean(mlp_per_example_gradients(theta, X, y, hidden), axis=0)


def numerical_hessian(gradient, theta, step=1e-5):
    """Central differences of `gradient`, made symmetric."""
    columns = []
    for e in np.eye(len(theta)):
        columns.append((gradient(theta + step * e) - gradient(theta - step * e)) / (2 * step))
    hessian = np.array(columns).T
    return (hessian + hessian.T) / 2


def mlp_hessian(theta, X, y, hidden, step=1e-5):
    return numerical_hessian(lambda t: mlp_gradient(t, X, y, hidden), theta, step)


# Price's estimate, IVON and Vadam (diagonal). θₖ = μ + σεₖ with σ² = 1/(ess (h+δ)) of the old h throughout.


class NaivePrice(NaiveNaturalGradient):
    """Ĥ = mean over k of ∇ℓ(θₖ)(θₖ−μ)/σ², the update as written at the top of this file."""

    def __init__(self, mean, **settings):
        super().__init__(mean, full=False, **settings)
        if self.mc_samples < 1:
            raise ValueError("Price's estimate needs mc_samples >= 1: without noise there is nothing to multiply with")

    def step(self, grad, noises):
        """grad(θ) = ∇ℓ(θ)."""
        thetas = self.samples(noises)
        gradients = [grad(theta) for theta in thetas]
        variance = 1.0 / (self.ess * (self.hess + self.delta))
        products = [g * (theta - self.mean) / variance for g, theta in zip(gradients, thetas, strict=True)]
        self.update(average(gradients), average(products))


class NaiveIVON(NaivePrice):
    """IVON (Shen et al., "Variational Learning is Effective for Large Deep Networks", 2024).

    ĝ = mean over k of ∇ℓ(θₖ),  ĥ = mean over k of ∇ℓ(θₖ)(θₖ−μ)/σ²
    m ← β₁m + (1−β₁)ĝ
    h ← β₂h + (1−β₂)ĥ + ½(1−β₂)²(h−ĥ)²/(h+δ)                              (the old h on the right)
    m̂ = m/(1−β₁ᵗ)
    μ ← μ − α clip[(m̂ + δ(μ−m0))/(h+δ)]                                   (the new h)

    with α = lr, or lr (h₀+δ) when `rescale_lr`. With r = (1−β₂)(h−ĥ)/(h+δ) the new h+δ is (1 − r + r²/2) times the
    old, at least half of it: never negative. A sequence of such halvings is ended at h+δ = δ/1000.
    """

    def __init__(self, mean, *, betas=(0.9, 0.99999), rescale_lr=False, **settings):
        super().__init__(mean, betas=betas, **settings)
        self.alpha = self.lr * (self.hess + self.delta) if rescale_lr else self.lr

    def update(self, gradient, hess_estimate):
        self.momentum = self.beta1 * self.momentum + (1.0 - self.beta1) * gradient
        step = 1.0 - self.beta2
        correction = 0.5 * step**2 * (self.hess - hess_estimate) ** 2 / (self.hess + self.delta)
        self.hess = self.beta2 * self.hess + step * hess_estimate + correction
        self.hess = np.maximum(self.hess, -(1.0 - 1e-3) * self.delta)

        self.t += 1
        debiased = self.momentum / (1.0 - self.beta1**self.t)
        direction = (debiased + self.delta * (self.mean - self.prior_mean)) / (self.hess + self.delta)
        self.mean = self.mean - self.alpha * np.clip(direction, -self.clip_radius, self.clip_radius)


class NaiveVadam:
    """Vadam (Khan et al., "Fast and Scalable Bayesian Deep Learning by Weight-Perturbation in Adam", 2018).

    σ² = 1/(N h + λ) = 1/(ess (h+δ)), this h not debiased;  θₖ = μ + σεₖ,  gₖ = ∇ℓ(θₖ)
    m ← β₁m + (1−β₁) (mean over k of gₖ + δ(μ−m0))
    h ← β₂h + (1−β₂) mean over k of gₖ²
    m̂ = m/(1−β₁ᵗ),  ĥ = h/(1−β₂ᵗ)
    μ ← μ − lr clip[m̂/(sqrt(ĥ)+δ)]
    """

    def __init__(self, mean, *, num_data, prior_precision=1.0, prior_mean=0.0, temperature=1.0, lr=1e-3,
                 betas=(0.9, 0.999), mc_samples=1, antithetic=False, hess_init=0.0,
                 clip_radius=float("inf")):  # fmt: skip
        self.mean = np.array(mean, dtype=np.float64)
        self.num_data = num_data / temperature
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.lr = lr
        self.beta1, self.beta2 = betas
        self.mc_samples = mc_samples
        self.antithetic = antithetic
        self.clip_radius = clip_radius
        self.momentum = np.zeros_like(self.mean)
        self.hess = hess_init * np.ones_like(self.mean)
        self.t = 0

    def step(self, grad, noises):
        """grad(θ) = ∇ℓ(θ)."""
        sigma = 1.0 / np.sqrt(self.num_data * self.hess + self.prior_precision)
        delta = self.prior_precision / self.num_data
        epsilons = sample_noises(self.mc_samples, self.antithetic, noises)
        thetas = [self.mean + sigma * epsilon for epsilon in epsilons]
        if self.mc_samples == 0:
            thetas = [self.mean.copy()]
        gradients = [grad(theta) for theta in thetas]

        total = average(gradients) + delta * (self.mean - self.prior_mean)
        self.momentum = self.beta1 * self.momentum + (1.0 - self.beta1) * total
        self.hess = self.beta2 * self.hess + (1.0 - self.beta2) * average([g**2 for g in gradients])

        self.t += 1
        m_hat = self.momentum / (1.0 - self.beta1**self.t)
        h_hat = self.hess / (1.0 - self.beta2**self.t)
        direction = m_hat / (np.sqrt(h_hat) + delta)
        self.mean = self.mean - self.lr * np.clip(direction, -self.clip_radius, self.clip_radius)
