"""Which data sets there are, and where they are looked for."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from tests.lab.data.few_rows import TEST, write
from vprop.lab import data
from vprop.lab.data import DataError, DataNotFound, WrongChecksum


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(DataError, match=r"Unknown data set 'a2a'\. Must be one of: a1a, australian, breast_cancer, f"):
        data.load("a2a")


def test_every_file_has_a_checksum_and_a_public_address():
    from vprop.lab.data.registry import _SPECS

    files = [file for entry in _SPECS for file in entry.files]
    assert len(files) == 7
    for file in files:
        assert file.url.startswith("http")
        assert file.url.endswith("/" + file.name)
        assert all(len(bytes.fromhex(digest)) == 32 for digest in (file.sha256, *file.also_sha256))


def test_every_data_set_has_a_loader():
    from vprop.lab.data.load import _LOADERS

    assert set(_LOADERS) == set(data.DATASETS)


@pytest.mark.parametrize("below", ["libsvm", "."])
def test_data_dir_holds_the_files_directly_or_below_their_folder(tmp_path, tiny, below):
    write(tmp_path / "given" / below)
    loaded = data.load("a1a", tmp_path / "given", download=False)
    assert loaded.source == "file"
    assert loaded.train_x.shape == (2, 123)
    assert loaded.train_x.dtype == loaded.train_y.dtype == torch.float64
    assert loaded.train_x[0].nonzero().flatten().tolist() == [0, 2]
    assert loaded.train_y.tolist() == [1.0, 0.0]
    assert loaded.test_y.tolist() == [0.0]


def test_order_of_the_places(tmp_path, tiny, cache, monkeypatch):
    folders = {name: write(tmp_path / name) for name in ("given", "variable")}
    monkeypatch.setenv("VPROP_DATA", str(folders["variable"]))
    write(cache / "libsvm")
    assert data.fetch("a1a", folders["given"]).paths[0] == folders["given"] / "a1a"
    assert data.fetch("a1a").paths[0] == folders["variable"] / "a1a"
    monkeypatch.setenv("VPROP_DATA", str(tmp_path / "missing"))
    located = data.fetch("a1a")
    assert located.paths == (cache / "libsvm" / "a1a", cache / "libsvm" / "a1a.t")
    assert located.source == "cache"


def test_a_place_may_hold_some_of_the_files(tmp_path, tiny, cache):
    """The source is then the least direct one."""
    folder = write(tmp_path / "given")
    write(cache)
    (folder / "a1a.t").unlink()
    located = data.fetch("a1a", folder, download=False)
    assert located.paths == (folder / "a1a", cache / "a1a.t")
    assert located.source == "cache"


def test_a_tilde_is_the_home_folder(tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "given")
    assert data.fetch("a1a", "~/given").paths[0] == tmp_path / "given" / "a1a"
    monkeypatch.setenv("VPROP_DATA", "~/given")
    assert data.fetch("a1a").paths[0] == tmp_path / "given" / "a1a"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_an_absolute_xdg_folder_the_cache_is_in_the_home_folder(tmp_path, monkeypatch, value):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data.cache_dir() == tmp_path / ".cache" / "vprop"


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(DataError, match=r"no home folder for the data cache. Set XDG_CACHE_HOME"):
        data.cache_dir()


@pytest.mark.parametrize("name", ["a1a", "breast_cancer"])
def test_a_data_dir_that_is_not_there_is_an_error_of_its_own(tmp_path, name):
    missing = tmp_path / "missing"
    with pytest.raises(DataError, match=r"data_dir='.*missing' does not exist\. Give --data-dir an existing") as info:
        data.load(name, missing)
    assert not isinstance(info.value, DataNotFound)
    missing.write_text("")
    with pytest.raises(DataError, match=r"data_dir='.*missing' is not a folder\. Give --data-dir"):
        data.load(name, missing)


def test_a_wrong_checksum_in_a_folder(tmp_path, tiny):
    folder = write(tmp_path / "given", test=TEST[:-1])
    with pytest.raises(WrongChecksum) as info:
        data.load("a1a", folder)
    found = hashlib.sha256(TEST[:-1]).hexdigest()
    assert str(info.value) == (
        f"{folder / 'a1a.t'} has the wrong checksum: expected sha256 {tiny.files[1].sha256}, found {found}. "
        "Remove or replace it; the published file is at http://127.0.0.1:1/a1a.t."
    )
    assert info.value.path == folder / "a1a.t"


def test_a_wrong_checksum_in_the_cache(tiny, cache):
    write(cache, train=b"")
    with pytest.raises(WrongChecksum, match="Remove or replace it; it will be downloaded again"):
        data.load("a1a")


def test_another_edition_of_a_file(tmp_path, tiny, monkeypatch):
    file = dataclasses.replace(tiny.files[0], sha256="0" * 64, also_sha256=(tiny.files[0].sha256,))
    monkeypatch.setitem(data.DATASETS, "a1a", dataclasses.replace(tiny, files=(file, tiny.files[1])))
    assert data.load("a1a", write(tmp_path / "given")).source == "file"


def test_a_file_that_cannot_be_read(tmp_path, tiny, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied")

    folder = write(tmp_path / "given")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"Cannot read .*a1a: Permission denied. Make it readable, or remove it."):
        data.load("a1a", folder)


def test_not_found_names_the_places_and_the_remedy(tmp_path, tiny, cache, monkeypatch):
    with pytest.raises(DataNotFound) as info:
        data.load("a1a", download=False)
    assert str(info.value) == (
        "Data set 'a1a' not found: no file a1a. Looked in: --data-dir (not given), $VPROP_DATA (not set), "
        f"the cache {cache} (no such folder). "
        "The download from http://127.0.0.1:1/a1a was not tried (download=False). "
        "Get the file from there and put it into a folder given with --data-dir or $VPROP_DATA, "
        "or use breast_cancer, which ships with scikit-learn."
    )
    monkeypatch.setenv("VPROP_DATA", str(tmp_path / "variable"))
    (tmp_path / "given").mkdir()
    cache.mkdir(parents=True)
    with pytest.raises(DataNotFound) as info:
        data.load("a1a", tmp_path / "given", download=False)
    assert (
        f"Looked in: --data-dir {tmp_path / 'given'}, $VPROP_DATA {tmp_path / 'variable'} (no such folder), "
        f"the cache {cache}. " in str(info.value)
    )
