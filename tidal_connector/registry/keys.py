# SPDX-License-Identifier: Apache-2.0
"""Which keys and values every store takes, so that what works on one works on all. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tidal_connector.registry.base import Delete, Put

CHANGES_LIMIT = 100
"""Changes in one write; etcd's own default limit is 128 operations."""

VALUE_LIMIT = 1 << 20
"""Bytes of one value; etcd refuses requests above 1.5 MiB."""

_PART = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:@+~=-]{1,200}\Z")


def is_name(text: str) -> bool:
    """Whether a text can be one part of a key: 1 to 200 letters, digits or ``. _ : @ + ~ = -``."""
    return _PART.match(text) is not None


def check_key(key: str) -> None:
    """Check a key that is to be written.

    Raises:
        ValueError: it is no path of names.
    """
    if len(key) > 1024 or not all(is_name(part) for part in key.split("/")):
        shown = key if len(key) <= 200 else key[:200] + "..."
        raise ValueError(f"key {shown!r}: expected names of letters, digits and . _ : @ + ~ = - joined by /")


def check_prefix(prefix: str) -> None:
    """Check a prefix that is to be read; it may end within a name, and be empty.

    Raises:
        ValueError: no key can begin with it.
    """
    whole, _, last = prefix.rpartition("/")
    if (whole or "/" in prefix) and not all(is_name(part) for part in whole.split("/")):
        raise ValueError(f"prefix {prefix!r}: expected names of letters, digits and . _ : @ + ~ = - joined by /")
    if last and not is_name(f"{last}x"):
        raise ValueError(f"prefix {prefix!r}: expected letters, digits and . _ : @ + ~ = - after the last /")


def check_value(key: str, value: bytes) -> None:
    """Check a value that is to be written.

    Raises:
        ValueError: it is too large.
    """
    if len(value) > VALUE_LIMIT:
        raise ValueError(f"value of {key!r} has {len(value)} bytes: expected at most {VALUE_LIMIT}")


def check_changes(changes: Sequence[Put | Delete], expect: Mapping[str, int]) -> None:
    """Check a write before any of it is done.

    Raises:
        ValueError: too many changes, a key that occurs twice, an odd key or a value that is too large.
    """
    if len(changes) > CHANGES_LIMIT or len(expect) > CHANGES_LIMIT:
        raise ValueError(f"a write of {len(changes)} changes and {len(expect)} conditions: expected at most 100 each")
    if len({change.key for change in changes}) != len(changes):
        raise ValueError("a write changes one key twice; whether the first or the second holds is not defined")
    for change in changes:
        check_key(change.key)
        if isinstance(change, Put):
            check_value(change.key, change.value)
    for key in expect:
        check_key(key)
