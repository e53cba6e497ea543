# SPDX-License-Identifier: Apache-2.0
"""What every transfer plane promises: ``submit`` byte runs, ``poll`` receipts.

A plane knows bytes and peers, not requests. It owns the threads it needs, between ``open`` and ``close``. A
receipt is the only proof that no byte of a source will be read any more: a failed descriptor alone is none,
because the transport may still be reading its neighbours.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NewType, TypeVar

import msgspec

from tidal_connector.config import PlaneKind, TidalConfig
from tidal_connector.errors import ConfigError
from tidal_connector.layout import Home
from tidal_connector.transfer.runs import Run

if TYPE_CHECKING:
    from tidal_connector.transfer.ascend import Npu

Ticket = NewType("Ticket", int)
"""One submitted batch; unique within its plane."""

PlaneT = TypeVar("PlaneT", bound="TransferPlane")


class Receipt(msgspec.Struct, frozen=True):
    """The end of a ticket: every descriptor that was handed to the transport has ended.

    Attributes:
        ticket: what ended.
        ok: every byte was acknowledged by the target's transport.
        bytes: acknowledged bytes, also of a failed ticket.
        started: when its first descriptor was handed on (monotonic seconds); its submission if none was.
        finished: when its last descriptor ended (monotonic seconds).
        reason: why it failed; empty when ok.
        drained: every descriptor that was handed on was acknowledged, so that nothing can land late; true for
            ok, and for a cancelled ticket whose descriptors in flight all ended well.
    """

    ticket: Ticket
    ok: bool
    bytes: int
    started: float
    finished: float
    reason: str = ""
    drained: bool = False


class TransferPlane(abc.ABC):
    """Writes local memory into the registered memory of peers."""

    name: str

    def __enter__(self: PlaneT) -> PlaneT:
        self.open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abc.abstractmethod
    def open(self) -> None:
        """Start; must come before every other call.

        Raises:
            TransferFailed: the transport cannot be started.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stop all threads. Tickets in flight end without a receipt; their sources are not read afterwards.
        Idempotent."""

    @abc.abstractmethod
    def register(self, address: int, length: int, home: Home, *, target: bool = True) -> None:
        """Make ``length`` bytes at ``address`` a source and a target, once, before peers connect.

        Args:
            address: first byte.
            length: bytes.
            home: kind of memory.
            target: False keeps peers from writing there, where the transport allows it (prefill's caches
                over TCP).

        Raises:
            TransferFailed: the transport refuses the range (it overlaps a registered one, or is empty).
        """

    @abc.abstractmethod
    def endpoint(self) -> str:
        """Return what peers pass to :meth:`submit` to reach this process; constant while open."""

    @abc.abstractmethod
    def submit(self, peer: str, runs: Sequence[Run]) -> Ticket:
        """Queue a batch of runs for a peer's endpoint. Never blocks; any thread.

        Raises:
            TransferFailed: a source lies in no single registered range, or the plane is closed.
        """

    @abc.abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Hand nothing more of a ticket on; its receipt (not ok) comes when what was handed on has ended.

        A ticket that has ended, or of which everything has been handed on and then succeeds, is not changed.
        """

    @abc.abstractmethod
    def poll(self) -> list[Receipt]:
        """Return the receipts since the last call, each ticket exactly once. Never blocks; any thread."""

    @abc.abstractmethod
    def forget_peer(self, peer: str) -> None:
        """Cancel all of a peer's tickets and drop what is cached about it (it restarted or is lost)."""

    def open_door(self) -> str:
        """Return an endpoint for one peer alone; where the transport has but one, that one.

        Raises:
            TransferFailed: the transport cannot open another.
        """
        return self.endpoint()

    def shut_door(self, endpoint: str) -> None:
        """Begin to shut a peer's door, whatever that peer is doing. Never blocks; any thread; idempotent."""
        del endpoint  # where everybody is told the same one, it stays open

    def door_shut(self, endpoint: str) -> bool:
        """Say whether no write can come through this door any more: a fence, where the transport can build one."""
        return False

    @abc.abstractmethod
    def peer_connections(self, host: str, others: Iterable[str] = ()) -> int | None:
        """Count the connections to our data ports that may be a host's; None where that cannot be known.

        Args:
            host: the peer's host.
            others: hosts of other peers; what comes from them does not count, what comes from anywhere else does.
        """


def open_plane(config: TidalConfig, host: str, on_receipt: Callable[[], None], npu: Npu | None = None) -> TransferPlane:
    """Make the plane that a configuration names; the caller enters it as a context manager.

    Args:
        config: which plane, and its settings.
        host: address under which peers reach this process's data ports.
        on_receipt: called from any thread whenever :meth:`TransferPlane.poll` has something new.
        npu: the NPUs, for an engine that runs on one.

    Raises:
        ConfigError: the loopback plane was asked for; it reaches no other process.
    """
    if config.transfer.plane is PlaneKind.MOONCAKE:
        from tidal_connector.transfer.mooncake import MooncakePlane

        return MooncakePlane(
            config.transfer,
            host,
            on_receipt,
            stall_s=config.control.stall_s,
            quarantine_s=config.quarantine_s,
            npu=npu,
        )
    raise ConfigError(
        "transfer.plane = 'loopback': it moves bytes inside one process and is built by tests; use 'mooncake'"
    )
