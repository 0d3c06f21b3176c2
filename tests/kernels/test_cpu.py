"""What only the CPU's kernels have: threads, instruction sets, and doing without them."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

from tests.kernels.checks import NOISE, STEP, compiled, problem
from vprop.kernels import cpu
from vprop.kernels.table import TILE, Role

pytestmark = pytest.mark.skipif(cpu._library() is None, reason="built without compiled kernels")

LIBRARIES = compiled()
each_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES.keys())


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@each_library
def test_threads_change_no_bit(library, threads):
    given = problem([(50, 1000), (3,), (300_003,), (0,), (5, 7)], layouts=("contiguous", "permuted"), momentum=True)
    step = replace(STEP, clip_radius=1.0)
    results = []
    for number in (1, 2, 3, 2):
        threads(number)
        ours = given.copy()
        table = ours.table()
        library.perturb(table, NOISE, 1)
        library.step(table, step)
        normals = library.normals(3, 400_000)
        results.append([*itertools.chain(*ours.roles.values()), table.clipped, normals])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_shares_are_of_equal_cost():
    sizes = [10] * 500 + [TILE * 1000] + [0] * 7 + [3]
    shares = cpu._divided(sizes, 2)
    assert len(shares) > 2
    assert shares[0][0] == 0
    assert shares[-1][1] == 500 + 1000 + 1
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    full = [high - max(low, 500) for low, high in shares]
    assert max(full) - min(full) < 1000 / len(shares)
    assert cpu._divided([5, 7], 4) == [(0, 2)]
    assert cpu._divided([0], 4) == [(0, 0)]


def test_every_call_is_made_and_an_error_is_seen(threads):
    threads(2)
    done = []

    def fails():
        raise ValueError("from a call")

    with pytest.raises(ValueError, match="from a call"):
        cpu._in_parallel([fails] * 2)
    cpu._in_parallel([lambda: done.append(1)] * 5)
    assert done == [1] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_its_own_threads(threads):
    threads(2)
    library = next(iter(LIBRARIES.values()))
    expected = library.normals(0, 400_000)[::1000].tolist()
    child = os.fork()
    if child == 0:  # where torch's own threads are missing, too: no torch operation that uses them
        os._exit(0 if library.normals(0, 400_000)[::1000].tolist() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_environment_can_forbid_it(monkeypatch):
    monkeypatch.setenv("VPROP_NO_KERNELS", "1")
    assert not cpu.available()
    monkeypatch.setenv("VPROP_NO_KERNELS", "0")
    assert cpu.available()


def test_without_a_library(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "path_of", lambda name: tmp_path / name)
    cpu._library.cache_clear()
    try:
        assert not cpu.available()
        with pytest.raises(RuntimeError, match="without its compiled CPU kernels"):
            cpu.perturb(problem([(3,)]).table(), NOISE, 1)
    finally:
        cpu._library.cache_clear()


def test_the_chosen_library(threads):
    given = problem([(33,)])
    one, other = given.copy(), given.copy()
    cpu.perturb(one.table(), NOISE, 1)
    cpu.step(one.table(), STEP)
    best = next(iter(LIBRARIES.values()))
    best.perturb(other.table(), NOISE, 1)
    best.step(other.table(), STEP)
    assert torch.equal(one.roles[Role.WEIGHT][0], other.roles[Role.WEIGHT][0])
    out = torch.empty(9)
    cpu.normal(out, 1, seed=5, parameter=2, step=9, source=0)
    assert torch.equal(out, best.normals(1, 10))
