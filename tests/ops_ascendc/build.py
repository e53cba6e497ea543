# SPDX-License-Identifier: Apache-2.0
"""Builds the simulated kernels: the sources of the operators, unchanged or with one planted fault, as a shared library.

Takes a folder for what it makes. Any process; a library that was built before from the same sources is used again.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.arch.source import ROOT

OPERATORS = ROOT / "ops_ascendc"
KERNELS = (
    Path("gather_selection_kv_cache/op_kernel/gather_selection_kv_cache.cpp"),
    Path("gather_miss_rows/op_kernel/gather_miss_rows.cpp"),
)
HARNESS = Path("harness/tidal_kernels.cpp")
INCLUDES = (
    "harness",
    "sim/include",
    "common/host",
    "common/kernel",
    "gather_selection_kv_cache/op_kernel",
    "gather_miss_rows/op_kernel",
)
# -Wno-unused-parameter: the outputs of an operator that alias its inputs have names and no use
FLAGS = ("-std=c++17", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")
RELEASE = ("-O2",)
QUICK = ("-O0",)
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
COVERED = ("-O0", "--coverage", "-fno-inline")


def compiler() -> str:
    """Return g++; without it nothing here can run."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("g++ is not installed")
    return found


def kernel_sources() -> list[Path]:
    """Return the files that run on a device, from the operators' folder on."""
    folders = ("common/kernel", *(str(kernel.parent) for kernel in KERNELS))
    return sorted(
        path.relative_to(OPERATORS) for folder in folders for path in (OPERATORS / folder).iterdir() if path.is_file()
    )


def build(folder: Path, flags: tuple[str, ...], sources: Path = OPERATORS) -> Path:
    """Return the library, built with the flags from the operators' folder or from a copy of it.

    Raises:
        RuntimeError: the compiler refuses a source; its words are the message.
    """
    return link(folder, flags, sources, [*KERNELS, HARNESS], folder)


def link(folder: Path, flags: tuple[str, ...], sources: Path, changed: list[Path], objects: Path) -> Path:
    """Return the library made of the changed sources, compiled anew, and of what ``build`` left for the others.

    Args:
        folder: what is made here.
        flags: of the compiler.
        sources: where the changed sources are; what they include and is not there is taken from the original.
        changed: paths below ``sources``.
        objects: the folder of an earlier ``build`` with the same flags.

    Raises:
        RuntimeError: the compiler refuses a source; its words are the message.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = _base(flags, sources)

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        _run([*base, "-c", str(sources / source), "-o", str(target)], folder)
        return target

    with ThreadPoolExecutor(2) as workers:
        made = list(workers.map(compiled, changed))
    kept = [objects / f"{source.stem}.o" for source in (*KERNELS, HARNESS) if source not in changed]
    library = folder / "libtidal_kernels.so"
    _run([*base, "-shared", *map(str, [*made, *kept]), "-o", str(library)], folder)
    return library


def precompiled(folder: Path, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Compile what stands for CANN's header, which is most of a kernel's text, and return flags that make use of it.

    Args:
        folder: what is made here.
        flags: of the compiler; those that come back have them, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header = folder / "kernel_operator_once.h"
    header.write_text('#include "kernel_operator.h"\n')
    _run([*_base(flags, OPERATORS), "-x", "c++-header", str(header), "-o", f"{header}.gch"], folder)
    return (*flags, "-include", str(header))


def _base(flags: tuple[str, ...], sources: Path) -> list[str]:
    roots = dict.fromkeys((sources, OPERATORS))
    return [compiler(), *FLAGS, *flags, *(f"-I{root / include}" for root in roots for include in INCLUDES)]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
