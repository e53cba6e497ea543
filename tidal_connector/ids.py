# SPDX-License-Identifier: Apache-2.0
"""The names that travel through the package, as distinct types.

Host and device page ids are different types although both are integers: with vLLM's block ids used for both
they are often equal, and that is exactly when mixing them up goes unnoticed.
"""

from __future__ import annotations

import enum
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""vLLM's engine-internal request id; never equal on two engines, never parsed for meaning."""

TransferId = NewType("TransferId", str)
"""One attempt to hand a request over, made fresh by the proxy (sequential mode: by the prefill engine)."""

EngineId = NewType("EngineId", str)
"""The operator's name for an engine; survives restarts."""

Incarnation = NewType("Incarnation", str)
"""One life of a worker process: 32 hexadecimal digits, random at process start."""

Generation = NewType("Generation", int)
"""Counts the reservations of one decode worker; a notice of another generation is dropped."""

HostPageId = NewType("HostPageId", int)
"""A page of the host pool: the latents of one block in one layer."""

DevicePageId = NewType("DevicePageId", int)
"""A page of a device cache: the index keys (or, on prefill, also the latents) of one block in one layer."""


class Role(enum.StrEnum):
    """What an engine does; the value is what command line and registry call it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def new_incarnation() -> Incarnation:
    """Return a fresh random incarnation (128 bit, hexadecimal)."""
    return Incarnation(secrets.token_hex(16))


def new_transfer_id() -> TransferId:
    """Return a fresh random transfer id (``xfer-`` and 128 bit, hexadecimal)."""
    return TransferId(f"xfer-{secrets.token_hex(16)}")
