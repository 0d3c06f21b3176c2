"""The data of a task as tensors on a device: what is trained on, what is judged on, and outliers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vprop.files import replacing
from vprop.lab.data import files, load
from vprop.lab.data.load import scikit_learn
from vprop.lab.deep.tasks import DeepTask, Part

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Images:
    """Normalised images, with labels."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    outliers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Text:
    """Characters as numbers: the part to train on, and windows to judge on with the character after each."""

    train: Tensor
    test_x: Tensor
    test_y: Tensor
    characters: int


def prepare(task: DeepTask, data_dir: Path | None, kept: Path) -> None:
    """See that the data are there, and keep a copy that every run reads in no time: to decode CIFAR takes seconds."""
    if not task.of_images:
        for name in {task.data, task.pretraining or task.data}:
            _raw_text(name, data_dir)
        return
    raw = _raw_images(task.data, data_dir, kept)
    (x, y), (test_x, test_y) = raw
    _keep(kept / f"{task.data}.npz", {"x": x, "y": y, "test_x": test_x, "test_y": test_y})
    for name in task.outliers:
        _keep(kept / f"{name}.npz", {"x": _raw_outliers(name, test_x, data_dir, kept)})


def images(task: DeepTask, part: Part, data_dir: Path | None, device: torch.device, kept: Path) -> Images:
    """For a tuning run the held-out training images stand in the place of the test images, which are not used."""
    (x, y), (test_x, test_y) = _raw_images(task.data, data_dir, kept)
    if part == "tuning":
        first = len(x) - round(task.validation_share * len(x))
        (x, y), (test_x, test_y) = (x[:first], y[:first]), (x[first:], y[first:])
    classes = int(y.max()) + 1
    scaled = x.to(device).float() / 255
    shift, scale = scaled.mean((0, 2, 3), keepdim=True), scaled.std((0, 2, 3), keepdim=True)

    def normalised(raw: Tensor) -> Tensor:
        return (raw.to(device).float() / 255 - shift) / scale

    outliers = task.outliers if part == "final" else ()
    return Images(
        normalised(x),
        with_wrong_labels(y, task.label_noise, classes).to(device),
        normalised(test_x),
        test_y.to(device),
        classes,
        {name: normalised(_raw_outliers(name, test_x, data_dir, kept)) for name in outliers},
    )


def with_wrong_labels(y: Tensor, share: float, classes: int) -> Tensor:
    """A share of the labels moved to another class, each other class as likely: the same ones for all runs."""
    if not share:
        return y
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    changed = y.clone()
    changed[chosen] = (y[chosen] + torch.randint(1, classes, (len(chosen),), generator=generator)) % classes
    return changed


def text(task: DeepTask, part: Part, data_dir: Path | None, device: torch.device, source: str | None = None) -> Text:
    """The first nine tenths are for training; the last tenth is the test part, of a tuning run the last of those.

    ``source`` is another text than the task's: what a network is trained on before it is adapted. It shares its
    characters with the task's text.
    """
    names = sorted({source or task.data, task.data, task.pretraining or task.data})
    raw = {name: _raw_text(name, data_dir) for name in names}
    characters = sorted(set("".join(raw.values())))
    numbers = torch.zeros(128, dtype=torch.long)
    numbers[[ord(one) for one in characters]] = torch.arange(len(characters))
    bytes_of = bytearray(raw[source or task.data].encode("ascii"))
    all_of_it = numbers[torch.frombuffer(bytes_of, dtype=torch.uint8).long()]
    for _ in range(2 if part == "tuning" else 1):
        first = int(0.9 * len(all_of_it))
        train, test = all_of_it[:first], all_of_it[first:]
        all_of_it = train
    x, y = _windows(test, task.length, task.windows)
    return Text(train.to(device), x.to(device), y.to(device), len(characters))


def _windows(test: Tensor, length: int, most: int) -> Labelled:
    """Pieces side by side, every so many-th if there are too many, and the same one character further on."""
    starts = torch.arange(0, len(test) - length, length)
    if len(starts) > most:
        starts = starts[torch.linspace(0, len(starts) - 1, most).long()]
    rows = starts[:, None] + torch.arange(length)
    return test[rows], test[rows + 1]


def random_windows(train: Tensor, count: int, length: int, generator: torch.Generator) -> Labelled:
    """Pieces from anywhere, and the same one character further on."""
    starts = torch.randint(len(train) - length, (count, 1), generator=generator, device=train.device)
    rows = starts + torch.arange(length, device=train.device)
    return train[rows], train[rows + 1]


@lru_cache(maxsize=2)
def _raw_images(name: str, data_dir: Path | None, kept: Path) -> tuple[Labelled, Labelled]:
    if (copy := _copy(kept / f"{name}.npz")) is not None:
        return (copy["x"], copy["y"]), (copy["test_x"], copy["test_y"])
    if name == "cifar10":
        return files.cifar10(data_dir)
    if name == "cifar10_subset":  # its own 1,000 test images are too few for the third digit
        return files.cifar10_subset(data_dir)[0], files.cifar10_test(data_dir)
    if name == "fashion_mnist":
        data = load(name, data_dir)
        as_bytes = [(x[:, None] * 255).round().to(torch.uint8) for x in (data.train_x, data.test_x)]
        return (as_bytes[0], data.train_y), (as_bytes[1], data.test_y)
    digits = scikit_learn("digits").load_digits()
    x = torch.as_tensor(digits.images * 15.9375).to(torch.uint8)[:, None]
    y = torch.as_tensor(digits.target).long()
    return (x[:200], y[:200]), (x[200:300], y[200:300])


@lru_cache(maxsize=2)
def _raw_outliers(name: str, like: Tensor, data_dir: Path | None, kept: Path) -> Tensor:
    if (copy := _copy(kept / f"{name}.npz")) is not None:
        return copy["x"]
    if name == "cifar100":
        return files.cifar100_test(data_dir)
    if name == "notmnist":
        return files.notmnist_test(data_dir)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, like.shape, dtype=torch.uint8, generator=generator)


@lru_cache(maxsize=3)
def _raw_text(name: str, data_dir: Path | None) -> str:
    if name != "words":
        return files.text(name, data_dir)
    generator = torch.Generator().manual_seed(2)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "it"]
    return " ".join(words[i] for i in torch.randint(len(words), (1000,), generator=generator).tolist())


def _keep(path: Path, tensors: dict[str, Tensor]) -> None:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as file:  # another command may be keeping the same data
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})  # type: ignore[arg-type]


def _copy(path: Path) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    with np.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}
