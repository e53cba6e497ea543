# SPDX-License-Identifier: Apache-2.0
"""What a check finds, as a value."""

from __future__ import annotations

import enum

import msgspec


class State(enum.StrEnum):
    """How bad it is."""

    PASS = "pass"
    WARN = "warn"
    """It runs, but slower, less safely, or not yet proven with this version."""
    FAIL = "fail"
    """It does not run, or not as the settings demand."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        what: the subject, the same for every run.
        state: how bad it is.
        text: what was found, with the numbers.
        fix: what to type or change; empty where nothing is wrong.
    """

    what: str
    state: State
    text: str
    fix: str = ""


def good(what: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(what, State.PASS, text)


def warn(what: str, text: str, fix: str) -> Finding:
    """Return a finding that can be lived with."""
    return Finding(what, State.WARN, text, fix)


def fail(what: str, text: str, fix: str) -> Finding:
    """Return a finding that cannot."""
    return Finding(what, State.FAIL, text, fix)
