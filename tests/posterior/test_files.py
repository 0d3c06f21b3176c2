"""Posteriors on disk, whatever happens to the disk: interrupted writes, damaged files, files of other kinds."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import vprop
from vprop import GaussianPrior
from vprop.posterior import DiagonalPosterior, FullPosterior


def small_posterior(value=1.0, model=None, **rest):
    model = nn.Linear(2, 1, bias=False) if model is None else model
    means = {name: torch.full_like(p, value).detach() for name, p in model.named_parameters()}
    variances = {name: torch.full_like(p, 0.5).detach() for name, p in model.named_parameters()}
    prior = GaussianPrior({name: torch.tensor(0.0) for name in means}, {name: torch.tensor(1.0) for name in means})
    return DiagonalPosterior(model, means, variances, prior, ess=10.0, **rest)


def load(path, model=None):
    return vprop.load_posterior(path, nn.Linear(2, 1, bias=False) if model is None else model)


# -- interrupted writes ------------------------------------------------------------------------------------------


def in_place(save_file):
    """``save_file`` as old versions of safetensors have it: what was in the file is lost from the start."""

    def save(tensors, filename, metadata=None):
        save_file(tensors, f"{filename}.whole", metadata=metadata)
        content = Path(f"{filename}.whole").read_bytes()
        os.unlink(f"{filename}.whole")
        with open(filename, "wb", buffering=0) as file:
            for start in range(0, len(content), 1 << 16):
                file.write(content[start : start + (1 << 16)])

    return save


def large_posterior(value):
    return small_posterior(float(value), nn.Linear(256, 256))


def save_for_ever(path, first, pipe):
    """Save posteriors with the values first, first + 1, …, and write to the pipe which have been saved."""
    for value in itertools.count(first):
        large_posterior(value).save(path)
        os.write(pipe, f"{value}\n".encode())


def check_kills(path, kills):
    """Kill a process that saves at random moments: the file is what was saved last, or just not yet reported."""
    import safetensors.torch

    safetensors.torch.save_file = in_place(safetensors.torch.save_file)
    moments, model, last = random.Random(0), nn.Linear(256, 256), 0
    large_posterior(0).save(path)
    for _ in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_for_ever(path, last + 1, writing)
        os.close(writing)
        time.sleep(0.1 * moments.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reading) as file:
            reported = [last, *map(int, file.read().split())][-1]
        (last,) = {int(value) for mean in load(path, model).mean.values() for value in mean.unique()}
        assert last in (reported, reported + 1)


def run_check_kills(path, kills):
    """In a process of its own, which has one thread and so may fork."""
    script = f"from tests.posterior.test_files import check_kills; check_kills({str(path)!r}, {kills})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no processes to fork and kill")
def test_killed_while_saving(tmp_path):
    run_check_kills(tmp_path / "posterior.safetensors", kills=15)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no processes to fork and kill")
def test_killed_many_times_while_saving(tmp_path):
    run_check_kills(tmp_path / "posterior.safetensors", kills=300)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_while_saving_leaves_the_old_file_alone(tmp_path, monkeypatch, error):
    import safetensors.torch

    path = tmp_path / "posterior.safetensors"
    small_posterior(1.0).save(path)

    def breaks_off(tensors, filename, metadata=None):
        Path(filename).write_bytes(b"half a file")
        raise error("enough")

    monkeypatch.setattr(safetensors.torch, "save_file", breaks_off)
    with pytest.raises(error, match="enough"):
        small_posterior(2.0).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["posterior.safetensors"]
    assert load(path).mean["weight"].tolist() == [[1.0, 1.0]]


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    """The limit on the size of a file stands in for the disk: the system refuses to write more."""
    resource = pytest.importorskip("resource", reason="the system cannot limit the size of files")
    path = tmp_path / "posterior.safetensors"
    posterior = large_posterior(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            posterior.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_file_has_the_mode_of_any_new_file(tmp_path):
    small_posterior().save(tmp_path / "posterior.safetensors")
    (tmp_path / "any").touch()
    assert (tmp_path / "posterior.safetensors").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_tensors_that_share_memory_are_saved(tmp_path):
    posterior = small_posterior()
    shared = posterior.mean["weight"]
    posterior.prior.mean["weight"] = shared  # a posterior as its own prior
    posterior.save(tmp_path / "posterior.safetensors")
    assert torch.equal(load(tmp_path / "posterior.safetensors").prior.mean["weight"], shared)


# -- damaged files -----------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found(tmp_path):
    """In the header, its padding, the settings, the checksum itself and the tensors."""
    path = tmp_path / "posterior.safetensors"
    small_posterior().save(path)
    whole, model = path.read_bytes(), nn.Linear(2, 1, bias=False)
    assert len(whole) < 2000
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=str(path)):
            vprop.load_posterior(path, model)
    path.write_bytes(whole)
    vprop.load_posterior(path, model)


@pytest.mark.slow
def test_each_bit_of_every_byte(tmp_path):
    path = tmp_path / "posterior.safetensors"
    small_posterior().save(path)
    whole, model = path.read_bytes(), nn.Linear(2, 1, bias=False)
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
            with pytest.raises(ValueError, match=str(path)):
                vprop.load_posterior(path, model)


def test_what_is_wrong_with_a_damaged_file_is_said(tmp_path):
    path = tmp_path / "posterior.safetensors"
    small_posterior().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"its checksum is wrong\. .*take another copy of it"):
        load(path)
    path.write_bytes(whole.replace(b'"checksum"', b'"chesckum"'))
    with pytest.raises(ValueError, match=r"unknown entries \['chesckum'\]"):
        load(path)


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1])
def test_a_file_that_was_cut_short(tmp_path, length):
    path = tmp_path / "posterior.safetensors"
    small_posterior().save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=rf"{path}: it cannot be read as a safetensors file .* cut short"):
        load(path)


def test_bytes_after_the_end(tmp_path):
    path = tmp_path / "posterior.safetensors"
    small_posterior().save(path)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=str(path)):
        load(path)


def test_files_of_other_kinds(tmp_path):
    import safetensors.torch

    path = tmp_path / "posterior.safetensors"
    for content in (b"no such thing", b"\x80\x02", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path}: it cannot be read as a safetensors file"):
            load(path)
    safetensors.torch.save_file({"w": torch.ones(2)}, path, metadata={"format": "pt", "author": "another"})
    with pytest.raises(ValueError, match=rf"{path}: not a posterior of this library \(format 'pt'"):
        load(path)
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "missing")):
        load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        small_posterior().save(tmp_path)


# -- files of old versions, which have no checksum ---------------------------------------------------------------


def old_file(path, tensors=None, settings=None):
    import safetensors.torch

    tensors = {
        "mean/weight": torch.ones(1, 2),
        "variance/weight": torch.full((1, 2), 0.5),
        "prior_mean/weight": torch.tensor(0.0),
        "prior_precision/weight": torch.tensor(1.0),
    } | (tensors or {})
    everything = {"structure": "diagonal", "ess": 10.0, "seed": 0, "likelihood": None, "order": ["weight"]}
    text = json.dumps(everything | {"noise_variance": 1.0} | (settings or {}))
    metadata = {"format": "vprop-posterior-1", "settings": text}
    safetensors.torch.save_file({k: t for k, t in tensors.items() if t is not None}, path, metadata=metadata)


def test_a_file_without_a_checksum_is_read(tmp_path):
    old_file(tmp_path / "old")
    posterior, new = load(tmp_path / "old"), small_posterior()
    assert torch.equal(posterior.mean["weight"], new.mean["weight"])
    assert torch.equal(posterior.sample(seed=1)["weight"], new.sample(seed=1)["weight"])


def test_a_noise_variance_of_classes_in_an_old_file_means_nothing(tmp_path):
    old_file(tmp_path / "old", settings={"likelihood": "categorical", "noise_variance": 0.5})
    assert load(tmp_path / "old").predict(torch.ones(3, 2)).probs.shape == (3, 1)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"tensors": {"variance/weight": None}}, r"lacks tensors of \['variance'\]"),
        ({"tensors": {"mean/weight": None}}, r"lacks tensors"),
        ({"settings": {"structure": "full"}}, r"lacks tensors of \['matrix/precision'\]"),
        ({"settings": {"structure": None}}, r"its settings are not complete"),
        ({"settings": {"order": ["bias"]}}, r"its order is not that of its parameters"),
        ({"settings": {"order": None}}, r"its order is not that of its parameters"),
        ({"settings": {"structure": "low_rank"}}, r"unknown structure 'low_rank': .* Update vprop"),
    ],
)
def test_a_file_without_a_checksum_that_lacks_something(tmp_path, changes, pattern):
    old_file(tmp_path / "old", **changes)
    with pytest.raises(ValueError, match=rf"{tmp_path / 'old'}: .*{pattern}"):
        load(tmp_path / "old")


# -- other models ------------------------------------------------------------------------------------------------


def with_norm(norm):
    return nn.Sequential(nn.Linear(2, 3), norm(3))


def test_buffers_must_fit_in_both_directions(tmp_path):
    path = tmp_path / "posterior.safetensors"
    small_posterior(model=with_norm(nn.BatchNorm1d)).save(path)
    load(path, with_norm(nn.BatchNorm1d))
    with pytest.raises(ValueError, match=rf"{path} .* it has the buffer '1\.num_batches_tracked' .* no such buffer"):
        load(path, with_norm(nn.LayerNorm))
    small_posterior(model=with_norm(nn.LayerNorm)).save(path)
    with pytest.raises(ValueError, match=rf"{path} .* the model has a buffer '1\.running_mean' of shape \(3,\), the"):
        load(path, with_norm(nn.BatchNorm1d))


class WithBuffers(nn.Module):
    """A weight, a table of some size, and a mask that is made when it is needed."""

    def __init__(self, table=2, mask=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 2))
        self.register_buffer("table", torch.zeros(table))
        self.register_buffer("mask", None if mask is None else torch.zeros(mask), persistent=False)


def test_shapes_of_buffers_must_fit(tmp_path):
    path = tmp_path / "posterior.safetensors"
    small_posterior(model=WithBuffers(2)).save(path)
    with pytest.raises(ValueError, match=r"it has the buffer 'table' of shape \(2,\), the model has \(3,\)"):
        load(path, WithBuffers(3))


@pytest.mark.parametrize(("saved", "loaded"), [(None, 4), (4, None), (4, 5)])
def test_buffers_that_no_state_dict_has_may_differ(tmp_path, saved, loaded):
    path = tmp_path / "posterior.safetensors"
    small_posterior(model=WithBuffers(mask=saved)).save(path)
    load(path, WithBuffers(mask=loaded))


@pytest.mark.parametrize("model", [None, nn.Linear, "model.pt", [nn.Linear(2, 1)]], ids=str)
def test_what_is_no_model(tmp_path, model):
    small_posterior().save(tmp_path / "posterior.safetensors")
    with pytest.raises(TypeError, match=r"load_posterior\(path, model\): got .*, must be a torch\.nn\.Module\. Pass "):
        vprop.load_posterior(tmp_path / "posterior.safetensors", model)


@pytest.mark.parametrize("path", [None, 7, ""])
def test_what_is_no_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"save\(path\): got .* must be the name of a file"):
        small_posterior().save(path)
    with pytest.raises(TypeError, match=r"load_posterior\(path, model\): got .* must be the name of a file"):
        load(path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_posterior_has_a_checksum_too(tmp_path):
    model = nn.Linear(2, 1, bias=False)
    prior = GaussianPrior({"weight": torch.tensor(0.0)}, {"weight": torch.tensor(1.0)})
    precision = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    path = tmp_path / "posterior.safetensors"
    FullPosterior(model, {"weight": torch.zeros(1, 2)}, precision, prior, ess=10.0).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="its checksum is wrong"):
        load(path)
