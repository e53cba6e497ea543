# SPDX-License-Identifier: Apache-2.0
"""Words about rows are passed on in order, and on a device not before the device has written them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tidal_connector.vllm_plugin.timeline import AfterDevice, AtOnce, timeline_of  # noqa: E402

WAIT_S = 10.0


class Event:
    """Passes when it is told to."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()


class Device:
    """Records events and notes what was passed on."""

    def __init__(self, deadline_s: float = WAIT_S) -> None:
        self.events: list[Event] = []
        self.heard: list[str] = []
        self.timeline = AfterDevice(self.record, deadline_s)

    def record(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def say(self, text: str) -> None:
        self.timeline.say(lambda: self.heard.append(text))

    def say_written(self, text: str) -> None:
        self.timeline.say_written(lambda: self.heard.append(text))


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.timeline.close()


def test_rows_are_not_announced_before_the_device_has_written_them_and_words_stay_in_order(device: Device) -> None:
    device.say("open")
    assert device.timeline.settle(WAIT_S)
    device.say_written("layer 0")
    device.say_written("layer 1")
    device.say("finish")
    assert not device.timeline.settle(0.05)
    assert device.heard == ["open"]
    device.events[1].passed.set()  # the later event alone lets nothing through
    assert not device.timeline.settle(0.05)
    assert device.heard == ["open"]
    device.events[0].passed.set()
    assert device.timeline.settle(WAIT_S)
    assert device.heard == ["open", "layer 0", "layer 1", "finish"]


def test_a_layer_that_the_device_never_finishes_is_not_announced_and_holds_up_nobody_for_ever() -> None:
    device = Device(deadline_s=0.05)
    device.say_written("layer 0")
    device.say("abort")
    assert device.timeline.settle(WAIT_S)
    assert device.heard == ["abort"]
    device.timeline.close()


def test_a_word_that_fails_does_not_end_the_thread(device: Device) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    device.timeline.say(broken)
    device.say("after")
    assert device.timeline.settle(WAIT_S)
    assert device.heard == ["after"]


def test_closing_drops_what_waits_and_ends_the_thread() -> None:
    device = Device()
    device.say_written("layer 0")
    device.timeline.close()
    device.timeline.close()
    assert device.heard == []
    assert not [thread for thread in threading.enumerate() if thread.name == "tidal-written"]


def test_on_a_cpu_words_are_passed_on_at_once() -> None:
    timeline = timeline_of(torch.device("cpu"))
    assert isinstance(timeline, AtOnce)
    heard: list[str] = []
    timeline.say(lambda: heard.append("say"))
    timeline.say_written(lambda: heard.append("written"))
    assert heard == ["say", "written"]
    assert timeline.settle(0.0)
