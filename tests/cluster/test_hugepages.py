# SPDX-License-Identifier: Apache-2.0
"""Hugepages that were added are taken away again, whatever ends their owner."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tidal_connector.cluster import hugepages
from tidal_connector.cluster.hugepages import HUGEPAGE_BYTES, extra_hugepages, free_hugepages

OWNER = """
import time
from tidal_connector.cluster.hugepages import HUGEPAGE_BYTES, extra_hugepages, free_hugepages
with extra_hugepages((free_hugepages() + 3) * HUGEPAGE_BYTES):
    print("changed", flush=True)
    time.sleep(600)
"""


def can_add() -> bool:
    free = free_hugepages()
    if free is None:
        return False
    with extra_hugepages((free + 1) * HUGEPAGE_BYTES) as line:
        return "cannot" not in line


@pytest.mark.hugepages
def test_pages_are_there_inside_and_gone_afterwards() -> None:
    if not can_add():
        pytest.skip("hugepages cannot be added here")
    before = free_hugepages()
    assert before is not None
    with extra_hugepages((before + 3) * HUGEPAGE_BYTES) as line:
        assert "of 3 hugepages were added" in line
        assert free_hugepages() == before + 3
    assert free_hugepages() == before


@pytest.mark.hugepages
def test_pages_are_taken_away_when_the_owner_is_killed() -> None:
    if not can_add():
        pytest.skip("hugepages cannot be added here")
    before = free_hugepages()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "changed\n"
    assert free_hugepages() != before
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    for _ in range(500):
        if free_hugepages() == before:
            return
        time.sleep(0.02)
    raise AssertionError("the hugepages stayed")


def test_nothing_is_changed_where_enough_pages_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "free_hugepages", lambda: 5)
    with extra_hugepages(5 * HUGEPAGE_BYTES) as line:
        assert line == "5 hugepages are free, 5 are needed"


def test_a_kernel_without_hugepages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "free_hugepages", lambda: None)
    with extra_hugepages(1) as line:
        assert "falls back" in line
