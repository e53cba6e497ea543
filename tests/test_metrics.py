# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest

from tidal_connector.metrics import Counters


def test_counters_only_rise() -> None:
    counters = Counters()
    counters.add("bytes_pushed", 5)
    counters.add("bytes_pushed", -3)
    counters.set("peers", 2)
    counters.set("peers", 1)
    assert counters.snapshot()["bytes_pushed"] == 5
    assert counters.snapshot()["peers"] == 1


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()
    threads = [threading.Thread(target=lambda: [counters.add("aborts_sent") for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot()["aborts_sent"] == 20_000


def test_an_unknown_name_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        Counters().add("nobody_knows")
