# SPDX-License-Identifier: Apache-2.0
"""Finding libascendcl at run time: nothing here needs CANN at build time, and without it nothing but a clear error.

A copy that the process has loaded already (``torch_npu`` does) is taken before any other: two runtimes in one process
would not know of each other's devices, contexts and registrations. Keeps no state; any thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from tidal_connector.config import ascend_homes, ascendcl_path
from tidal_connector.errors import DeviceMissing

SONAME = "libascendcl.so"


def load(path: str | None = None) -> tuple[ctypes.CDLL, str]:
    """Load the library and return it with the path that it came from.

    Args:
        path: the file to load, and no other; None takes ``TIDAL_ASCENDCL``, and where that is not set searches: what
            this process has loaded, the toolkit of ``ASCEND_HOME_PATH`` and ``ASCEND_TOOLKIT_HOME``, the loader's path.

    Raises:
        DeviceMissing: none can be loaded; the text names each place and why not.
    """
    tried = []
    for where, name, mode in _candidates(path):
        try:
            library = ctypes.CDLL(name, mode=mode)
        except OSError as error:
            tried.append(f"{where}: {' '.join(str(error).split())}")
            continue
        return library, name if os.path.isabs(name) else _origin()
    raise DeviceMissing(
        f"{SONAME} cannot be loaded; tried {'; '.join(tried)}; source the toolkit's set_env.sh before the engine "
        "starts, or name the file in TIDAL_ASCENDCL"
    )


def _candidates(path: str | None) -> Iterator[tuple[str, str, int]]:
    named, where = path, "the path that was given"
    if named is None:
        named, where = ascendcl_path(), "TIDAL_ASCENDCL"
    if named is not None:
        yield where, os.path.abspath(named), os.RTLD_NOW
        return
    yield "this process", SONAME, os.RTLD_NOW | os.RTLD_NOLOAD
    for variable, home in ascend_homes():
        for folder in ("lib64", f"{platform.machine()}-linux/lib64"):
            yield variable, str(Path(home).absolute() / folder / SONAME), os.RTLD_NOW
    yield "the loader's path", SONAME, os.RTLD_NOW


def _origin() -> str:
    """Return the file of the copy that was found by its name alone."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.partition("/")[2]
        if file.rpartition("/")[2].startswith(SONAME):
            return f"/{file}"
    return SONAME
