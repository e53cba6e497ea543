# SPDX-License-Identifier: Apache-2.0
"""The pool as kernels see it: aliases of a registration on an NPU, plain views on the CPU, one pool for all ranks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.standins.ascendcl import Standin  # noqa: E402
from tests.standins.build import ascendcl  # noqa: E402
from tidal_connector.config import DeviceAccess, PageKind, PoolConfig  # noqa: E402
from tidal_connector.errors import ConfigError  # noqa: E402
from tidal_connector.memory import Share  # noqa: E402
from tidal_connector.ops.npu import alias  # noqa: E402
from tidal_connector.vllm_plugin.ascend import pool  # noqa: E402

MIB = 1 << 20
PLAIN = PoolConfig(pages=PageKind.PLAIN, register=DeviceAccess.PAGES)
CPU = torch.device("cpu")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device whose runtime is the stand-in; tensors over aliases are (alias, shape). Nothing may stay registered."""
    library = Standin(ascendcl())
    monkeypatch.setenv("TIDAL_ASCENDCL", str(library.path))
    monkeypatch.setattr(alias, "alias_tensor", lambda found, shape, dtype, device: (found, shape))
    monkeypatch.setattr(pool, "_number", lambda device: 0)
    yield SimpleNamespace(type="npu")
    assert library.violations() == []
    assert library.registrations == 0
    library.reset()


def test_each_part_is_one_alias_although_a_registration_covers_less_than_the_pool(npu: Any) -> None:
    parts = [(0, 3 * MIB), (3 * MIB, MIB), (4 * MIB, 3 * MIB), (7 * MIB, MIB)]
    settings = PoolConfig(pages=PageKind.PLAIN, register=DeviceAccess.PAGES, register_chunk=4 * MIB)
    opened = pool.open_pool(8 * MIB, settings, npu, [offset for offset, _ in parts])
    with opened.region:
        assert not opened.shared
        for offset, length in parts:
            found, shape = opened.view(offset, length)
            assert shape == (length,)
            assert found.length == length
            assert found.pointer != opened.region.address + offset  # the host's address means nothing to a kernel


def test_a_pool_that_no_kernel_can_reach_is_refused(npu: Any) -> None:
    settings = PoolConfig(pages=PageKind.PLAIN, register=DeviceAccess.OFF)
    with pytest.raises(ConfigError, match='kernels read them there; set it to "auto"'):
        pool.open_pool(4 * MIB, settings, npu, [0])


def test_on_the_cpu_a_part_is_a_view() -> None:
    opened = pool.open_pool(2 * MIB, PLAIN, CPU, [0, MIB])
    with opened.region:
        view = opened.view(MIB, 16)
        view.fill_(7)
        assert bytes(opened.region.buffer[MIB : MIB + 17]) == bytes([7] * 16 + [0])
        del view
        opened = None


def test_ranks_that_share_a_pool_read_what_another_wrote() -> None:
    name = uuid.uuid4().hex

    def open_as(rank: int) -> Any:
        share = Share(name, rank, 2, fingerprint="0 1048576", wait_s=20.0)
        return pool.open_pool(2 * MIB, PLAIN, CPU, [0, MIB], share)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(open_as, (0, 1))
    with first.region, second.region:
        assert first.shared
        assert second.shared
        first.view(MIB, 8).fill_(5)
        assert second.view(MIB, 9).tolist() == [5] * 8 + [0]
        assert first.region.address != second.region.address
        first = second = None
