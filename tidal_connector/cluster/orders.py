# SPDX-License-Identifier: Apache-2.0
"""What an engine's supervisor (``tidal serve``) is told through the registry: one order per engine, ``orders/ENGINE``.

Written by operators (``tidal drain``) and by the conductor of a rollout; heard by the supervisor. Orders have no lease:
an order that was given while its engine's machine was down still holds when it comes back.

* ``drain``: take no new requests, let the running ones finish, stop (at the deadline in any case).
* ``serve``: an engine that was started with ``admission = true`` says ``starting`` although it is healthy, so that no
  proxy sends it a client's request, until this order names its revision: its rollout has probed it and lets it in. An
  engine without ``admission`` needs no such order.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from tidal_connector.config import Positive
from tidal_connector.registry.base import Entry

ORDERS = "orders/"
"""Prefix of all orders."""

AWAITS_ADMISSION = "healthy; waits to be let in"
"""The note of an engine that is healthy and waits for its rollout's order ``serve``."""


class Want(enum.StrEnum):
    """What is ordered."""

    DRAIN = "drain"
    SERVE = "serve"


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One order.

    Attributes:
        want: what to do.
        deadline_s: ``drain``: seconds that running requests have.
        revision: ``serve``: the revision that is let in; one of another revision goes on waiting.
        by: who gave it, for logs.
    """

    want: Want
    deadline_s: Positive = 60.0
    revision: str = ""
    by: str = ""


def order_key(engine: str) -> str:
    """Return where the order to an engine lies."""
    return ORDERS + engine


def encode_order(order: Order) -> bytes:
    """Return an order as it is stored."""
    return msgspec.json.encode(order)


def order_of(entries: Mapping[str, Entry], engine: str) -> Order | None:
    """Return the order to an engine; None where there is none, or none that can be read."""
    entry = entries.get(order_key(engine))
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=Order)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def kept_down(engine: str, order: Order) -> str:
    """Return in words that an order to drain keeps an engine down, and what ends that."""
    by = f" by {order.by}" if order.by else ""
    return f"drained as ordered{by}; to have it started again: tidal drain {engine} --cancel"
