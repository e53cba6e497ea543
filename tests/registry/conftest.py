# SPDX-License-Identifier: Apache-2.0
"""Beds for the registry's tests, and the check that no test leaves a thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd import EtcdServer, needs_etcd
from tests.registry.beds import Bed, EtcdBed, FileBed, MemoryBed, eventually


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One plain etcd for all tests that need no more than an etcd."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(params=["memory", "file", pytest.param("etcd", marks=needs_etcd)])
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    """Each kind of store in turn."""
    made: Bed
    if request.param == "etcd":
        made = EtcdBed(tmp_path, request.getfixturevalue("shared_etcd"))
    else:
        made = (MemoryBed if request.param == "memory" else FileBed)(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Whatever a test opens ends with it."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        return [each.name for each in threading.enumerate() if each not in before and each.name.startswith("tidal-")]

    assert eventually(lambda: not left(), 2), left()
