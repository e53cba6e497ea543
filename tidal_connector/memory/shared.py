# SPDX-License-Identifier: Apache-2.0
"""One host pool for all ranks of an engine on a node: rank 0 makes it, the others map the same pages.

Takes the pool's settings and who shares it; hands on a region like any other, which each process may register with its
own NPU. The pages are those of files without a name: when the last process that maps them has ended, by whatever way,
the kernel has them back, and nothing else is left behind. A rank whose pool cannot be had, or whose peer ends in the
meantime, learns why within the deadline. One thread of each process opens and closes; any may use the memory.
"""

from __future__ import annotations

import socket

import msgspec

from tidal_connector.config import PoolConfig
from tidal_connector.errors import ConfigError, PeerLost, PoolExhausted, TidalError
from tidal_connector.log import get_logger
from tidal_connector.memory import mapping
from tidal_connector.memory.builder import Builder, Progress
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.region import MemoryRegion
from tidal_connector.memory.report import RegionReport, size_text
from tidal_connector.memory.shared_handover import Listener, fetch
from tidal_connector.memory.shared_pages import SharedPages, map_files
from tidal_connector.memory.shared_wire import VERSION, Deadline, Hello, Offer, has_ended

_log = get_logger(__name__)


class Share(msgspec.Struct, frozen=True):
    """Who shares a pool.

    Attributes:
        name: of the pool, the same on all its ranks and no other engine's on this machine; it should change with each
            start of the engine.
        rank: this process, from 0; rank 0 makes the pool.
        world: how many ranks share it.
        fingerprint: text that says what lies in the pool, such as the layout's; all ranks must name the same.
        wait_s: longest wait for the other ranks, in seconds. It must cover faulting all pages in: some seconds for each
            100 GiB on hugepages, minutes on ordinary pages.
    """

    name: str
    rank: int
    world: int
    fingerprint: str
    wait_s: float = 600.0


class SharedRegion(MemoryRegion):
    """This process's mapping of a shared pool.

    Attributes:
        share: who shares it.
    """

    def __init__(
        self, address: int, length: int, report: RegionReport, share: Share, peers: dict[int, socket.socket]
    ) -> None:
        super().__init__(address, length, report)
        self.share = share
        self._peers = peers

    def check(self) -> None:
        """See whether the ranks that this one is connected to still share the pool: rank 0, or all others for rank 0.

        The memory stays usable without them; what they were to write into it will not come.

        Raises:
            PeerLost: one has ended, or has closed the pool.
        """
        gone = [rank for rank, peer in self._peers.items() if has_ended(peer)]
        if gone:
            raise PeerLost(
                f"shared pool {self.share.name!r}: rank {', '.join(map(str, gone))} has ended; end this engine's other "
                "ranks and start it anew"
            )

    def close(self) -> None:
        """Unmap the pool, as every region does, and let the other ranks see it. Idempotent."""
        super().close()
        for peer in self._peers.values():
            peer.close()


def open_shared(
    length: int,
    settings: PoolConfig,
    share: Share,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> SharedRegion:
    """Make or map a pool of at least ``length`` bytes; returns on all ranks once every one of them has it.

    Args:
        length: bytes wanted, the same on all ranks.
        settings: kind of pages, as for :func:`~tidal_connector.memory.region.open_region`; those of rank 0 count.
        share: who shares it.
        progress: called on rank 0 while pages are faulted in.
        machine: what the machine has; None asks the kernel.

    Raises:
        PoolExhausted: the memory cannot be had on rank 0; every rank raises it.
        PeerLost: a rank ended, or did not come within ``share.wait_s``.
        LayoutMismatch: ranks disagree about length, world or fingerprint.
        Conflict: two processes claim the same rank of this name.
        ConfigError: a number is out of range, or a setting names nothing that exists.
    """
    if length < 1 or not 0 <= share.rank < share.world:
        raise ConfigError(
            f"shared pool of {length} bytes, rank {share.rank} of {share.world}: expected at least 1 byte and a rank "
            "from 0 to below the number of ranks"
        )
    hello = Hello(VERSION, share.rank, share.world, length, share.fingerprint)
    deadline = Deadline(share.wait_s)
    if share.rank == 0:
        return _make(hello, settings, share, deadline, progress, machine or Machine())
    return _join(hello, settings, share, deadline)


def _make(
    hello: Hello,
    settings: PoolConfig,
    share: Share,
    deadline: Deadline,
    progress: Progress | None,
    machine: Machine,
) -> SharedRegion:
    pages = SharedPages()
    with Listener(share.name, hello, deadline) as listener:
        try:
            try:
                address, length, report = Builder(hello.length, settings, progress, machine, pages).build()
            except TidalError as error:
                listener.refuse(error)
                raise
            pages.seal()
            offer = Offer(tuple(each.size for each in pages.files), report)
            try:
                peers = listener.hand_on(offer, [each.descriptor for each in pages.files])
            except BaseException:
                mapping.unmap(address, length)
                raise
        finally:
            pages.close()
    _log.info("%s, shared by %d ranks", report.line(), share.world)
    return SharedRegion(address, length, report, share, peers)


def _join(hello: Hello, settings: PoolConfig, share: Share, deadline: Deadline) -> SharedRegion:
    found: list[tuple[int, int, RegionReport]] = []

    def map_them(offer: Offer, descriptors: list[int]) -> None:
        try:
            found.append((*map_files(offer.sizes, descriptors, settings.prefault), offer.report))
        except OSError as error:
            raise PoolExhausted(
                f"shared pool {share.name!r}: rank {share.rank} cannot map its {size_text(sum(offer.sizes))}: "
                f"{error.strerror}; see ulimit -v and the memory cgroup"
            ) from None

    try:
        peer = fetch(share.name, hello, deadline, map_them)
    except BaseException:
        for address, length, _ in found:
            mapping.unmap(address, length)
        raise
    return SharedRegion(*found[0], share, {0: peer})
