# SPDX-License-Identifier: Apache-2.0
"""The compiled operators: finding the native module, and calling it with the best path of this processor.

Arguments are checked by the public operators. Any thread; the interpreter is released during a call.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tidal_connector.config import native_library_path
from tidal_connector.errors import NativeOpMissing

_MODULE = "tidal_connector._native"


class CopyPath(enum.IntEnum):
    """Ways to copy a row, as ``csrc/include/tidal/copy.h`` numbers them."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2


@cache
def load() -> ModuleType:
    """Return the native module: the one that ``TIDAL_NATIVE`` names, else the installed one.

    Raises:
        NativeOpMissing: there is none, or it cannot be loaded.
    """
    path = native_library_path()
    try:
        if path is None:
            return importlib.import_module(_MODULE)
        spec = importlib.util.spec_from_file_location(_MODULE, path)
        if spec is None or spec.loader is None:
            raise ImportError("not an extension module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        where = f"TIDAL_NATIVE = {path!r}" if path else _MODULE
        raise NativeOpMissing(f"{where} cannot be loaded: {error}; build it with: pip install .") from error
    return module


def paths() -> list[CopyPath]:
    """Return the copy paths that this processor has.

    Raises:
        NativeOpMissing: the native module is not there.
    """
    module = load()
    return [path for path in CopyPath if module.has_path(path)]


def copy_rows(
    source: npt.NDArray[np.uint8],
    source_rows: npt.NDArray[np.int64],
    destination: npt.NDArray[np.uint8],
    destination_rows: npt.NDArray[np.int64],
    threads: int = 1,
    path: CopyPath | None = None,
) -> int:
    """Do what ``reference.copy_rows`` does, on one copy path (None: the best).

    Raises:
        NativeOpMissing: the native module is not there.
    """
    module = load()
    return int(module.copy_rows(source, source_rows, destination, destination_rows, threads, _number(module, path)))


def gather_rows(
    pool: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
    threads: int = 1,
    path: CopyPath | None = None,
) -> int:
    """Do what ``reference.gather_rows`` does, on one copy path (None: the best).

    Raises:
        NativeOpMissing: the native module is not there.
    """
    module = load()
    return int(module.copy_rows(pool, slots, out[np.newaxis], None, threads, _number(module, path)))


def copy_stream(threads: int, path: CopyPath | None = None) -> Any:
    """Return the native side of a ``CopyStream``, on one copy path (None: the best).

    Raises:
        NativeOpMissing: the native module is not there.
    """
    module = load()
    return module.CopyStream(threads, _number(module, path))


def move_set(sources: list[npt.NDArray[np.uint8]], destinations: list[npt.NDArray[np.uint8]]) -> Any:
    """Return the native side of a ``MoveSet``; arrays are ``[pages, page_tokens, row_bytes]``.

    Raises:
        NativeOpMissing: the native module is not there.
    """
    return load().MoveSet(sources, destinations)


def _number(module: ModuleType, path: CopyPath | None) -> int:
    return int(module.best_path() if path is None else path)
