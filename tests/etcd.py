# SPDX-License-Identifier: Apache-2.0
"""A private etcd on free ports, with its data in a folder of the test: it can be stopped, killed, frozen and wiped.

::

    with EtcdServer(tmp_path) as etcd:
        store = open_store(RegistryConfig(url=etcd.url))

It keeps its ports when it starts again. ``tls`` and :meth:`EtcdServer.enable_auth` make it what production needs;
:func:`joined` makes several of them one cluster.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import pytest
from pyetcd import etcdrpc

from tidal_connector.address import join_address

BINARY = shutil.which("etcd")
_MISSING = "etcd is not installed (Debian package etcd-server)"

needs_etcd = pytest.mark.skipif(BINARY is None, reason=_MISSING)
START_S = 20.0


def etcd_binary() -> str:
    """Return where etcd is; a test on a machine without it is skipped."""
    return BINARY or pytest.skip(_MISSING)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on, outside the range from which the kernel gives ports to connections: so it
    is still free when a server comes back to it."""
    for port in random.sample(range(20000, 32000), 200):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port on {host}")


def joined(*servers: EtcdServer) -> str:
    """Make servers that have not started members of one cluster, and return what ``registry.url`` says."""
    for each in servers:
        each._members = list(servers)
    return "etcd://" + ",".join(each.netloc for each in servers)


class EtcdServer:
    """One member, one process.

    Attributes:
        host: address that it listens on.
        port: for clients.
        folder: its log and its data.
        tls: its options for TLS, for the next start.
        process: while it runs.
    """

    def __init__(
        self,
        folder: Path,
        host: str = "127.0.0.1",
        *,
        tls: Sequence[str] = (),
        options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ) -> None:
        """Prepare; ``start`` starts it.

        Args:
            folder: a folder of the test.
            host: address to listen on.
            tls: etcd's options for TLS (``tests.certificates`` makes them); none: plain.
            options: more of etcd's options.
            wrapper: a command to start it by, such as ``ip netns exec a``.
        """
        self.host = host
        self.folder = folder
        self.port, self._peer, self._metrics = free_port(), free_port(), free_port()
        self.tls, self._options, self._wrapper = list(tls), list(options), list(wrapper)
        self.process: subprocess.Popen[bytes] | None = None
        self._members = [self]

    @property
    def name(self) -> str:
        """Its name among the members of a cluster."""
        return f"private-{self.port}"

    @property
    def peer_url(self) -> str:
        """Where the other members of its cluster find it."""
        return self._at(self._peer)

    @property
    def netloc(self) -> str:
        """``host:port`` for clients."""
        return join_address(self.host, self.port)

    @property
    def url(self) -> str:
        """What ``registry.url`` says."""
        return f"etcd://{self.netloc}"

    def _at(self, port: int, scheme: str = "http") -> str:
        return f"{scheme}://{join_address(self.host, port)}"

    def start(self, wait: bool = True) -> None:
        """Start it, with the data that it has; by default wait until it answers."""
        assert self.process is None, "etcd runs already"
        client = self._at(self.port, "https" if self.tls else "http")
        peer = self.peer_url
        cluster = ",".join(f"{each.name}={each.peer_url}" for each in self._members)
        command = [
            *self._wrapper,
            *(etcd_binary(), "--name", self.name, "--data-dir", str(self.folder / "etcd-data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--listen-metrics-urls", self._at(self._metrics)),
            *("--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "warn", "--logger", "zap"),
            *self.tls,
            *self._options,
        ]
        with (self.folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until it answers."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            assert self.process.poll() is None, f"etcd ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"etcd did not become ready:\n{self.log()}"
            time.sleep(0.05)

    def healthy(self) -> bool:
        """Whether it says so itself (only where this process can reach its address)."""
        try:
            with urllib.request.urlopen(self._at(self._metrics) + "/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (OSError, urllib.error.URLError):
            return False

    def log(self) -> str:
        """The end of what it logged."""
        return (self.folder / "etcd.log").read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def freeze(self) -> None:
        """Stop its time: connections stay open, nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Delete its data; only while it is stopped."""
        assert self.process is None, "etcd still runs"
        shutil.rmtree(self.folder / "etcd-data", ignore_errors=True)

    def channel(self, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
        """Return a connection of the test's own, past the product."""
        return grpc.secure_channel(self.netloc, credentials) if credentials else grpc.insecure_channel(self.netloc)

    def keys(self, prefix: str = "") -> dict[str, etcdrpc.KeyValue]:
        """Return what it holds under a prefix, read past the product (without TLS and login)."""
        start = prefix.encode() or b"\0"
        end = b"\0" if not prefix else start[:-1] + bytes([start[-1] + 1])
        with self.channel() as channel:
            found = etcdrpc.KVStub(channel).Range(etcdrpc.RangeRequest(key=start, range_end=end), timeout=5)
        return {kv.key.decode(errors="backslashreplace"): kv for kv in found.kvs}

    def put(self, key: str | bytes, value: bytes, ttl_s: int = 0) -> None:
        """Write a key past the product, under a lease of its own if ``ttl_s`` is given (without TLS and login)."""
        name = key if isinstance(key, bytes) else key.encode()
        with self.channel() as channel:
            grant = etcdrpc.LeaseGrantRequest(TTL=ttl_s)
            lease = etcdrpc.LeaseStub(channel).LeaseGrant(grant, timeout=5).ID if ttl_s else 0
            etcdrpc.KVStub(channel).Put(etcdrpc.PutRequest(key=name, value=value, lease=lease), timeout=5)

    def delete(self, key: str) -> None:
        """Delete a key past the product (without TLS and login)."""
        with self.channel() as channel:
            etcdrpc.KVStub(channel).DeleteRange(etcdrpc.DeleteRangeRequest(key=key.encode()), timeout=5)

    def revoke(self, lease: int) -> None:
        """Revoke a lease past the product (without TLS and login)."""
        with self.channel() as channel:
            etcdrpc.LeaseStub(channel).LeaseRevoke(etcdrpc.LeaseRevokeRequest(ID=lease), timeout=5)

    def compact(self) -> None:
        """Forget all history (without TLS and login)."""
        with self.channel() as channel:
            kv = etcdrpc.KVStub(channel)
            revision = kv.Range(etcdrpc.RangeRequest(key=b"x"), timeout=5).header.revision
            kv.Compact(etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=5)

    def enable_auth(
        self, users: Mapping[str, tuple[str, str]], credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """Demand a login from now on: ``root`` with password ``root``, and these users.

        Args:
            users: password and the prefix that may be read and written, by name.
            credentials: of TLS.
        """
        with self.channel(credentials) as channel:
            auth = etcdrpc.AuthStub(channel)
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name="root", password="root"), timeout=5)
            auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=5)
            for name, (password, prefix) in users.items():
                auth.UserAdd(etcdrpc.AuthUserAddRequest(name=name, password=password), timeout=5)
                auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name=name), timeout=5)
                start = prefix.encode()
                allowed = etcdrpc.Permission(
                    permType=etcdrpc.Permission.READWRITE, key=start, range_end=start[:-1] + bytes([start[-1] + 1])
                )
                auth.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(name=name, perm=allowed), timeout=5)
                auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=name, role=name), timeout=5)
            auth.AuthEnable(etcdrpc.AuthEnableRequest(), timeout=5)

    def change_password(self, user: str, password: str) -> None:
        """Give a user another password, as root."""
        with self.channel() as channel:
            auth = etcdrpc.AuthStub(channel)
            token = auth.Authenticate(etcdrpc.AuthenticateRequest(name="root", password="root"), timeout=5).token
            request = etcdrpc.AuthUserChangePasswordRequest(name=user, password=password)
            auth.UserChangePassword(request, timeout=5, metadata=(("token", token),))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
