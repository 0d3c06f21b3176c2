"""What follows from a posterior beyond predictions: which example matters, which weight does, what if it were gone."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from torch import Tensor

from vprop.objective import LossFunction

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior
    from vprop.posterior.pruning import PrunedPosterior
    from vprop.posterior.sensitivity import Sensitivity

ExampleMethod = Literal["auto", "outputs", "gradient"]


class Decisions:
    """The methods, and what a structure provides for them: each is one operation on its Gaussian."""

    correlated: ClassVar[bool] = False
    """Whether Σ has the correlations of all weights, so that JΣJᵀ is what an example's outputs really vary by."""
    _instead: ClassVar[str] = "Of a structure of your own, write it."
    """What to do where a question has no answer."""

    # -- what a structure provides ---------------------------------------------------------------------------

    def _covariance_times(self, rows: Tensor) -> Tensor:
        """Each of ``rows`` (n, weights), in the order of ``mean``, times Σ. For :meth:`sensitivity`."""
        raise NotImplementedError

    def _curvature_of(self, rows: Tensor) -> Tensor:
        """Σᵢ rᵢrᵢᵀ over ``rows`` (n, weights), as far as the structure keeps it. For :meth:`forget`."""
        raise NotImplementedError

    def _without(self, curvature: Tensor, gradient: Tensor, ess: float) -> Posterior:
        """N(μ + P'⁻¹g, P'⁻¹) with P' = P − C, given C and g in float64. For :meth:`forget`."""
        raise NotImplementedError

    def _given_zeros(self, kept: Tensor) -> Posterior:
        """The posterior of the weights in ``kept`` (a flat mask), as one parameter ``"kept"``, given that the others
        are zero. For :meth:`prune`."""
        raise NotImplementedError

    def _require(self, method: str, question: str) -> None:
        """Refuse a question that the structure does not provide ``method`` for."""
        if getattr(type(self), method) is getattr(Decisions, method):
            raise TypeError(
                f"{question}(): a {type(self).__name__} cannot answer, because its class has no {method}(). "
                f"{self._instead.format(question=question)}"
            )

    # -- the questions ---------------------------------------------------------------------------------------

    def sensitivity(
        self,
        data: Any,
        *,
        loss_fn: LossFunction | None = None,
        at: Any = None,
        num_data: float | None = None,
        method: ExampleMethod = "auto",
        chunk_size: int | None = None,
    ) -> Sensitivity:
        """How weights and predictions would change without each example of ``data``, with no training again.

        See :mod:`vprop.posterior.sensitivity` for the mathematics.

        Args:
            data: examples that the posterior was trained on: a pair (x, y) of tensors or arrays, a loader of such
                pairs, or a :class:`vprop.Objective` (or several). They may be some of the training data.
            loss_fn: the mean loss that was trained with; by default what the posterior's ``likelihood`` says.
            at: inputs of the model, for the change of the outputs there: ``result.changes_at`` (examples, inputs,
                outputs).
            num_data: how many examples like these the posterior was trained on; by default ess times the
                temperature, which is the optimizer's ``num_data``. Pass it where that counted something else (tokens).
                With weights of classes in the loss an example counts by its weight over the mean weight of ``data``:
                of data with another mean than the N training examples, pass N times the latter over the former.
            method: ``"outputs"`` differentiates each output of an example; ``"gradient"`` its loss alone, to first
                order and without ``prediction_change``; ``"auto"`` is the first up to 64 outputs.
            chunk_size: examples that are differentiated at a time; ``None`` bounds memory by itself.

        >>> import torch, vprop
        >>> x, y = torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([[1.0], [1.0], [5.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = vprop.VON(model.parameters(), lr=1.0, num_data=3, betas=(0.0, 0.0))
        >>> loss = optimizer.step(vprop.Objective(model, vprop.GaussianLikelihood(learnable=False), x, y))
        >>> posterior = optimizer.posterior(model, likelihood="gaussian")
        >>> posterior.sensitivity((x, y)).top(1).tolist()
        [2]
        """
        from vprop.posterior.sensitivity import measure

        self._require("_covariance_times", "sensitivity")

        arguments = {"num_data": num_data, "method": method, "chunk_size": chunk_size}
        return measure(cast("Posterior", self), data, loss_fn, at, **arguments)

    def forget(
        self,
        data: Any,
        *,
        loss_fn: LossFunction | None = None,
        num_data: float | None = None,
        method: ExampleMethod = "auto",
        chunk_size: int | None = None,
    ) -> Any:
        """The posterior without the contribution of ``data``, which it was trained on; this one stays as it is.

        Exact for a linear model with Gaussian noise and a full covariance; elsewhere a step of Newton's from here,
        good for few examples. See :mod:`vprop.posterior.forgetting`. ``ess`` shrinks by the examples. The arguments
        are those of :meth:`sensitivity`.
        """
        from vprop.posterior.forgetting import forget

        self._require("_without", "forget")

        arguments = {"num_data": num_data, "method": method, "chunk_size": chunk_size}
        return forget(cast("Posterior", self), data, loss_fn, **arguments)

    def prune(
        self,
        fraction: float | None = None,
        *,
        threshold: float | None = None,
        scope: Literal["global", "parameter"] = "global",
        by: Literal["signal_to_noise", "magnitude"] = "signal_to_noise",
        parameters: Collection[str] | None = None,
    ) -> PrunedPosterior:
        """The posterior given that the weights with the smallest |μ|/σ are zero; this one stays as it is.

        Args:
            fraction: of the weights to set to zero, from 0 up to (not including) 1; or
            threshold: set to zero what has |μ|/σ (or |μ|) below that.
            scope: ``"global"`` compares the weights of all parameters, ``"parameter"`` takes the fraction of each.
            by: ``"signal_to_noise"`` is |μ|/σ; ``"magnitude"`` is |μ|.
            parameters: names of those that are pruned; by default all of at least two dimensions (no biases).
        """
        from vprop.posterior.pruning import PrunedPosterior, prune

        if not isinstance(self, PrunedPosterior):
            self._require("_given_zeros", "prune")

        return prune(cast("Posterior", self), fraction, threshold, scope=scope, by=by, parameters=parameters)
