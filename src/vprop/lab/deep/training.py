"""Training that keeps a device busy: data that lie there, and a step that is recorded once and then replayed.

A small network's step is some hundreds of kernels of a few microseconds each; launched one by one they take longer to
ask for than to run. On a GPU the whole step (fetch a batch, set the step size, forward, backward, update) is one CUDA
graph. Elsewhere the same function is called as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import vprop
from vprop.functional.eigenbasis import is_solved
from vprop.optim.cycles import in_cycles

WARM_UP = 3
"""Steps that run as they are before the recording, as torch asks for; they count as steps of the training."""

Loss = Callable[[Tensor, Tensor], Tensor]


class Trainer:
    """Trains ``model`` with batches that are slices of an epoch's tensors.

    ``rates`` are the step sizes, one for each step of the whole training. The optimizer's ``lr`` is a tensor that the
    step itself fills from them, so that a recorded step follows the schedule. ``forward`` is what is called in place of
    the model, a compiled one say; ``capture=False`` is for optimizers whose step cannot be recorded; ``autocast`` says
    whether the network runs in bfloat16, which it does on a GPU if nothing is said;
    ``first_step`` is how many steps were made before, by a training that this one goes on with.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        rates: Tensor,
        batch_size: int,
        *,
        loss: Loss = F.cross_entropy,
        autocast: bool | None = None,
        forward: Callable[[Tensor], Tensor] | None = None,
        capture: bool = True,
        first_step: int = 0,
    ) -> None:
        self.model, self.optimizer, self.batch_size, self.loss = model, optimizer, batch_size, loss
        self.forward = model if forward is None else forward
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.captures = capture and self.on_gpu
        self.autocast = self.on_gpu if autocast is None else autocast
        self.rates = rates.to(self.device, torch.float32)
        self.total = torch.tensor(first_step, dtype=torch.int64, device=self.device)
        self.lr = self.rates[0].clone()
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        self.steps_done = self.first_step = first_step
        self._refresh_every = _refresh_interval(optimizer)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._turn: torch.cuda.CUDAGraph | None = None
        self._has_turned = False
        self._epoch: tuple[Tensor, Tensor] | None = None
        self._at = torch.zeros((), dtype=torch.int64, device=self.device)

    def run_epoch(self, x: Tensor, y: Tensor) -> None:
        """One pass over ``x`` and ``y`` in their order; rows that fill no batch are left out."""
        count = len(x) // self.batch_size
        if count == 0:
            raise ValueError(f"{len(x)} rows make no batch of {self.batch_size}.")
        self._take(x[: count * self.batch_size], y[: count * self.batch_size])
        self._at.zero_()
        self.model.train()
        for _ in range(min(count, len(self.rates) - self.steps_done)):
            self._next_step()
            self.steps_done += 1

    def _take(self, x: Tensor, y: Tensor) -> None:
        """Into memory that stays where it is, as a recorded step reads from where it read when it was recorded."""
        if self._epoch is None:
            self._epoch = x.clone(), y.clone()
            return
        for kept, new in zip(self._epoch, (x, y), strict=True):
            kept.copy_(new)

    def _next_step(self) -> None:
        if not self.captures:
            self._step()
        elif self.steps_done - self.first_step < WARM_UP:
            stream = _side_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream(self.device).wait_stream(stream)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._step()
            self._graph.replay()
            if self._refresh_every and (self.steps_done + 1) % self._refresh_every == 0:
                self._refresh((self.steps_done + 1) // self._refresh_every)

    def _refresh(self, number: int) -> None:
        """Let bases follow, which a recorded step does not do: by small turns, recorded as well, but in a few cases."""
        assert isinstance(self.optimizer, vprop.VariationalOptimizer)
        if is_solved(number) or not self._has_turned:  # the first turn runs as it is, as torch asks for
            self.optimizer.refresh_bases(solve=is_solved(number))
            self._has_turned = self._has_turned or not is_solved(number)
            return
        if self._turn is None:
            self._turn = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._turn):
                self.optimizer.refresh_bases(solve=False)
        self._turn.replay()

    def _step(self) -> None:
        assert self._epoch is not None
        x, y = (_row(kept.view(-1, self.batch_size, *kept.shape[1:]), self._at) for kept in self._epoch)
        self.lr.copy_(_row(self.rates, self.total))

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            # The cache would keep casts of weights from one forward to the next recording.
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
                loss = self.loss(self.forward(x), y)
            loss.backward()
            return loss

        if isinstance(self.optimizer, vprop.VariationalOptimizer):
            self.optimizer.step(closure)
        elif hasattr(self.optimizer, "sampled_params"):  # a package of others that draws weights
            with self.optimizer.sampled_params(train=True):
                closure()
            self.optimizer.step()
        else:
            closure()
            self.optimizer.step()
        self.total += 1
        self._at += 1


def _refresh_interval(optimizer: Optimizer) -> int:
    """Steps between two refreshes of bases, which a recorded step does not make itself; 0 if it has none."""
    groups = [group for group in optimizer.param_groups if group.get("structure") == "eigenbasis"]
    return min((group["basis_every"] for group in groups), default=0)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all trainings: torch keeps workspaces for every stream that it has seen."""
    return torch.cuda.Stream(device)


def _row(table: Tensor, at: Tensor) -> Tensor:
    """``table[at]`` without asking the device where that is, which a recording could not."""
    return table.index_select(0, at.view(1))[0]


def one_cycle(peak: float, steps: int, warm_up: float = 0.05) -> Tensor:
    """Torch's ``OneCycleLR`` as numbers: up from ``peak``/25 over a ``warm_up`` part of the steps, then down."""
    return cosine_cycles(peak, (steps,), warm_up)


def cosine_cycles(peak: float, ends: Sequence[int], warm_up: float = 0.05) -> Tensor:
    """The library's ``CosineCycles`` as numbers."""
    shares = [in_cycles(step, ends, warm_up) for step in range(ends[-1])]
    return peak * torch.tensor(shares, dtype=torch.float64, device="cpu")


def cosine_then_constant(peak: float, last: float, steps: int, constant: float = 0.25, warm_up: float = 0.05) -> Tensor:
    """As ``one_cycle``, down to ``last``, where it stays for the last part of the steps: what SWAG averages over."""
    falling = steps - round(constant * steps)
    at = torch.arange(falling, dtype=torch.float64, device="cpu")
    top = warm_up * steps - 1
    up = _cosine(peak / 25, peak, at / top if top > 0 else at + 1)
    down = _cosine(peak, last, (at - top) / (falling - 1 - top))
    return torch.cat([torch.where(at <= top, up, down), at.new_full((steps - falling,), last)])


def _cosine(first: float, last: float, part: Tensor) -> Tensor:
    return last + (first - last) / 2 * (1 + torch.cos(math.pi * part))


def epochs(
    x: Tensor, y: Tensor, count: int, generator: torch.Generator, change: Callable[[Tensor], Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` times all rows in a new order, ``change``d if asked for (crops, flips)."""
    for _ in range(count):
        order = torch.randperm(len(x), generator=generator, device=x.device)
        yield (x[order] if change is None else change(x[order])), y[order]


def flips_and_crops(generator: torch.Generator, by: int = 4) -> Callable[[Tensor], Tensor]:
    """Each image flipped half of the time and moved by up to ``by`` pixels, zeros coming in from the sides."""

    def change(x: Tensor) -> Tensor:
        return torch.cat([_flipped_and_cropped(part, by, generator) for part in x.split(10_000)])

    return change


def _flipped_and_cropped(x: Tensor, by: int, generator: torch.Generator) -> Tensor:
    count, _, height, width = x.shape
    flip = torch.rand(count, 1, 1, 1, generator=generator, device=x.device) < 0.5
    padded = F.pad(torch.where(flip, x.flip(-1), x), (by, by, by, by))
    shift = torch.randint(0, 2 * by + 1, (2, count), generator=generator, device=x.device)
    rows = (shift[0, :, None] + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (shift[1, :, None] + torch.arange(width, device=x.device))[:, None, None, :]
    image = torch.arange(count, device=x.device)[:, None, None, None]
    channel = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[image, channel, rows, columns]
