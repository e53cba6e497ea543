# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ, and the only place that imports it: one listening socket, and one outgoing socket for each peer that we call.

Takes and hands on whole frames, each with its *route*: the connection that it came from or goes to. Nothing in a
:class:`Channel` blocks: a frame that cannot be handed to the kernel now is dropped and reported, and the protocol
repeats what matters. Everything but its constructor is called from the control thread. :func:`ask` is for others: one
question to one worker, and a bounded wait for the answer. CURVE keys belong into ``_socket``.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from types import TracebackType

import msgspec
import zmq

from tidal_connector.address import join_address, only_ipv6, parse_address
from tidal_connector.config import ControlConfig
from tidal_connector.control.messages import FRAME_LIMIT
from tidal_connector.errors import ConfigError

_HIGH_WATER = 4096  # frames that wait in a socket, per peer
_BURST = 64  # frames read from a socket before the others get their turn


class Route(msgspec.Struct, frozen=True, order=True):
    """One connection: ``address`` and ``line`` for those that we called, ``caller`` (ZeroMQ's name) for those that
    called us.

    Attributes:
        address: ``host:port`` that was dialled.
        line: the engine that was asked for; two engines looked for at one address get a connection each.
        caller: ZeroMQ's name of an incoming connection.
    """

    address: str = ""
    line: str = ""
    caller: bytes = b""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Channel:
    """The sockets of one worker.

    Attributes:
        address: the ``host:port`` that peers connect to, with the port that was really bound.
    """

    def __init__(self, bind: str, advertise: str | None = None) -> None:
        """Listen.

        Args:
            bind: ``host:port``; port 0 lets the kernel choose. Nothing else is listened on.
            advertise: host, or ``host:port``, that peers connect to; None takes that of ``bind``.

        Raises:
            ConfigError: an address cannot be read, bound, or reached by anybody.
        """
        host, port = parse_address("control.bind", bind)
        shown, shown_port = ControlConfig(bind=bind, advertise=advertise).advertised()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._dialled: dict[Route, zmq.Socket[bytes]] = {}
        self._ipv6 = ":" in host
        self._listener = _socket(self._context, zmq.ROUTER, self._ipv6)
        self._listener.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown caller is an error to see, not a silent drop
        try:
            self._listener.bind(f"tcp://{join_address(host, port)}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"control.bind = {bind!r}: {error}; choose a free port, or 0, on an address of this machine"
            ) from None
        bound = int(bytes(self._listener.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
        self.address = join_address(shown, shown_port or bound)
        self._poller.register(self._listener, zmq.POLLIN)

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def watch(self, fd: int) -> None:
        """Let :meth:`wait` also return when a file descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def dial(self, address: str, line: str) -> Route:
        """Start connecting to a peer's ``host:port``; a line that is dialled already keeps its connection.

        Raises:
            ConfigError: the address cannot be read.
        """
        host, port = parse_address("control address", address)
        route = Route(address, line)
        if route not in self._dialled:
            # A name is looked up by ZeroMQ, off this thread: in the family in which we listen ourselves; an IPv6 socket
            # also takes IPv4 where there is nothing else.
            by_name = not _is_address(host)
            socket = _socket(self._context, zmq.DEALER, self._ipv6 if by_name else ":" in host)
            try:
                socket.connect(f"tcp://{join_address(host, port)}")
            except zmq.ZMQError as error:
                socket.close()
                raise ConfigError(f"control address = {address!r}: {error}") from None
            self._dialled[route] = socket
            self._poller.register(socket, zmq.POLLIN)
        return route

    def hang_up(self, route: Route) -> None:
        """Close a connection that we called; frames that still wait in it are dropped."""
        socket = self._dialled.pop(route, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()

    def send(self, route: Route, frame: bytes) -> bool:
        """Hand a frame to the kernel; False where that cannot be done now."""
        try:
            if route.caller:
                self._listener.send_multipart([route.caller, frame], flags=zmq.NOBLOCK)
            else:
                socket = self._dialled.get(route)
                if socket is None:
                    return False
                socket.send(frame, flags=zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            return False  # not connected yet, its queue is full, or the caller has gone
        return True

    def wait(self, timeout_s: float) -> None:
        """Sleep until a frame or a watched descriptor can be read, or the time is over."""
        self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))

    def receive(self) -> Iterator[tuple[Route, bytes]]:
        """Yield the frames that have arrived, a bounded number from each peer."""
        for _ in range(_BURST):
            try:
                parts = self._listener.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            # A caller that sends several parts, or none, speaks something else: its frame is refused as unreadable.
            yield Route(caller=parts[0]), parts[1] if len(parts) == 2 else b""
        for route, socket in list(self._dialled.items()):
            for _ in range(_BURST):
                if socket.closed:
                    break
                try:
                    parts = socket.recv_multipart(flags=zmq.NOBLOCK)
                except zmq.Again:
                    break
                yield route, parts[0] if len(parts) == 1 else b""

    def close(self, linger_s: float = 0.0) -> None:
        """Close every socket and end ZeroMQ's threads; may be called again.

        Args:
            linger_s: how long frames that were sent just before may still take to leave.
        """
        for socket in (self._listener, *self._dialled.values()):
            if not socket.closed:
                socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
        for route in list(self._dialled):
            self.hang_up(route)
        self._listener.close()
        self._context.term()


def ask(address: str, frame: bytes, timeout_s: float) -> bytes | None:
    """Send one frame to a worker's ``host:port`` and return the first that comes back; None where none comes in time.

    Opens and closes a connection of its own; any thread.

    Args:
        address: where the worker listens.
        frame: what is sent.
        timeout_s: seconds for connecting, sending and waiting together.

    Raises:
        ConfigError: the address cannot be read, or no socket can be had for it.
    """
    host, port = parse_address("control address", address)
    until = time.monotonic() + timeout_s
    try:
        with zmq.Context[zmq.Socket[bytes]]() as context, _socket(context, zmq.DEALER, only_ipv6(host)) as socket:
            socket.setsockopt(zmq.SNDTIMEO, max(1, int(timeout_s * 1000)))
            socket.connect(f"tcp://{join_address(host, port)}")
            socket.send(frame)
            if not socket.poll(max(0, int((until - time.monotonic()) * 1000))):
                return None
            parts = socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None
    except zmq.ZMQError as error:
        raise ConfigError(f"control address = {address!r}: {error}") from None
    return parts[0] if len(parts) == 1 else b""


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, ipv6: bool) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a peer that is not there
    return socket
