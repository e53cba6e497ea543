# SPDX-License-Identifier: Apache-2.0
"""Build a stand-in for a library that is not on this machine; a second call with the same sources takes the first's."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "standins"
ASCENDCL = ("ascendcl.cpp", "ascendcl_memory.cpp", "second_mapping.cpp")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-fvisibility=default", "-Wall", "-Wextra", "-Werror")


def build(soname: str, sources: Sequence[str | Path], defines: Sequence[str] = (), flags: Sequence[str] = ()) -> Path:
    """Return the library's file, ``<soname>`` in a folder of its own.

    Args:
        soname: what the library calls itself.
        sources: files; relative ones lie beside this one.
        defines: preprocessor names, to leave parts out.
        flags: further arguments of the compiler, such as include folders and libraries.

    Raises:
        RuntimeError: the compiler refuses; the text is its own.
    """
    files = [HERE / source for source in sources]
    digest = hashlib.blake2b(repr((soname, FLAGS, flags, defines)).encode(), digest_size=8)
    for file in sorted({*files, *HERE.glob("*.h")}):
        digest.update(file.name.encode() + file.read_bytes())
    folder = BUILT / digest.hexdigest()
    target = folder / soname
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / soname
        names = [f"-D{name}" for name in defines]
        command = ["g++", *FLAGS, *names, f"-Wl,-soname,{soname}", "-o", str(made), *map(str, files), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{soname} was not built:\n{done.stderr}")
        os.replace(made, target)  # whole or not at all: another run may build the same
    return target


def ascendcl(*defines: str, sources: Sequence[str | Path] = (), flags: Sequence[str] = ()) -> Path:
    """Return the stand-in for libascendcl, with further parts of it.

    Args:
        defines: ``STANDIN_WITHOUT_...`` names, for versions that lack functions.
        sources: further parts.
        flags: further arguments of the compiler.
    """
    return build("libascendcl.so", (*ASCENDCL, *sources), defines, flags)
