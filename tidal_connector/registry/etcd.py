# SPDX-License-Identifier: Apache-2.0
"""etcd's protocol, and the only place that imports its client: bounded calls to one of several endpoints, logged in.

Of ``pyetcd`` this takes the messages and stubs. Its client object is not used: it measures failed endpoints by the wall
clock, logs in once in its life, and its watch has calls without a bound. Here:

* Every call has a deadline. A watch has none by nature; :class:`Events` can be cancelled from any thread.
* A call that finds no server, or none that answers in time, gives up this connection; the next one tries the next
  endpoint. A connection across a network that was cut is never trusted again: its TCP may stay silent for a minute.
* A token that etcd does not know (it restarted, the token was too old, passwords changed) is replaced by logging in
  again with the password file as it is now; the call is made once more. Certificates are read anew at each connection.
* What went wrong is one line, in a :class:`RegistryLost`.

Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import msgspec
from pyetcd import etcdrpc

from tidal_connector.address import join_address
from tidal_connector.errors import RegistryLost
from tidal_connector.log import get_logger
from tidal_connector.registry.etcd_channel import hint, is_answer, knows_no_users, open_channel, said, wants_login
from tidal_connector.registry.settings import RegistryConfig, endpoints_of

_log = get_logger(__name__)

_PAGE = 16  # keys in one answer: even if each has the 1.5 MiB that etcd takes, it stays below the limit of a message
Answer = TypeVar("Answer")


class LeaseGone(RegistryLost):
    """The lease that a call names has ended."""


class Found(msgspec.Struct, frozen=True):
    """A key's value, the revision that wrote it, and the lease that it is under (0: none)."""

    value: bytes
    revision: int
    lease: int


class Change(msgspec.Struct, frozen=True):
    """What a watch tells: what a key holds since a revision, None where it is gone."""

    key: bytes
    revision: int
    found: Found | None


class Write(msgspec.Struct, frozen=True):
    """One change of a transaction: a value, under a lease if not 0; ``value`` None deletes."""

    key: bytes
    value: bytes | None
    lease: int = 0


class _Line:
    """One connection: a channel, its stubs and its token."""

    def __init__(self, target: str, channel: grpc.Channel) -> None:
        self.target = target
        self.channel = channel
        self.token: str | None = None  # empty: etcd asks for none
        kv, lease = etcdrpc.KVStub(channel), etcdrpc.LeaseStub(channel)
        self.range, self.txn = kv.Range, kv.Txn
        self.grant, self.revoke, self.keep_alive = lease.LeaseGrant, lease.LeaseRevoke, lease.LeaseKeepAlive
        self.watch = etcdrpc.WatchStub(channel).Watch
        self.authenticate = etcdrpc.AuthStub(channel).Authenticate

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self.token),) if self.token else ()


class Events:
    """A running watch, as etcd streams it. Iterating ends when it is cut or cancelled."""

    def __init__(self, line: _Line, request: Any) -> None:
        self._over = threading.Event()
        self._call = line.watch(self._requests(request), metadata=line.metadata)

    def _requests(self, request: Any) -> Iterator[Any]:
        yield request
        self._over.wait()  # etcd would take the end of our requests for a wish to go on; others in between might not

    def batches(self) -> Iterator[list[Change]]:
        """Yield changes in their order; an empty batch says that the watch stands.

        Raises:
            RegistryLost: the watch was cut, refused, or asks for history that was compacted.
        """
        try:
            for answer in self._call:
                if answer.compact_revision:
                    raise RegistryLost(f"etcd has compacted its history up to revision {answer.compact_revision}")
                if answer.canceled:
                    raise RegistryLost(f"etcd ended the watch: {answer.cancel_reason or 'no reason given'}")
                yield [
                    Change(each.kv.key, each.kv.mod_revision, None if each.type == each.DELETE else _found(each.kv))
                    for each in answer.events
                ]
        except grpc.RpcError as error:
            raise RegistryLost(said(error)) from None
        raise RegistryLost("etcd ended the watch")

    def cancel(self) -> None:
        """End it; whoever iterates is told that it was cut."""
        self._over.set()
        self._call.cancel()


class EtcdClient:
    """Calls to whichever endpoint answers."""

    def __init__(self, config: RegistryConfig, timeout_s: float) -> None:
        """Prepare; nothing is connected before the first call.

        Args:
            config: endpoints, TLS and login.
            timeout_s: bound of each call.
        """
        self._config = config
        self._timeout_s = timeout_s
        self._targets = [join_address(host, port) for host, port in endpoints_of(config.url)]
        self._next = 0
        self._line: _Line | None = None
        self._lock = threading.Lock()  # over the connection
        self._login = threading.Lock()  # one login at a time
        self._closed = False
        self._unguarded_said = False

    # --- calls ---

    def range(self, prefix: bytes) -> tuple[int, dict[bytes, Found]]:
        """Return everything under a prefix as it was at one revision, and that revision.

        Raises:
            RegistryLost: etcd does not answer.
        """
        found: dict[bytes, Found] = {}
        start, revision = prefix, 0
        while True:
            # All pages are of the first one's revision. Each has a bound of its own: megabytes take longer.
            request = etcdrpc.RangeRequest(key=start, range_end=_end_of(prefix), limit=_PAGE, revision=revision)
            answer = self._call(lambda line: line.range, request)
            revision = revision or answer.header.revision
            found.update((kv.key, _found(kv)) for kv in answer.kvs)
            if not answer.more:
                return revision, found
            start = answer.kvs[-1].key + b"\0"

    def get(self, key: bytes) -> Found | None:
        """Return what a key holds.

        Raises:
            RegistryLost: etcd does not answer.
        """
        answer = self._call(lambda line: line.range, etcdrpc.RangeRequest(key=key))
        return _found(answer.kvs[0]) if answer.kvs else None

    def transact(
        self, expect: Mapping[bytes, int], unleased: Sequence[bytes], writes: Sequence[Write]
    ) -> Mapping[bytes, Found] | None:
        """Make all writes, if every key in ``expect`` has that revision (0: absent) and no ``unleased`` one a lease.

        Returns:
            None where they were made, otherwise what the keys of both conditions hold.

        Raises:
            RegistryLost: etcd does not answer; it is not known whether they were made.
        """
        compare = [
            etcdrpc.Compare(key=key, target=etcdrpc.Compare.MOD, result=etcdrpc.Compare.EQUAL, mod_revision=revision)
            for key, revision in expect.items()
        ]
        compare += [
            etcdrpc.Compare(key=key, target=etcdrpc.Compare.LEASE, result=etcdrpc.Compare.EQUAL, lease=0)
            for key in unleased
        ]
        keys = sorted({*expect, *unleased})
        look = [etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key)) for key in keys]
        request = etcdrpc.TxnRequest(compare=compare, success=[_operation(each) for each in writes], failure=look)
        answer = self._call(lambda line: line.txn, request, again=False)
        if answer.succeeded:
            return None
        return {kv.key: _found(kv) for each in answer.responses for kv in each.response_range.kvs}

    def grant(self, ttl_s: int) -> int:
        """Begin a lease and return its id.

        Raises:
            RegistryLost: etcd does not answer.
        """
        return int(self._call(lambda line: line.grant, etcdrpc.LeaseGrantRequest(TTL=ttl_s)).ID)

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; return whether it was still there.

        Raises:
            RegistryLost: etcd does not answer.
        """

        def ask(line: _Line, deadline: float) -> bool:
            request = iter([etcdrpc.LeaseKeepAliveRequest(ID=lease)])
            call = line.keep_alive(request, timeout=_left(deadline), metadata=line.metadata)
            try:
                answer = next(iter(call), None)
            finally:
                call.cancel()
            return answer is not None and answer.TTL > 0

        return self._bounded(ask)

    def revoke(self, lease: int) -> None:
        """End a lease, with every key under it.

        Raises:
            RegistryLost: etcd does not answer.
        """
        with contextlib.suppress(LeaseGone):
            self._call(lambda line: line.revoke, etcdrpc.LeaseRevokeRequest(ID=lease))

    def watch(self, prefix: bytes, revision: int) -> Events:
        """Begin to watch a prefix, from this revision on.

        Raises:
            RegistryLost: there is no connection.
        """
        create = etcdrpc.WatchCreateRequest(key=prefix, range_end=_end_of(prefix), start_revision=revision)
        return self._bounded(lambda line, _: Events(line, etcdrpc.WatchRequest(create_request=create)))

    def settle(self, key: bytes) -> None:
        """Find an endpoint that answers, asking each of them once if need be.

        Args:
            key: what to ask for; the user must be allowed to read it.

        Raises:
            RegistryLost: none does.
        """
        self.anywhere(lambda: self.get(key))

    def anywhere(self, ask: Callable[[], Answer]) -> Answer:
        """Ask what may be asked again, of each endpoint once if need be, and return the first answer.

        Raises:
            RegistryLost: none answers.
        """
        for _ in self._targets[1:]:
            with contextlib.suppress(RegistryLost):
                return ask()
        return ask()

    def close(self) -> None:
        """Close the connection; calls under way end with :class:`RegistryLost`."""
        with self._lock:
            self._closed = True
            line, self._line = self._line, None
        if line is not None:
            line.channel.close()

    # --- one call ---

    def _call(self, method: Callable[[_Line], Any], request: Any, again: bool = True) -> Any:
        return self._bounded(
            lambda line, deadline: method(line)(request, timeout=_left(deadline), metadata=line.metadata), again
        )

    def _bounded(self, ask: Callable[[_Line, float], Answer], again: bool = True) -> Answer:
        """Ask on the present connection; log in where that is asked for, and give the connection up where it is bad.

        Args:
            ask: makes the call, with a line and until a deadline.
            again: whether to ask once more where another thread gave this connection up meanwhile.
        """
        deadline = time.monotonic() + self._timeout_s
        line = self._connected()
        try:
            return self._logged_in(line, ask, deadline)
        except grpc.RpcError as error:
            if not is_answer(error):
                mine = self._give_up(line)
                if again and not mine and error.code() is grpc.StatusCode.CANCELLED:
                    return self._bounded(ask, again=False)
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise LeaseGone(f"etcd at {line.target}: {said(error)}") from None
            raise RegistryLost(f"etcd at {line.target}: {said(error)}{hint(error, self._config)}") from None
        except ValueError as error:  # grpc says so when the channel was closed before the call
            self._give_up(line)
            if again:
                return self._bounded(ask, again=False)
            raise RegistryLost(f"etcd at {line.target}: {error}") from None

    def _logged_in(self, line: _Line, ask: Callable[[_Line, float], Answer], deadline: float) -> Answer:
        token = line.token
        if self._config.user and token is None:
            token = self._log_in(line, token, deadline)
        try:
            return ask(line, deadline)
        except grpc.RpcError as error:
            if not self._config.user or not wants_login(error):
                raise
            self._log_in(line, token, deadline)
            return ask(line, deadline)

    def _log_in(self, line: _Line, refused: str | None, deadline: float) -> str | None:
        """Get a token, unless another thread has just got one; return it (empty where etcd asks for none)."""
        with self._login:
            if line.token != refused:
                return line.token
            try:
                password = Path(self._config.password_file).read_text(encoding="utf-8").split("\n", 1)[0].strip("\r")
            except (OSError, UnicodeDecodeError) as error:
                raise RegistryLost(f"registry.password_file = {self._config.password_file!r}: {error}") from None
            request = etcdrpc.AuthenticateRequest(name=self._config.user, password=password)
            try:
                line.token = line.authenticate(request, timeout=_left(deadline)).token
            except grpc.RpcError as error:
                if not knows_no_users(error):
                    raise
                line.token = ""
                if not self._unguarded_said:
                    self._unguarded_said = True
                    _log.warning("etcd at %s knows no users: anybody may change the registry", line.target)
            return line.token

    def _connected(self) -> _Line:
        with self._lock:
            if self._closed:
                raise RegistryLost("the store was closed")
            if self._line is None:
                target = self._targets[self._next]
                self._line = _Line(target, open_channel(self._config, target))
            return self._line

    def _give_up(self, line: _Line) -> bool:
        """Close a connection, unless that was done, and return whether; the next call tries the next endpoint."""
        with self._lock:
            if self._line is not line:
                return False
            self._line = None
            self._next = (self._next + 1) % len(self._targets)
        line.channel.close()
        return True


def _operation(write: Write) -> Any:
    if write.value is None:
        return etcdrpc.RequestOp(request_delete_range=etcdrpc.DeleteRangeRequest(key=write.key))
    put = etcdrpc.PutRequest(key=write.key, value=write.value, lease=write.lease)
    return etcdrpc.RequestOp(request_put=put)


def _found(kv: Any) -> Found:
    return Found(kv.value, kv.mod_revision, kv.lease)


def _end_of(prefix: bytes) -> bytes:
    """The first key after all that begin with a prefix, which ends in a character below 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
