# SPDX-License-Identifier: Apache-2.0
"""The bell: no ring is lost, many count as one, and none hurts after its end."""

from __future__ import annotations

import select
import threading
from collections import deque

import pytest

from tidal_connector.control.wake import Wake


def rung(wake: Wake, timeout_s: float = 0.0) -> bool:
    return bool(select.select([wake.fd], [], [], timeout_s)[0])


def test_rings_count_as_one_until_cleared() -> None:
    with Wake() as wake:
        assert not rung(wake)
        wake.ring()
        wake.ring()
        assert rung(wake)
        wake.clear()
        assert not rung(wake)
        wake.clear()
        wake.ring()
        assert rung(wake)


def test_a_ring_after_the_end_does_nothing() -> None:
    wake = Wake()
    wake.close()
    wake.close()
    wake.ring()
    wake.clear()
    with pytest.raises(ValueError, match="closed"):
        _ = wake.fd


def test_nothing_that_is_posted_before_a_ring_is_overslept() -> None:
    posted: deque[int] = deque()
    total = 20_000
    with Wake() as wake:

        def post() -> None:
            for number in range(total):
                posted.append(number)
                wake.ring()

        thread = threading.Thread(target=post)
        thread.start()
        seen = 0
        while seen < total:
            assert rung(wake, 10.0), f"slept on with {seen} of {total} seen"
            wake.clear()
            while posted:
                posted.popleft()
                seen += 1
        thread.join()
