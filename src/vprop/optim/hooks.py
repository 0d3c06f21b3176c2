"""The hooks that let an attached model see samples, and that keep samples out of its checkpoints."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vprop.wrappers import unwrapped

if TYPE_CHECKING:
    from vprop.optim.loops import TrainingLoops


class _Hook:
    """A hook that asks an optimizer, for one model only.

    It holds weak references, and copies of it do nothing: a deep copy of an attached model (an average of the
    weights, say) must not write samples into the original's weights, and a pickled model must not drag the
    optimizer along.
    """

    def __init__(self, optimizer: TrainingLoops | None = None, model: nn.Module | None = None) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer) if optimizer is not None else _nothing
        self._model: Callable[[], Any] = weakref.ref(model) if model is not None else _nothing

    def _optimizer_of(self, module: nn.Module) -> TrainingLoops | None:
        return self._optimizer() if module is self._model() else None

    @property
    def __name__(self) -> str:  # torch.jit.script asks hooks for it, and has no other place for a message
        raise AttributeError(
            "torch.jit.script cannot compile a model that is attached to an optimizer of vprop. Detach it first, "
            "with what optimizer.attach(model) returned: handle.remove()."
        )

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return type(self), ()


class _BeforeForward(_Hook):
    attachment: Attachment | None = None

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Training mode: put the sample in. Evaluation mode: take it out."""
        optimizer = self._optimizer_of(module)
        if optimizer is not None:
            optimizer._before_forward(module.training)


class _BeforeInnerForward(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Evaluation mode: take the sample out. In training mode it is the wrapper that samples."""
        if torch.compiler.is_compiling():  # called through torch.compile, which must not meet more than this
            return
        optimizer = self._optimizer_of(module)
        if optimizer is not None and not module.training:
            optimizer._before_forward(False)


class _AfterForward(_Hook):
    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        """Evaluation mode: the sample comes back. Training mode: if the forward raised there will be no backward."""
        optimizer = self._optimizer_of(module)
        if optimizer is None or is_captured():  # then nothing was done before it
            return
        if not module.training:
            optimizer._after_evaluation()
        elif result is None and sys.exc_info()[0] is not None and not _inside_backward():
            optimizer._leave_attached_sample()


class _AfterInnerForward(_Hook):
    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        """Evaluation mode: the sample comes back."""
        if torch.compiler.is_compiling():
            return
        optimizer = self._optimizer_of(module)
        if optimizer is not None and not module.training:
            optimizer._after_evaluation()


class _BeforeStateDict(_Hook):
    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """What is saved is the mean."""
        optimizer = self._optimizer_of(module)
        if optimizer is not None:
            optimizer._sampling.begin_look()


class _AfterStateDict(_Hook):
    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Copies of what will not be in the weights any longer, and the sample comes back."""
        optimizer = self._optimizer_of(module)
        if optimizer is None:
            return
        aside = optimizer._sampling.aside
        if aside is not None:
            for name, p in module._parameters.items():
                if id(p) in aside.out and prefix + name in state_dict:
                    saved = state_dict[prefix + name]
                    state_dict[prefix + name] = saved.detach().clone().requires_grad_(saved.requires_grad)
        optimizer._sampling.end_look()


class _BeforeLoadStateDict(_Hook):
    def __call__(self, module: nn.Module, *rest: Any) -> None:
        """What is loaded must not have noise subtracted from it later."""
        optimizer = self._optimizer_of(module)
        if optimizer is not None:
            optimizer._leave_attached_sample()


def is_captured() -> bool:
    """Whether torch.jit.trace or torch.export is writing down what the model does."""
    return torch._C._is_tracing() or torch.compiler.is_compiling()


def _inside_backward() -> bool:
    """Whether autograd is at work: gradient checkpointing repeats forwards there, and stops them half-way."""
    return torch._C._current_graph_task_id() != -1


class CheckpointGuard:
    """What ``guard_checkpoints`` returns: until ``remove()``, no sample gets into or under the model's checkpoints."""

    def __init__(self, optimizer: TrainingLoops, model: nn.Module) -> None:
        self._handles: list[RemovableHandle] = []
        # Modules without parameters have hooks, too: then one look at the mean is enough for all modules inside them.
        for module in model.modules():
            self._handles += [
                module.register_state_dict_pre_hook(_BeforeStateDict(optimizer, module)),
                module.register_state_dict_post_hook(_AfterStateDict(optimizer, module)),
                module.register_load_state_dict_pre_hook(_BeforeLoadStateDict(optimizer, module)),
            ]

    def remove(self) -> None:
        """Guard no more."""
        for handle in self._handles:
            handle.remove()


def is_attached(optimizer: TrainingLoops, model: nn.Module) -> bool:
    """Whether forwards of the model, or of a part of it, see the optimizer's samples."""
    return any(
        isinstance(hook, _BeforeForward) and hook._optimizer_of(module) is optimizer
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


class Attachment:
    """What ``attach`` returns: ``remove()`` takes a sample out of the weights and detaches."""

    def __init__(self, optimizer: TrainingLoops, model: nn.Module) -> None:
        self._optimizer = weakref.ref(optimizer)
        for hook in [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]:
            if isinstance(hook, _BeforeForward) and hook.attachment is not None and hook.attachment._shares(optimizer):
                hook.attachment.remove()  # an earlier optimizer's, or our own: only one can sample
        before = _BeforeForward(optimizer, model)
        before.attachment = self
        # First of all hooks: that of FSDP copies the weights.
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(before, prepend=True)]
        self._handles.append(model.register_forward_hook(_AfterForward(optimizer, model), always_call=True))
        inside = unwrapped(model)
        if inside is not model:  # what a rank evaluates by itself, ddp.module(x), or somebody without torch.compile
            hook = _BeforeInnerForward(optimizer, inside)
            self._handles.append(inside.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(inside.register_forward_hook(_AfterInnerForward(optimizer, inside), always_call=True))
        self._guard = CheckpointGuard(optimizer, model)

    def _shares(self, other: TrainingLoops) -> bool:
        """Whether the optimizer has parameters in common with another, or is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            return True
        ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in ours for group in other.param_groups for p in group["params"])

    def remove(self) -> None:
        """Detach; the weights are the mean afterwards."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._leave_attached_sample()
            optimizer._loop.attached = False
        self._guard.remove()
        for handle in self._handles:
            handle.remove()


def _nothing() -> None:
    return None
