# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks over real sockets and with real bytes: each rank sends and gets its share, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from tests.control import several
from tests.control.pair import INDEX, LATENT, Decode, Prefill, eventually, layout
from tests.control.several import decode_engine, prefill_engine
from tidal_connector.control.handshake import Local, answer, check_welcome, hello
from tidal_connector.control.messages import Identity, Welcome
from tidal_connector.control.shares import SHARE_RULE
from tidal_connector.decode.reservations import Phase
from tidal_connector.errors import ProtocolError
from tidal_connector.ids import EngineId, Incarnation
from tidal_connector.layout import Home, Placement, Region
from tidal_connector.transfer.loopback import LoopbackFabric

LATENTS, KEYS = 3 * LATENT, 2 * INDEX  # bytes of a token over all layers


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.mark.parametrize(("p", "d"), [(2, 1), (1, 2), (2, 2), (4, 2), (3, 2)], ids=str)
def test_every_rank_gets_its_rows_and_none_is_written_twice(
    stack: ExitStack, fabric: LoopbackFabric, p: int, d: int
) -> None:
    prefill, decode = prefill_engine(stack, fabric, p), decode_engine(stack, fabric, d)
    for number, early in enumerate((True, False)):
        handover = several.Handover(f"{number}", prefill, decode, 70)
        if early:
            handover.reserve()
        handover.open()
        handover.compute()
        if not early:
            handover.reserve()
        got, sent = handover.received(), handover.sent()
        assert [outcome.reason for outcome in (*got, *sent)] == [""] * (p + d)
        handover.assert_equal()
        wanted = 70 * (LATENTS + d * KEYS)
        assert sum(outcome.bytes for outcome in got) == sum(outcome.bytes for outcome in sent) == wanted
    assert all(rank.counters.snapshot()["bytes_pushed"] for rank in prefill[:3])  # three layers: a fourth rank is idle


def test_a_rank_that_has_nothing_to_send_says_so(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = prefill_engine(stack, fabric, 4), decode_engine(stack, fabric, 1)
    handover = several.Handover("idle", prefill, decode, 33)
    handover.open()
    handover.reserve()
    handover.compute()
    assert handover.received()[0].ok
    assert [outcome.bytes for outcome in handover.sent()] == [33 * 52, 33 * 52, 33 * 40, 0]


def test_what_one_rank_of_prefill_lacks_fails_the_attempt_once(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = prefill_engine(stack, fabric, 2), decode_engine(stack, fabric, 2)
    handover = several.Handover("half", prefill, decode, 40)
    handover.open()
    handover.reserve()
    handover.compute(ranks=[0])
    prefill[1].sender.abort(handover.p_request, "its forward pass broke")
    for outcome in handover.received():
        assert "rank 1 of prefill" in outcome.reason
        assert "its forward pass broke" in outcome.reason
    assert not any(rank.receiver.outcomes() for rank in decode)
    assert "its forward pass broke" in prefill[1].outcome().reason
    assert prefill[0].outcome().bytes <= 40 * (LATENTS + 2 * KEYS)


def test_one_rank_of_decode_that_gives_up_ends_it_for_all_that_the_same_rank_serves(
    stack: ExitStack, fabric: LoopbackFabric
) -> None:
    prefill, decode = prefill_engine(stack, fabric, 1), decode_engine(stack, fabric, 2)
    handover = several.Handover("left", prefill, decode, 40)
    handover.reserve()
    handover.open()
    for rank in decode:
        eventually(lambda legs=rank.receiver._legs: [leg.receive.phase for _, leg in legs()] == [Phase.RECEIVING])
    decode[1].receiver.abort(handover.d_request, "its client left")
    got = handover.received()
    assert got[1].reason == "its client left"
    assert "rank 1 of decode: decode gave it up: its client left" in got[0].reason
    handover.compute()
    assert "its client left" in handover.sent()[0].reason


def test_a_refusal_reaches_every_rank_of_prefill(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = prefill_engine(stack, fabric, 3), decode_engine(stack, fabric, 2)
    handover = several.Handover("never", prefill, decode, 40)
    handover.open()
    for rank in decode:
        rank.receiver.decline(handover.transfer, EngineId("prefill-0"), prefill[0].loop.address, "no room")
    handover.compute()
    assert all("no room" in outcome.reason for outcome in handover.sent())


def test_the_address_of_another_rank_is_refused_with_that_of_rank_0(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = prefill_engine(stack, fabric, 2), decode_engine(stack, fabric, 1)
    handover = several.Handover("wrong", prefill, decode, 20)
    handover.reserve(prefill[1].loop.address)
    (outcome,) = handover.received()
    assert f"give that of its rank 0, {prefill[0].loop.address}" in outcome.reason


def test_a_rank_that_is_not_the_one_that_was_looked_for_is_refused(stack: ExitStack, fabric: LoopbackFabric) -> None:
    other = Prefill(stack, fabric)
    liar = Prefill(stack, fabric, size=2, meet=lambda address: (address, other.loop.address))
    handover = several.Handover("liar", [liar], decode_engine(stack, fabric, 1), 20)
    handover.reserve()
    (outcome,) = handover.received()
    assert "rank 1 of 2 was looked for, rank 0 of 1 answered" in outcome.reason


def test_decode_engines_of_different_sizes_do_not_share_a_transfer(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill = prefill_engine(stack, fabric, 1)
    handover = several.Handover("taken", prefill, decode_engine(stack, fabric, 2), 20)
    handover.open()
    handover.reserve()
    alone = Decode(stack, fabric, engine="decode-1")
    second = several.Handover("taken", prefill, [alone], 20)
    handover.compute()
    assert all(outcome.ok for outcome in handover.received())
    second.reserve()
    assert "taken by a decode engine of 2 ranks; this one has 1" in alone.outcome().reason
    assert handover.sent()[0].ok


def local(engine: str, rank: int, size: int) -> Local:
    regions = (
        Region(s.kind, s.layer, s.row_bytes, Home.DEVICE, 4096, 16 * s.row_bytes, 16, 4) for s in layout().regions
    )
    siblings = tuple(f"10.0.0.1:{7000 + k}" for k in range(size))
    identity = Identity(EngineId(engine), Incarnation(f"{engine}-{rank}"), rank, size)
    return Local(identity, layout(), Placement(tuple(regions)), "10.0.0.1:5", 9.0, siblings=siblings)


@pytest.mark.parametrize(("p", "d", "fits"), [(1, 1, True), (2, 1, False), (1, 2, False), (2, 2, False)])
def test_a_release_that_knows_no_shares_fits_only_where_there_is_nothing_to_share(p: int, d: int, fits: bool) -> None:
    here, there = local("prefill-0", 0, p), local("decode-0", 0, d)
    heard = hello(there, EngineId("prefill-0"))
    welcome, peer = answer(here, heard)
    assert (peer.identity.size, welcome.siblings) == (d, here.siblings)
    assert check_welcome(there, EngineId("prefill-0"), welcome).siblings == here.siblings
    older = msgspec.structs.replace(heard, shares=0)
    old_welcome = Welcome(welcome.identity, welcome.fingerprint, welcome.endpoint, welcome.lease_s)
    if fits:
        answer(here, older)
        check_welcome(there, EngineId("prefill-0"), old_welcome)
        return
    words = rf"{p} ranks and share rule {SHARE_RULE}, 'decode-0' \(there\) has {d} and rule 0: run the same release"
    with pytest.raises(ProtocolError, match=words):
        answer(here, older)
    with pytest.raises(ProtocolError, match="run the same release on both sides"):
        check_welcome(there, EngineId("prefill-0"), old_welcome)


def test_frames_of_a_release_without_ranks_are_read_as_of_one_rank() -> None:
    """Structs travel as arrays: an older release sends fewer items, and overlooks those that it does not know."""
    welcome, _ = answer(local("prefill-0", 0, 1), hello(local("decode-0", 0, 1), EngineId("prefill-0")))
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(welcome))
    assert raw[-2:] == [SHARE_RULE, ["10.0.0.1:7000"]]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(raw[:-2]), type=Welcome)
    assert (read.shares, read.siblings) == (0, ())


def test_ranks_that_are_named_without_their_addresses_are_refused() -> None:
    here, there = local("prefill-0", 0, 2), local("decode-0", 0, 1)
    welcome, _ = answer(here, hello(there, EngineId("prefill-0")))
    with pytest.raises(ProtocolError, match="has 2 ranks and names 1 control addresses"):
        check_welcome(there, EngineId("prefill-0"), msgspec.structs.replace(welcome, siblings=("10.0.0.1:7000",)))
