# SPDX-License-Identifier: Apache-2.0
"""Machines for tests: network namespaces joined by a bridge, each behind a link of limited speed (root needed).

::

    with Network(["prefill", "decode"], rate="1gbit") as network:
        server = network["decode"].server("decode", [...], ...)

Every node has an address of IPv4 and one of IPv6 and its own loopback; this process takes part as one more machine, at
the bridge's own address, and so reaches every node. Names hold this process's id. A network goes with its block; what
a killed process left is taken away by whoever makes the next one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import pytest

from tests.e2e.relay import Relay
from tidal_connector.address import join_address
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.config import child_environment

COMMAND_S = 20.0
JUMBO = 9000
"""MTU of a network with delays: a relay in Python carries few large frames better than many small ones."""

_OURS = re.compile(r"(?:tidal-|td)(\d+)[-bvt]")
_numbers = itertools.count()


class Unavailable(Exception):
    """Namespaces, or what they need, cannot be made here; the text says what is missing."""


class Traffic(NamedTuple):
    """Bytes on a node's link since it was made, as the node sees them."""

    received: int
    sent: int


class Node:
    """One machine.

    Attributes:
        name: what tests call it.
        namespace: its network namespace.
        ipv4, ipv6: its addresses.
    """

    def __init__(self, name: str, namespace: str, link: str, ipv4: str, ipv6: str, relay: Relay | None) -> None:
        self.name = name
        self.namespace = namespace
        self.ipv4 = ipv4
        self.ipv6 = ipv6
        self._link = link
        self._relay = relay

    def address(self, family: int) -> str:
        """Return the address of family 4 or 6."""
        return self.ipv6 if family == 6 else self.ipv4

    def at(self, family: int, port: int) -> str:
        """Return ``host:port`` with the address of family 4 or 6."""
        return join_address(self.address(family), port)

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs on this node.

        ``ip netns exec`` would also replace ``/sys``, and with it the limits on memory that a container set.
        """
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *command]

    def run(self, command: Sequence[str]) -> str:
        """Run a command here, wait for its end, and return what it printed."""
        return _run(self.inside(command))

    def server(
        self,
        name: str,
        command: Sequence[str],
        url: str,
        log: Path,
        probe: str = "/health",
        environment: Mapping[str, str] | None = None,
    ) -> ServerProcess:
        """Return a server of this node, not started yet."""
        return ServerProcess(name, self.inside(command), environment or child_environment(), url, log, probe)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """Take the node's link down while the block runs; nobody is told, frames are just lost."""
        _run(["ip", "link", "set", self._link, "down"])
        try:
            yield
        finally:
            _run(["ip", "link", "set", self._link, "up"])

    def delay(self, seconds: float) -> None:
        """Let every frame take so much longer, each way; only for nodes made with a relay."""
        assert self._relay is not None, f"node {self.name} has no relay"
        self._relay.delay(seconds)

    def traffic(self) -> Traffic:
        """Return the bytes on its link."""
        (link,) = json.loads(_run(["ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0"]))
        return Traffic(link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"])

    def listeners(self) -> set[str]:
        """Return the addresses on which something listens for TCP here."""
        lines = self.run(["ss", "-Hltn"]).splitlines()
        return {line.split()[3].rpartition(":")[0].strip("[]") for line in lines}


class Network:
    """The nodes and what joins them, as a context manager.

    Raises:
        Unavailable: it cannot be made here.
    """

    def __init__(self, names: Sequence[str], *, rate: str = "1gbit", relayed: Sequence[str] = ()) -> None:
        """Prepare.

        Args:
            names: of the nodes.
            rate: of each node's link, each way, as ``tc`` writes it.
            relayed: nodes whose frames pass through a relay, so that they can be delayed.
        """
        self._names = list(names)
        self._rate = rate
        self._relayed = set(relayed)
        self._exit = contextlib.ExitStack()
        self._nodes: dict[str, Node] = {}
        self._number = next(_numbers)

    @property
    def names(self) -> list[str]:
        """The nodes, in the order in which they were asked for."""
        return list(self._names)

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __enter__(self) -> Self:
        if reason := unavailable():
            raise Unavailable(reason)
        sweep()
        with contextlib.ExitStack() as made:
            self._make(made)
            self._exit = made.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def host(self) -> Node:
        """This process's place in the network."""
        return self._host

    def _make(self, made: contextlib.ExitStack) -> None:
        mark = f"td{os.getpid()}"
        bridge = f"{mark}b{self._number}"
        subnet = _free_subnet()
        prefix = f"198.{18 + subnet // 256}.{subnet % 256}"
        prefix6 = f"fd74:6964:616c:{subnet:x}:"
        mtu = str(JUMBO if self._relayed else 1500)
        made.callback(_remove, ["ip", "link", "delete", bridge])
        _run(["ip", "link", "add", bridge, "mtu", mtu, "type", "bridge", "forward_delay", "0", "mcast_snooping", "0"])
        self._host = Node("host", "", bridge, f"{prefix}.254", f"{prefix6}:fe", None)
        _run(["ip", "link", "set", bridge, "up"])
        _run(["ip", "address", "add", f"{self._host.ipv4}/24", "dev", bridge])
        _run(["ip", "address", "add", f"{self._host.ipv6}/64", "dev", bridge, "nodad"])
        for index, name in enumerate(self._names, 1):
            namespace = f"tidal-{os.getpid()}-{self._number}-{name}"
            link = f"{mark}v{self._number}n{index}"
            made.callback(_remove, ["ip", "netns", "delete", namespace])
            _run(["ip", "netns", "add", namespace])
            relay = None
            if name in self._relayed:
                inner = f"{mark}t{self._number}n{index}"
                relay = made.enter_context(Relay(link, inner))
                _run(["ip", "link", "set", inner, "netns", namespace])
                _run(["ip", "-n", namespace, "link", "set", inner, "name", "eth0"])
            else:
                made.callback(_remove, ["ip", "link", "delete", link])
                _run(["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace])
            node = Node(name, namespace, link, f"{prefix}.{index}", f"{prefix6}:{index:x}", relay)
            _run(["ip", "link", "set", link, "mtu", mtu, "master", bridge, "up"])
            _run(["ip", "-n", namespace, "link", "set", "lo", "up"])
            _run(["ip", "-n", namespace, "link", "set", "eth0", "mtu", mtu, "up"])
            _run(["ip", "-n", namespace, "address", "add", f"{node.ipv4}/24", "dev", "eth0"])
            _run(["ip", "-n", namespace, "address", "add", f"{node.ipv6}/64", "dev", "eth0", "nodad"])
            _run(["tc", "qdisc", "replace", "dev", link, "root", *_shape(self._rate)])
            _run(["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", *_shape(self._rate)])
            self._nodes[name] = node


def skip_without_namespaces() -> None:
    """Skip a test where no network can be made, with the reason."""
    if reason := unavailable():
        pytest.skip(f"network namespaces cannot be made here: {reason}")


@functools.cache
def unavailable() -> str | None:
    """Return why no network can be made here, or None; tries it once."""
    if os.geteuid() != 0:
        return "root is needed"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"the program {tool} is not installed (Debian packages iproute2 and util-linux)"
    namespace, link = f"tidal-{os.getpid()}-probe", f"td{os.getpid()}v-probe"
    steps = [
        ["ip", "netns", "add", namespace],
        ["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace],
        ["ip", "link", "set", link, "up"],
        ["tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", *_shape("1gbit")],
        ["ip", "-n", namespace, "address", "add", "fd74:6964:616c:ffff::1/64", "dev", "eth0", "nodad"],
        ["nsenter", f"--net=/run/netns/{namespace}", "true"],
    ]
    try:
        for step in steps:
            _run(step)
    except Unavailable as error:
        return str(error)
    finally:
        _remove(["ip", "link", "delete", link])
        _remove(["ip", "netns", "delete", namespace])
    return None


def sweep() -> list[str]:
    """Take away the namespaces and links of processes that are gone, and return their names."""
    swept = []
    for namespace in _namespaces():
        if _is_orphan(namespace):
            _remove(["ip", "netns", "delete", namespace])
            swept.append(namespace)
    for link in _links():
        if _is_orphan(link):
            _remove(["ip", "link", "delete", link])
            swept.append(link)
    return swept


def _is_orphan(name: str) -> bool:
    found = _OURS.match(name)
    return found is not None and not Path(f"/proc/{found[1]}").exists()


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _links() -> list[str]:
    return [link["ifname"] for link in json.loads(_run(["ip", "-j", "link", "show"]))]


def _free_subnet() -> int:
    """Return a number below 512 whose /24 of 198.18.0.0/15, the range kept for tests of networks, has no route here."""
    routes = json.loads(_run(["ip", "-j", "route", "show"]))
    taken = {route["dst"] for route in routes}
    for number in range(512):
        subnet = (os.getpid() + number) % 512
        if f"198.{18 + subnet // 256}.{subnet % 256}.0/24" not in taken:
            return subnet
    raise Unavailable("every subnet of 198.18.0.0/15 is in use")


def _shape(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _remove(command: Sequence[str]) -> None:
    """Run a command that takes something away which may be gone already."""
    subprocess.run(command, capture_output=True, timeout=COMMAND_S, check=False)
