# SPDX-License-Identifier: Apache-2.0
"""A pool of several ranks: real processes for what only they can show, threads of this one for the rest."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.memory.sharing import Rank, ranks
from tests.memory.test_region import hugetlbfs as hugetlbfs  # noqa: PLC0414 - a fixture
from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import ConfigError, Conflict, LayoutMismatch, PeerLost, PoolExhausted, ProtocolError
from tidal_connector.memory import Share, SharedRegion, mapping, open_shared, shared
from tidal_connector.memory.machine import Machine
from tidal_connector.memory.shared_pages import SharedPages, map_files
from tidal_connector.memory.shared_wire import Deadline, Hello, Mapped, Offer, address_of, receive, send

MIB, TWO_MIB = 1 << 20, 2 << 20
PLAIN = PoolConfig(pages=PageKind.PLAIN)

Reserve = Callable[[int], None]
Opening = Callable[..., "Future[SharedRegion]"]


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4()}"


@pytest.fixture
def opening(name: str) -> Iterator[Opening]:
    """A function that opens a rank's pool in a thread; what was opened is closed in the end, nothing may be left."""
    before = descriptors()
    with ThreadPoolExecutor(8) as threads:
        opened: list[Future[SharedRegion]] = []

        def begin(
            rank: int,
            world: int = 2,
            length: int = 4 * MIB,
            fingerprint: str = "f",
            wait_s: float = 10.0,
            machine: Machine | None = None,
        ) -> Future[SharedRegion]:
            share = Share(name, rank, world, fingerprint, wait_s)
            opened.append(threads.submit(open_shared, length, PLAIN, share, machine=machine))
            return opened[-1]

        yield begin
        for each in opened:
            if each.exception(10) is None:
                each.result().close()
    assert descriptors() == before
    assert "/memfd:tidal-pool" not in Path("/proc/self/maps").read_text()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def connected(name: str) -> socket.socket:
    """A connection to whoever hands this pool on."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for _ in range(500):
        try:
            connection.connect(address_of(name))
            return connection
        except ConnectionRefusedError:
            time.sleep(0.01)
    raise AssertionError("nobody listens")


def test_what_one_rank_writes_all_others_see(name: str) -> None:
    with ranks(3, 4 * MIB, PLAIN, name) as all_of_them:
        reports = [each.answer() for each in all_of_them]
        assert [report[0] for report in reports] == ["open"] * 3
        assert reports[0] == reports[1] == reports[2]
        for number, each in enumerate(all_of_them):
            each("write", number * MIB + 5, b"rank %d" % number)
        for each in all_of_them:
            for number in range(3):
                assert each("read", number * MIB + 5, 6) == b"rank %d" % number
            assert each("read", 4 * MIB - 1, 1) == b"\0"
            assert each("check") == ""


def test_a_rank_whose_creator_is_killed_is_told_and_keeps_the_bytes(name: str) -> None:
    with ranks(2, 4 * MIB, PLAIN, name) as (first, second):
        assert [first.answer()[0], second.answer()[0]] == ["open", "open"]
        first("write", 0, b"written")
        first.kill()
        assert second("check").startswith(f"PeerLost: shared pool {name!r}: rank 0 has ended")
        assert second("read", 0, 7) == b"written"


def test_a_creator_that_is_killed_while_it_builds_is_seen_at_once(name: str) -> None:
    """Ranks 1 and 2 of 3 have come, rank 2 says nothing, and rank 0 dies meanwhile: long before the time is up."""
    first = Rank(4 * MIB, PLAIN, Share(name, 0, 3, "f", 60.0))
    second = Rank(4 * MIB, PLAIN, Share(name, 1, 3, "f", 60.0))
    connection = connected(name)  # rank 0 listens
    while Path("/proc/net/unix").read_text().count(address_of(name)[1:]) < 3:  # its socket, and two connections
        time.sleep(0.01)
    start = time.monotonic()
    first.kill()
    assert second.answer()[0] == "PeerLost"
    assert time.monotonic() - start < 10
    connection.close()
    for each in (first, second):
        each.end()


def test_a_rank_may_come_before_rank_0(opening: Opening) -> None:
    second = opening(1)
    time.sleep(0.2)
    assert opening(0).result(10).length == second.result(10).length == 4 * MIB


def test_one_rank_alone_needs_nobody(opening: Opening) -> None:
    region = opening(0, 1).result(10)
    region.check()
    region.buffer[0] = 1


def test_the_same_pages_lie_at_two_addresses(opening: Opening) -> None:
    first, second = opening(0).result, opening(1).result
    one, other = first(10), second(10)
    assert one.address != other.address
    one.buffer[3 * MIB] = 77
    assert other.buffer[3 * MIB] == 77
    assert one.report == other.report
    assert one.report.pieces == ((PageKind.PLAIN, 4 * MIB),)


def test_the_first_that_closes_is_seen_by_the_others(opening: Opening) -> None:
    first, second = opening(0), opening(1)
    first.result(10).check()
    second.result(10).close()
    with pytest.raises(PeerLost, match="rank 1 has ended; end this engine's other ranks"):
        first.result(10).check()


def test_without_rank_0_the_wait_ends(opening: Opening) -> None:
    with pytest.raises(PeerLost, match=r"no rank 0 handed it on within 0.3 s .*network namespace"):
        opening(1, wait_s=0.3).result(10)


def test_ranks_that_do_not_come_are_named(opening: Opening) -> None:
    first, second = opening(0, 4, wait_s=0.6), opening(2, 4)
    with pytest.raises(PeerLost, match=r"rank 1, 3 has not mapped it within 0.6 s"):
        first.result(10)
    with pytest.raises(PeerLost, match="rank 1, 3 has not mapped it"):
        second.result(10)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"fingerprint": "g"}, "fingerprint is 'g' on rank 1 and 'f' on rank 0"),
        ({"length": 8 * MIB}, "length is 8388608 on rank 1 and 4194304 on rank 0"),
        ({"world": 3}, "world is 3 on rank 1 and 2 on rank 0"),
    ],
)
def test_ranks_that_expect_different_pools_both_refuse(opening: Opening, other: dict[str, object], text: str) -> None:
    first, second = opening(0), opening(1, **other)
    for each in (first, second):
        with pytest.raises(LayoutMismatch, match=text):
            each.result(10)


def test_memory_that_rank_0_cannot_have_is_told_to_all(opening: Opening, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1024 kB\n")
    first, second, third = opening(0, 3, machine=Machine(tmp_path)), opening(1, 3), opening(2, 3)
    for each in (first, second, third):
        with pytest.raises(PoolExhausted, match="4 MiB on ordinary pages wanted, 1 MiB available"):
            each.result(10)


def test_memory_that_another_rank_cannot_map_fails_all(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared, "map_files", refuse)
    first, second = opening(0), opening(1)
    for each in (first, second):
        with pytest.raises(PoolExhausted, match="rank 1 cannot map its 4 MiB: Cannot allocate memory"):
            each.result(10)


def test_who_says_nothing_keeps_no_rank_waiting(opening: Opening, name: str) -> None:
    first = opening(0)
    connected(name).close()  # comes and goes without a word
    silent = connected(name)
    second = opening(1)
    assert first.result(5).length == second.result(5).length == 4 * MIB
    assert silent.recv(1) == b""
    silent.close()


def test_a_rank_that_ends_is_seen_although_another_says_nothing(opening: Opening, name: str) -> None:
    first = opening(0, 3)
    silent, second = connected(name), connected(name)
    send(second, Hello(1, 1, 3, 4 * MIB, "f"), "rank 0")
    second.close()
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        first.result(5)
    silent.close()


def test_a_rank_that_ends_after_it_mapped_the_pool_is_seen_while_another_is_missing(
    opening: Opening, name: str
) -> None:
    first = opening(0, 3)
    second = connected(name)
    send(second, Hello(1, 1, 3, 4 * MIB, "f"), "rank 0")
    receive(second, Offer, "rank 0", Deadline(5))
    send(second, Mapped(), "rank 0")
    second.close()
    with pytest.raises(PeerLost, match="rank 1 has ended"):
        first.result(5)


def test_a_name_that_is_in_use(opening: Opening, name: str) -> None:
    waiting = opening(0, 3, wait_s=1)
    time.sleep(0.2)
    with pytest.raises(Conflict, match="another process hands it on already"):
        open_shared(4 * MIB, PLAIN, Share(name, 0, 2, "f"))
    assert isinstance(waiting.exception(10), PeerLost)


def test_two_processes_of_one_number(opening: Opening) -> None:
    first, second, third = opening(0, 3), opening(1, 3), opening(1, 3)
    assert isinstance(first.exception(10), Conflict)
    assert "a second process calls itself rank 1" in str(first.exception())
    assert isinstance(second.exception(10), Conflict)
    assert isinstance(third.exception(10), Conflict)


def test_what_is_no_message_is_refused(opening: Opening, name: str) -> None:
    first = opening(0)
    connection = connected(name)
    connection.send(b"\xc1 no message")
    with pytest.raises(ProtocolError, match="sent what is no message"):
        first.result(10)
    connection.close()


def test_another_version_is_refused_with_both_numbers(opening: Opening, name: str) -> None:
    first = opening(0)
    connection = connected(name)
    send(connection, Hello(2, 1, 2, 4 * MIB, "f"), "rank 0")
    with pytest.raises(ProtocolError, match="rank 1 speaks version 2 of sharing: expected 1"):
        first.result(10)
    connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user")
def test_another_user_is_not_heard(opening: Opening, name: str) -> None:
    first = opening(0)
    connected_as_nobody = (
        "import os, socket, sys\nos.seteuid(65534)\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect('\\0' + sys.argv[1])\nprint(s.recv(1))\n"
    )
    time.sleep(0.2)
    command = [sys.executable, "-c", connected_as_nobody, address_of(name)[1:]]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout == "b''\n"
    second = opening(1)
    assert first.result(10).length == second.result(10).length


@pytest.mark.parametrize(("length", "rank", "world"), [(0, 0, 1), (MIB, 2, 2), (MIB, -1, 2), (MIB, 0, 0)])
def test_numbers_out_of_range_are_wrong_settings(name: str, length: int, rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 byte and a rank"):
        open_shared(length, PLAIN, Share(name, rank, world, "f"))


def test_the_address_space_around_a_shared_pool_is_given_back(opening: Opening) -> None:
    def spaces() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = spaces()
    for _ in range(10):
        first, second = opening(0), opening(1)
        first.result(10).close()
        second.result(10).close()
    assert spaces() <= before + 8  # stacks of threads


def test_no_rank_can_take_pages_from_under_the_others(opening: Opening, name: str) -> None:
    """What rank 1 is handed cannot be cut or made longer; who touched a page that was cut off would be killed."""
    first, handed = opening(0), list[int]()
    with connected(name) as second:
        send(second, Hello(1, 1, 2, 4 * MIB, "f"), "rank 0")
        offer = receive(second, Offer, "rank 0", Deadline(5), handed)
        assert len(handed) == len(offer.sizes) == 1
        for size in (0, 2 * MIB, 8 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(handed[0], size)
        os.close(handed[0])
    assert isinstance(first.exception(5), PeerLost)


def flags_of(address: int) -> list[str]:
    """What the kernel notes of the mapping that begins here; ``dc`` is its mark of MADV_DONTFORK."""
    _, _, found = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")
    return found.partition("VmFlags:")[2].partition("\n")[0].split()


def test_a_child_process_does_not_inherit_the_pool(opening: Opening) -> None:
    """Otherwise each fork would take the pool's page tables along, and a child that lives on its pages."""
    first, second = opening(0).result, opening(1).result
    for region in (first(10), second(10)):
        assert "dc" in flags_of(region.address), "it is copied on fork"


def test_dropped_pages_leave_the_files_that_they_were_in() -> None:
    pages, at = SharedPages(), mapping.reserve(8 * MIB)
    pages.plain(at, 2 * MIB)
    pages.plain(at + 2 * MIB, 4 * MIB)
    pages.drop(at + 3 * MIB, 3 * MIB)
    assert [each.size for each in pages.files] == [2 * MIB, MIB]
    assert [os.fstat(each.descriptor).st_size for each in pages.files] == [2 * MIB, MIB]
    pages.drop(at + MIB, 7 * MIB)
    assert [each.size for each in pages.files] == [MIB]
    pages.seal()
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(pages.files[0].descriptor, size)
    with pytest.raises(LayoutMismatch, match="has 1048576 bytes: expected 2097152"):
        map_files((TWO_MIB,), [pages.files[0].descriptor], prefault=True)
    before = descriptors()
    pages.close()
    pages.close()
    assert descriptors() == before - 1
    mapping.unmap(at, 8 * MIB)


@pytest.mark.hugepages
class TestRealHugepages:
    def test_partly_on_hugepages_all_ranks_see_the_same_pieces(self, hugepages: Reserve, name: str) -> None:
        hugepages(5)
        with ranks(2, 16 * MIB, PoolConfig(), name) as (first, second):
            kind, report, length = first.answer()
            assert (kind, report, length) == second.answer()
            (best, had), (rest, _) = report.pieces
            assert (best, had) == (PageKind.HUGE_2M, 10 * MIB)
            assert rest in (PageKind.TRANSPARENT, PageKind.PLAIN)
            assert length == 16 * MIB
            assert "8 2 MiB hugepages wanted (2 MiB each), 5 free, 5 had" in report.line()
            second("write", 10 * MIB - 3, b"across")
            assert first("read", 10 * MIB - 3, 6) == b"across"
        assert Machine().free_hugepages(TWO_MIB) == 5

    def test_kill_minus_9_of_rank_0_leaves_no_hugepage_in_use_once_the_others_end(
        self, hugepages: Reserve, name: str
    ) -> None:
        hugepages(4)
        with ranks(2, 8 * MIB, PoolConfig(pages=PageKind.HUGE_2M), name) as (first, second):
            assert first.answer()[0] == second.answer()[0] == "open"
            assert Machine().free_hugepages(TWO_MIB) == 0
            first("write", 0, b"kept")
            first.kill()
            assert second("read", 0, 4) == b"kept"
            assert Machine().free_hugepages(TWO_MIB) == 0
            second.kill()
            assert Machine().free_hugepages(TWO_MIB) == 4

    def test_demanded_hugepages_that_are_short_are_told_to_all(self, hugepages: Reserve, name: str) -> None:
        hugepages(3)
        with ranks(2, 8 * MIB, PoolConfig(pages=PageKind.HUGE_2M), name) as both:
            for each in both:
                kind, text = each.answer()
                assert kind == "PoolExhausted"
                assert "4 2 MiB hugepages wanted (2 MiB each), 3 free" in text
        assert Machine().free_hugepages(TWO_MIB) == 3

    def test_a_hugetlbfs_directory_then_other_hugepages(self, hugepages: Reserve, hugetlbfs: Path, name: str) -> None:
        hugepages(8)
        with ranks(2, 16 * MIB, PoolConfig(path=str(hugetlbfs)), name) as (first, second):
            _, report, _ = first.answer()
            second.answer()
            assert report.pieces == ((PageKind.HUGETLBFS, 8 * MIB), (PageKind.HUGE_2M, 8 * MIB))
            assert list(hugetlbfs.iterdir()) == []
            first("write", 8 * MIB - 2, b"both")
            assert second("read", 8 * MIB - 2, 4) == b"both"
        assert Machine().free_hugepages(TWO_MIB) == 8
