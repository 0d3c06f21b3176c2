"""Who takes part: this library's methods in every path and loop, torch's optimizers, and peers that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

import vprop
from vprop.lab.bench import peers
from vprop.lab.bench.clock import Call
from vprop.lab.bench.errors import BenchError, Unavailable, first_line, matching
from vprop.lab.bench.limits import TORCH, loop_bytes
from vprop.lab.bench.tensors import Holder, Tensors, give

TINY = 1e-6
"""A step size: nothing that is timed depends on it, and the weights stay as they are."""
EXPECTED = (ValueError, TypeError, RuntimeError, NotImplementedError, ImportError)
"""What a path that does not exist here raises. Out of memory is among them."""


@dataclass
class Ready:
    """A contender at work: calls which together are one step of training, without forward and backward."""

    stages: dict[str, Call]
    plain: Call | None = None
    """What is in the stages but not counted: for peers that cannot do without a forward and backward."""
    kept: Any = None
    """What must live as long as the calls do."""


@dataclass(frozen=True)
class Contender:
    """One way to make a step."""

    method: str
    path: str
    loop: str
    build: Callable[[Tensors], Ready]
    family: str
    bytes_per_param: dict[str, int] = field(default_factory=dict)
    """The least that each stage must move; see ``limits``."""
    note: str = ""
    own_copies: int = 0
    """How many of the weights and gradients it has for itself, beside those it was given: not extra memory."""

    @property
    def name(self) -> str:
        """As shown."""
        return " ".join(word for word in (self.method, self.path, self.loop) if word)

    @property
    def captured(self) -> bool:
        """Whether it is a CUDA graph."""
        return self.path.endswith("CUDA graph")

    def ready(self, tensors: Tensors) -> Ready:
        """At work on these tensors; one call was made to see that it can."""
        try:
            ready = self.build(tensors)
            for stage in ready.stages.values():
                stage()
        except EXPECTED as error:
            raise Unavailable(first_line(error)) from error
        return ready


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
PATHS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "default": {},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
LOOPS = ("closure", "context", "attach")


def _ours(method: Variant, path: str, loop: str, wrap: Callable[[Call], Call] | None = None, **more: Any) -> Contender:
    """A method in a path and a loop; ``wrap`` compiles or captures what is called."""

    def build(tensors: Tensors) -> Ready:
        params = tensors.parameters()
        optimizer = method.build(
            params, lr=TINY, num_data=1e5, **method.arguments, **PATHS.get(path, PATHS["default"]), **more
        )
        ready = _LOOPS[loop](optimizer, params, tensors)
        if wrap is not None:
            (stage,) = ready.stages
            ready.stages[stage] = wrap(ready.stages[stage])
        return ready

    stages = ("sample", "restore", "step") if loop == "in parts" else (loop,)
    moved = {stage: loop_bytes(stage, momentum=method.momentum, pair=method.pair) for stage in stages}
    shown = f"{path} CUDA graph" if wrap is _captured else "compiled" if wrap is _compiled else path
    return Contender(method.name, shown, loop, build, "vprop", moved)


def _closure(optimizer: Any, params: list[Any], tensors: Tensors) -> Ready:
    """Gradients are there already: the closure does nothing. Between two samples the optimizer takes them away."""
    several = optimizer.mc_samples > 1

    def closure() -> float:
        if several:
            give(params, tensors.grads)
        return 0.0

    return Ready({"closure": lambda: optimizer.step(closure)}, kept=params)


def _context(optimizer: Any, params: list[Any], tensors: Tensors) -> Ready:
    samples = optimizer.mc_samples

    def call() -> None:
        for sample in range(samples):
            with optimizer.sampled_params(sample):
                if samples > 1:
                    give(params, tensors.grads)
        optimizer.step()

    return Ready({"context": call}, kept=params)


def _attach(optimizer: Any, params: list[Any], tensors: Tensors) -> Ready:
    model = Holder(params)
    handle = optimizer.attach(model)

    def call() -> None:
        model()
        optimizer.step()

    return Ready({"attach": call}, kept=(model, handle))


def _in_parts(optimizer: Any, params: list[Any], tensors: Tensors) -> Ready:
    """Entering a sample, leaving it, and the step, each by itself."""
    blocks: list[Any] = []

    def sample() -> None:
        blocks.append(optimizer.sampled_params())
        blocks[-1].__enter__()

    def restore() -> None:
        blocks.pop().__exit__(None, None, None)

    return Ready({"sample": sample, "restore": restore, "step": lambda: optimizer.step()}, kept=params)


_LOOPS: dict[str, Callable[[Any, list[Any], Tensors], Ready]] = {
    "closure": _closure,
    "context": _context,
    "attach": _attach,
    "in parts": _in_parts,
}


def _compiled(call: Call) -> Call:
    torch._dynamo.reset()
    return torch.compile(call)


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
        for path in PATHS:
            for loop in LOOPS:
                if not (method.pair and loop == "attach"):  # several samples need a closure or a context
                    yield _ours(method, path, loop)
            if path == "fused" and not method.pair:
                yield _ours(method, path, "in parts")
        for path in ("fused", "foreach"):
            yield _ours(method, path, "closure", _captured, capturable=True)
        yield _ours(method, "default", "closure", _compiled)


# -- torch -------------------------------------------------------------------------------------------------------------


def _of_torch(optimizer: type[Optimizer], path: str, arguments: dict[str, Any], capture: bool = False) -> Contender:
    def build(tensors: Tensors) -> Ready:
        made: Any = optimizer
        step: Call = made(tensors.parameters(), lr=TINY, **arguments).step
        return Ready({"step": _captured(step) if capture else step})

    name = optimizer.__name__
    return Contender(name, path, "", build, "torch", {"step": TORCH[name]})


def _torch() -> Iterator[Contender]:
    for optimizer in (torch.optim.RMSprop, torch.optim.AdamW, torch.optim.SGD):
        yield _of_torch(optimizer, "default", {})
        yield _of_torch(optimizer, "for-loop", {"foreach": False})
        yield _of_torch(optimizer, "foreach", {"foreach": True})
        if optimizer is not torch.optim.RMSprop:  # which torch has no fused version of
            yield _of_torch(optimizer, "fused", {"fused": True})
    yield _of_torch(torch.optim.RMSprop, "CUDA graph", {"capturable": True}, capture=True)
    yield _of_torch(torch.optim.AdamW, "fused CUDA graph", {"fused": True, "capturable": True}, capture=True)


# -- others ------------------------------------------------------------------------------------------------------------


def _peers() -> Iterator[Contender]:
    for peer in peers.PEERS:

        def build(tensors: Tensors, peer: peers.Peer = peer) -> Ready:
            peers.require(peer)
            call, plain = peer.build(tensors)
            return Ready({"step": call}, plain)

        moved = {"step": loop_bytes("context", momentum=True)} if peer.does_ivon else {}
        yield Contender(peer.name, "", "", build, "peer", moved, peer.note, peer.own_copies)


REFERENCE = "RMSprop default"
"""What all times are divided by."""


def contenders() -> list[Contender]:
    """All of them, the reference first."""
    return [*_torch(), *_library(), *_peers()]


def for_memory() -> list[Contender]:
    """Those whose memory is worth a table: no compiled code, and one loop of paths that are not fused."""
    return [
        contender
        for contender in contenders()
        if contender.path != "compiled"
        and not contender.captured
        and (contender.family != "vprop" or contender.path == "fused" or contender.loop == "closure")
    ]


def choose(words: list[str], among: list[Contender] | None = None) -> list[Contender]:
    """Those whose name holds one of the words; all if there are none."""
    everybody = contenders() if among is None else among
    names = matching(words, [contender.name for contender in everybody])
    return [contender for contender in everybody if contender.name in names]


def by_name(name: str) -> Contender:
    """The one of that name."""
    found = [contender for contender in contenders() if contender.name == name]
    if not found:
        names = ", ".join(contender.name for contender in contenders())
        raise BenchError(f"Invalid contender {name!r}. There are: {names}.")
    return found[0]
