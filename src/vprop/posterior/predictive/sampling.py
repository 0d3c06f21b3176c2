"""Outputs under weights drawn from the posterior: in a loop, or many draws at once with vmap.

With vmap the multiplications of all draws are one batched multiplication. That saves the overhead of many small calls,
and nothing else: where the model is large enough to keep the machine busy, a loop is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vprop.posterior.predictive.batch_norm import DrawStatistics
from vprop.posterior.predictive.dropout import DrawMasks
from vprop.posterior.predictive.functions import ModelFunction, Prepared, function_of, told_with_input
from vprop.posterior.predictive.inputs import has_rows, leaves

if TYPE_CHECKING:
    from vprop.posterior._base import Posterior

_DRAWN_AT_ONCE = 1 << 20
"""Weights, of all draws that are made together."""
_KEPT_BYTES = 1 << 28
"""Draws are kept from batch to batch if they take no more; otherwise each batch makes them again."""
_LARGEST_VMAP = {"cpu": 1 << 19}
"""Examples times weights up to which vmap was faster than a loop where it was measured (`vprop bench predict`)."""

_BATCHED_WELL = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.AlphaDropout,
    nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.SiLU, nn.GELU, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Hardtanh, nn.ReLU6,
)  # fmt: skip
"""Layers that vmap multiplies well; convolutions with a filter for each draw are faster for some sizes only."""


class SampledOutputs:
    """For each batch its outputs under the same draws of the weights, the draws first."""

    def __init__(
        self,
        posterior: Posterior,
        samples: range,
        seed: int,
        *,
        vmap: bool | None,
        several: bool,
        statistics: DrawStatistics | None = None,
        masks: DrawMasks | None = None,
    ) -> None:
        self._posterior, self._samples, self._seed = posterior, samples, seed
        self._function: ModelFunction = function_of(posterior)
        self._statistics, self._masks = statistics, masks
        self._vmap = vmap if statistics is None and masks is None else False
        elements = posterior.num_parameters
        size = sum(weight.numel() * weight.element_size() for weight in posterior.mean.values())
        self._at_once = max(1, min(len(samples), _DRAWN_AT_ONCE // max(1, elements)))
        self._several = several
        self._keeps = several and size * len(samples) <= _KEPT_BYTES
        self._kept: list[dict[str, Tensor]] = []

    def __call__(self, x: Any, report: Callable[[int], None]) -> Tensor:
        """The outputs for a batch; ``report`` is told of forwards that were made."""
        with told_with_input(x, self._posterior.model):
            prepared = self._function.prepare(x)
            outputs = []
            first = self._samples.start
            for draws in self._draws():
                outputs += self._under(draws, prepared, x, first)
                count = len(next(iter(draws.values())))
                first += count
                report(count)
        return torch.cat(outputs)

    def _draws(self) -> Iterator[dict[str, Tensor]]:
        """All draws, as many in a stack as are made together."""
        if self._kept:
            yield from self._kept
            return
        kept = []
        for start in self._samples[:: self._at_once]:
            stop = min(start + self._at_once, self._samples.stop)
            draws = self._posterior._stacked_draws(self._seed, start, stop)
            if self._keeps:
                kept.append(draws)
            yield draws
        self._kept = kept

    def _under(self, draws: dict[str, Tensor], prepared: Prepared, x: Any, first: int) -> list[Tensor]:
        """The outputs under a stack of draws, whose numbers begin with ``first``."""
        if self._wants_vmap(x):
            try:
                return [torch.func.vmap(lambda weights: self._function(weights, prepared))(draws)]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if self._vmap:
                    raise RuntimeError(
                        f"predict(vmap=True): torch.func.vmap cannot run this model: {error} Leave vmap out, and the "
                        "draws are run one by one."
                    ) from error
                self._vmap = False  # the loop says what is wrong, if it is not vmap
                prepared = self._function.prepare(x)
        outputs = []
        for i in range(len(next(iter(draws.values())))):
            weights = {name: stack[i] for name, stack in draws.items()}
            if self._statistics is not None:
                weights |= self._statistics.under(first + i, weights)
            masks = None if self._masks is None else self._masks.of(first + i)
            outputs.append(self._function(weights, prepared, masks).unsqueeze(0))
        return outputs

    def _wants_vmap(self, x: Any) -> bool:
        """As was asked; or for several batches where it was measured to be faster: small models on a CPU.

        For a single batch the time goes into drawing the weights, and a loop gives the outputs of ``sampled_models`` to
        the last digit.
        """
        if self._vmap is not None:
            return self._vmap
        device = next(iter(self._posterior.mean.values())).device.type
        rows = max((len(value) for value in leaves(x) if has_rows(value)), default=1)
        small = rows * self._posterior.num_parameters <= _LARGEST_VMAP.get(device, 0)
        worth = self._several and self._at_once > 1 and small and not self._function.anew
        return worth and _is_batched_well(self._posterior.model)


def _is_batched_well(model: nn.Module) -> bool:
    """Whether the layers are known to be, and no hook would get to see the batched tensors."""
    modules = list(model.modules())
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    return not hooked and all(
        type(module) in _BATCHED_WELL for module in modules if not module._modules and type(module) is not nn.Sequential
    )
