# SPDX-License-Identifier: Apache-2.0
"""What a real etcd, and the network before it, can do to a registry: FR-15, FR-16, FR-20 and their kinds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import pytest

from tests.arch.source import ROOT
from tests.etcd import EtcdServer, joined, needs_etcd
from tests.registry.beds import GONE, TTL, Seen, eventually
from tests.registry.clockstep import COMPILER, SteppedClock
from tests.relay import Relay
from tidal_connector.errors import RegistryLost
from tidal_connector.registry.base import Delete, Put
from tidal_connector.registry.common import CommonStore
from tidal_connector.registry.etcd_store import EtcdStore
from tidal_connector.registry.settings import RegistryConfig

pytestmark = [pytest.mark.faults, needs_etcd]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    made = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield made
    made.kill()


@pytest.fixture
def etcd(server: EtcdServer) -> Iterator[EtcdServer]:
    """An etcd that the test may break; the next one gets it mended."""
    if server.process is None:
        server.start()
    yield server
    if server.process is not None:
        server.thaw()


class Opener:
    """Opens clients of a cluster that is this test's own."""

    def __init__(self, etcd: EtcdServer, cluster: str) -> None:
        self.cluster = cluster
        self.root = f"/tidal/{cluster}/"
        self.key = f"{self.root}h"
        self.stores: list[CommonStore] = []
        self._etcd = etcd

    def __call__(self, url: str | None = None, ttl_s: float = TTL) -> CommonStore:
        config = RegistryConfig(url=url or self._etcd.url, cluster=self.cluster, ttl_s=ttl_s)
        self.stores.append(EtcdStore(config))
        return self.stores[-1]


@pytest.fixture
def opened(server: EtcdServer, tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(server, tmp_path.name)
    yield opener
    for store in opener.stores:
        store.close()


# --- FR-15: an etcd hiccup ---


def restart(server: EtcdServer) -> None:
    server.kill()
    time.sleep(TTL * 0.5)
    server.start()


def restart_empty(server: EtcdServer) -> None:
    server.kill()
    server.wipe()
    server.start()


def pause(factor: float) -> Callable[[EtcdServer], None]:
    def hiccup(server: EtcdServer) -> None:
        server.freeze()
        time.sleep(TTL * factor)
        server.thaw()

    hiccup.__name__ = f"pause_{factor:g}_ttl"
    return hiccup


def revoke(server: EtcdServer) -> None:
    for entry in server.keys("/tidal/").values():
        if entry.lease:
            server.revoke(entry.lease)


@pytest.mark.parametrize(
    "hiccup",
    [pause(0.5), pause(0.9), pause(1.1), pause(5), restart, restart_empty, revoke],
    ids=lambda each: each.__name__,
)
def test_fr_15_an_entry_comes_back_after_a_hiccup(
    etcd: EtcdServer, opened: Opener, hiccup: Callable[[EtcdServer], None]
) -> None:
    engine, proxy = opened(), opened()
    hold = engine.hold("h", b"v", TTL)
    assert hold.wait(5)
    seen = Seen()
    proxy.watch("", seen)
    assert seen.values({"h": b"v"})
    hiccup(etcd)
    healed = time.monotonic()
    assert eventually(lambda: hold.held and opened.key in etcd.keys(opened.root), TTL)
    assert seen.values({"h": b"v"}, max(0.1, healed + TTL - time.monotonic()))
    # It stays, once, and is renewed under whatever lease it has now.
    time.sleep(TTL * 1.2)
    assert list(etcd.keys(opened.root)) == [opened.key]
    assert hold.held
    assert all(set(each.entries) <= {"h"} for each in seen.all)
    assert seen.values({"h": b"v"})


def test_fr_15_many_engines_come_back_together(etcd: EtcdServer, opened: Opener) -> None:
    proxy = opened()
    holds = [opened().hold(f"h{number:02}", b"v", TTL) for number in range(24)]
    assert all(hold.wait(10) for hold in holds)
    seen = Seen()
    proxy.watch("", seen)
    assert seen.wait(lambda each: len(each.entries) == 24)
    restart_empty(etcd)
    assert seen.wait(lambda each: each.fresh and len(each.entries) == 24, TTL * 3)  # two cores bear them all
    time.sleep(TTL)
    assert len(etcd.keys(opened.root)) == 24
    assert all(hold.held for hold in holds)


def test_who_waits_for_a_turn_needs_no_lease_of_before(etcd: EtcdServer, opened: Opener) -> None:
    """One holds and one waits while the data is lost: both leases are gone, and only one side sees it by its entry."""
    holds = [opened().hold("h", value, TTL) for value in (b"1", b"2")]
    assert eventually(lambda: any(hold.held for hold in holds))
    restart_empty(etcd)
    assert eventually(lambda: opened.key in etcd.keys(opened.root), TTL * 2)
    time.sleep(TTL * 0.5)
    first = next(hold for hold in holds if hold.held)
    first.release()
    second = next(hold for hold in holds if hold is not first)
    assert second.wait(TTL * 2)


def test_an_update_during_an_outage_is_made_afterwards(etcd: EtcdServer, opened: Opener) -> None:
    hold = opened().hold("h", b"1", TTL)
    assert hold.wait(5)
    etcd.kill()
    hold.update(b"2")
    assert not hold.wait(TTL * 1.5)
    assert not hold.held
    etcd.start()
    assert hold.wait(TTL * 2)
    assert etcd.keys(opened.key)[opened.key].value == b"2"


def test_an_outage_is_quiet_and_cheap(etcd: EtcdServer, opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    store = opened()
    hold = store.hold("h", b"v", TTL)
    assert hold.wait(5)
    seen = Seen()
    store.watch("", seen)
    assert seen.values({"h": b"v"})
    with caplog.at_level("WARNING", "tidal.registry"):
        etcd.kill()
        assert seen.wait(lambda each: not each.fresh)
        before = time.process_time()
        time.sleep(2.5)
        assert time.process_time() - before < 0.5
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, said  # the hold's line and the watch's
    assert all("trying on" in text and "\n" not in text for text in said)
    assert [each.fresh for each in seen.all] == [True, False]
    assert seen.last == {"h": b"v"}


def test_every_call_is_bounded_while_etcd_is_frozen(etcd: EtcdServer, opened: Opener) -> None:
    store = opened()
    hold = store.hold("h", b"v", TTL)
    assert hold.wait(5)
    seen = Seen()
    store.watch("", seen)
    assert seen.values({"h": b"v"})
    etcd.freeze()
    for call in (lambda: store.read(""), lambda: store.write([Put("k", b"")])):
        began = time.monotonic()
        with pytest.raises(RegistryLost, match=r"^etcd at 127\S+: no answer in time; see that it runs"):
            call()
        assert time.monotonic() - began < 1.5
    began = time.monotonic()
    hold.update(b"2")
    assert time.monotonic() - began < 0.1
    hold.release()
    assert time.monotonic() - began < 2
    store.close()
    assert time.monotonic() - began < 3
    etcd.thaw()
    assert eventually(lambda: not etcd.keys(opened.root), GONE + 1)  # left to its TTL


# --- a frozen member ---

HOLDER = """
import json, sys, time
from tidal_connector.registry.settings import RegistryConfig, open_store
url, cluster, value = sys.argv[1:]
store = open_store(RegistryConfig(url=url, cluster=cluster, ttl_s=1))
hold = store.hold("h", value.encode(), 1)
told = []
store.watch("", told.append)
while True:
    print(json.dumps({"held": hold.held, "snapshots": len(told), "wall": time.time()}), flush=True)
    time.sleep(0.05)
"""


class Said(msgspec.Struct):
    held: bool
    snapshots: int
    wall: float


class Holder:
    """A process that holds the key ``h``, and says ever again whether it believes so."""

    def __init__(self, etcd: EtcdServer, opened: Opener, value: str, more: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, etcd.url, opened.cluster, value],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            env={**os.environ, **(more or {})},
        )
        assert self.process.stdout is not None
        self._out = self.process.stdout
        os.set_blocking(self._out.fileno(), False)

    def said(self) -> list[Said]:
        """What it has said since the last call."""
        lines = (self._out.read() or b"").split(b"\n")
        return [msgspec.json.decode(line, type=Said) for line in lines if line.endswith(b"}") and line.startswith(b"{")]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def test_a_frozen_or_killed_member_goes_and_does_not_come_between_its_successor(
    etcd: EtcdServer, opened: Opener
) -> None:
    seen = Seen()
    opened().watch("", seen)
    with Holder(etcd, opened, "first") as first:
        assert seen.values({"h": b"first"}, 10)
        first.freeze()
        assert seen.values({}, GONE)
        first.thaw()
        assert seen.values({"h": b"first"}, TTL * 1.5)  # nobody took its place
        first.freeze()
        assert seen.values({}, GONE)
        with opened() as other:
            successor = other.hold("h", b"second", TTL)
            assert successor.wait(5)
            first.said()
            first.thaw()
            time.sleep(TTL * 1.2)
            assert etcd.keys(opened.key)[opened.key].value == b"second"
            assert successor.held
            # It knows from its first look at the clock on; one line may have been under way when it was frozen.
            assert not any(each.held for each in first.said()[1:])
        assert seen.values({"h": b"first"}, GONE)
    assert seen.values({}, GONE)  # killed at the end of its context


# --- FR-16: a cut watch ---


@pytest.mark.parametrize("compacted", [False, True], ids=["plain", "compacted"])
@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_fr_16_a_watch_misses_no_delete_while_it_is_cut(
    etcd: EtcdServer, opened: Opener, how: str, compacted: bool
) -> None:
    with Relay(etcd.netloc) as relay:
        proxy, engine, survivor = opened(f"etcd://{relay.netloc}"), opened(), opened()
        assert engine.hold("h", b"v", TTL).wait(5)
        assert survivor.hold("stays", b"v", TTL).wait(5)
        survivor.write([Put("changes", b"old"), Put("goes", b"")])
        seen = Seen()
        proxy.watch("", seen)
        assert seen.values({"h": b"v", "stays": b"v", "changes": b"old", "goes": b""})
        getattr(relay, how)()
        engine.die()
        survivor.write([Put("changes", b"new"), Delete("goes"), Put("comes", b"")])
        assert seen.wait(lambda each: not each.fresh, TTL * 3)
        assert set(seen.last or {}) == {"h", "stays", "changes", "goes"}  # what was last heard
        assert eventually(lambda: opened.key not in etcd.keys(opened.root), GONE)
        if compacted:
            etcd.compact()
        relay.mend()
        assert seen.values({"stays": b"v", "changes": b"new", "comes": b""}, TTL * 2)
        assert seen.all[-1].entries == survivor.read("").entries
        # And the stream flows again, without waiting for the next reading of the prefix.
        survivor.write([Put("changes", b"newer")])
        assert seen.values({"stays": b"v", "changes": b"newer", "comes": b""}, 0.3)


def test_a_short_cut_of_the_stream_alone_is_not_told(
    etcd: EtcdServer, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    with Relay(etcd.netloc) as relay:
        proxy, other = opened(f"etcd://{relay.netloc}"), opened()
        seen = Seen()
        proxy.watch("", seen)
        assert seen.values({})
        with caplog.at_level("WARNING", "tidal.registry"):
            relay.cut()
            relay.mend()
            other.write([Put("k", b"1")])
            assert seen.values({"k": b"1"}, 1)
        assert all(each.fresh for each in seen.all)
        assert not caplog.records


def test_a_reading_that_is_ahead_of_its_stream_is_not_undone(etcd: EtcdServer, opened: Opener) -> None:
    """Writes as fast as they go while the watch reads the prefix again and again: it ends with what is there."""
    store, other = opened(), opened()
    seen = Seen()
    store.watch("", seen)
    over = time.monotonic() + 2
    number = 0
    while time.monotonic() < over:
        number += 1
        key = f"k{number % 5}"
        other.write([Put(key, b"%d" % number) if number % 3 else Delete(key)])
    assert eventually(lambda: seen.all[-1].entries == other.read("").entries, 2)
    assert number > 100


# --- FR-20: a slow start ---


_REFUSED = r"^etcd at {}: cannot be reached: connection refused; start etcd there, or correct registry\.url$"


def test_an_address_where_no_etcd_is_is_said_in_plain_words_with_what_to_do(opened: Opener) -> None:
    with pytest.raises(RegistryLost, match=_REFUSED.format("127.0.0.1:9")):
        opened("etcd://127.0.0.1:9").read("")
    words = r": cannot be reached: its name does not resolve; start etcd there, or correct registry\.url$"
    with pytest.raises(RegistryLost, match=words):
        opened("etcd://nobody.invalid:2379").read("")


def test_fr_20_registration_waits_for_an_etcd_that_starts_late(tmp_path: Path, opened: Opener) -> None:
    server = EtcdServer(tmp_path)
    store = opened(server.url)
    hold = store.hold("h", b"v", TTL)
    seen = Seen()
    store.watch("", seen)
    assert not hold.wait(TTL * 1.5)
    assert not seen.all
    with pytest.raises(RegistryLost, match=_REFUSED.format(server.netloc)):
        store.read("")
    with server:
        assert hold.wait(TTL * 2)
        assert seen.values({"h": b"v"}, TTL * 2)


# --- several endpoints ---


def test_a_dead_endpoint_is_passed_over(etcd: EtcdServer, opened: Opener) -> None:
    dead = "127.0.0.1:9"
    store = opened(f"etcd://{dead},{etcd.netloc}")
    assert store.read("").entries == {}  # at once: each endpoint is asked
    assert opened(f"etcd://{dead},{etcd.netloc}").hold("h", b"v", TTL).wait(2)
    opened(f"etcd://{dead},{etcd.netloc}").write([Put("k", b"")])
    seen = Seen()
    opened(f"etcd://{dead},{etcd.netloc}").watch("", seen)
    assert seen.values({"h": b"v", "k": b""}, 2)


def test_a_cluster_of_three_loses_one_member_after_another(tmp_path: Path, opened: Opener) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    servers = [EtcdServer(folder) for folder in folders]
    url = joined(*servers)
    try:
        for server in servers:
            server.start(wait=False)
        for server in servers:
            server.wait_ready()
        store = opened(url, 2.0)
        hold = store.hold("h", b"v", 2.0)
        assert hold.wait(5)
        seen = Seen()
        store.watch("", seen)
        assert seen.values({"h": b"v"})
        for index, harm, mend in ((0, servers[0].freeze, servers[0].thaw), (1, servers[1].kill, servers[1].start)):
            harm()
            other = servers[(index + 1) % 3]
            assert eventually(lambda: _put(other, f"{opened.root}k{index}"), 10)  # noqa: B023
            assert seen.wait(lambda each: each.fresh and f"k{index}" in each.entries, 8)  # noqa: B023
            assert hold.wait(5)
            assert store.read("h").entries["h"].value == b"v"
            mend()
            servers[index].wait_ready()
        assert list(servers[2].keys(opened.key)) == [opened.key]
    finally:
        for server in servers:
            server.kill()


def _put(server: EtcdServer, key: str) -> bool:
    try:
        server.put(key, b"")
    except Exception:  # an election goes on
        return False
    return True


# --- clocks ---


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_steps_of_the_wall_clock_change_nothing(etcd: EtcdServer, opened: Opener, tmp_path: Path) -> None:
    clock = SteppedClock(tmp_path)
    seen = Seen()
    opened().watch("", seen)
    with Holder(etcd, opened, "v", clock.environment) as process:
        assert seen.values({"h": b"v"}, 10)
        assert eventually(lambda: [each for each in process.said() if each.held and each.snapshots])
        time.sleep(0.2)
        before, changes = process.said()[-1], len(seen.all)
        assert abs(before.wall - time.time()) < 60
        for step in (86400, -86400):
            clock.step(step)
            time.sleep(TTL)
            told = process.said()
            assert abs(told[-1].wall - time.time() - step) < 60
            assert len(told) > 5
            assert all(each.held for each in told)
            assert told[-1].snapshots == before.snapshots
        assert len(seen.all) == changes


def test_nothing_in_the_registry_reads_the_wall_clock() -> None:
    for path in (ROOT / "tidal_connector" / "registry").glob("*.py"):
        assert not re.search(r"\btime\.time\(|datetime", path.read_text(encoding="utf-8")), path.name


# --- what strangers write ---


def test_fr_41_keys_and_values_of_strangers_do_no_harm(etcd: EtcdServer, opened: Opener) -> None:
    store = opened(ttl_s=6.0)
    seen = Seen()
    store.watch("members/", seen)
    assert seen.values({})
    etcd.put(opened.root.encode() + b"members/\xff\xfe", b"x")
    etcd.put(opened.root + "members/", b"x")
    etcd.put(opened.root + "members/a//b\n", b"x")
    etcd.put(opened.root[:-1] + "x/members/c", b"of another cluster")
    for number in range(20):  # more than a message of gRPC takes by default, and more than one page
        etcd.put(f"{opened.root}members/big-{number}", bytes(1 << 20))
    assert seen.wait(lambda each: len(each.entries) == 23, 20)
    assert set(store.read("members/").entries) == set(seen.all[-1].entries)
    assert {"members/\\xff\\xfe", "members/", "members/a//b\n"} <= set(seen.all[-1].entries)


def test_fr_43_an_entry_under_another_lease_is_left_alone(etcd: EtcdServer, opened: Opener) -> None:
    hold = opened().hold("h", b"owner", TTL)
    assert hold.wait(5)
    etcd.put(opened.key, b"thief", ttl_s=2)  # whoever has etcd's rights can do it: that is why etcd needs auth
    assert eventually(lambda: not hold.held, TTL)
    time.sleep(TTL * 0.6)
    assert etcd.keys(opened.key)[opened.key].value == b"thief"
    assert hold.wait(6)  # as soon as the other lease ends
    assert etcd.keys(opened.key)[opened.key].value == b"owner"


def test_no_thread_outlives_its_store(etcd: EtcdServer, opened: Opener) -> None:
    def names() -> set[str]:
        return {each.name for each in threading.enumerate()}

    before = names()
    for _ in range(3):
        with opened() as store:
            store.watch("", Seen())
            assert store.hold("h", b"", TTL).wait(5)
    assert eventually(lambda: names() <= before, 3), names() - before
