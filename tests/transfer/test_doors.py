# SPDX-License-Identifier: Apache-2.0
"""A door that is shut is a fence: nothing that a peer has under way, or tries again, lands behind it."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tidal_connector.config import TransferConfig
from tidal_connector.layout import Home
from tidal_connector.transfer.mooncake import MooncakePlane

pytestmark = [pytest.mark.mooncake, pytest.mark.faults, pytest.mark.timeout(120)]

LENGTH = 2 << 30  # more than a second of writing over loopback
STALL_S = 4.0
OLD, UNTOUCHED = 0x55, 0x7E
BOUND_S = 30.0


class Decode:
    """A plane with one door, and the memory behind it."""

    def __init__(self, stack: ExitStack) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, LENGTH), np.uint8)
        self.rang = threading.Event()
        self.plane = stack.enter_context(MooncakePlane(TransferConfig(), "127.0.0.1", self.rang.set, stall_s=STALL_S))
        self.plane.register(self.memory.ctypes.data, LENGTH, Home.HOST)
        self.door = self.plane.open_door()

    def wait_for_bytes(self) -> None:
        deadline = time.monotonic() + BOUND_S
        while not (self.memory[:: 1 << 20] == OLD).any():
            assert time.monotonic() < deadline, "nothing landed"
            time.sleep(0.01)

    def shut(self) -> None:
        self.rang.clear()
        self.plane.shut_door(self.door)
        deadline = time.monotonic() + BOUND_S
        while not self.plane.door_shut(self.door):
            assert self.rang.wait(deadline - time.monotonic()), "the door did not shut"
            self.rang.clear()


@pytest.fixture
def decode() -> Iterator[Decode]:
    with ExitStack() as stack:
        yield Decode(stack)


@pytest.fixture
def writer(decode: Decode) -> Iterator[subprocess.Popen[str]]:
    arguments = [decode.door, str(decode.memory.ctypes.data), str(LENGTH), str(STALL_S)]
    command = [sys.executable, "-m", "tests.transfer.writer", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.kill()


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_lands_behind_a_shut_door(decode: Decode, writer: subprocess.Popen[str], frozen: bool) -> None:
    decode.wait_for_bytes()
    if frozen:
        writer.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
    decode.shut()
    assert (decode.memory[:: 1 << 20] != OLD).any(), "the write had ended before the door was shut"
    decode.memory[:] = UNTOUCHED  # the pages belong to another request now
    writer.send_signal(signal.SIGCONT)
    time.sleep(STALL_S + 2.0)  # the writer tries again over new connections, and gives up
    assert (decode.memory == UNTOUCHED).all()


def test_other_doors_stay_open(decode: Decode) -> None:
    other = decode.plane.open_door()
    assert other != decode.door
    decode.shut()
    assert not decode.plane.door_shut(other)
    decode.plane.shut_door(decode.door)
    assert decode.plane.door_shut(decode.door)
