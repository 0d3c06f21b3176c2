"""The callback that samples in a Trainer, and that scores the posterior whenever the Trainer evaluates."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from vprop.checks import check_num_samples, check_seed
from vprop.integrations.huggingface._loss_scale import LossScaleCheck
from vprop.integrations.huggingface._optimizer import check_for_trainer, variational_optimizer
from vprop.integrations.huggingface._scores import LOWER_IS_BETTER, score
from vprop.likelihood import LikelihoodLike, snapshot_likelihood
from vprop.optim import VariationalOptimizer
from vprop.parallel.sharding import sums


class PosteriorCallback(TrainerCallback):
    """Variational training in a Hugging Face ``Trainer``, and evaluation with samples.

        trainer = Trainer(..., optimizers=(optimizer, None), callbacks=[PosteriorCallback(num_samples=8)])

    - **Training.** The optimizer is attached to the model when training begins (unless it already is) and detached when
      it ends: the weights are the mean then.
    - **Evaluation.** What the Trainer measures is the model at the mean. Beside it stand scores of the prediction
      averaged over ``num_samples`` draws of the weights, as ``eval_posterior_…`` (``test_posterior_…`` after
      ``trainer.predict``). Classifiers: ``loss`` (the log-loss of the averaged prediction), ``accuracy``,
      ``calibration_error``, and ``perplexity`` where tokens have labels. Regression: ``loss`` (the negative
      log-density) and ``mse``. They are in the log and in the metrics, so that
      ``metric_for_best_model="eval_posterior_loss"`` and early stopping can use them. Weights are bit for bit as
      before, and so is the rest of the training run.
    - **Log.** Training logs get ``posterior_kl``, ``posterior_sigma`` (root mean square of σ) and
      ``posterior_curvature`` (mean of h).
    - **Best model.** With ``load_best_model_at_end`` the optimizer's state is loaded with the weights: the
      posterior is the best checkpoint's, not its mean with the variances of the last step.

    Loggers that the Trainer lists before this callback (TensorBoard, Weights & Biases) see the added values if it is
    moved to the front: ``trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(PosteriorCallback))``.

    Args:
        num_samples: draws of the weights per evaluation, each as costly as the Trainer's own evaluation; 0 for none.
        seed: of the draws, which are the same in every evaluation: what changes is the posterior.
        likelihood: what the model's outputs are; by default what its ``config.problem_type`` or its labels say.
        noise_variance: for regression; by default ½, which belongs to the mean squared error.
    """

    def __init__(
        self,
        num_samples: int = 8,
        *,
        seed: int = 0,
        likelihood: LikelihoodLike | None = None,
        noise_variance: float | Tensor | None = None,
    ) -> None:
        snapshot_likelihood(likelihood, noise_variance)  # refuses what is none
        self.num_samples = check_num_samples(num_samples, least=0, default=8)
        self.seed = check_seed(seed)
        self.likelihood = likelihood
        self.noise_variance = noise_variance
        self._attachment: Any = None
        self._loss_scale_check: LossScaleCheck | None = None
        self._evaluating = False
        self._scores: dict[str, float] = {}

    # -- training --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the optimizer against the model, and attach it."""
        model, optimizer = kwargs["model"], variational_optimizer(kwargs["optimizer"])
        check_for_trainer(optimizer, model)
        _check_direction(args)
        self._evaluating = False
        if not optimizer.is_attached(model):
            self._attachment = optimizer.attach(model)
        self._loss_scale_check = LossScaleCheck(optimizer, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the optimizer's state follow the best weights if they were loaded, and detach."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _load_state_of(state.best_model_checkpoint, variational_optimizer(kwargs["optimizer"]))
        if self._attachment is not None:
            self._attachment.remove()
            self._attachment = None
        if self._loss_scale_check is not None:
            self._loss_scale_check.remove()
            self._loss_scale_check = None

    # -- evaluation and logs ---------------------------------------------------------------------------------

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that an evaluation is going on: the next log is its result."""
        self._evaluating = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add scores to the log of an evaluation, and a description of the posterior to one of training.

        The log of an evaluation is also what the evaluation returns. Its copy in the history was made before.
        """
        if logs is None or kwargs.get("optimizer") is None:
            return
        if self._evaluating and _prefix_of(logs) is not None:
            added = self._score(logs, args, **kwargs)
        elif "loss" in logs:
            added = _describe(variational_optimizer(kwargs["optimizer"]), kwargs["model"])
        else:
            return
        logs.update(added)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(added)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See to it that the scores are in the metrics, also where a Trainer has logged a copy of them or nothing."""
        if self._evaluating and kwargs.get("optimizer") is not None:
            self._score(kwargs["metrics"], args, **kwargs)
        kwargs["metrics"].update(self._scores)
        self._scores = {}

    def on_predict(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        """Add scores to the metrics of a prediction, if its data have labels."""
        self.on_evaluate(args, state, control, metrics=metrics, **kwargs)

    def _score(
        self,
        logs: dict[str, Any],
        args: Any,
        *,
        model: nn.Module,
        optimizer: Any,
        eval_dataloader: Any,
        **rest: Any,
    ) -> dict[str, float]:
        """Score the data that were just evaluated, once."""
        self._evaluating, self._scores, prefix = False, {}, _prefix_of(logs)
        if self.num_samples and prefix is not None:
            scores = score(
                variational_optimizer(optimizer).posterior(model),
                eval_dataloader,
                num_samples=self.num_samples,
                seed=self.seed,
                label_name=(args.label_names or ["labels"])[0],
                likelihood=self.likelihood,
                noise_variance=self.noise_variance,
            )
            self._scores = {f"{prefix}_posterior_{name}": value for name, value in scores.items()}
        return self._scores


def _prefix_of(logs: dict[str, Any]) -> str | None:
    """``eval`` in the metrics of an evaluation, or what else their names begin with; ``None`` in those of training."""
    ending = "_samples_per_second"
    prefixes = [name.removesuffix(ending) for name in logs if name.endswith(ending)]
    return prefixes[0] if prefixes and prefixes[0] != "train" else None


@torch.no_grad()
def _describe(optimizer: VariationalOptimizer, model: nn.Module) -> dict[str, float]:
    """KL, σ and h in one number each; the KL is left out where the prior is flat."""
    posterior = optimizer.posterior(model)
    variance = sum(float(v.sum(dtype=torch.float64)) for v in posterior.variance.values()) / posterior.num_parameters
    described = {"posterior_sigma": math.sqrt(variance)}
    if all(bool((precision > 0).all()) for precision in posterior.prior.precision.values()):
        described["posterior_kl"] = float(posterior.kl())
    curvatures = [m.hess for m in optimizer.marginals() if m.steps > 0 and m.hess is not None]
    if curvatures:
        described["posterior_curvature"] = sum(sums(curvatures)) / sum(hess.numel() for hess in curvatures)
    return described


def _check_direction(args: Any) -> None:
    """Refuse to keep the worst model: the Trainer guesses from the name whether more is better."""
    name = args.metric_for_best_model or ""
    _, found, score_name = name.rpartition("posterior_")
    lower = LOWER_IS_BETTER.get(score_name)
    if found and lower is not None and args.greater_is_better is lower:
        raise ValueError(
            f"Invalid greater_is_better={args.greater_is_better} for metric_for_best_model={name!r}: must be "
            f"{not lower}, or the worst model counts as the best. Set it in TrainingArguments, whose default is "
            "True for all names that do not end in 'loss'."
        )


def _load_state_of(checkpoint: str, optimizer: VariationalOptimizer) -> None:
    path = Path(checkpoint) / "optimizer.pt"
    if path.is_file():
        optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return
    warnings.warn(
        f"{path} does not exist, so the posterior has the best model's mean with the variances of the last step. Train "
        "with save_only_model=False for the best model's variances.",
        stacklevel=2,
    )
