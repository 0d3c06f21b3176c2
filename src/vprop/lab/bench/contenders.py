"""Who takes part: this library's methods in every loop, torch's optimizers, and peers that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import vprop
from vprop.lab.bench import peers
from vprop.lab.bench.clock import Call
from vprop.lab.bench.errors import EXPECTED, BenchError, Unavailable, first_line, matching
from vprop.lab.bench.limits import TORCH, loop_bytes
from vprop.lab.bench.tensors import Holder, Tensors

TINY = 1e-6
"""A step size: nothing that is timed depends on it, and the weights stay as they are."""
REFERENCE = "RMSprop default"
"""What all times are divided by."""

Stages = dict[str, Call]
"""Calls that together are one step of training, without forward and backward."""


@dataclass(frozen=True)
class Contender:
    """One way to make a step."""

    name: str
    build: Callable[[Tensors], Stages]
    bytes_per_param: dict[str, int] = field(default_factory=dict)
    """The least that each stage must move; see ``limits``."""
    own_copies: int = 0
    """How many of the weights and gradients it has for itself, beside those it was given: not extra memory."""

    def ready(self, tensors: Tensors) -> Stages:
        """At work on these tensors; one call was made to see that it can."""
        try:
            stages = self.build(tensors)
            for stage in stages.values():
                stage()
        except EXPECTED as error:
            raise Unavailable(first_line(error)) from error
        return stages


# -- loops -------------------------------------------------------------------------------------------------------------


def closure_loop(optimizer: Any, model: nn.Module, backward: Call) -> Call:
    """``step(closure)``."""
    return lambda: optimizer.step(backward)


def context_loop(optimizer: Any, model: nn.Module, backward: Call) -> Call:
    """``with sampled_params():``, once for each sample."""

    def call() -> None:
        for sample in range(optimizer.mc_samples):
            with optimizer.sampled_params(sample):
                backward()
        optimizer.step()

    return call


def attach_loop(optimizer: Any, model: nn.Module, backward: Call) -> Call:
    """``attach``, and then a plain loop."""
    optimizer.attach(model)
    return plain_loop(optimizer, model, backward)


def plain_loop(optimizer: Any, model: nn.Module, backward: Call) -> Call:
    """That of an optimizer which does not sample."""

    def call() -> None:
        backward()
        optimizer.step()

    return call


def ivon_loop(optimizer: Any, model: nn.Module, backward: Call) -> Call:
    """That of ivon-opt."""

    def call() -> None:
        with optimizer.sampled_params(train=True):
            backward()
        optimizer.step()

    return call


LOOPS = {"closure": closure_loop, "context": context_loop, "attach": attach_loop}


# -- this library ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """An optimizer of this library with its arguments."""

    name: str
    build: Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    momentum: bool = False
    pair: bool = False


METHODS = (
    Variant("Vprop", vprop.Vprop),
    Variant("Vprop centred", vprop.Vprop, {"mc_samples": 2, "antithetic": True, "centered": True}, pair=True),
    Variant("IVON", vprop.IVON, momentum=True),
    Variant("Vario", vprop.Vario, {"batch_size": 32}, momentum=True),
    Variant("Vadam", vprop.Vadam, {"hess_init": 1.0}, momentum=True),
)


def ours(method: Variant, path: str, loop: str, **more: Any) -> Contender:
    """A method in a loop, in a path: "fused" (the kernels) or "foreach" (torch's own operations)."""

    def build(tensors: Tensors) -> Stages:
        params = tensors.parameters()
        model = Holder(params)
        arguments = {path: True, "lr": TINY, "num_data": 1e5} | method.arguments | more
        optimizer = method.build(params, **arguments)

        def backward() -> object:
            loss = model()
            if method.pair:  # between two samples the optimizer takes the gradients away
                for param, grad in zip(params, tensors.grads, strict=True):
                    param.grad = grad
            return loss

        if loop == "in parts":
            return _in_parts(optimizer)
        call = LOOPS[loop](optimizer, model, backward)
        return {loop: _captured(call) if "capturable" in more else call}

    stages = ("sample", "restore", "step") if loop == "in parts" else (loop,)
    moved = {stage: loop_bytes(stage, momentum=method.momentum, pair=method.pair) for stage in stages}
    shown = f"{path} CUDA graph" if "capturable" in more else path
    return Contender(f"{method.name} {shown} {loop}", build, moved)


def _in_parts(optimizer: Any) -> Stages:
    """Entering a sample, leaving it, and the step, each by itself."""
    blocks: list[Any] = []

    def sample() -> None:
        blocks.append(optimizer.sampled_params())
        blocks[-1].__enter__()

    return {"sample": sample, "restore": lambda: blocks.pop().__exit__(None, None, None), "step": optimizer.step}


def _captured(call: Call) -> Call:
    """The call as a CUDA graph, to be replayed."""
    if not torch.cuda.is_available():
        raise Unavailable("a CUDA graph needs a CUDA device")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _library() -> Iterator[Contender]:
    for method in METHODS:
        for loop in LOOPS:
            if not (method.pair and loop == "attach"):  # several samples need a closure or a context
                yield ours(method, "fused", loop)
        yield ours(method, "foreach", "closure")
    yield ours(METHODS[0], "fused", "in parts")


GRAPH = ours(METHODS[0], "fused", "closure", capturable=True)
"""The last to be measured: a capture that fails can leave the device in disorder."""


# -- others ------------------------------------------------------------------------------------------------------------


def _torch(name: str, optimizer: Callable[..., Any], **arguments: Any) -> Contender:
    def build(tensors: Tensors) -> Stages:
        return {"step": optimizer(tensors.parameters(), lr=TINY, **arguments).step}

    return Contender(name, build, {"step": TORCH[name.split()[0]]})


def _ivon_opt(tensors: Tensors) -> Stages:
    return {"step": ivon_loop(peers.ivon(tensors.parameters()), nn.Module(), lambda: None)}


SMALL = (
    _torch(REFERENCE, torch.optim.RMSprop),
    _torch("RMSprop foreach", torch.optim.RMSprop, foreach=True),
    _torch("AdamW fused", torch.optim.AdamW, fused=True),
    _torch("SGD default", torch.optim.SGD),
    *_library(),
    # It moves the weights into a tensor of its own, and what IVON with a context must move.
    Contender("ivon-opt", _ivon_opt, {"step": loop_bytes("context", momentum=True)}, own_copies=1),
)
TIMED = (*SMALL, GRAPH)
MEASURED = (*SMALL, Contender("Pyro BBVI", lambda tensors: {"step": peers.pyro_step(tensors)}, own_copies=2))
"""Whose memory is measured."""


def choose(words: list[str], among: tuple[Contender, ...] = TIMED) -> list[Contender]:
    """Those whose name holds one of the words; all if there are none."""
    names = matching(words, [contender.name for contender in among])
    return [contender for contender in among if contender.name in names]


def by_name(name: str) -> Contender:
    """The one of that name."""
    found = {contender.name: contender for contender in (*TIMED, *MEASURED)}
    if name not in found:
        raise BenchError(f"Invalid contender {name!r}. There are: {', '.join(found)}.")
    return found[name]
