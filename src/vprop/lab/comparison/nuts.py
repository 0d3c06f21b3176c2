"""The posterior itself, without a Gaussian: Hamiltonian Monte Carlo (NUTS) for logistic regression, by NumPyro.

NumPyro is an extra of its own, and is imported where it is used: whoever redraws the tables from stored results does
not need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from vprop.lab.comparison import scores
from vprop.lab.comparison.scores import score_probs
from vprop.lab.comparison.tasks import TableSpec, task
from vprop.lab.engine import binary
from vprop.lab.engine.job import Job
from vprop.lab.environment import environment
from vprop.lab.errors import UsageError
from vprop.metrics import calibration, classification

MAX_R_HAT, MIN_ESS = 1.01, 400
"""What a sample must reach to be a reference: the limits that Vehtari et al. (2021) recommend."""

_AT_ONCE = 100
"""Draws whose predictions are computed together; bounds the memory."""


@dataclass(frozen=True)
class Sampling(Job):
    """Everything that decides the outcome, and where the data are."""

    spec: TableSpec
    fingerprint: str
    warmup: int = 1000
    draws: int = 2000
    chains: int = 2
    seed: int = 0
    uses_library: ClassVar[bool] = False

    @property
    def identity(self) -> dict[str, Any]:
        """Budgets of training do not matter."""
        return super().identity | {"spec": self.spec.name}

    def code(self) -> tuple[ModuleType, ...]:
        """Of the library only what scores the probabilities."""
        return scores, classification, calibration, binary, sys.modules[__name__]

    def compute(self) -> dict[str, Any]:
        """Draw, summarise and check. For a process of its own: it switches JAX to float64."""
        # By name, because type checkers should not ask for an extra that few have.
        jax, numpyro, infer, diagnostics = (
            importlib.import_module(name) for name in ("jax", "numpyro", "numpyro.infer", "numpyro.diagnostics")
        )
        numpyro.enable_x64()
        work = task(self.spec, "final", self.data_dir)
        x, y = jax.numpy.asarray(work.train_x.numpy()), jax.numpy.asarray(work.train_y[:, 0].numpy())
        prior = numpyro.distributions.Normal(0.0, work.prior_precision**-0.5).expand([x.shape[1]]).to_event(1)

        def model() -> None:
            weights = numpyro.sample("weights", prior)
            numpyro.sample("labels", numpyro.distributions.Bernoulli(logits=x @ weights).to_event(1), obs=y)

        chains = infer.MCMC(
            infer.NUTS(model, dense_mass=True),
            num_warmup=self.warmup,
            num_samples=self.draws,
            num_chains=self.chains,
            chain_method="sequential",
            progress_bar=False,
        )
        chains.run(jax.random.PRNGKey(self.seed), extra_fields=("diverging",))
        drawn = chains.get_samples(group_by_chain=True)["weights"]
        weights = torch.tensor(drawn.tolist(), dtype=torch.float64).flatten(0, 1)
        probs = torch.zeros(len(work.test_x), dtype=torch.float64)
        for some in weights.split(_AT_ONCE):
            probs += torch.sigmoid(some @ work.test_x.T).sum(0) / len(weights)
        return {
            "task": f"nuts-{self.spec.name}",
            "fingerprint": self.fingerprint,
            "environment": environment() | {"numpyro": numpyro.__version__, "jax": jax.__version__},
            "settings": {"warmup": self.warmup, "draws": self.draws, "chains": self.chains, "seed": self.seed},
            "prior_precision": work.prior_precision,
            "mean": weights.mean(0).tolist(),
            "variance": weights.var(0).tolist(),
            "r_hat_max": float(diagnostics.split_gelman_rubin(drawn).max()),
            "ess_min": float(diagnostics.effective_sample_size(drawn).min()),
            "divergences": int(chains.get_extra_fields()["diverging"].sum()),
            "scores": score_probs(work, torch.stack([1 - probs, probs], dim=-1)),
        }


def installed() -> bool:
    """Whether NumPyro can be imported."""
    try:
        return importlib.util.find_spec("numpyro") is not None
    except ValueError:  # a module that is marked as missing
        return False


def require() -> None:
    """Say what to install."""
    if not installed():
        raise UsageError(
            "NUTS needs NumPyro, which is not installed: pip install numpyro. The tables can be redrawn without it, "
            "from the results that are stored."
        )


def check(result: dict[str, Any]) -> None:
    """Refuse a sample that has not converged as a reference."""
    if not (result["r_hat_max"] <= MAX_R_HAT and result["ess_min"] >= MIN_ESS):
        raise UsageError(
            f"{result['task']} has not converged: r-hat is up to {result['r_hat_max']:.3f} (must be <= {MAX_R_HAT}), "
            f"the effective sample size down to {result['ess_min']:.0f} (must be >= {MIN_ESS}). Use more draws."
        )


def load(folder: Path, spec: TableSpec, fingerprint: str) -> dict[str, Any] | None:
    """The stored result for this task's data; ``None`` if there is none, or one for other data."""
    try:
        result = json.loads((folder / f"nuts-{spec.name}.json").read_text(encoding="utf-8"))
        return result if result["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
