"""Compiling the CPU kernels, with and without a compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from vprop.kernels import cpu
from vprop.noise import Draw
from vprop.noise import normal as portable_normal

ROOT = Path(__file__).parents[2]
SOURCE = Path("src/vprop/kernels/cpu.c")
has_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
QUICKLY = "-O0"
"""An option for libraries that no test computes with: compiling them takes a quarter of the time."""


class Hook:
    """As much of hatchling's interface as the hook uses."""

    def __init__(self, root: Path, target_name: str) -> None:
        self.root, self.target_name, self.said = str(root), target_name, []
        self.app = types.SimpleNamespace(display_warning=self.said.append)


@pytest.fixture
def build(monkeypatch, tmp_path):
    """The hook's module with a tree of its own, without any of the environment's settings."""
    for name in ("CC", "VPROP_NO_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    parents = ["hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"]
    for name in (*parents, f"{parents[-1]}.interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[f"{parents[-1]}.interface"].BuildHookInterface = Hook
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    shutil.copy(ROOT / SOURCE, tmp_path / SOURCE)
    module.root = tmp_path
    return module


def run(build, target="wheel"):
    """What the hook tells hatchling, and what it says."""
    hook, data = build.KernelsBuildHook(build.root, target), {"artifacts": [], "pure_python": True, "tag": None}
    hook.initialize("standard", data)
    return data, hook.said


def libraries(build):
    return sorted(path.name for path in (build.root / SOURCE).parent.iterdir() if path.name != "cpu.c")


@has_compiler
def test_a_wheel_gets_what_is_compiled(build):
    data, said = run(build)
    assert said == []
    assert "/src/vprop/kernels/_cpu_default.so" in data["artifacts"]
    assert sorted(Path(name).name for name in data["artifacts"]) == libraries(build)
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-")
    out = torch.empty(50)
    library = cpu.Library((build.root / SOURCE).with_name("_cpu_default.so"))
    library.normal(out, 3, seed=1, parameter=2, step=3, source=4)
    torch.testing.assert_close(out, portable_normal(3, 53, Draw(1, 2, 3, 4)), rtol=2e-6, atol=2e-6)


@has_compiler
def test_plain_c_does_the_same(build):
    """What other processors run: the same normals, whatever the vectors are made of."""
    source = build.root / SOURCE
    target = source.with_name("portable.so")
    assert build.compile_library(build.compilers()[0], source, target, ["-DVPROP_PORTABLE", "-Werror", "-Wall"]) is None
    out = torch.empty(5000)
    cpu.Library(target).normal(out, 3, seed=2**40, parameter=2, step=3, source=4)
    torch.testing.assert_close(out, portable_normal(3, 5003, Draw(2**40, 2, 3, 4)), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("python", "machine", "target", "tag"),
    [
        ("linux-x86_64", "x86_64", None, "linux_x86_64"),
        ("macosx-10.13-universal2", "arm64", None, "macosx_11_0_arm64"),  # pip knows no older system there
        ("macosx-10.13-universal2", "x86_64", None, "macosx_10_13_x86_64"),
        ("macosx-14.0-arm64", "arm64", "13.3", "macosx_13_0_arm64"),
        ("macosx-14-arm64", "arm64", None, "macosx_14_0_arm64"),
    ],
)
def test_tags_that_pip_installs(build, monkeypatch, python, machine, target, tag):
    monkeypatch.setattr(build.sysconfig, "get_platform", lambda: python)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.delenv("MACOSX_DEPLOYMENT_TARGET", raising=False)
    if target is not None:
        monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", target)
    assert build.platform_tag() == tag


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler --option", "true"])
def test_without_a_compiler_the_wheel_is_pure(build, monkeypatch, compiler):
    (build.root / SOURCE).with_name("_cpu_default.so").write_text("of an earlier build")
    monkeypatch.setenv("CC", compiler)
    data, said = run(build)
    assert data == {"artifacts": [], "pure_python": True, "tag": None}
    assert libraries(build) == []
    assert len(said) == 1
    assert "No working C compiler" in said[0]


@has_compiler
def test_an_unknown_instruction_set_is_left_out(build, monkeypatch):
    monkeypatch.setattr(build, "variants", lambda: {"default": [QUICKLY], "avx9": ["-march=no-such-processor"]})
    data, said = run(build)
    assert libraries(build) == ["_cpu_default.so"]
    assert len(data["artifacts"]) == 1
    assert "avx9 could not be compiled" in said[0]


def test_the_environment_can_forbid_it(build, monkeypatch):
    monkeypatch.setenv("VPROP_NO_KERNELS", "1")
    data, said = run(build)
    assert data["pure_python"] is True
    assert libraries(build) == []
    assert "VPROP_NO_KERNELS" in said[0]


def test_a_source_distribution_is_left_alone(build):
    data, _ = run(build, target="sdist")
    assert data["artifacts"] == []
    assert libraries(build) == []


@has_compiler
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_a_real_wheel(tmp_path):
    """From the source distribution, as ``python -m build`` makes it; but with a compiler that takes less time."""
    compiler = tmp_path / "compiler"
    found = next(filter(shutil.which, ("cc", "gcc", "clang")))
    compiler.write_text(f'#!/bin/sh\nexec {found} "$@" {QUICKLY}\n')
    compiler.chmod(0o755)
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "out", "dist", "docs", "tests", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignored)
    shutil.copy(ROOT / ".gitignore", tree)

    def hatchling(folder, target):
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(tmp_path / "dist")]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ | {"CC": str(compiler)})

    hatchling(tree, "sdist")
    archive = next((tmp_path / "dist").glob("*.tar.gz"))
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    hatchling(next((tmp_path / "unpacked").iterdir()), "wheel")
    wheel = next((tmp_path / "dist").glob("*.whl"))
    assert "-py3-none-" in wheel.name
    assert "any" not in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "vprop/kernels/_cpu_default.so" in names


@has_compiler
@pytest.mark.parametrize("change", [("return 5 +", "return 1 +"), ("int64_t layout(void)", "int64_t other(void)")])
def test_a_library_of_other_sources_is_refused(build, change, monkeypatch):
    """It would read the structures wrongly, and nobody would see it."""
    source = build.root / SOURCE
    source.write_text(source.read_text().replace(*change))
    monkeypatch.setattr(build, "variants", lambda: {"default": [QUICKLY]})
    run(build)
    with pytest.raises(RuntimeError, match=r"_cpu_default\.so was compiled from another version of vprop's sources"):
        cpu.Library(source.with_name("_cpu_default.so"))
