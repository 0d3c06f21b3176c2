"""Larger sets for networks, read from files that the user has: nothing here is downloaded.

CIFAR is kept losslessly in three planes of residuals, which deflate well. Per channel a pixel is stored as its
difference (mod 256) to the median of left, up, and left + up − corner, with zeros outside of the image; afterwards the
residuals of green are subtracted from those of red and blue (mod 256). :func:`unfiltered` undoes both.
"""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vprop.lab.data.errors import DataError
from vprop.lab.data.find import locate
from vprop.lab.data.idx import parse_idx
from vprop.lab.data.registry import DataFile

DataDir = str | os.PathLike[str] | None

_CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
_BOOKS = "https://github.com/GITenberg"
_NOT_MNIST = "https://github.com/davidflanagan/notMNIST-to-MNIST"
_SHAKESPEARE = "https://github.com/karpathy/char-rnn"

FILES = {
    "cifar10": (
        DataFile("train_0.npz", "cifar10", _CIFAR, "294403a1dc8e8d85d2611751198ff12c4f28d8405480b5e283edad81b8d42b43"),
        DataFile("train_1.npz", "cifar10", _CIFAR, "5f3785c221efd473a0fcba0cfb2ada3731aeef1c8703c43179a7692747da9115"),
        DataFile("test.npz", "cifar10", _CIFAR, "23f9cd4335ce7b1d2dfa1e1f2cd90f8d0fe03728a367aff7f59918870b9cefc7"),
    ),
    "cifar100": (
        DataFile("test.npz", "cifar100", _CIFAR, "630d4bc5705ea1bd3b737e130eef8a83918a12e1add13bd5e23fd889c156c3c8"),
    ),
    "cifar10_subset": (
        DataFile(
            "cifar10_5k1k.npz",
            "cifar10_subset",
            _CIFAR,
            "7903e143a713f2649f4633423952d9031d278a0889301d02e9d15ad968fe9ca5",
        ),
    ),
    "notmnist": (
        DataFile(
            "notmnist-t10k-images-idx3-ubyte.gz",
            "extra",
            _NOT_MNIST,
            "70ae9e06201f2827e5b0a3781a3169d735dd2efc69996b9eeaee7f10ed4044d7",
        ),
    ),
    "tinyshakespeare": (
        DataFile(
            "tinyshakespeare.txt",
            "text",
            _SHAKESPEARE,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    "books": (
        DataFile("books.txt.xz", "extra", _BOOKS, "b8e94c31660d84437db42767e66f3ae63275ef37172c02486da90494902e4766"),
    ),
}
"""By the name of the set. The addresses say where the data come from; the files themselves are made from those."""

Labelled = tuple[Tensor, Tensor]
"""Images, uint8 of shape (n, channels, height, width), and labels."""


def cifar10(data_dir: DataDir = None) -> tuple[Labelled, Labelled]:
    """All of it: 50,000 images to train with and 10,000 to test on, in an order in which any prefix is a sample."""
    first, second, test = (_planes(path) for path in _paths("cifar10", data_dir))
    train = torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])
    return train, test


def cifar10_test(data_dir: DataDir = None) -> Labelled:
    """The 10,000 test images alone."""
    file = FILES["cifar10"][-1]
    return _planes(locate("cifar10", file, data_dir))


def cifar100_test(data_dir: DataDir = None) -> Tensor:
    """10,000 images of other things than CIFAR-10's."""
    (path,) = _paths("cifar100", data_dir)
    return _planes(path)[0]


def cifar10_subset(data_dir: DataDir = None) -> tuple[Labelled, Labelled]:
    """5,000 images to train with and 1,000 to test on."""
    (path,) = _paths("cifar10_subset", data_dir)
    with np.load(path) as file:
        train, test = (
            (
                torch.from_numpy(file[f"X_{part}"]).permute(0, 3, 1, 2).contiguous(),
                torch.from_numpy(file[f"y_{part}"]).long(),
            )
            for part in ("train", "test")
        )
    return train, test


def notmnist_test(data_dir: DataDir = None) -> Tensor:
    """10,000 grey letters of the size of Fashion-MNIST's images."""
    (path,) = _paths("notmnist", data_dir)
    return parse_idx(path, 3)[:, None]


def text(name: str, data_dir: DataDir = None) -> str:
    """The text called ``name``: ``tinyshakespeare`` or ``books``."""
    (path,) = _paths(name, data_dir)
    content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return content.decode("ascii")


def _paths(name: str, data_dir: DataDir) -> tuple[Path, ...]:
    return tuple(locate(name, file, data_dir) for file in FILES[name])


def _planes(path: Path) -> Labelled:
    with np.load(path) as file:
        missing = {"r", "g", "b", "y"} - set(file.files)
        if missing:
            raise DataError(f"{path} has no array {min(missing)!r}: expected r, g, b and y.")
        images = unfiltered(file["r"], file["g"], file["b"])
        return torch.from_numpy(images), torch.from_numpy(file["y"].astype(np.int64))


def unfiltered(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """Images of shape (n, 3, height, width) from the residuals of their planes."""
    residuals = np.stack([red + green, green, blue + green])  # uint8 wraps around, which is mod 256
    _, count, height, width = residuals.shape
    # Images last, so that a step of the recursion over pixels handles all of them in one piece of memory.
    residuals = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1))
    pixels = np.zeros((height + 1, width + 1, 3, count), np.int16)
    for i in range(height):
        for j in range(width):
            up, left, corner = pixels[i, j + 1], pixels[i + 1, j], pixels[i, j]
            low, high = np.minimum(left, up), np.maximum(left, up)
            middle = np.clip(left + up - corner, low, high)  # the median of three
            pixels[i + 1, j + 1] = (middle + residuals[i, j]) & 255
    return np.ascontiguousarray(pixels[1:, 1:].transpose(3, 2, 0, 1).astype(np.uint8))
