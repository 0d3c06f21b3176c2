"""What a run trains: the network of a task, batches for it, and what it is judged on, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vprop.lab.deep import data
from vprop.lab.deep.gpt import CharacterGPT, adapt, next_character_loss
from vprop.lab.deep.networks import resnet20
from vprop.lab.deep.tasks import STEPS_OF_A_CHUNK, DeepTask, Part
from vprop.lab.deep.training import Loss, epochs, flips_and_crops


@dataclass(frozen=True)
class How:
    """What a run is told that does not decide its outcome, beyond rounding."""

    out: Path = Path("out/deep")
    device: str = "cpu"
    fast: tuple[str, ...] = ()
    """Of ``FAST``."""
    stop_at: float | None = None
    """The time, in seconds since 1970, at which a run that is not finished gives up."""

    @property
    def data(self) -> Path:
        """Where copies of the data are kept."""
        return self.out / "data"

    @property
    def autocast(self) -> torch.dtype | None:
        """Of predictions: 16 bits with more digits than training has, on a GPU."""
        return torch.float16 if self.device.startswith("cuda") else None

    @contextmanager
    def at_speed(self) -> Iterator[None]:
        """What a GPU is fast with, for a time: TF32 in products of 32 bits, and cuDNN's search if it was asked for.

        Networks run in 16 bits; such products are those of an eigenbasis.
        """
        if not self.device.startswith("cuda"):
            yield
            return
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        search = "cudnn-benchmark" in self.fast
        try:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True) if search else nullcontext():
                yield
        finally:
            torch.set_float32_matmul_precision(before)


FAST = ("channels-last", "bfloat16", "compile", "cudnn-benchmark", "without-graphs")
"""What may make a device faster: another order of images in memory, networks that train in bfloat16 on a CPU as they do
on a GPU, torch.compile, and a search for convolutions; and steps that are not recorded as CUDA graphs, which are
slower, for what cannot be recorded."""


class Workload(Protocol):
    """What the loop needs to know of a task."""

    num_data: int
    batch: int
    loss: Loss
    rows: int
    """Inputs of a forward when nothing is trained."""
    test: Tensor
    labels: Tensor
    outliers: dict[str, Tensor]

    def model(self, dropout: float) -> nn.Module:
        """A new network, from torch's generator, on the device."""

    @property
    def steps_of_a_chunk(self) -> int:
        """Of an epoch, or of what stands for one."""

    def steps(self, share: float) -> int:
        """Of a whole training, or of a share of it."""

    def chunks(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of epochs, or of so many steps, without end; all of one size."""


class ImageWork:
    """A ResNet on images."""

    loss: Loss

    def __init__(self, task: DeepTask, part: Part, data_dir: Path | None, how: How) -> None:
        self.task, self.batch, self.loss = task, task.batch, F.cross_entropy
        self.device = torch.device(how.device)
        self.images = data.images(task, part, data_dir, self.device, how.data)
        self.channels_last = "channels-last" in how.fast
        self.num_data, self.rows = len(self.images.train_x), 2000 if self.device.type == "cuda" else 250
        self.test, self.labels, self.outliers = self.images.test_x, self.images.test_y, self.images.outliers

    def model(self, dropout: float) -> nn.Module:
        """With the normalisation of the task."""
        shape = {"width": self.task.width, "blocks": self.task.blocks, "channels_last": self.channels_last}
        channels, classes = self.images.train_x.shape[1], self.images.classes
        return resnet20(channels, classes, norm=self.task.norm, dropout=dropout, **shape).to(self.device)  # type: ignore[arg-type]

    @property
    def steps_of_a_chunk(self) -> int:
        """An epoch's."""
        return self.num_data // self.batch

    def steps(self, share: float) -> int:
        """Whole epochs."""
        return max(1, round(share * self.task.epochs)) * self.steps_of_a_chunk

    def chunks(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Epochs in new orders, with crops and flips if the task has them."""
        change = flips_and_crops(generator) if self.task.augment else None
        while True:
            yield from epochs(self.images.train_x, self.images.train_y, 1, generator, change)


class TextWork:
    """A transformer on characters; with adapters, one that was trained on another text before."""

    loss: Loss
    outliers: dict[str, Tensor]

    def __init__(self, task: DeepTask, part: Part, data_dir: Path | None, how: How, source: str | None = None) -> None:
        self.task, self.batch, self.loss, self.outliers = task, task.batch, next_character_loss, {}
        self.device, self.source, self.how = torch.device(how.device), source, how
        self.text = data.text(task, part, data_dir, self.device, source)
        self.num_data, self.rows = len(self.text.train), 64 if self.device.type == "cuda" else 16
        self.test, self.labels = self.text.test_x, self.text.test_y

    def model(self, dropout: float) -> nn.Module:
        """A new one, or the one that was trained before with new adapters."""
        task = self.task
        model = CharacterGPT(self.text.characters, task.length, task.layers, task.channels, task.heads, dropout)
        if task.family == "lora" and self.source is None:
            model.load_state_dict(torch.load(pretrained_path(task, self.how), weights_only=True))
            adapt(model, task.rank)
        return model.to(self.device)

    @property
    def steps_of_a_chunk(self) -> int:
        """The same for all texts."""
        return STEPS_OF_A_CHUNK

    def steps(self, share: float) -> int:
        """As the task says."""
        return max(1, round(share * self.task.steps))

    def chunks(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows from anywhere in the text."""
        while True:
            yield data.random_windows(self.text.train, STEPS_OF_A_CHUNK * self.batch, self.task.length, generator)


def workload(task: DeepTask, part: Part, data_dir: Path | None, how: How) -> Workload:
    """Of the task, on the device."""
    return ImageWork(task, part, data_dir, how) if task.of_images else TextWork(task, part, data_dir, how)


def pretrained_path(task: DeepTask, how: How) -> Path:
    """Where the network lies that the task's adapters are for."""
    return how.out / "pretrained" / f"{task.name}.pt"
