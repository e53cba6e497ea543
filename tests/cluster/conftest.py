# SPDX-License-Identifier: Apache-2.0
"""One etcd for the tests of engines under supervision; each test has a cluster of its own in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.serve_bed import Bed, open_bed
from tests.etcd import EtcdServer


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def bed(shared_etcd: EtcdServer, tmp_path: Path) -> Iterator[Bed]:
    with open_bed(shared_etcd, tmp_path) as found:
        yield found
