"""The callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vprop.checks import check_num_samples, check_seed
from vprop.integrations._prediction import sampled_outputs
from vprop.integrations._scores import Scores, scores_for
from vprop.integrations.lightning._framework import callback_class
from vprop.integrations.lightning._optimizers import from_checkpoint, summary, variational, variational_of
from vprop.likelihood import LikelihoodLike, snapshot_likelihood
from vprop.optim import VariationalOptimizer
from vprop.posterior import Posterior

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = callback_class()

Forward = Callable[[Any, Any], tuple[Tensor, Tensor]]


class PosteriorCallback(Callback):
    """Brings a variational optimizer and Lightning's Trainer together.

    ``Trainer(callbacks=[PosteriorCallback("categorical")])``, beside ``configure_optimizers`` that returns an optimizer
    of vprop's, does three things:

    - **Training.** Where Lightning computes gradients outside of the optimizer's ``step`` (``accumulate_grad_batches``
      above 1, ``precision="16-mixed"``, manual optimization), it keeps the step's sample in the weights from the start
      of a batch to the step, so that all gradients are taken there. Without the callback this is an error. It has room
      for one sample: with ``mc_samples`` above 1 use neither accumulation nor 16-mixed. Checkpoints and validation see
      the mean; callbacks that read the weights themselves in the middle of an accumulation see the sample.
    - **Validation and testing.** Beside the module's own step, which sees the mean, it averages the predictions of
      ``num_samples`` weights, those of ``posterior.predict(x, num_samples, seed)``, and logs the scores over the whole
      data set: ``val_posterior/log_loss`` and, for classifiers, ``val_posterior/accuracy`` and
      ``val_posterior/calibration_error``, for regression ``val_posterior/rmse`` and ``val_posterior/coverage`` (of the
      central 90 % interval); ``test_posterior/…`` likewise. They can be monitored (early stopping, best checkpoint).
      Outside of ``fit``, ``trainer.validate(model, ckpt_path=...)`` takes the posterior from the checkpoint.
    - **Logs.** Every ``every_n_steps`` steps: ``posterior/curvature`` (mean of h), ``posterior/kl`` (to the prior, in
      nats) and ``posterior/kl_per_example``, ``posterior/noise`` (root mean square of σ) and
      ``posterior/noise_to_weights`` (the same, relative to that of the weights).

    Args:
        likelihood: what the outputs of the model are, as in ``posterior.predict``; ``None`` for no posterior averaging.
        noise_variance: for ``likelihood="gaussian"``, the variance of an observation around its mean.
        num_samples: weights drawn per validation batch, each of which costs a forward pass.
        seed: which ones.
        forward: ``forward(module, batch) -> (outputs, targets)``, for batches that are not ``(x, y)`` or modules that
            are not called as ``module(x)``.
        every_n_steps: how often to log; ``None`` for never.
    """

    def __init__(
        self,
        likelihood: LikelihoodLike | None = None,
        *,
        noise_variance: float | Tensor | None = None,
        num_samples: int = 8,
        seed: int = 0,
        forward: Forward | None = None,
        every_n_steps: int | None = 50,
    ) -> None:
        snapshot_likelihood(likelihood, noise_variance)  # checks them
        check_num_samples(num_samples, default=8)
        if every_n_steps is not None and not (type(every_n_steps) is int and every_n_steps >= 1):
            raise ValueError(f"Invalid every_n_steps={every_n_steps!r}: must be an integer >= 1, or None for no logs.")
        self.likelihood = likelihood
        self.noise_variance = noise_variance
        self.num_samples = num_samples
        self.seed = check_seed(seed)
        self.every_n_steps = every_n_steps
        self._forward = inputs_and_targets if forward is None else forward
        self._stepping: list[Optimizer] = []
        self._logged_steps = 0
        self._guards: list[Any] = []
        self._checkpoint: list[dict[str, Any]] | None = None
        self._posterior: Posterior | None = None
        self._scores: dict[int, Scores] = {}
        """By the number of the loader."""

    # -- training --------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look for an optimizer of ours; and keep samples out of checkpoints."""
        optimizers = variational(trainer.optimizers)
        if not optimizers:
            found = [type(optimizer).__name__ for optimizer in trainer.optimizers]
            raise RuntimeError(
                f"PosteriorCallback needs an optimizer of vprop's, but configure_optimizers returned {found}. Return "
                "one (vprop.Vprop(self.parameters(), num_data=...), say), or leave the callback out."
            )
        self._logged_steps = trainer.global_step
        for optimizer in optimizers:
            self._guards.append(optimizer.guard_checkpoints(pl_module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the sample of the coming step into the weights if gradients are not computed inside of the step."""
        if trainer.fit_loop._skip_backward:  # a pass over the data for BatchNorm, by StochasticWeightAveraging
            for optimizer in variational(trainer.optimizers):
                optimizer.zero_grad()  # Lightning steps at its end, and old gradients must not count again
            return
        why = _gradients_outside_of_step(trainer, pl_module)
        if why is None:
            return
        for optimizer in variational(trainer.optimizers):
            if optimizer.mc_samples <= 1:
                optimizer.hold_sample()
            elif pl_module.automatic_optimization:  # else the module may pass a closure to step()
                raise RuntimeError(
                    f"{why} with mc_samples={optimizer.mc_samples}: Lightning then computes gradients once per batch, "
                    "outside of the optimizer's step, which leaves room for one sample. Use mc_samples=1, or larger "
                    "batches instead of accumulation and 'bf16-mixed' instead of '16-mixed'."
                )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Remember that this batch ends in a step."""
        self._stepping.append(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step, take out a sample that is still there; and log."""
        stepping, self._stepping = variational(self._stepping), []
        for optimizer in stepping:
            optimizer.discard_samples()  # there is one if GradScaler skipped the step
        if self.every_n_steps is None or not stepping:
            return
        if trainer.global_step // self.every_n_steps > self._logged_steps // self.every_n_steps:
            self._logged_steps = trainer.global_step
            self._log_summaries(trainer, pl_module)

    def _log_summaries(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """To callback_metrics and all loggers, also where Lightning's own ``log_every_n_steps`` is not met."""
        values: dict[str, float] = {}
        for number, optimizer in enumerate(variational_of(trainer.optimizers, pl_module)):
            prefix = "posterior" if number == 0 else f"posterior_{number}"
            values |= {f"{prefix}/{name}": value for name, value in summary(optimizer, pl_module).items()}
        trainer.callback_metrics.update({name: torch.tensor(value, device="cpu") for name, value in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the mean in the weights, also where training stops in the middle of an accumulation."""
        for optimizer in variational(trainer.optimizers):
            optimizer.discard_samples()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the module."""
        self._let_go(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the mean in the weights, and let go of the module."""
        self._let_go(trainer)

    def _let_go(self, trainer: Trainer) -> None:
        for optimizer in variational(trainer.optimizers):
            optimizer.discard_samples()
        for guard in self._guards:
            guard.remove()
        self._guards, self._stepping = [], []
        self._posterior, self._scores = None, {}

    # -- validation and testing ------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the checkpoint of an earlier run."""
        self._checkpoint = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Outside of fit Lightning restores weights alone, so remember what the checkpoint says of the posterior."""
        if trainer.state.fn != "fit":
            self._checkpoint = checkpoint.get("optimizer_states")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the mean back if a sample is in the weights, and take a snapshot of the posterior."""
        for optimizer in variational(trainer.optimizers):
            optimizer.release_sample()
        self._posterior, self._scores = None, {}
        optimizer_now = None if self.likelihood is None else self._optimizer(trainer, pl_module)
        if optimizer_now is not None:
            self._posterior = optimizer_now.posterior(
                _Forward(pl_module, self._forward), likelihood=self.likelihood, noise_variance=self.noise_variance
            )

    def _optimizer(self, trainer: Trainer, pl_module: LightningModule) -> VariationalOptimizer | None:
        """The optimizer that knows the posterior: the Trainer's or, outside of fit, the checkpoint's."""
        if trainer.state.fn != "fit" and trainer.ckpt_path:
            found = variational(from_checkpoint(pl_module, self._checkpoint)) if self._checkpoint else []
        else:
            found = variational_of(trainer.optimizers, pl_module)
        if len(found) > 1:
            raise RuntimeError(
                f"PosteriorCallback(likelihood={self.likelihood!r}) found {len(found)} optimizers of vprop's, and can "
                "average predictions over the posterior of one. Make them one optimizer with parameter groups, or pass "
                "likelihood=None."
            )
        if not found and trainer.state.fn != "fit":
            warnings.warn(
                "PosteriorCallback knows no posterior of this module, so there are no scores of averaged predictions. "
                "Pass a checkpoint that was saved in training, trainer.validate(model, ckpt_path=...), or use the "
                "Trainer that trained the module.",
                RuntimeWarning,
                stacklevel=2,
            )
        return found[0] if found else None

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Average the predictions over samples of the weights; the module's own weights are not touched."""
        if self._posterior is None or self._posterior.likelihood is None:
            return
        likelihood, noise = self._posterior.likelihood, self._posterior.noise_variance
        scores = self._scores.setdefault(dataloader_idx, scores_for(likelihood, noise))
        with trainer.precision_plugin.val_step_context():
            draws = sampled_outputs(self._posterior.sampled_models(self.num_samples, self.seed), (batch,))
            scores.add(_checked(outputs, targets, likelihood) for outputs, targets in draws)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores."""
        self._log_scores(trainer, pl_module, "val", len(trainer.num_val_batches))

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As for validation."""
        self.on_validation_start(trainer, pl_module)

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """As for validation."""
        self.on_validation_batch_end(*args, **kwargs)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As for validation."""
        self._log_scores(trainer, pl_module, "test", len(trainer.num_test_batches))

    def _log_scores(self, trainer: Trainer, pl_module: LightningModule, stage: str, num_loaders: int) -> None:
        if self._posterior is None:
            return
        for loader, scores in sorted(self._scores.items()):
            suffix = f"/dataloader_idx_{loader}" if num_loaders > 1 else ""  # as Lightning names them
            values = scores.result(trainer.world_size)
            for name, value in values.items():  # the same in all processes; sync_dist only keeps Lightning from warning
                pl_module.log(f"{stage}_posterior/{name}{suffix}", value, sync_dist=True, add_dataloader_idx=False)
        self._posterior, self._scores = None, {}


class _Forward(nn.Module):
    """A module whose forward takes a batch and returns outputs and targets."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, batch: Any) -> tuple[Any, Any]:
        """What the function of the user's returns."""
        return self._forward(self.module, batch)


def _checked(outputs: Any, targets: Any, likelihood: str) -> tuple[Tensor, Tensor]:
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise TypeError(
            f"PosteriorCallback got outputs of type {type(outputs).__name__} and targets of type "
            f"{type(targets).__name__}, must be tensors. Return such a pair from PosteriorCallback(forward=...)."
        )
    if likelihood == "categorical" and outputs.shape[:-1] != targets.shape:
        raise ValueError(
            f"Invalid targets of shape {tuple(targets.shape)}: must be {tuple(outputs.shape[:-1])}, class numbers for "
            f"outputs of shape {tuple(outputs.shape)} whose last dimension are the classes. Return such a pair from "
            "PosteriorCallback(forward=...)."
        )
    return outputs, targets


def inputs_and_targets(module: nn.Module, batch: Any) -> tuple[Any, Any]:
    """``module(x)`` and ``y`` of a batch ``(x, y)``."""
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise TypeError(
            f"PosteriorCallback got a batch of type {type(batch).__name__}, and understands pairs (x, y) only. Pass "
            "forward=..., a function forward(module, batch) that returns (outputs, targets)."
        )
    return module(batch[0]), batch[1]


def _gradients_outside_of_step(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Why Lightning computes gradients outside of the closure that it gives to ``step``, if it does."""
    if not pl_module.automatic_optimization:
        return "Manual optimization"
    if trainer.accumulate_grad_batches > 1:
        return f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "precision='16-mixed'"
    return None
