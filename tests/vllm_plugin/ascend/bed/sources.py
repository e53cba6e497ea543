# SPDX-License-Identifier: Apache-2.0
"""The pinned source distributions of vLLM and vllm-ascend, downloaded once into a folder that git ignores.

``python -m tests.vllm_plugin.ascend.bed.sources`` fetches what is missing and prints where it lies; a second call
does nothing. Nothing is built and nothing of it is ever committed. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.arch.source import ROOT
from tests.vllm_plugin.ascend.bed.index import (
    Deadline,
    SourcesUnavailable,
    SourcesWrong,
    find_file,
    open_address,
    read_chunks,
)

CACHE = ROOT / ".cache" / "ascend"
SECONDS = 300.0
_LAYOUT = "1"  # raised when other members are unpacked

# What setup.py of vllm-ascend writes where it builds for an Atlas A3; the platform reads the chip from it.
_BUILD_INFO = "# Written beside the unpacked sources: what a build for Atlas A3 says.\n__device_type__ = 'A3'\n"


@dataclass(frozen=True)
class Release:
    """One source distribution: what it is, and which of its members are unpacked."""

    project: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def stem(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}"

    @property
    def filename(self) -> str:
        return f"{self.stem}.tar.gz"


VLLM = Release(
    "vllm",
    "0.23.0",
    "760269db3d9611e12e524681df1bca0977d5d2f5fcb4481cc34d33efc4ae7ff5",
    ("vllm/", "vllm.egg-info/"),
)
VLLM_ASCEND = Release(
    "vllm-ascend",
    "0.23.0.post1",
    "a3b9f4a5dd7aa50c37e03d1f35937c4ae5aeacc49b734cac74d59ce5757738e1",
    ("vllm_ascend/", "vllm_ascend.egg-info/", "csrc/torch_binding.cpp"),
)


@dataclass(frozen=True)
class Sources:
    """Folders that go on ``sys.path``: one holds the package ``vllm``, the other ``vllm_ascend``."""

    vllm: Path
    vllm_ascend: Path

    @property
    def operator_schemas(self) -> Path:
        """The C++ file in which vllm-ascend declares its operators to torch."""
        return self.vllm_ascend / "csrc" / "torch_binding.cpp"


def ensure_sources(cache: Path = CACHE, seconds: float = SECONDS) -> Sources:
    """Return the unpacked sources, after downloading what is missing; processes that ask at once take turns.

    Raises:
        SourcesUnavailable: the index cannot be reached within the time.
        SourcesWrong: it holds something else than what is pinned.
    """
    deadline = Deadline.within(seconds)
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / "lock"):
        return Sources(unpacked(VLLM, cache, deadline), unpacked(VLLM_ASCEND, cache, deadline))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpacked(release: Release, cache: Path, deadline: Deadline, indexes: list[str] | None = None) -> Path:
    """Return the folder of a release, after downloading and unpacking it unless that was done before.

    Raises:
        SourcesUnavailable: it cannot be reached within the time.
        SourcesWrong: what is there is not what is pinned.
    """
    folder = cache / release.stem
    stamp = folder / ".unpacked"
    current = f"{release.sha256} {_LAYOUT}\n"
    if stamp.is_file() and stamp.read_text() == current:
        return folder
    archive = cache / release.filename
    if not archive.is_file() or _digest(archive) != release.sha256:
        download(release, archive, deadline, indexes)
    shutil.rmtree(folder, ignore_errors=True)
    _unpack(release, archive, cache)
    if release is VLLM_ASCEND:
        (folder / "vllm_ascend" / "_build_info.py").write_text(_BUILD_INFO)
    stamp.write_text(current)
    return folder


def download(release: Release, archive: Path, deadline: Deadline, indexes: list[str] | None = None) -> None:
    """Download a source distribution and check its digest before it gets its name.

    Raises:
        SourcesUnavailable: it cannot be reached within the time.
        SourcesWrong: its digest is another one.
    """
    address = find_file(release.project, release.filename, deadline, indexes)
    partial = archive.with_suffix(".partial")
    digest = hashlib.sha256()
    try:
        with open_address(address, deadline) as answer, partial.open("wb") as file:
            for chunk in read_chunks(answer, deadline, release.filename):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != release.sha256:
            raise SourcesWrong(
                f"{release.filename}: sha256 is {digest.hexdigest()}, expected {release.sha256}; "
                "the index serves another file under this name"
            )
        partial.replace(archive)
    finally:
        partial.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(release: Release, archive: Path, cache: Path) -> None:
    wanted = tuple(f"{release.stem}/{name}" for name in release.members)
    with tarfile.open(archive) as tar:
        members = [m for m in tar if m.name.startswith(wanted)]
        tar.extractall(cache, members, filter="data")
    missing = [name for name in release.members if not (cache / release.stem / name).exists()]
    if missing:
        raise SourcesWrong(f"{release.filename} has no {', '.join(missing)}")


if __name__ == "__main__":
    try:
        found = ensure_sources()
    except (SourcesUnavailable, SourcesWrong) as error:
        sys.exit(f"contract sources: {error}")
    print(f"contract sources: {found.vllm.relative_to(ROOT)}, {found.vllm_ascend.relative_to(ROOT)}")
