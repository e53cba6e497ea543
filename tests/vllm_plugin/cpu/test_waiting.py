# SPDX-License-Identifier: Apache-2.0
"""A reader that sleeps early is woken by every message."""

from __future__ import annotations

import threading
import time

import pytest

pytestmark = pytest.mark.vllm


def test_messages_arrive_in_order_whether_the_reader_spins_or_sleeps() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    from tidal_connector.vllm_plugin.cpu import waiting

    waiting.PATCH.apply()
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    read: list[int] = []
    thread = threading.Thread(target=lambda: read.extend(reader.dequeue(timeout=20) for _ in range(40)))
    thread.start()
    for number in range(40):
        writer.enqueue(number)
        if number % 4 == 0:
            time.sleep(10 * waiting.SPIN_S)
    thread.join(30)
    assert read == list(range(40))
    reader.shutdown()
    writer.shutdown()
