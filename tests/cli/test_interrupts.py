# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and the end of the terminal end a command as Ctrl-C does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tidal_connector.cli.interrupts import sigterm_interrupts


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """Have SIGHUP end a process, however these tests were started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_undoes_everything_and_is_as_before_afterwards(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_second_hangup_does_not_cut_the_undoing_short() -> None:
    undone = []

    @contextlib.contextmanager
    def something() -> Iterator[None]:
        try:
            yield
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            undone.append(True)

    with pytest.raises(KeyboardInterrupt), sigterm_interrupts(), something():
        os.kill(os.getpid(), signal.SIGHUP)
    assert undone


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGHUP)
