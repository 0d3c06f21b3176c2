"""How many operations the optimizer's part of a training step of a small network is: launches, on a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vprop import bundles
from vprop.kernels import cpu
from vprop.lab.deep.contenders import ivon, layers_in_an_eigenbasis, vario
from vprop.lab.deep.gpt import CharacterGPT, next_character_loss
from vprop.lab.deep.networks import resnet20

WITHOUT_WORK = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "_local_scalar_dense"),
    *("empty", "empty_like", "empty_strided", "new_empty", "_record_function_enter_new", "_record_function_exit"),
}


class Counter(TorchDispatchMode):
    """Counts operations that compute something, and calls of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.paused = 0, False
        for name in ("perturb", "step", "normal"):
            setattr(cpu, name, self._counted(getattr(cpu, name)))

    def _counted(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            kernel(*args, **kwargs)

        return call

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        if not self.paused and function._schema.name.split("::")[1] not in WITHOUT_WORK:
            self.count += 1
        return function(*args, **(kwargs or {}))


FACTS = {"num_data": 1000, "batch_size": 2}
MAKERS: dict[str, Callable[..., Any]] = {
    "vario": lambda groups: vario(groups, FACTS, lr=1e-3),
    "ivon": lambda groups: ivon(groups, FACTS, sigma=0.008, speed=1e-3),
}


def groups(model: nn.Module, structure: str) -> list[dict[str, Any]]:
    """This structure for the weights of layers, and a diagonal for the rest: two groups, whichever it is."""
    layers, others = layers_in_an_eigenbasis(model)
    return [layers | {"structure": structure}, others]


def networks() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor]]]:
    """ResNet-20 and the GPT on characters, narrower, each with a loss."""
    x, y = torch.randn(2, 3, 32, 32), torch.arange(2)
    text = torch.randint(65, (2, 17))
    return {
        "resnet": (resnet20(3), lambda model: F.cross_entropy(model(x), y)),
        "gpt": (CharacterGPT(65, 16, 6, 48, 6), lambda m: next_character_loss(m(text[:, :-1]), text[:, 1:])),
    }


def launches(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """In the mean over steps in which every basis is refreshed once; those of a captured step have no refresh."""
    bundles.bundle_limit = lambda device: 1 << 24  # as on a GPU
    counter, rows, steps = Counter(), [], 2 if arguments.short else 10
    for network in networks():
        for name, structure in product(MAKERS, ("diagonal", "eigenbasis")):
            torch.manual_seed(0)  # how many operations a decomposition takes depends on the gradients
            model, loss = networks()[network]
            optimizer = MAKERS[name](groups(model, structure))

            def closure(model: Any = model, optimizer: Any = optimizer, loss: Any = loss) -> Tensor:
                counter.paused = True
                optimizer.zero_grad()
                value: Tensor = loss(model)
                value.backward()  # type: ignore[no-untyped-call]
                counter.paused = False
                return value

            for _ in range(2 + 2 * steps):
                optimizer.step(closure)
            counter.count = 0
            with counter:
                for _ in range(steps):
                    optimizer.step(closure)
            total, counter.count = counter.count, 0
            with counter:
                optimizer.refresh_bases(solve=False)
            row = {"network": network, "optimizer": name, "structure": structure, "launches": total / steps}
            rows.append(row | {"of_one_refresh_of_all": counter.count})
            print(rows[-1], flush=True)
    return rows
