# SPDX-License-Identifier: Apache-2.0
"""Adds 2 MiB hugepages to the kernel's pool for a while, and takes them away again.

The change is made by a child process that undoes it when its standard input closes, which also happens when the owner
is killed with -9: ``python -m tidal_connector.cluster.hugepages PAGES``. Needs root; without it nothing changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tidal_connector.config import child_environment

HUGEPAGE_BYTES = 2 << 20
_FOLDER = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_TOTAL = _FOLDER / "nr_hugepages"
_ANSWER_S = 30.0


@contextlib.contextmanager
def extra_hugepages(length: int) -> Iterator[str]:
    """Make sure that a pool of a length in bytes finds free hugepages while the ``with`` block runs, if that can be.

    Yields:
        One line that says what was done.
    """
    wanted = -(-length // HUGEPAGE_BYTES)
    free = free_hugepages()
    if free is None:
        yield "the kernel offers no 2 MiB hugepages; the pool falls back to other pages"
        return
    if free >= wanted:
        yield f"{free} hugepages are free, {wanted} are needed"
        return
    child = subprocess.Popen(
        [sys.executable, "-m", "tidal_connector.cluster.hugepages", str(wanted - free)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child.stdout.readline().strip() or "hugepages cannot be added; the pool falls back to other pages"
    finally:
        child.stdin.close()
        child.wait(_ANSWER_S)
        child.stdout.close()


def free_hugepages() -> int | None:
    """Return how many 2 MiB hugepages are free; None where the kernel has none."""
    try:
        return int((_FOLDER / "free_hugepages").read_text())
    except OSError:
        return None


def add_until_closed(pages: int) -> None:
    """Add hugepages, say on standard output what came of it, and take them away when standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the owner's end is what counts
        signal.signal(number, signal.SIG_IGN)
    try:
        added = _change(pages)
    except OSError as error:
        print(f"hugepages cannot be added ({error.strerror}); the pool falls back to other pages", flush=True)
        return
    try:
        print(f"{added} of {pages} hugepages were added; they are taken away at the end", flush=True)
        sys.stdin.read()
    finally:
        _change(-added)


def _change(pages: int) -> int:
    """Add pages to the kernel's number, or take some away, and return by how much it changed.

    The kernel takes a total, so two processes that do this at once would undo one another's change: one at a time.

    Raises:
        OSError: this process may not.
    """
    with _TOTAL.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = int(_TOTAL.read_text())
        _TOTAL.write_text(str(max(0, before + pages)))
        return int(_TOTAL.read_text()) - before


if __name__ == "__main__":
    add_until_closed(int(sys.argv[1]))
