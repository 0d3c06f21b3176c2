"""Hugging Face: the Trainer, Accelerate and peft's adapters.

Every optimizer of this library goes into ``Trainer(optimizers=(optimizer, None))``. :class:`PosteriorCallback` attaches
it, scores the posterior's predictions in every evaluation, and detaches at the end:

    trainer = Trainer(model, args, ..., optimizers=(optimizer, None), callbacks=[PosteriorCallback()])

A loop of your own with Accelerate needs nothing from here: ``optimizer.attach(model)`` before ``accelerator.prepare``,
or ``variational_optimizer(optimizer).attach(model)`` after it.
"""

from vprop.integrations._requirements import require

require("transformers", "4.46")  # before the imports that need it

from vprop.integrations.huggingface._callback import PosteriorCallback  # noqa: E402
from vprop.integrations.huggingface._optimizer import variational_optimizer  # noqa: E402
from vprop.integrations.huggingface._targets import num_targets  # noqa: E402

__all__ = ["PosteriorCallback", "num_targets", "variational_optimizer"]
