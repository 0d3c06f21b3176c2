"""The data of the deep networks: read as they were written, and never the test part where settings are chosen."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vprop.lab.data import DataNotFound, WrongChecksum, files
from vprop.lab.deep import data
from vprop.lab.deep.tasks import SHORT, TASKS

IMAGES, TEXT, _ = SHORT
CPU = torch.device("cpu")


def filtered(images):
    """As the files are described, pixel by pixel: residuals of the planes of (n, height, width, 3) images."""
    count, height, width, _ = images.shape
    planes = np.zeros((3, count, height, width), dtype=int)
    for n in range(count):
        for c in range(3):
            plane = images[n, :, :, c].astype(int)
            for i in range(height):
                for j in range(width):
                    left = plane[i, j - 1] if j else 0
                    up = plane[i - 1, j] if i else 0
                    corner = plane[i - 1, j - 1] if i and j else 0
                    planes[c, n, i, j] = (plane[i, j] - sorted([left, up, left + up - corner])[1]) % 256
    red, green, blue = planes
    return [((plane) % 256).astype(np.uint8) for plane in (red - green, green, blue - green)]


def write_cifar(folder, name, images, labels):
    red, green, blue = filtered(images)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, r=red, g=green, b=blue, y=labels.astype(np.uint8))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_filter_is_undone():
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 7, 3), dtype=np.uint8)
    images[0] = 255
    np.testing.assert_array_equal(files.unfiltered(*filtered(images)), images.transpose(0, 3, 1, 2))


def test_cifar_is_put_together_in_its_order(tmp_path, monkeypatch):
    random = np.random.default_rng(1)
    parts = {name: random.integers(0, 256, (n, 4, 4, 3), dtype=np.uint8) for name, n in (("0", 3), ("1", 2), ("t", 4))}
    labels = {name: random.integers(0, 10, len(part)) for name, part in parts.items()}
    names = {"0": "train_0.npz", "1": "train_1.npz", "t": "test.npz"}
    sums = {key: write_cifar(tmp_path / "cifar10", names[key], parts[key], labels[key]) for key in parts}
    entries = [replace(file, sha256=sums[key]) for file, key in zip(files.FILES["cifar10"], parts, strict=True)]
    monkeypatch.setitem(files.FILES, "cifar10", tuple(entries))
    (x, y), (test_x, test_y) = files.cifar10(tmp_path)
    np.testing.assert_array_equal(x, np.concatenate([parts["0"], parts["1"]]).transpose(0, 3, 1, 2))
    assert y.tolist() == [*labels["0"], *labels["1"]]
    np.testing.assert_array_equal(test_x, parts["t"].transpose(0, 3, 1, 2))
    assert test_y.tolist() == list(labels["t"])
    assert torch.equal(files.cifar10_test(tmp_path)[0], test_x)


def test_a_file_that_is_not_there_or_not_the_one(tmp_path, monkeypatch):
    monkeypatch.delenv("VPROP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataNotFound, match=r"no file extra/books.txt.xz\. Looked in: --data-dir .*\$VPROP_DATA"):
        files.text("books", tmp_path)
    (tmp_path / "books.txt.xz").write_bytes(b"something else")
    with pytest.raises(WrongChecksum, match="wrong checksum"):
        files.text("books", tmp_path)


def test_a_share_of_the_labels_is_wrong_and_no_more():
    y = torch.randint(0, 10, (1000,), generator=torch.Generator().manual_seed(0))
    changed = data.with_wrong_labels(y, 0.1, 10)
    assert int((changed != y).sum()) == 100
    assert changed.min() >= 0
    assert changed.max() <= 9
    assert torch.equal(changed, data.with_wrong_labels(y, 0.1, 10))
    assert torch.equal(data.with_wrong_labels(y, 0.0, 10), y)


def test_settings_are_chosen_without_test_images(tmp_path):
    final = data.images(IMAGES, "final", None, CPU, tmp_path)
    tuning = data.images(IMAGES, "tuning", None, CPU, tmp_path)
    assert (len(final.train_x), len(tuning.train_x), len(tuning.test_x)) == (200, 150, 50)
    assert torch.equal(torch.cat([tuning.train_y, tuning.test_y]), final.train_y)
    assert not tuning.outliers
    # The scale is that of the images that are trained on.
    assert tuning.train_x.mean().abs() < 1e-5
    assert tuning.train_x.std() == pytest.approx(1, abs=1e-3)
    assert tuning.test_x.mean().abs() > 1e-4


def test_settings_are_chosen_without_the_end_of_the_text():
    final, tuning = data.text(TEXT, "final", None, CPU), data.text(TEXT, "tuning", None, CPU)
    whole = len(data._raw_text("words", None))
    assert len(final.train) == int(0.9 * whole)
    assert torch.equal(tuning.train, final.train[: int(0.9 * len(final.train))])
    held_out = final.train[len(tuning.train) :]
    assert torch.equal(tuning.test_x[0], held_out[: TEXT.length])


def test_targets_are_the_next_characters():
    text = data.text(TEXT, "final", None, CPU)
    assert torch.equal(text.test_x[:, 1:], text.test_y[:, :-1])
    assert len(text.test_x) <= TEXT.windows
    x, y = data.random_windows(text.train, 20, 8, torch.Generator().manual_seed(0))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.shape == (20, 8)
    assert len({tuple(row) for row in x.tolist()}) > 10


def test_a_kept_copy_is_what_was_read(tmp_path):
    data._raw_images.cache_clear()
    data.prepare(IMAGES, None, tmp_path)
    read = data._raw_images("digits", None, Path("nowhere"))
    data._raw_images.cache_clear()
    kept = data._raw_images("digits", None, tmp_path)
    assert all(torch.equal(a, b) for one, two in zip(read, kept, strict=True) for a, b in zip(one, two, strict=True))
    data._raw_images.cache_clear()


def test_two_commands_may_keep_the_same_data_at_once(tmp_path, monkeypatch):
    path, tensors, write = tmp_path / "images.npz", {"x": torch.arange(5)}, np.savez

    def write_beside_another(*args, **kwargs):
        write(*args, **kwargs)
        monkeypatch.setattr(np, "savez", write)
        data._keep(path, tensors)

    monkeypatch.setattr(np, "savez", write_beside_another)
    data._keep(path, tensors)
    assert torch.equal(data._copy(path)["x"], tensors["x"])
    assert list(tmp_path.iterdir()) == [path]


def test_adapters_share_their_characters_with_the_text_before():
    task = replace(TEXT, family="lora", pretraining="words")
    assert data.text(task, "final", None, CPU).characters == data.text(task, "final", None, CPU, "words").characters


@pytest.mark.slow
def test_the_published_means_of_cifar10(monkeypatch):
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    try:
        (x, y), (test_x, _) = files.cifar10(folder if folder.is_dir() else None)
    except DataNotFound as error:
        pytest.skip(str(error))
    np.testing.assert_allclose((x.float() / 255).mean((0, 2, 3)), [0.49140, 0.48216, 0.44653], atol=6e-6)
    np.testing.assert_allclose((test_x.float() / 255).mean((0, 2, 3)), [0.49421, 0.48513, 0.45041], atol=6e-6)
    assert y.bincount().tolist() == [5000] * 10


def test_every_task_names_data_that_are_known():
    known = {*files.FILES, "fashion_mnist"}
    for task in TASKS:
        assert {task.data, *task.outliers} <= known
        assert not task.pretraining or task.pretraining in known
        assert (task.epochs > 0) == task.of_images
        assert (task.steps > 0) != task.of_images
