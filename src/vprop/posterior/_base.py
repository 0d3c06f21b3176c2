"""What every posterior answers by sampling, whatever its structure: predictions and the ELBO."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vprop import noise
from vprop.checks import check_flag, check_num_samples, check_seed, invalid
from vprop.likelihood import Likelihood, LikelihoodLike, snapshot_likelihood
from vprop.objective import LossFunction, Objective
from vprop.posterior import _registry, io
from vprop.posterior._arguments import check_weights
from vprop.posterior._decisions import Decisions
from vprop.posterior._elbo import ElboEstimate, elbo_estimate
from vprop.posterior.calibrated import Scales
from vprop.posterior.prediction import Prediction
from vprop.posterior.predictive.head import last_layer
from vprop.posterior.predictive.models import drawn_models
from vprop.posterior.predictive.run import Keep, Method, Settings, predict
from vprop.posterior.prior import GaussianPrior
from vprop.wrappers import refuse_sharded

_COUNTING = threading.Lock()
"""Two threads that ask a posterior for a fresh draw at once must not get the same one."""


class Posterior(Decisions, ABC):
    """A snapshot of a Gaussian over the weights of ``model``, by parameter name.

    Training on does not change it. Parameters of the model that are not in ``mean`` are constants; buffers (the
    running statistics of BatchNorm) are part of the snapshot, and so is the noise of a
    :class:`vprop.likelihood.GaussianLikelihood` that is given as ``likelihood``.

    A posterior of another structure is a subclass that names its ``structure`` and provides what follows below. It is
    then saved, and :func:`vprop.load_posterior` makes it from a file wherever the module that defines it is imported.
    """

    structure: ClassVar[str]
    """What files call it. A class that gives itself one is registered under it."""
    sections_by_parameter: ClassVar[tuple[str, ...]] = ()
    """The sections of a file, of those that it adds, that must have a tensor for every parameter."""
    needed_tensors: ClassVar[tuple[str, ...]] = ()
    """The tensors, as ``"section/name"``, that a file must have beside these."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "structure" in vars(cls):
            _registry.register(cls)

    def __init__(
        self,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        *,
        ess: float | None,
        temperature: float | None = 1.0,
        seed: int = 0,
        snapshot: int = 1,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
        buffers: dict[str, Tensor] | None = None,
        scales: Scales | None = None,
    ) -> None:
        self.scales = Scales() if scales is None else scales
        self.likelihood: Likelihood | None
        self.likelihood, self.noise_variance = snapshot_likelihood(likelihood, noise_variance)
        self.model = model
        self.mean = mean
        self.prior = prior
        self.ess = ess
        self.temperature = temperature
        self.seed = check_seed(seed)
        self.snapshot = snapshot
        if buffers is None:
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self.buffers = buffers
        self.head: str | None = None
        """The module that the weights belong to, if the rest of the model is to be run once (:meth:`last_layer`)."""
        self.constants: dict[str, Tensor] = {}
        """Weights without a posterior that are not those of the model, but of the snapshot."""
        self._weight_dtypes = {name: p.dtype for name, p in model.named_parameters() if name in mean}
        self._draws = 0

    # -- what a structure provides ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def variance(self) -> dict[str, Tensor]:
        """Marginal variances by parameter name."""

    @abstractmethod
    def _draw(self, seed: int, sample: int, snapshot: int = 0) -> dict[str, Tensor]:
        """Draw number ``sample`` of the stream with key ``seed``, in the precision of the mean.

        ``snapshot`` 0 is for draws that the caller gave a seed for.
        """

    @abstractmethod
    def log_prob(self, weights: dict[str, Tensor]) -> Tensor:
        """log q(weights), as a 0-dimensional float64 tensor."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Entropy of q in nats."""

    @abstractmethod
    def kl(self) -> Tensor:
        """KL(q ‖ prior) in nats, in closed form."""

    @abstractmethod
    def as_prior(self) -> dict[str, Any]:
        """The arguments that make this posterior the prior of the next optimizer over the same parameters."""

    # -- what it provides for linearised predictions, last layers, files and merges, if there are to be any --------

    def _times_root(self, jacobian: dict[str, Tensor]) -> Iterable[Tensor]:
        """JR in parts, (…, some columns) each, with R any matrix for which RRᵀ = Σ; Σ over parts of (JR)(JR)ᵀ is JΣJᵀ.

        ``jacobian`` has for every parameter a tensor (…, *the parameter's shape), the derivatives by its weights.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how a Jacobian is multiplied by its covariance, which "
            "method='linearized' needs. Write _times_root(), or use the default, method='monte_carlo'."
        )

    def _restricted(self, names: list[str]) -> Posterior:
        """The marginal of some parameters, in their order. To be extended by what a structure keeps beside the mean."""
        other = copy.copy(self)
        other.mean = {name: self.mean[name] for name in names}
        other.prior = GaussianPrior(
            {name: self.prior.mean[name] for name in names}, {name: self.prior.precision[name] for name in names}
        )
        other._draws = 0
        return other

    def _sections(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that a file has beyond mean, prior and buffers, by section and name."""
        raise NotImplementedError(f"{type(self).__name__} does not say what is saved of it")

    def _settings(self) -> dict[str, Any]:
        """What a file has beside tensors and what every posterior has: entries for JSON, which go into ``rest``."""
        return {}

    @classmethod
    def _from_sections(
        cls,
        model: nn.Module,
        mean: dict[str, Tensor],
        prior: GaussianPrior,
        sections: Mapping[str, dict[str, Tensor]],
        **rest: Any,
    ) -> Posterior:
        """A posterior from what :meth:`_sections` gave; ``rest`` are further arguments of ``__init__``.

        ``mean`` is in the order that it had when it was saved.
        """
        raise NotImplementedError(f"{cls.__name__} does not say how it is made from a file")

    def _in_order(self, names: list[str]) -> Posterior:
        """The same posterior with the parameters in another order. To be extended where more than names has one."""
        other = copy.copy(self)
        other.mean = {name: self.mean[name] for name in names}
        return other

    def _merged(self, shards: Sequence[Any], prior: GaussianPrior, rest: dict[str, Any]) -> Posterior:
        """The posterior given the data of all ``shards``, of which this is the first; see :func:`vprop.merge`.

        They are of one class and in one order. ``prior`` is that of the whole, ``rest`` are further arguments of
        ``__init__``.
        """
        diagonals = "Merge [p.as_diagonal() for p in posteriors], without the correlations"
        remedy = diagonals if hasattr(self, "as_diagonal") else "Write one"
        raise TypeError(
            f"merge(posteriors): a {type(self).__name__} cannot be merged, because its class has no _merged(). "
            f"{remedy}, or train the shards with optimizers of a structure that can be merged."
        )

    def _prior_matrix(self, prior: GaussianPrior) -> Tensor | None:
        """Λ of a prior as a matrix over all weights; ``None`` if the structure has no priors with correlations."""
        return None

    def _with_variance_times(self, scale: float) -> Posterior:
        """The same mean with the covariance times ``scale``, for :func:`vprop.calibration.fit_variance_scale`."""
        raise TypeError(
            f"The variance of a {type(self).__name__} cannot be scaled, because its class has no "
            "_with_variance_times(). Write one; or calibrate with fit_temperature or fit_noise_scale."
        )

    def _with_variance_scale(self, scale: float) -> Posterior:
        """The same, with the scale on record among what calibration has changed."""
        other = self._with_variance_times(scale)
        other.scales = self.scales._replace(variance=self.scales.variance * scale)
        return other

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file; :func:`vprop.load_posterior` reads it.

        Parameters without a posterior (frozen ones, or those of a model that the optimizer holds only a part of)
        are not saved: the model given to ``load_posterior`` must have them.
        """
        io.save(self, path)

    # -- sampling --------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """How many weights have a posterior."""
        return sum(mean.numel() for mean in self.mean.values())

    def sample(self, seed: int | None = None) -> dict[str, Tensor]:
        """Weights drawn from the posterior, in the model's dtypes: fits ``torch.func.functional_call``.

        The same ``seed`` gives the same draw; without one every call draws afresh.
        """
        if seed is not None:
            return self._in_model_dtypes(self._draw(check_seed(seed), 0))
        with _COUNTING:
            draw = self._draws
            self._draws += 1
        return self._in_model_dtypes(self._draw(self.seed, draw, self.snapshot))

    @torch.no_grad()
    def predict(
        self,
        x: Any,
        num_samples: int = 32,
        seed: int = 0,
        *,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
        method: Method = "monte_carlo",
        keep: Keep = "samples",
        batch_size: int | None = None,
        vmap: bool | None = None,
        progress: bool | None = None,
        batch_norm: Any = None,
        dropout: bool = False,
    ) -> Prediction:
        """Outputs of the model, in evaluation mode, under ``num_samples`` weights drawn with ``seed``.

        ``x`` is a tensor or a NumPy array, which the model is called with once for each draw; a tuple, which becomes
        the positional arguments of the model, or a dict, its keyword arguments; or a loader: a DataLoader, or an
        iterator, over batches x, (x, y) or dicts. Labels are ignored, inputs moved to the model's device. All batches
        meet the same weights, so that a prediction does not depend on how the data are cut, and results are gathered on
        the CPU. Of an output that has ``logits`` (Hugging Face) these are taken. Outputs are those of a
        calibrated posterior (:mod:`vprop.calibration`), if it is one.

        Nothing of the model is changed meanwhile: any number of threads may predict at once, while another one trains.

        Args:
            x: the inputs.
            num_samples: draws of the weights.
            seed: which draws.
            likelihood: what the outputs are (see :class:`Prediction`); by default what the posterior was made with.
            noise_variance: of likelihood "gaussian"; by default what the posterior was made with, or else 1.
            method: "monte_carlo" draws weights. "linearized" draws none: f(x, μ) + J(θ−μ) has normal outputs, whose
                means and covariances JΣJᵀ are computed (:class:`LinearizedPrediction`).
            keep: "samples", or "summary": probabilities or means with their uncertainties, num_samples times smaller.
            batch_size: cut tensors and arrays into batches of so many rows; ``None`` takes all at once.
            vmap: run many draws at once; ``None`` does so where it was measured to be faster.
            progress: ``True`` for a bar, ``False`` for none, ``None`` for one in terminals if it takes long.
            batch_norm: training inputs, of any kind that ``x`` may be; the statistics of BatchNorm layers are then
                estimated from them anew under each draw of the weights, as means over batches. ``None`` takes the
                running statistics of the snapshot, which are an average over the weights that training went through.
            dropout: average over dropout masks as well: dropout layers are active, with masks of their own for each
                draw and each batch, from ``seed``. For a model that was trained with dropout.
        """
        settings = Settings(num_samples, seed, method, keep, batch_size, vmap, progress, batch_norm, dropout)
        return predict(self, x, settings, likelihood, noise_variance)

    def last_layer(self, head: str | None = None) -> Posterior:
        """The posterior of the last layer alone: all other weights are at their mean, and predictions run them once.

        A draw of the weights then costs a call of the head. ``head`` is the name of a module, as
        ``model.named_modules()`` has it, that is called once, and whose output is the model's. By default it is the one
        that all weights with a posterior belong to, or else the last one that has weights.
        """
        return last_layer(self, head)

    def sampled_models(
        self,
        num_samples: int = 32,
        seed: int = 0,
        *,
        dtype: torch.dtype | None = None,
        batch_norm: Any = None,
        dropout: bool = False,
    ) -> Iterator[Callable[..., Any]]:
        """The model in evaluation mode under one draw of the weights after the other, to be called like the model.

        The draws are those of ``predict(x, num_samples, seed)``, which this is for where outputs are not tensors, or
        too large to be kept: a language model's, say. Outputs are the model's own, without what :attr:`scales` has for
        logits and log-variances. Call each before the next is drawn. ``dtype`` runs the model in
        another precision than its own; ``batch_norm`` and ``dropout`` are those of :meth:`predict`, and every call has
        new masks. Nothing of the model is changed meanwhile.

        >>> import torch, vprop
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        >>> posterior = vprop.Vprop(model.parameters(), num_data=100).posterior(model)
        >>> with torch.no_grad():
        ...     mean = sum(sampled(x) for sampled in posterior.sampled_models(8)) / 8
        >>> bool(torch.allclose(mean, posterior.predict(x, 8).samples.mean(0), atol=1e-6))
        True
        """
        num_samples, seed = check_num_samples(num_samples), check_seed(seed)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise invalid("dtype", dtype, "None or a floating-point torch.dtype", "None is the model's own precision.")
        refuse_sharded(self.model, "sampled_models()")
        check_flag("dropout", dropout)
        return drawn_models(self, num_samples, seed, dtype, batch_norm, dropout)

    def _fixed(self) -> dict[str, Tensor]:
        """What the model has, beside the weights that are drawn, otherwise than now."""
        return self.buffers | self.constants

    def _shared_out(self, num_samples: int, seed: int) -> list[tuple[Posterior, range]]:
        """Which draws of a prediction are made by whom: all by itself, or some by each member of a mixture."""
        return [(self, range(num_samples))]

    def _noise_variances(self, members: Sequence[Posterior]) -> list[float | Tensor]:
        """The noise around outputs of each of ``members``, who are of those of ``_shared_out``."""
        return [self.noise_variance] * len(members)

    def _stacked_draws(self, seed: int, start: int, stop: int) -> dict[str, Tensor]:
        """Draws ``start`` to ``stop - 1`` of a seed, in the first dimension, in the model's dtypes."""
        draws = [self._in_model_dtypes(self._draw(seed, sample)) for sample in range(start, stop)]
        return {name: torch.stack([draw[name] for draw in draws]) for name in self.mean}

    def _noise(self, seed: int, sample: int, snapshot: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Standard normals like each parameter, by name and in any order, for :meth:`_draw`.

        They depend on the parameter's place in ``mean``.
        """
        names = list(self.mean)
        means = list(self.mean.values())
        draws = [
            noise.Draw(seed, number, step=snapshot, sample=sample, stream=noise.Stream.POSTERIOR)
            for number in range(len(means))
        ]
        for i, eps in noise.normals_like(means, draws):
            yield names[i], eps

    def _by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector over all weights as tensors like the parameters."""
        pieces = vector.split([mean.numel() for mean in self.mean.values()])
        return {
            name: piece.reshape(mean.shape).to(mean.dtype)
            for (name, mean), piece in zip(self.mean.items(), pieces, strict=True)
        }

    def _flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Tensors like the parameters (or numbers for whole parameters) as one wide vector."""
        device = next(iter(self.mean.values())).device
        return torch.cat([values[name].to(device).double().expand(m.shape).flatten() for name, m in self.mean.items()])

    def _in_model_dtypes(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight.to(self._weight_dtypes[name]) for name, weight in weights.items()}

    def _check_names(self, weights: Mapping[str, Tensor]) -> None:
        check_weights(weights, self.mean)

    # -- the ELBO --------------------------------------------------------------------------------------------

    def elbo(
        self,
        objective: Objective | Iterable[Any],
        num_samples: int = 32,
        *,
        loss_fn: LossFunction | None = None,
        seed: int = 0,
    ) -> Tensor:
        """ess·E_q[−mean loss] − KL(q ‖ prior), as a 0-dimensional float64 tensor.

        ``objective`` is an :class:`vprop.Objective`, or a loader: an iterable of objectives, or of (x, y) batches
        with ``loss_fn(model(x), y)`` their mean loss. The loss should be a true negative log-likelihood (with its
        constants), and the objective should cover the training data: what it covers stands for all of them.

        The mean loss is that of all the data as one batch, however they are cut. For that a batch counts as much as
        its loss is divided by: torch's losses, also in a module, a partial or a function of your own, are
        Σᵢ wᵢℓᵢ / Σᵢ wᵢ over the batch's targets (the pixels of an image, the tokens of a text), wᵢ = 0 for an ignored
        one and the weight of its class where classes have weights, so a batch counts as its Σw. One in which nothing
        counts is left out. ess stands for as many such targets: ``num_data`` is the number of those that are not
        ignored, and class weights share it out among them (their mean over the data counts as 1). Of a loss
        that does not end in one call of torch's, nothing of this is seen: its batches count as their lengths, as they
        should for a mean over examples, and one that is NaN makes the ELBO NaN.
        """
        estimate = self.elbo_estimate(objective, num_samples, loss_fn=loss_fn, seed=seed)
        return torch.tensor(estimate.value, dtype=torch.float64, device="cpu")

    def elbo_estimate(
        self,
        objective: Objective | Iterable[Any],
        num_samples: int = 32,
        *,
        loss_fn: LossFunction | None = None,
        seed: int = 0,
    ) -> ElboEstimate:
        """The ELBO with its two parts and the standard error of the Monte Carlo average."""
        return elbo_estimate(self, objective, num_samples, loss_fn, seed)
