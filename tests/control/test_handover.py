# SPDX-License-Identifier: Apache-2.0
"""Two control loops in one process, over real sockets and with real bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from tests.control.pair import FAST, Decode, Handover, Prefill, eventually, layout
from tidal_connector.ids import EngineId, RequestId, TransferId
from tidal_connector.transfer.loopback import LoopbackFabric


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def fabric() -> LoopbackFabric:
    return LoopbackFabric()


@pytest.mark.parametrize("pages", [(16, 16), (128, 128), (16, 128), (128, 16)], ids=str)
def test_every_size_arrives_to_the_byte(stack: ExitStack, fabric: LoopbackFabric, pages: tuple[int, int]) -> None:
    prefill = Prefill(stack, fabric, page_tokens=pages[0])
    decode = Decode(stack, fabric, page_tokens=pages[1])
    moved = 0
    for tokens in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300):
        for array in decode.memory.arrays:
            array[:] = 0x7E
        handover = Handover(f"{tokens}", prefill, decode, tokens)
        handover.reserve()
        handover.open()
        handover.compute(0, tokens)
        handover.done()
        got = decode.outcome()
        assert (got.ok, got.reason, got.bytes) == (True, "", handover.expected_bytes())
        handover.assert_equal()
        sent = prefill.outcome()
        assert (sent.ok, sent.bytes, sent.request) == (True, handover.expected_bytes(), handover.request)
        moved += handover.expected_bytes()
    assert prefill.counters.snapshot()["bytes_pushed"] == moved
    assert decode.counters.snapshot()["bytes_received"] == moved


@pytest.mark.parametrize("first", [1, 15, 16, 17, 64, 100])
def test_prefix_hits_of_decode_are_not_sent(stack: ExitStack, fabric: LoopbackFabric, first: int) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric, page_tokens=32)
    handover = Handover("hit", prefill, decode, 101, first=first)
    handover.open()
    handover.compute(0, 101)
    handover.reserve()
    handover.done()
    assert decode.outcome().bytes == handover.expected_bytes()
    handover.assert_equal()


def test_chunks_land_while_later_ones_are_computed(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("chunks", prefill, decode, 200)
    handover.open()
    handover.compute(0, 32)  # before the reservation
    handover.reserve()
    for first in range(32, 192, 32):
        handover.compute(first, first + 32)
    landed = layout().transfer_bytes(192)
    eventually(lambda: prefill.counters.snapshot()["bytes_pushed"] == landed)
    assert not decode.receiver.outcomes()
    handover.compute(192, 200)
    handover.done()
    assert decode.outcome().ok
    handover.assert_equal()
    sent = prefill.outcome()
    assert landed <= sent.bytes_before_prefill_end <= sent.bytes == handover.expected_bytes()


def test_eight_at_once(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric, page_tokens=16), Decode(stack, fabric, page_tokens=128, pages=32)
    handovers = [Handover(f"c{slot}", prefill, decode, 301, slot=slot, seed=slot) for slot in range(8)]
    for handover in handovers[::2]:
        handover.reserve()
    for handover in handovers:
        handover.open()
    for first in range(0, 301, 100):
        for handover in handovers:
            handover.compute(first, min(301, first + 100))
    for handover in handovers[1::2]:
        handover.reserve()
    for handover in handovers:
        handover.done()
    ended: set[str] = set()
    while len(ended) < 8:
        assert decode.receiver.wait(10)
        for outcome in decode.receiver.outcomes():
            assert outcome.ok, outcome.reason
            ended.add(outcome.request)
    for handover in handovers:
        handover.assert_equal()


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_fr_3_nothing_lacking_still_frees_prefill(stack: ExitStack, fabric: LoopbackFabric, tokens: int) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("empty", prefill, decode, tokens, first=tokens)
    handover.open()
    handover.compute(0, tokens)
    handover.reserve()
    got = decode.outcome()
    assert (got.ok, got.bytes) == (True, 0)
    assert not prefill.sender.outcomes()  # vLLM still has the request
    handover.done()
    sent = prefill.outcome()
    assert (sent.ok, sent.bytes) == (True, 0)


def test_sequential_order_prefill_first(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("seq", prefill, decode, 50)
    handover.open(hold_s=30.0)
    handover.compute(0, 50)
    handover.done()
    eventually(lambda: prefill.counters.snapshot()["pages_held"] == 4)
    assert not prefill.sender.outcomes()
    handover.reserve()
    assert decode.outcome().ok
    assert prefill.outcome().ok
    handover.assert_equal()
    eventually(lambda: prefill.counters.snapshot()["pages_held"] == 0)


def test_fr_1_nobody_reserves(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("alone", prefill, decode, 50)
    handover.open(hold_s=0.2)
    handover.compute(0, 50)
    handover.done()
    sent = prefill.outcome()
    assert not sent.ok
    assert "hold_s" in sent.reason
    handover.reserve()  # too late: told at once, and nothing is in quarantine
    got = decode.outcome()
    assert not got.ok
    assert "hold_s" in got.reason
    assert decode.counters.snapshot()["transfers_quarantined"] == 0


def test_fr_2_decode_declines(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    late, early = Handover("late", prefill, decode, 50), Handover("early", prefill, decode, 50)
    late.open(hold_s=60.0)
    late.compute(0, 50)
    late.done()
    address = prefill.loop.address
    for handover in (late, early):
        decode.receiver.decline(handover.transfer, EngineId("prefill-0"), address, "max_model_len is 32")
    assert "max_model_len" in prefill.outcome().reason
    eventually(lambda: prefill.counters.snapshot()["aborts_received"] >= 2)
    early.open(hold_s=60.0)  # the decline was there before the request
    early.compute(0, 50)
    early.done()
    assert "max_model_len" in prefill.outcome().reason
    assert not decode.receiver.outcomes()


def test_abort_on_decode_while_bytes_fly(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("leaves", prefill, decode, 300)
    handover.open()
    handover.reserve()
    fabric.hold()
    handover.compute(0, 300)
    eventually(lambda: decode.counters.snapshot()["peers"] == 1)
    eventually(lambda: prefill.counters.snapshot()["descriptors_submitted"] > 0)
    decode.receiver.abort(RequestId("d-leaves"), "the client left")
    eventually(lambda: prefill.counters.snapshot()["aborts_received"] >= 1)
    handover.done()
    assert not prefill.sender.wait(0.05)  # its pages are still being read
    assert not decode.receiver.outcomes()  # and written
    fabric.release()
    got, sent = decode.outcome(), prefill.outcome()
    assert (got.ok, sent.ok) == (False, False)
    assert "the client left" in got.reason
    assert "the client left" in sent.reason
    assert decode.counters.snapshot()["transfers_quarantined"] == 0


def test_fr_11_abort_on_prefill_is_told_to_decode(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("given", prefill, decode, 300)
    handover.reserve()
    handover.open()
    handover.compute(0, 100)
    prefill.sender.abort(handover.request, "the proxy gave up")
    assert "the proxy gave up" in prefill.outcome().reason
    assert "the proxy gave up" in decode.outcome().reason
    unheard = Handover("unheard", prefill, decode, 300)
    unheard.reserve()
    prefill.sender.reject(unheard.transfer, "aborted in prefill's queue")
    assert "aborted in prefill's queue" in decode.outcome().reason


def test_failed_writes_put_pages_into_quarantine(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    fabric.fail_after, fabric.late = 2, True
    handover = Handover("torn", prefill, decode, 300)
    handover.reserve()
    handover.open()
    handover.compute(0, 300)
    handover.done()
    assert "the transport failed" in prefill.outcome().reason
    assert "the transport failed" in decode.outcome().reason
    assert decode.counters.snapshot()["transfers_quarantined"] == 1


def test_a_broken_worker_call_fails_its_own_transfer_only(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    bad, good = Handover("bad", prefill, decode, 20), Handover("good", prefill, decode, 20, slot=1)
    for handover in (bad, good):
        handover.open()
        handover.reserve()
    prefill.sender.ready(bad.request, (99,), 0, 20)
    good.compute(0, 20)
    good.done()
    prefill.sender.finish(bad.request, 20)
    outcomes = {}
    while len(outcomes) < 2:
        assert decode.receiver.wait(10)
        outcomes.update({outcome.transfer: outcome for outcome in decode.receiver.outcomes()})
    assert "layers [99] have no region" in outcomes[bad.transfer].reason
    assert outcomes[good.transfer].ok
    good.assert_equal()


@pytest.mark.parametrize(
    ("engine", "address", "words"),
    [
        ("prefill-0", "127.0.0.1:1", "accept_s"),
        ("prefill-9", None, "engine 'prefill-9' was looked for, engine 'prefill-0' is here"),
        ("prefill-0", "no port", 'expected "host:port"'),
        ("decode-1", "decode", "sends no KV"),
    ],
    ids=["closed port", "other engine", "no address", "a decode engine"],
)
def test_fr_12_one_bad_address_fails_one_request(
    stack: ExitStack, fabric: LoopbackFabric, engine: str, address: str | None, words: str
) -> None:
    settings = msgspec.structs.replace(FAST, accept_s=0.3)
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric, settings=settings)
    other = Decode(stack, fabric, engine="decode-1")
    bad, good = Handover("bad", prefill, decode, 20), Handover("good", prefill, decode, 20, slot=1)
    bad.reserve(engine, other.loop.address if address == "decode" else address)
    assert words in decode.outcome().reason
    good.reserve()
    good.open()
    good.compute(0, 20)
    good.done()
    assert decode.outcome().ok
    good.assert_equal()


def test_fr_36_layouts_that_differ_part_at_the_handshake(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill = Prefill(stack, fabric)
    decode = Decode(stack, fabric, kv=layout(weights="w1"))
    handover = Handover("differ", prefill, decode, 20)
    handover.reserve()
    reason = decode.outcome().reason
    assert "weights: 'w0' here, 'w1' there" in reason


def test_fr_23_two_requests_with_one_transfer_id(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("same", prefill, decode, 20)
    handover.open()
    double = RequestId("p-double")
    prefill.sender.open(double, handover.transfer, None)
    prefill.sender.ready(double, None, 0, 20)
    prefill.sender.finish(double, 20)
    assert "belongs to another request" in prefill.outcome().reason
    handover.reserve()
    handover.compute(0, 20)
    handover.done()
    assert decode.outcome().ok
    assert prefill.outcome().ok
    handover.assert_equal()


def test_preempted_rows_are_sent_again_and_others_are_not(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("preempted", prefill, decode, 100)
    handover.open()
    handover.reserve()
    handover.compute(0, 64)
    eventually(lambda: prefill.counters.snapshot()["bytes_pushed"] == layout().transfer_bytes(64))
    prefill.sender.unready(handover.request, 0)
    assert prefill.sender.quiesce([handover.request], 5.0)
    for array in prefill.memory.arrays:
        array[:] = 0xEE  # another request's rows
    handover.pages = [page + 50 for page in handover.pages]
    handover.open()
    handover.compute(0, 100)
    handover.done()
    assert decode.outcome().ok
    assert prefill.outcome().bytes == handover.expected_bytes()
    handover.assert_equal()


def test_quiesce_waits_for_what_is_in_flight(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("held", prefill, decode, 100)
    handover.open()
    handover.reserve()
    fabric.hold()
    handover.compute(0, 64)
    eventually(lambda: prefill.counters.snapshot()["descriptors_submitted"] > 0)
    prefill.sender.unready(handover.request, 0)
    assert not prefill.sender.quiesce([handover.request], 0.05)
    fabric.release()
    assert prefill.sender.quiesce([handover.request], 5.0)
    handover.compute(0, 100)
    handover.done()
    assert decode.outcome().ok
    handover.assert_equal()


def test_a_closed_prefill_ends_what_decode_waits_for(fabric: LoopbackFabric, stack: ExitStack) -> None:
    decode = Decode(stack, fabric)
    with ExitStack() as inner:
        prefill = Prefill(inner, fabric)
        handover = Handover("stops", prefill, decode, 100)
        handover.open()
        handover.reserve()
        handover.compute(0, 50)
        eventually(lambda: decode.counters.snapshot()["peers"] == 1)
    got = decode.outcome()
    assert not got.ok
    assert "the engine stops" in got.reason
    eventually(lambda: decode.counters.snapshot()["peers"] == 0)


def test_fr_13_prefill_comes_back_on_the_same_address(fabric: LoopbackFabric, stack: ExitStack) -> None:
    decode = Decode(stack, fabric)
    address = ""
    for life in range(3):
        settings = msgspec.structs.replace(FAST, bind=address or FAST.bind)
        with ExitStack() as inner:
            prefill = Prefill(inner, fabric, settings=settings)
            address = prefill.loop.address
            handover = Handover(f"life{life}", prefill, decode, 40, slot=life, seed=life)
            handover.reserve()
            handover.open()
            handover.compute(0, 40)
            handover.done()
            assert decode.outcome().ok
            handover.assert_equal()
        eventually(lambda: decode.counters.snapshot()["peers"] == 0)


def test_a_flood_of_intents_does_not_cost_the_lease(stack: ExitStack, fabric: LoopbackFabric) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("flood", prefill, decode, 40)
    handover.open()
    handover.reserve()
    eventually(lambda: prefill.counters.snapshot()["transfers_started"] == 1)
    for _ in range(200):  # three seconds of work, five leases
        prefill.sender._post(lambda now: time.sleep(0.015), lambda why, now: None)
    handover.compute(0, 40)
    handover.done()
    assert decode.outcome().ok
    assert decode.counters.snapshot()["leases_expired"] == 0


def test_a_silent_prefill_is_lost_when_its_lease_ends(fabric: LoopbackFabric, stack: ExitStack) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("silent", prefill, decode, 40)
    handover.open()
    handover.reserve()
    eventually(lambda: prefill.counters.snapshot()["transfers_started"] == 1)
    told = threading.Event()
    prefill.sender._post(lambda now: _sleep_until(told), lambda why, now: None)
    got = decode.outcome()
    told.set()
    assert "silent for its lease" in got.reason
    assert TransferId(got.transfer) == handover.transfer
    assert decode.counters.snapshot()["leases_expired"] == 1


def test_a_transfer_that_landed_at_one_decode_engine_fails_at_the_next(
    stack: ExitStack, fabric: LoopbackFabric
) -> None:
    """A proxy that tries decode again elsewhere with the same parameters: both engines count generations from 1."""
    prefill = Prefill(stack, fabric)
    one, other = Decode(stack, fabric), Decode(stack, fabric, engine="decode-1")
    handover = Handover("twice", prefill, one, 40)
    handover.open()
    handover.compute(0, 40)
    handover.done()
    handover.reserve()
    assert one.outcome().ok
    assert prefill.outcome().ok
    Handover("twice", prefill, other, 40).reserve()
    got = other.outcome()
    assert not got.ok
    assert "is over" in got.reason


@pytest.mark.parametrize("reserved_first", [True, False])
def test_rows_of_another_prompt_never_land(stack: ExitStack, fabric: LoopbackFabric, reserved_first: bool) -> None:
    """Both engines tokenize on their own: with ``truncate_prompt_tokens: -1`` each keeps what its own length allows."""
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("other", prefill, decode, 40)
    if reserved_first:
        handover.reserve(prompt="b")
        eventually(lambda: decode.counters.snapshot()["peers"] == 1)
    handover.open(prompt="a")
    handover.compute(0, 40)
    handover.done()
    if not reserved_first:
        handover.reserve(prompt="b")
    got = decode.outcome()
    assert not got.ok
    assert "prompts" in got.reason
    assert "prompts" in prefill.outcome().reason
    for array in decode.memory.arrays:
        assert (array == 0x7E).all()


def test_a_request_whose_transfer_was_given_up_is_reported_when_vllm_ends_it(
    stack: ExitStack, fabric: LoopbackFabric
) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("given-up", prefill, decode, 40)
    handover.open()
    handover.compute(0, 20)
    prefill.sender.give_up(handover.request, "its pages were taken by a preemption")
    handover.reserve()
    assert "preemption" in decode.outcome().reason
    assert not prefill.sender.outcomes()
    prefill.sender.abort(handover.request, "its client left")
    assert "preemption" in prefill.outcome().reason


def test_a_request_with_the_transfer_id_of_another_leaves_nothing_behind(
    stack: ExitStack, fabric: LoopbackFabric
) -> None:
    prefill, decode = Prefill(stack, fabric), Decode(stack, fabric)
    handover = Handover("double", prefill, decode, 40)
    handover.open()
    double = RequestId("p-second")
    prefill.sender.open(double, handover.transfer, None)
    handover.reserve()
    handover.compute(0, 40)
    handover.done()
    assert decode.outcome().ok
    assert prefill.outcome().ok
    prefill.sender.open(double, handover.transfer, None)  # its second chunk, after the owner's end
    prefill.sender.finish(double, 40)
    assert "another request" in prefill.outcome().reason
    assert not prefill.sender._ledger.records
    assert not prefill.sender._ledger.requests


def _sleep_until(told: threading.Event) -> None:
    assert told.wait(8.0)
