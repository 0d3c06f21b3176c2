"""An installed vprop at work, with nothing but torch: ``python tests/smoke.py [--compiled | --pure]``.

For environments that hold the package alone, where the tests cannot run: an empty one, an old torch, another Python.
``--compiled`` also wants the compiled CPU kernels to be there, ``--pure`` wants none. With safetensors, a posterior is
saved and loaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import vprop
from vprop.kernels import cpu


def classes(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three clouds, and which cloud each is of."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (count,), generator=generator)
    centres = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    return centres[y] + 0.5 * torch.randn(count, 2, generator=generator), y


def trained(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.nn.Module, vprop.Vario]:
    """A small classifier after some steps of the recommended optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    optimizer = vprop.Vario(model.parameters(), lr=1e-2, num_data=len(x), batch_size=len(x))
    optimizer.attach(model)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def main() -> None:
    """Train, predict, save, load."""
    parser = argparse.ArgumentParser(description="An installed vprop at work.")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--compiled", action="store_true", help="the CPU kernels must be there")
    kind.add_argument("--pure", action="store_true", help="there must be no CPU kernels")
    options = parser.parse_args()
    if (options.compiled and not cpu.available()) or (options.pure and cpu.available()):
        raise SystemExit(f"The compiled CPU kernels are {'there' if cpu.available() else 'missing'}.")
    x, y = classes(300)
    model, optimizer = trained(x, y)
    if options.compiled:  # an error where there is no kernel
        vprop.Vprop(model.parameters(), num_data=len(x), fused=True).step(vprop.Objective(model, F.cross_entropy, x, y))
    posterior = optimizer.posterior(model, likelihood="categorical")
    prediction = posterior.predict(x)
    accuracy = (prediction.probs.argmax(-1) == y).double().mean().item()
    far = posterior.predict(torch.tensor([[0.0, 0.0]])).entropy.item()
    if accuracy < 0.95 or far <= prediction.entropy.median().item():
        raise SystemExit(f"Accuracy {accuracy:.3f}, entropy between the clouds {far:.3f}: nothing was learned.")
    saved = "not saved, without safetensors"
    if importlib.util.find_spec("safetensors") is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "posterior.safetensors"
            posterior.save(path)
            if not torch.equal(vprop.load_posterior(path, model).predict(x).probs, prediction.probs):
                raise SystemExit("A loaded posterior predicts something else.")
        saved = "saved and loaded"
    kernels = "compiled kernels" if cpu.available() else "no compiled kernels"
    print(f"vprop {vprop.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {kernels}:")
    print(f"accuracy {accuracy:.3f}; {saved}.")


if __name__ == "__main__":
    main()
