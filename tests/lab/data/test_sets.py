"""The data sets themselves, those of files where they are on this machine."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest
import torch

from vprop.lab import data
from vprop.lab.data import DataError
from vprop.lab.data.load import parse_libsvm

# The machine's own settings, read before the fixture below hides them.
REAL_DATA = Path(os.environ.get("VPROP_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")


def _real_data(*files):
    """The folder of the published files; skips when one of those named is not on this machine."""
    missing = [file for file in files if not (REAL_DATA / file).is_file()]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} in $VPROP_DATA or ../shared/data (looked in {REAL_DATA})")
    return REAL_DATA


def _check_against_registry(loaded):
    entry = data.DATASETS[loaded.name]
    assert loaded.train_x.shape == (entry.train_rows, *entry.shape)
    assert loaded.test_x.shape == (entry.test_rows, *entry.shape)
    assert loaded.train_y.shape == (entry.train_rows,)
    assert loaded.test_y.shape == (entry.test_rows,)


def test_a1a():
    from sklearn.datasets import load_svmlight_file

    real_data = _real_data("libsvm/a1a", "libsvm/a1a.t")
    loaded = data.load("a1a", real_data, download=False)
    _check_against_registry(loaded)
    assert loaded.source == "file"
    assert loaded.train_y.sum() == 395
    assert loaded.test_y.sum() == 7446
    for part, x, y in (("a1a", loaded.train_x, loaded.train_y), ("a1a.t", loaded.test_x, loaded.test_y)):
        rows, labels = load_svmlight_file(str(real_data / "libsvm" / part), n_features=123)
        assert (x.numpy() == rows.toarray()).all()
        assert (y.numpy() == (labels > 0)).all()


def test_australian():
    real_data = _real_data("libsvm/australian_scale")
    loaded = data.load("australian", real_data, download=False)
    _check_against_registry(loaded)
    assert loaded.train_x.dtype == loaded.train_y.dtype == torch.float64
    assert loaded.train_y.sum() + loaded.test_y.sum() == 307
    everything = torch.cat([loaded.train_x, loaded.test_x])
    assert (everything[:, -1] == 1).all()
    assert (everything.amin(0)[:14] == -1).all()
    assert (everything.amax(0) == 1).all()
    rows, _ = parse_libsvm(real_data / "libsvm" / "australian_scale", 14)
    assert sorted(everything[:, :14].tolist()) == sorted(rows.tolist())  # each row once


def test_the_other_edition_of_australian_is_that_of_svm_scale():
    """A public copy fits svm-scale with values held in float32; the checksum is that of this recipe."""
    real_data = _real_data("libsvm/australian")
    rows, labels = parse_libsvm(real_data / "libsvm" / "australian", 14)
    low, high = rows.amin(0), rows.amax(0)
    single, low32, high32 = (tensor.float().double() for tensor in (rows, low, high))
    scaled = torch.where(rows == low, -1, torch.where(rows == high, 1, 2 * (single - low32) / (high32 - low32) - 1))
    text = "".join(
        f"{int(label):+d} " + "".join(f"{i}:{v:g} " for i, v in enumerate(row, 1) if v) + "\n"
        for label, row in zip(labels.tolist(), scaled.tolist(), strict=True)
    )
    (file,) = data.DATASETS["australian"].files
    assert (hashlib.sha256(text.encode()).hexdigest(),) == file.also_sha256


def test_fashion_mnist():
    real_data = _real_data(*(f"fashion_mnist/{file.name}" for file in data.DATASETS["fashion_mnist"].files))
    loaded = data.load("fashion_mnist", real_data, download=False)
    _check_against_registry(loaded)
    assert loaded.train_x.dtype == loaded.test_x.dtype == torch.float32
    assert loaded.train_x.amin() == 0
    assert loaded.train_x.amax() == 1
    assert loaded.train_y.bincount().tolist() == [6000] * 10
    assert loaded.test_y.bincount().tolist() == [1000] * 10
    assert float(loaded.train_x.mean()) == pytest.approx(0.2860, abs=1e-4)  # the published mean


def test_breast_cancer_is_standardised_by_its_training_rows():
    loaded = data.load("breast_cancer", download=False)
    _check_against_registry(loaded)
    assert loaded.source == "scikit-learn"
    assert loaded.train_x.dtype == loaded.train_y.dtype == torch.float64
    features = loaded.train_x[:, :-1]
    torch.testing.assert_close(features.mean(0), torch.zeros(30, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(features.var(0, correction=0), torch.ones(30, dtype=torch.float64))
    assert loaded.test_x[:, :-1].mean(0).abs().max() > 1e-3
    assert (loaded.train_x[:, -1] == 1).all()
    assert (loaded.test_x[:, -1] == 1).all()
    assert loaded.train_y.sum() + loaded.test_y.sum() == 357


def test_the_seed_chooses_the_split_and_nothing_else_does():
    first = data.load("breast_cancer")
    torch.rand(1)
    again, other = data.load("breast_cancer"), data.load("breast_cancer", seed=1)
    assert torch.equal(first.train_x, again.train_x)
    assert torch.equal(first.test_y, again.test_y)
    assert not torch.equal(first.train_y, other.train_y)


def test_the_split_never_changes():
    """It is part of every reported number."""
    from vprop.lab.data.load import _halves

    assert [half.tolist() for half in _halves(10, 0)] == [[2, 8, 4, 9, 1], [6, 7, 3, 0, 5]]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match=f"seed={seed}: must be from 0 to"):
        data.load("breast_cancer", seed=seed)


def test_breast_cancer_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="breast_cancer needs scikit-learn: pip install scikit-learn"):
        data.load("breast_cancer")
