"""What is trained on what: the configuration of `vprop compare deep`. The contenders are in ``contenders.py``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vprop.lab.deep.networks import Norm

Family = Literal["resnet", "gpt", "lora"]
Part = Literal["tuning", "final"]

SEEDS = (0, 1, 2)
"""Of what is reported."""
TUNING_SEED = 100
"""Of the runs that settings are chosen by, so that no reported run was chosen for being lucky."""
STEPS_OF_A_CHUNK = 100
"""Texts have no epochs: so many steps stand for one wherever training is looked at from time to time."""


@dataclass(frozen=True)
class DeepTask:
    """A network, its data, and how much is spent on them. All that is here decides the outcome of a run."""

    name: str
    """Of files, of the command's argument, and of places in the page."""
    title: str
    family: Family
    data: str
    batch: int = 128
    epochs: int = 0
    """Passes over the training images; texts have ``steps`` instead."""
    steps: int = 0
    tuning_share: float = 1.0
    """How long a tuning run is, as a share of the others: short where the best setting does not depend on it much."""
    tuned_on: str | None = None
    """Another task whose chosen settings are taken."""
    timed_on: str | None = None
    """Another task whose times are shown, since its steps are the same."""
    validation_share: float = 0.1
    """Of the training data, the last part: what settings are judged on. Tuning runs train on the rest alone."""
    samples: int = 64
    """Weight samples of a prediction; a tuning run takes a quarter of them."""
    outliers: tuple[str, ...] = ()
    """Data that the network was not trained for, to be told from the test data by their uncertainty."""
    label_noise: float = 0.0
    """The share of training labels that are replaced by wrong ones."""
    # -- images
    norm: Norm = "batch"
    augment: bool = False
    width: int = 16
    blocks: int = 3
    # -- texts
    length: int = 256
    layers: int = 6
    channels: int = 384
    heads: int = 6
    windows: int = 1000
    """Pieces of ``length`` characters that a text's test part is judged on, at most, spread over all of it."""
    # -- adapters
    rank: int = 8
    pretraining: str = ""
    """The text that the adapted network was trained on before, by AdamW."""
    pretraining_steps: int = 0

    @property
    def of_images(self) -> bool:
        """Or else of texts."""
        return self.family == "resnet"

    def shown(self) -> dict[str, Any]:
        """For a file of results: what is not the default."""
        default = asdict(DeepTask("", "", "resnet", ""))
        return {name: value for name, value in asdict(self).items() if value != default[name] and name != "timed_on"}


_CIFAR = DeepTask(
    "cifar10-40", "CIFAR-10, ResNet-20, 40 epochs", "resnet", "cifar10", epochs=40, augment=True,
    outliers=("cifar100",),
)  # fmt: skip
_FASHION = DeepTask(
    "fashion", "Fashion-MNIST, ResNet-20, crops and flips, 20 epochs", "resnet", "fashion_mnist", epochs=20,
    tuning_share=0.5, augment=True, outliers=("notmnist",),
)  # fmt: skip
_GPT = DeepTask(
    "gpt", "Characters of Shakespeare, GPT of 6 layers", "gpt", "tinyshakespeare", batch=64, steps=2500, samples=32
)
_BOOKS = replace(_GPT, name="gpt-books", title="Characters of books, GPT of 6 layers", data="books", tuning_share=0.5)
_LONGER = 3260
"""Steps of the diagonal in the time of 2,500 in an eigenbasis, by the times of a step in docs/deep/results/gpt.json."""

TASKS = (
    replace(_CIFAR, name="cifar10", title="CIFAR-10, ResNet-20, 100 epochs", epochs=100),
    replace(_CIFAR, timed_on="cifar10"),
    replace(
        _CIFAR, name="cifar10-noise", title="CIFAR-10 with 10 % wrong labels, ResNet-20, 40 epochs", label_noise=0.1,
        tuned_on="cifar10-40", timed_on="cifar10",
    ),
    replace(
        _CIFAR, name="cifar10-frn", title="CIFAR-10, ResNet-20 with FilterResponseNorm, 40 epochs", norm="frn",
        tuning_share=0.5,
    ),
    replace(
        _CIFAR, name="cifar10-5k", title="5,000 images of CIFAR-10, ResNet-20, 200 epochs", data="cifar10_subset",
        epochs=200, tuning_share=1.0, validation_share=0.2,
    ),
    # What two cores can do, with --fast bfloat16: the first in minutes a run, the second in an hour.
    replace(
        _CIFAR, name="cifar10-5k-40", title="5,000 images of CIFAR-10, ResNet-20, 40 epochs", data="cifar10_subset",
        validation_share=0.2, samples=16, outliers=(),
    ),
    replace(
        _CIFAR, name="cifar10-40-cpu", title="CIFAR-10, ResNet-20, 40 epochs, 16 draws", samples=16, outliers=(),
        tuned_on="cifar10-5k-40",
    ),
    _FASHION,
    replace(
        _FASHION, name="fashion-plain", title="Fashion-MNIST, ResNet-20, images as they are, 20 epochs", augment=False
    ),
    _GPT,
    replace(_GPT, name="gpt-longer", title=f"{_GPT.title}, {_LONGER:,} steps", steps=_LONGER, tuned_on="gpt"),
    _BOOKS,
    replace(_BOOKS, name="gpt-books-longer", title=f"{_BOOKS.title}, {_LONGER:,} steps", steps=_LONGER,
            tuned_on="gpt-books"),
    DeepTask(
        "lora", "From books to Shakespeare, adapters of rank 8 for a GPT of 4 layers", "lora", "tinyshakespeare",
        batch=32, steps=1000, samples=32, layers=4, channels=256, heads=4, pretraining="books", pretraining_steps=3000,
    ),
)  # fmt: skip

_LITTLE: dict[str, Any] = {"batch": 16, "samples": 4, "validation_share": 0.25}
_LITTLE_TEXT: dict[str, Any] = _LITTLE | {
    "steps": 6, "length": 16, "layers": 1, "channels": 8, "heads": 2, "windows": 10,
}  # fmt: skip
SHORT = (
    DeepTask(
        "short-images", "Digits", "resnet", "digits", epochs=2, outliers=("noise",), width=4, blocks=1, augment=True,
        **_LITTLE,
    ),
    DeepTask("short-text", "Words", "gpt", "words", **_LITTLE_TEXT),
    DeepTask(
        "short-lora", "Words after other words", "lora", "words", rank=2, pretraining="words", pretraining_steps=4,
        **_LITTLE_TEXT,
    ),
)  # fmt: skip
"""Data that need no file, a few steps: to see that everything runs."""

BY_NAME = {task.name: task for task in (*TASKS, *SHORT)}
