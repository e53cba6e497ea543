# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's ``ascend`` transport demands, checked before it starts; no NPU, the library stands in for itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping

import pytest

from tidal_connector.config import PlaneKind, Protocol, TidalConfig, TransferConfig, ascend_environment, load_config
from tidal_connector.errors import ConfigError, TransferFailed
from tidal_connector.layout import Home
from tidal_connector.transfer import ascend, mooncake
from tidal_connector.transfer.mooncake import MooncakePlane
from tidal_connector.transfer.plane import open_plane
from tidal_connector.transfer.runs import Run
from tidal_connector.transfer.segment import Buffer, Segment

HOST, GIB = "10.0.0.7", 1 << 30
POOL, CACHE = 1 << 40, 1 << 32


class Npus:
    """Sixteen NPUs, of which threads that entered use the third."""

    def __init__(self, device: int | None = 3) -> None:
        self.device = device
        self.entered: list[str] = []

    def current(self) -> int | None:
        return self.device

    def devices(self) -> int:
        return 16

    def enter(self, device: int) -> None:
        self.entered.append(f"{threading.current_thread().name} {device}")


class Library:
    """A TransferEngine that writes down how it is called."""

    made: int
    calls: list[tuple[object, ...]]

    def __init__(self) -> None:
        type(self).made += 1

    def initialize(self, *words: str) -> int:
        self.calls.append(("initialize", *words))
        return 0

    def get_rpc_port(self) -> int:
        return 15001

    def batch_register_memory(self, addresses: list[int], lengths: list[int], location: str) -> int:
        self.calls.append(("register", location, addresses, lengths))
        return 0

    def transfer_submit_write(self, peer: str, source: int, destination: int, length: int) -> int:
        self.calls.append(("write", peer, source, destination, length))
        return 7

    def transfer_check_status(self, write: int) -> int:
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[Library]:
    kind = type("Fresh", (Library,), {"made": 0, "calls": []})
    module = types.ModuleType("mooncake.engine")
    module.TransferEngine = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    described = Segment("ascend", (Buffer(POOL, 300 * GIB),))
    monkeypatch.setattr(mooncake, "ask_segment", lambda endpoint, deadline_s: described)
    return kind


def clear(patch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("MC_", "ASCEND_", "HCCL_")):
            patch.delenv(name)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    clear(monkeypatch)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def plane(npu: Npus | None, host: str = HOST, quarantine_s: float = 30.0) -> MooncakePlane:
    config = TransferConfig(PlaneKind.MOONCAKE, Protocol.ASCEND)
    return MooncakePlane(config, host, lambda: None, stall_s=10.0, quarantine_s=quarantine_s, npu=npu)


def test_the_pool_and_the_caches_are_registered_at_once_and_before_anybody_can_call(library: type[Library]) -> None:
    with plane(Npus()) as opened:
        assert library.calls == [("initialize", HOST, "P2PHANDSHAKE", "ascend", "")]
        opened.register(POOL, 300 * GIB, Home.HOST)
        opened.register(CACHE, GIB, Home.DEVICE)
        opened.register(CACHE + 2 * GIB, GIB, Home.DEVICE, target=False)  # a source has to be known, too
        assert len(library.calls) == 1
        assert opened.endpoint() == f"{HOST}:15001" == opened.open_door()
        assert library.calls[1:] == [
            ("register", "cpu:0", [POOL], [300 * GIB]),
            ("register", "npu:3", [CACHE, CACHE + 2 * GIB], [GIB, GIB]),
        ]
        with pytest.raises(TransferFailed, match="registered before the first of them connects"):
            opened.register(1 << 41, GIB, Home.HOST)
        opened.endpoint()
        assert len(library.calls) == 3
    assert library.made == 1


def test_writes_go_through_the_one_engine_on_threads_that_have_a_context(library: type[Library]) -> None:
    npu = Npus()
    with plane(npu) as opened:
        opened.register(CACHE, GIB, Home.DEVICE)
        opened.endpoint()
        done = 0
        for peer in ("10.0.0.8:1", "10.0.0.9:1"):
            opened.submit(peer, [Run(CACHE, POOL + 299 * GIB, 5)])
        while done < 2:
            receipts = opened.poll()
            assert all(receipt.ok for receipt in receipts)
            done += len(receipts)
    assert sorted(npu.entered) == [f"tidal-carry-10.0.0.{k}:1 3" for k in (8, 9)]
    assert library.made == 1
    assert ("write", "10.0.0.8:1", CACHE, POOL + 299 * GIB, 5) in library.calls


@pytest.mark.parametrize(
    ("npu", "host", "found", "kind", "words"),
    [
        (None, HOST, {}, TransferFailed, "needs the NPU of the engine, on the decode side as well"),
        (Npus(None), HOST, {}, TransferFailed, "has no ACL context; call torch.npu.set_device"),
        (Npus(), "127.0.0.1", {}, ConfigError, r"transfer.host = '127.0.0.1' is a loopback address"),
        (Npus(), "localhost", {}, ConfigError, "is a loopback address"),
        (Npus(), "::1", {}, ConfigError, "is a loopback address"),
        (Npus(), HOST, {"MC_FORCE_TCP": "0"}, ConfigError, r"MC_FORCE_TCP = '0' .*unset it \(0 counts as set\)"),
        (Npus(), HOST, {"MC_FORCE_HCA": "1"}, ConfigError, "MC_FORCE_HCA = '1' .*another transport"),
        (
            Npus(),
            HOST,
            {"ASCEND_TRANSFER_TIMEOUT": "20000"},
            ConfigError,
            "a write take 42.5 s, .*quarantine_s = 30",
        ),
        (Npus(), HOST, {"ASCEND_CONNECT_TIMEOUT": "3s"}, ConfigError, "'3s': expected a positive whole number"),
        (Npus(), HOST, {"MC_MAX_RPC_PORT": "21000"}, ConfigError, r"15000\.\.21000 meets 20000\.\.35999, .*16 NPUs"),
    ],
)
def test_what_does_not_fit_is_said_before_the_engine_is_made(
    library: type[Library],
    monkeypatch: pytest.MonkeyPatch,
    npu: Npus | None,
    host: str,
    found: Mapping[str, str],
    kind: type[Exception],
    words: str,
) -> None:
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=words):
        plane(npu, host).open()
    assert library.made == 0


def test_no_more_regions_than_one_process_may_register() -> None:
    regions = ascend.Regions(0)
    regions.add(POOL, 300 * GIB, Home.HOST)
    for number in range(255):
        regions.add(CACHE + number * GIB, GIB, Home.DEVICE)
    with pytest.raises(TransferFailed, match=r"257 regions \(1 of host memory, 256 of NPU 0\): HCCL registers 256"):
        regions.add(1, 1, Home.DEVICE)


def test_timeouts_end_a_write_within_the_stall_where_the_operator_says_nothing() -> None:
    found = ascend_environment(10.0)
    assert ascend.longest_write_s(found) == 10.0
    assert (found["ASCEND_CONNECT_TIMEOUT"], found["ASCEND_TRANSFER_TIMEOUT"]) == ("2500", "3750")
    assert ascend.longest_write_s({}) == 30.0
    ascend.check_deadlines({}, load_config({"transfer": {"protocol": "ascend"}}).quarantine_s)


def test_timeouts_of_the_operator_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "9000")
    assert ascend.longest_write_s(ascend_environment(10.0)) == 20.5
    with pytest.raises(ConfigError, match=r"20\.5 s, control.quarantine_s = 12: lower the timeouts"):
        ascend.check_deadlines(ascend_environment(), 12.0)


@pytest.mark.parametrize(
    ("ports", "npus", "base", "hit"),
    [
        ((7100, 7107), 16, 20000, False),
        ((19999, 19999), 16, 20000, False),
        ((20000, 20000), 1, 20000, True),
        ((20999, 21006), 1, 20000, True),
        ((21000, 21000), 1, 20000, False),
        ((35999, 35999), 16, 20000, True),
        ((36000, 36010), 16, 20000, False),
        ((15000, 40000), 8, 20000, True),
        ((0, 0), 16, 20000, False),
        ((65535, 65535), 16, 60000, True),
        ((20000, 20000), 16, 40000, False),
    ],
)
def test_ports_of_the_listeners(ports: tuple[int, int], npus: int, base: int, hit: bool) -> None:
    found = ascend.port_conflicts({"control.bind": ports}, npus, base)
    assert len(found) == hit
    if hit:
        assert f"control.bind: {'port ' if ports[0] == ports[1] else ''}{ports[0]}" in found[0]
        assert f"meets {base}..{min(65535, base + 1000 * npus - 1)}" in found[0]
        assert "set control.bind to ports outside, or ASCEND_BASE_PORT" in found[0]


@pytest.mark.parametrize(
    "found",
    [
        {"HCCL_INTRA_ROCE_ENABLE": "1"},
        {"ASCEND_BUFFER_POOL": "4:8"},
        {"ASCEND_GLOBAL_RESOURCE_CONFIG": '{"comm_resource_config.protocol_desc":["roce:device"]}'},
    ],
)
def test_what_a_link_into_host_memory_needs_is_one_line_unless_it_is_asked_for(found: dict[str, str]) -> None:
    assert ascend.link_note(found) == ""
    for without in ({}, {"HCCL_INTRA_ROCE_ENABLE": "0"}, {"ASCEND_BUFFER_POOL": "0:0"}):
        note = ascend.link_note(without)
        assert "HCCL_INTRA_ROCE_ENABLE=1" in note
        assert "A2" in note
        assert "A3" in note
        assert "\n" not in note


def test_the_configuration_reaches_the_plane(library: type[Library]) -> None:
    config = load_config({"transfer": {"protocol": "ascend"}, "control": {"quarantine_s": 5}})
    assert isinstance(config, TidalConfig)
    with pytest.raises(ConfigError, match=r"control\.quarantine_s = 5"):
        open_plane(config, HOST, lambda: None, Npus()).open()


_REAL = """
import sys
from tests.transfer.test_ascend import Npus, plane
from tidal_connector.errors import TransferFailed
import tidal_connector.transfer.ascend as ascend
ascend.check_host = lambda host: None
try:
    plane(Npus(), "127.0.0.1").open()
except TransferFailed as error:
    print(error)
"""


@pytest.mark.mooncake
def test_a_wheel_that_silently_runs_another_transport_is_found_out() -> None:
    """The wheel without NPUs takes the word "ascend" and runs TCP; a peer would see nothing but refused writes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MC_", "ASCEND_", "HCCL_"))}
    ran = subprocess.run(
        [sys.executable, "-c", _REAL], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert "transfer.protocol = 'ascend', but 'tcp' runs here" in ran.stdout, ran.stdout + ran.stderr
