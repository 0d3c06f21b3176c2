"""Compiles the CPU kernels while a wheel is built, also an editable one.

One library for each instruction set comes out of ``src/vprop/kernels/cpu.c``, and lies beside it. It is plain C that
Python does not appear in, so one wheel serves every version of Python. Without a working compiler (``$CC``, else
``cc``, ``gcc`` or ``clang``), or with ``VPROP_NO_KERNELS=1`` in the environment, the wheel is pure Python: the library
then does the same work with torch operations.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/vprop/kernels/cpu.c")
# No contraction: a sample must be taken out as exactly as it was put in. No -ffast-math: NaN must be found.
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
X86_64 = {
    "default": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
}
ELSEWHERE: dict[str, list[str]] = {"default": []}


class KernelsBuildHook(BuildHookInterface):
    """Adds the compiled libraries to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if self.target_name != "wheel":
            return
        built = build(Path(self.root) / SOURCE, say=self.app.display_warning)
        if not built:
            return
        build_data["artifacts"] += [f"/{path.relative_to(self.root).as_posix()}" for path in built]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def build(source: Path, say: Callable[[str], None]) -> list[Path]:
    """The libraries beside ``source``, as far as they can be compiled; those of an earlier build are gone."""
    for old in source.parent.glob("_cpu_*.so"):
        old.unlink()
    if os.environ.get("VPROP_NO_KERNELS", "0") not in ("", "0"):
        say("VPROP_NO_KERNELS is set: vprop is built without compiled CPU kernels.")
        return []
    for compiler in compilers():
        built = []
        for name, options in variants().items():
            target = source.with_name(f"_cpu_{name}.so")
            error = compile_library(compiler, source, target, options)
            if error is None:
                built.append(target)
            elif built:  # an older compiler does not know every instruction set
                say(f"The CPU kernels for {name} could not be compiled, and are left out: {error}")
            else:
                break
        if built:
            return built
    say("No working C compiler: vprop is built without compiled CPU kernels, and will be slower on the CPU.")
    return []


def compilers() -> list[list[str]]:
    """Commands to try; only ``$CC`` where it is set."""
    return [
        shlex.split(command) for command in ([os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"])
    ]


def variants() -> dict[str, list[str]]:
    """Compiler options by instruction set, the one that always works first."""
    return X86_64 if platform_tag().endswith(("x86_64", "amd64")) else ELSEWHERE


def compile_library(compiler: list[str], source: Path, target: Path, options: list[str]) -> str | None:
    """What went wrong, or ``None``. The target appears at once: a running program may have the old one open."""
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    if platform_tag().startswith("macosx_"):
        options = [*options, f"-mmacosx-version-min={oldest_macos()}"]
    command = [*compiler, *FLAGS, *options, str(source), "-o", str(partial), "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if result.returncode != 0:
            return result.stderr.strip()[-500:] or f"exit status {result.returncode}"
        if not partial.exists():
            return f"{compiler[0]} left no file"
        os.replace(partial, target)
    except OSError as error:
        return str(error)
    finally:
        partial.unlink(missing_ok=True)
    return None


def platform_tag() -> str:
    """Of the machine that compiles; a fat Python on macOS still compiles for one processor."""
    name = sysconfig.get_platform()
    if name.startswith("macosx-"):
        name = f"macosx-{oldest_macos()}-{platform.machine()}"
    return name.replace("-", "_").replace(".", "_")


def oldest_macos() -> str:
    """The version that ``$MACOSX_DEPLOYMENT_TARGET``, or else Python, asks for, as pip knows it: from 11 on N.0."""
    wanted = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or sysconfig.get_platform().split("-")[1]
    major, minor = (int(number) for number in [*wanted.split("."), "0"][:2])
    if major >= 11:
        return f"{major}.0"
    return "11.0" if platform.machine() == "arm64" else f"{major}.{minor}"  # no older system runs on these processors
