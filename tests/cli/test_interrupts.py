# SPDX-License-Identifier: Apache-2.0
"""SIGTERM ends a command as Ctrl-C does."""

from __future__ import annotations

import os
import signal

import pytest

from tidal_connector.cli.interrupts import sigterm_interrupts


def test_sigterm_undoes_everything_and_is_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
