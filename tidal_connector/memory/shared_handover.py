# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a node come to the pages of one pool: rank 0 hands descriptors on over a local socket.

The socket has an abstract name: no file is left behind, it is gone with its process, and only processes of this network
namespace and user are heard. A rank connects as soon as rank 0 listens, which is before it builds the pool, so that its
end is seen at once and not when the time is up. All ranks go on together or none does::

    rank r -> 0   Hello     who I am and what I expect the pool to be
    rank 0 -> r   Offer     sizes of the files, with their descriptors, and the report
    rank r -> 0   Mapped    I have them
    rank 0 -> r   Go        so has everybody

Instead of any of them a Refusal may come, with the error that the other side then raises, too. Used by each rank's
building thread; every wait ends by the deadline.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from tidal_connector.errors import Conflict, PeerLost, PoolExhausted, ProtocolError, TidalError
from tidal_connector.log import get_logger
from tidal_connector.memory.shared_wire import (
    MOST_FILES,
    Deadline,
    Go,
    Hello,
    Mapped,
    Offer,
    Refusal,
    address_of,
    check,
    receive,
    send,
    user_of,
)

_log = get_logger(__name__)

_RETRY_S = 0.05
_LINGER_S = 2.0  # for ranks that come after rank 0 has failed, so that they learn why


class Listener:
    """Rank 0's end, from before the pool is built until every rank has it; a context manager.

    Raises:
        Conflict: another process listens under this name.
    """

    def __init__(self, name: str, expected: Hello, deadline: Deadline) -> None:
        self._name = name
        self._expected = expected
        self._deadline = deadline
        self._peers: dict[int, socket.socket] = {}
        self._strangers: set[socket.socket] = set()  # connected, and have not said who they are
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(address_of(name))
        except OSError as error:
            self._socket.close()
            raise Conflict(
                f"shared pool {name!r}: another process hands it on already ({error.strerror}); give each engine of "
                "this machine a name of its own, and one of its ranks the number 0"
            ) from None
        self._socket.listen(expected.world)

    def hand_on(self, offer: Offer, descriptors: list[int]) -> dict[int, socket.socket]:
        """Give the pool to every other rank, wait until all have it, and return their connections by rank.

        Raises:
            PeerLost: a rank did not come in time, or ended.
            LayoutMismatch: a rank expects another pool.
            Conflict: two processes call themselves the same rank.
            ProtocolError: a rank of another version, or what is none.
            PoolExhausted: the pool is in more pieces than can be handed on.
            TidalError: what made another rank fail.
        """
        try:
            if len(descriptors) > MOST_FILES:
                raise PoolExhausted(
                    f"the pool came in {len(descriptors)} pieces, and {MOST_FILES} can be handed on: reserve its "
                    "hugepages at boot, before memory is fragmented"
                )
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                missing = set(range(1, self._expected.world))
                while missing:
                    self._step(offer, descriptors, selector, missing)
            for rank, peer in self._peers.items():
                send(peer, Go(), f"rank {rank}")
        except TidalError as error:
            self._tell(error)
            raise
        peers, self._peers = self._peers, {}
        return peers

    def refuse(self, error: TidalError) -> None:
        """Tell every rank why there will be no pool, those that come within two seconds, too."""
        end = Deadline(min(_LINGER_S, self._deadline.left()))
        while len(self._peers) < self._expected.world - 1 and end.left():
            self._socket.settimeout(max(end.left(), 0.001))
            with suppress(OSError, TidalError):
                connection, _ = self._socket.accept()
                self._peers[len(self._peers) + 1] = connection
                receive(connection, Hello, "a rank", end)
        self._tell(error)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._socket.close()
        for peer in (*self._peers.values(), *self._strangers):
            peer.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _step(self, offer: Offer, descriptors: list[int], selector: selectors.BaseSelector, missing: set[int]) -> None:
        """Wait for the next rank to come or to have mapped the pool; the latter are taken out of ``missing``."""
        ready = selector.select(self._deadline.left())
        if not ready:
            raise PeerLost(
                f"shared pool {self._name!r}: rank {', '.join(map(str, sorted(missing)))} has not mapped it within "
                f"{self._deadline.wait_s:g} s; see the log of that rank"
            )
        for key, _ in ready:
            if key.fileobj is self._socket:
                self._admit(selector)
                continue
            if isinstance(key.data, socket.socket):
                self._greet(key.data, offer, descriptors, selector)
                continue
            receive(self._peers[key.data], Mapped, f"rank {key.data}", self._deadline)
            missing.discard(key.data)  # and stays in the selector: from here on only its end can come

    def _admit(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._socket.accept()
        if user_of(connection) != os.geteuid():
            connection.close()
            return
        self._strangers.add(connection)
        selector.register(connection, selectors.EVENT_READ, connection)

    def _greet(
        self, connection: socket.socket, offer: Offer, descriptors: list[int], selector: selectors.BaseSelector
    ) -> None:
        """Hear who a connection is, once it has said something, and offer the pool; who only went is forgotten."""
        selector.unregister(connection)
        self._strangers.discard(connection)
        try:
            hello = receive(connection, Hello, "a rank", self._deadline)
            check(hello, self._expected)
            if hello.rank in self._peers or not 0 < hello.rank < self._expected.world:
                raise Conflict(f"shared pool {self._name!r}: a second process calls itself rank {hello.rank}")
        except PeerLost:
            _log.warning("shared pool %r: a process connected and went without a word", self._name)
            connection.close()
            return
        except TidalError as error:
            with suppress(TidalError):
                send(connection, Refusal.of(error), "a rank")
            connection.close()
            raise
        self._peers[hello.rank] = connection
        send(connection, offer, f"rank {hello.rank}", descriptors)
        selector.register(connection, selectors.EVENT_READ, hello.rank)

    def _tell(self, error: TidalError) -> None:
        for rank, peer in self._peers.items():
            with suppress(TidalError):
                send(peer, Refusal.of(error), f"rank {rank}")


def fetch(name: str, hello: Hello, deadline: Deadline, map_them: Callable[[Offer, list[int]], None]) -> socket.socket:
    """Get the pool from rank 0, and return the connection once every rank has it.

    Args:
        name: as rank 0's.
        hello: who this is.
        deadline: for everything together.
        map_them: maps the files, whose descriptors are closed afterwards.

    Raises:
        PeerLost: rank 0 did not come in time, or ended.
        LayoutMismatch: rank 0 has another pool.
        TidalError: what made rank 0 or another rank fail, or what ``map_them`` raises.
    """
    connection = _connect(name, deadline)
    descriptors: list[int] = []
    try:
        with suppress(PeerLost):  # what it said before it ended says why
            send(connection, hello, "rank 0")
        offer = receive(connection, Offer, "rank 0", deadline, descriptors)
        if len(descriptors) != len(offer.sizes):
            raise ProtocolError(f"{len(descriptors)} files of the shared pool arrived: expected {len(offer.sizes)}")
        try:
            map_them(offer, descriptors)
        except TidalError as error:
            with suppress(TidalError):
                send(connection, Refusal.of(error), "rank 0")
            raise
        with suppress(PeerLost):
            send(connection, Mapped(), "rank 0")
        receive(connection, Go, "rank 0", deadline)
    except BaseException:
        connection.close()
        raise
    finally:
        for each in descriptors:
            os.close(each)
    return connection


def _connect(name: str, deadline: Deadline) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address_of(name))
        except OSError as error:
            connection.close()
            if not deadline.left():
                raise PeerLost(
                    f"shared pool {name!r}: no rank 0 handed it on within {deadline.wait_s:g} s ({error.strerror}); it "
                    "must run on this machine and in this network namespace; see its own log"
                ) from None
            time.sleep(min(_RETRY_S, deadline.left()))
            continue
        if user_of(connection) != os.geteuid():
            connection.close()
            raise Conflict(f"shared pool {name!r}: a process of another user hands it on; choose another name")
        return connection
