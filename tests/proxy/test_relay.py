# SPDX-License-Identifier: Apache-2.0
"""What the client gets for whatever the engines do (field report FR-39), and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.proxy.answers import about, layout
from tidal_connector.control.messages import About
from tidal_connector.proxy.engines import Failure
from tidal_connector.proxy.settings import Timeouts

ALL_EVENTS = b"".join(b'data: {"choices": [{"text": "%d"}]}\n\n' % i for i in range(3)) + b"data: [DONE]\n\n"


def test_both_legs_carry_one_fresh_transfer_id(run_bed: Any) -> None:
    async def scenario(bed: Any) -> None:
        for _ in range(2):
            assert (await bed.post(max_tokens=7, logprobs=3)).status_code == 200
        p, d = bed.prefill[0].requests, bed.decode[0].requests
        assert [a.transfer == b.transfer for a, b in zip(p, d, strict=True)] == [True, True]
        assert p[0].transfer != p[1].transfer
        assert p[0].body["kv_transfer_params"] == {
            "mode": "push", "role": "prefill", "transfer_id": p[0].transfer, "decode_engine": "d0"
        }  # fmt: skip
        assert d[0].body["kv_transfer_params"] == {
            "mode": "push", "role": "decode", "transfer_id": p[0].transfer,
            "prefill_engine": "p0", "prefill_control": "127.0.0.1:7000",
        }  # fmt: skip
        assert (p[0].body["max_tokens"], d[0].body["max_tokens"]) == (1, 7)
        assert ("logprobs" in p[0].body, d[0].body["logprobs"]) == (False, 3)

    run_bed(scenario)


def test_legs_run_at_the_same_time(run_bed: Any, replies: Any) -> None:
    """Each engine answers only once the other has its request: a proxy that dispatches in turn would hang."""
    both = {"prefill": asyncio.Event(), "decode": asyncio.Event()}

    def meeting(mine: str, other: str) -> Any:
        async def behaviour(wire: Any) -> None:
            both[mine].set()
            await both[other].wait()
            await replies.ok(wire)

        return behaviour

    async def scenario(bed: Any) -> None:
        assert (await bed.post()).status_code == 200

    run_bed(scenario, [meeting("prefill", "decode")], [meeting("decode", "prefill")])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_passes_byte_for_byte(run_bed: Any, path: str) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post(path, stream=True)
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.content == ALL_EVENTS

    run_bed(scenario)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        (400, b'{"error": {"message": "too long"}}', "application/json"),
        (400, b"plain words", "text/plain"),
        (422, b'{"detail": []}', "application/json"),
        (429, b'{"error": {"message": "slow down"}}', "application/json"),
    ],
)
def test_fr_39_4xx_passes_and_is_never_retried(
    run_bed: Any, replies: Any, side: str, stream: bool, reply: tuple[int, bytes, str]
) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post(stream=stream)
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == reply
        other = bed.decode if side == "prefill" else bed.prefill
        assert len(bed.prefill[0].requests) == len(bed.decode[0].requests) == 1
        await bed.until(lambda: other[0].requests[0].cut)
        after = await bed.settled()
        assert after['tidal_proxy_requests_total{outcome="refused"}'] == 1
        assert not [name for name in after if name.startswith("tidal_proxy_leg_failures_total")]

    wrong = replies.status(*reply)
    legs = ([wrong], [replies.hang]) if side == "prefill" else ([replies.hang], [wrong])
    run_bed(scenario, *legs)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [500, 503])
def test_fr_39_5xx_is_retried_once_on_a_fresh_transfer_then_passed(
    run_bed: Any, replies: Any, side: str, status: int
) -> None:
    body = b'{"error": {"message": "engine dead"}}'

    async def scenario(bed: Any) -> None:
        answer = await bed.post()
        assert (answer.status_code, answer.content) == (status, body)
        failing = (bed.prefill if side == "prefill" else bed.decode)[0]
        assert len({seen.transfer for seen in failing.requests}) == len(failing.requests) == 2
        assert len({seen.headers["x-request-id"] for seen in failing.requests}) == 2
        assert (await bed.settled())["tidal_proxy_retries_total"] == 1

    wrong = replies.status(status, body)
    legs = ([wrong], [replies.hang]) if side == "prefill" else ([replies.hang], [wrong])
    run_bed(scenario, *legs)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_fr_39_lost_connection_is_retried_on_the_other_engine(
    run_bed: Any, replies: Any, side: str, stream: bool
) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post(stream=stream)
        assert answer.status_code == 200
        tried = bed.prefill if side == "prefill" else bed.decode
        assert [len(engine.requests) for engine in tried] == [1, 1]
        assert tried[0].requests[0].transfer != tried[1].requests[0].transfer

    good = replies.ok_or_stream
    if side == "prefill":
        run_bed(scenario, [replies.close, replies.ok], [replies.waiting_for("p0", good)])
    else:
        run_bed(scenario, [replies.ok], [replies.close, good])


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_fr_39_lost_connection_twice_is_a_502_that_names_the_engine(run_bed: Any, replies: Any, side: str) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post()
        assert answer.status_code == 502
        assert f"engine {side[0]}0 broke off" in answer.json()["error"]["message"]

    legs = ([replies.close], [replies.hang]) if side == "prefill" else ([replies.hang], [replies.close])
    run_bed(scenario, *legs)


def test_engine_that_cannot_be_reached_is_avoided_afterwards(run_bed: Any, replies: Any) -> None:
    async def scenario(bed: Any) -> None:
        engine = bed.prefill[0]
        await bed.until(lambda: engine.writers)  # it was asked for its health; the next time is later than this test
        engine.server.close()
        for writer in engine.writers:
            writer.close()
        for _ in range(4):
            assert (await bed.post()).status_code == 200
        assert (await bed.settled())['tidal_proxy_leg_failures_total{engine="p0",role="prefill"}'] == 1

    timeouts = Timeouts(inquiry_every_s=60.0)
    run_bed(scenario, [replies.ok, replies.ok], [replies.waiting_for("p0", replies.ok)], timeouts)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_ready_counts_an_engine_of_the_file_only_while_it_can_be_reached(run_bed: Any, replies: Any, side: str) -> None:
    async def scenario(bed: Any) -> None:
        async def says(status: int) -> Any:
            for _ in range(500):
                answer = await bed.client.get("/ready")
                if answer.status_code == status:
                    return answer.json()
                await asyncio.sleep(0.01)
            raise AssertionError(f"/ready never answered {status}")

        engine = (bed.prefill if side == "prefill" else bed.decode)[0]
        assert (await says(200))["pairs"] == 1
        engine.server.close()  # no request is made, all the while
        gone = await says(503)
        assert (gone["pairs"], gone["why"]) == (0, f"no {side} engine is reachable ({side[0]}0: out of reach)")
        engine.server = await asyncio.start_server(engine._connection, "127.0.0.1", engine.port)
        assert (await says(200))["pairs"] == 1

    quick = Timeouts(inquiry_every_s=0.1, cooldown_s=0.1, keepalive_s=0.1)
    run_bed(scenario, [replies.ok], [replies.ok], quick)


@pytest.mark.parametrize(
    ("status", "retryable", "refused"),
    [(404, False, True), (200, False, True), (200, True, False), (500, True, False), (504, False, False)],
)
def test_only_a_refusal_is_no_failure_of_the_engine(status: int, retryable: bool, refused: bool) -> None:
    assert Failure(status, {}, b"", retryable).refused is refused


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_fr_39_hang_is_cut_at_its_bound_and_not_retried(run_bed: Any, replies: Any, side: str) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post()
        assert answer.status_code == 504
        assert "did not answer within 0.3 s" in answer.json()["error"]["message"]
        for engine in (bed.prefill[0], bed.decode[0]):
            assert len(engine.requests) == 1
        hung = (bed.prefill if side == "prefill" else bed.decode)[0]
        await bed.until(lambda: hung.requests[0].cut)
        assert (await bed.settled())['tidal_proxy_requests_total{outcome="timeout"}'] == 1

    if side == "prefill":
        run_bed(scenario, [replies.hang], [replies.hang], Timeouts(prefill_s=0.3))
    else:
        run_bed(scenario, [replies.ok], [replies.hang], Timeouts(decode_s=0.3))


def test_fr_39_slow_prefill_below_its_bound_is_not_cut(run_bed: Any, replies: Any) -> None:
    done = asyncio.Event()

    async def slow(wire: Any) -> None:
        await asyncio.sleep(1.0)
        done.set()
        await replies.ok(wire)

    async def scenario(bed: Any) -> None:
        assert (await bed.post()).status_code == 200

    run_bed(scenario, [slow], [replies.after(done, replies.ok)], Timeouts(connect_s=0.2, prefill_s=30))


@pytest.mark.parametrize("behaviour", ["half_chunk", "stream_then_hang"])
def test_fr_39_broken_stream_ends_in_an_error_event(run_bed: Any, replies: Any, behaviour: str) -> None:
    async def scenario(bed: Any) -> None:
        text = (await bed.post(stream=True)).text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert json.loads(events[0])["choices"][0]["text"] == "0"
        error = json.loads(events[-2])["error"]
        assert error["code"] == (502 if behaviour == "half_chunk" else 504)
        assert events[-1] == "[DONE]"
        assert len(bed.decode[0].requests) == 1

    run_bed(scenario, decode=[getattr(replies, behaviour)], timeouts=Timeouts(stall_s=0.3))


def test_fr_39_invalid_events_pass_as_they_are(run_bed: Any, replies: Any) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post(stream=True)
        assert (answer.status_code, answer.content) == (200, b"\x00not an event\n")

    run_bed(scenario, decode=[replies.invalid_sse])


def test_fr_39_error_event_inside_a_stream_passes_and_is_counted(run_bed: Any, replies: Any) -> None:
    async def scenario(bed: Any) -> None:
        text = (await bed.post(stream=True)).text
        assert "engine died" in text
        assert text.endswith("data: [DONE]\n\n")
        assert (await bed.settled())['tidal_proxy_requests_total{outcome="stream_error"}'] == 1

    run_bed(scenario, decode=[replies.stream_then_error])


def test_error_event_as_the_first_event_is_retried(run_bed: Any, replies: Any) -> None:
    async def scenario(bed: Any) -> None:
        assert (await bed.post(stream=True)).content == ALL_EVENTS
        assert len({seen.transfer for seen in bed.decode[0].requests}) == 2
        assert "transfer failed" in (await bed.post(stream=True)).text

    last = replies.error_event
    run_bed(scenario, decode=[replies.in_turn(replies.error_event, replies.stream, last, last)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["before", "during"])
def test_client_that_leaves_cancels_both_legs(run_bed: Any, replies: Any, stream: bool, moment: str) -> None:
    async def scenario(bed: Any) -> None:
        task = asyncio.create_task(bed.post(stream=stream))
        await bed.until(lambda: bool(bed.decode[0].requests and bed.prefill[0].requests))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await bed.until(lambda: bed.decode[0].requests[0].cut and bed.prefill[0].requests[0].cut)
        found = await bed.settled()
        assert found['tidal_proxy_requests_total{outcome="disconnected"}'] == 1

    decode = replies.stream_then_hang if stream and moment == "during" else replies.hang
    run_bed(scenario, [replies.hang], [decode])


def test_client_that_reads_nothing_is_given_up(run_bed: Any, replies: Any) -> None:
    async def flood(wire: Any) -> None:
        await wire.start_stream()
        for _ in range(100):
            await wire.piece(b"data: " + b"x" * (1 << 20) + b"\n\n")
        await wire.hang()

    async def scenario(bed: Any) -> None:
        body = b'{"prompt": "hi", "stream": true}'
        _, writer = await asyncio.open_connection("127.0.0.1", bed.client.base_url.port, limit=1024)
        try:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            await bed.until(lambda: bool(bed.decode[0].requests))
            given_up = 'tidal_proxy_requests_total{outcome="disconnected"}'
            for _ in range(500):  # the place is free before the request is counted
                if (found := await bed.settled())[given_up]:
                    break
                await asyncio.sleep(0.01)
            assert found[given_up] == 1
        finally:
            writer.transport.abort()

    run_bed(scenario, None, [flood], Timeouts(stall_s=0.3))


def test_answer_without_the_prefill_engine_ends_its_leg(run_bed: Any, replies: Any) -> None:
    """A decode engine that has the whole prompt in its prefix cache, or computed it itself, needs nothing."""

    async def scenario(bed: Any) -> None:
        assert (await bed.post()).status_code == 200
        await bed.until(lambda: bed.prefill[0].requests[0].cut)
        assert (await bed.settled())['tidal_proxy_requests_total{outcome="ok"}'] == 1

    run_bed(scenario, [replies.hang])


def test_many_at_once_spread_over_the_engines_and_all_counters_return(run_bed: Any, replies: Any) -> None:
    async def scenario(bed: Any) -> None:
        answers = await asyncio.gather(*(bed.post(stream=i % 2 == 0, prompt=[1] * (i + 1)) for i in range(60)))
        assert {answer.status_code for answer in answers} == {200}
        assert all(len(engine.requests) >= 15 for engine in (*bed.prefill, *bed.decode))
        assert (await bed.settled())['tidal_proxy_requests_total{outcome="ok"}'] == 60

    run_bed(scenario, [replies.ok] * 2, [replies.ok_or_stream] * 2)


def test_fr_39_idle_connections_are_not_reused_after_the_engine_may_have_closed_them(
    run_bed: Any, replies: Any
) -> None:
    """The fake engine answers on a connection only once after an idle gap longer than ``keepalive_s``."""

    async def scenario(bed: Any) -> None:
        assert (await bed.post()).status_code == 200
        await asyncio.sleep(0.5)
        assert (await bed.post()).status_code == 200
        assert (await bed.settled())["tidal_proxy_retries_total"] == 0

    def only_fresh() -> Any:
        used: set[int] = set()

        async def behaviour(wire: Any) -> None:
            if id(wire.writer) in used:
                raise ConnectionResetError
            used.add(id(wire.writer))
            kept.append(wire.writer)
            await replies.ok(wire)

        kept: list[Any] = []
        return behaviour

    run_bed(scenario, [only_fresh()], [only_fresh()], Timeouts(keepalive_s=0.2))


def test_fr_23_equal_and_odd_request_ids(run_bed: Any) -> None:
    odd = ["same", "same", "x" * 300, "a/../b", "", "caf\u00e9 \u00fc".encode()]

    async def scenario(bed: Any) -> None:
        for name in odd:
            assert (await bed.post(headers={"x-request-id": name})).status_code == 200
        ids = [seen.headers["x-request-id"] for seen in bed.decode[0].requests]
        assert len(set(ids)) == len(odd)
        assert all(len(name) <= 81 and name.isascii() and "/" not in name and " " not in name for name in ids)
        assert [name.startswith("same-") for name in ids[:2]] == [True, True]
        assert ids == [seen.headers["x-request-id"] for seen in bed.prefill[0].requests]

    run_bed(scenario)


def test_fr_44_transfer_parameters_of_a_client_are_stripped(run_bed: Any) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_block_ids": [1, 2]}

    async def scenario(bed: Any) -> None:
        xargs = {"kv_transfer_params": "x", "kept": 1}
        await bed.post(kv_transfer_params=forged, ec_transfer_params=forged, vllm_xargs=xargs)
        for seen in (bed.prefill[0].requests[0], bed.decode[0].requests[0]):
            assert "192.0.2.1" not in json.dumps(seen.body)
            assert seen.body["vllm_xargs"] == {"kept": 1}

    run_bed(scenario)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"n": 2}, "n = 2"),
        ({"best_of": 3}, "best_of = 3"),
        ({"prompt": ["a", "b"]}, "prompt holds 2 prompts"),
        ({"prompt": [[1], [2]]}, "prompt holds 2 prompts"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_several_sequences_are_refused_in_one_line(run_bed: Any, body: dict[str, Any], words: str) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.post(**body)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert words in message
        assert "\n" not in message
        assert not bed.prefill[0].requests
        assert not bed.decode[0].requests

    run_bed(scenario)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe", pytest.param(b"[" * 50_000 + b"]" * 50_000, id="deep")]
)
def test_bodies_that_are_no_json_object_are_refused(run_bed: Any, raw: bytes) -> None:
    async def scenario(bed: Any) -> None:
        answer = await bed.client.post("/v1/completions", content=raw)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    run_bed(scenario)


def test_a_header_beyond_ascii_reaches_both_engines_as_it_came(run_bed: Any) -> None:
    key = "Bearer clé".encode("latin-1")

    async def scenario(bed: Any) -> None:
        body = b'{"prompt": "hi"}'
        answer = await bed.client.post("/v1/completions", content=body, headers={b"authorization": key})
        assert answer.status_code == 200
        for engine in (bed.prefill[0], bed.decode[0]):
            assert engine.requests[0].headers["authorization"].encode("latin-1") == key.lower()

    run_bed(scenario)


def test_fr_10_health_needs_one_engine_of_each_kind(run_bed: Any, replies: Any) -> None:
    async def scenario(bed: Any) -> None:
        assert (await bed.client.get("/health")).status_code == 200
        bed.prefill[0].healthy = False
        found = await bed.client.get("/health")
        assert found.status_code == 503
        assert found.json() == {
            "status": "no prefill engine is healthy",
            "prefill": {"p0": "status 503"},
            "decode": {"d0": "ok", "d1": "ok"},
            "barred": [],
            "unknown": ["p0", "d0", "d1"],
        }

    run_bed(scenario, [replies.ok], [replies.ok, replies.ok])


def test_models_come_from_the_decode_engine(run_bed: Any) -> None:
    async def scenario(bed: Any) -> None:
        assert (await bed.client.get("/v1/models")).json() == {"object": "list", "data": [{"id": "m"}]}

    run_bed(scenario)


def test_fr_36_engines_that_do_not_fit_get_no_request_and_the_client_one_clear_line(run_bed: Any, replies: Any) -> None:
    def ask(address: str, timeout_s: float) -> About:
        return {"127.0.0.1:7000": about("p0"), "127.0.0.1:7100": about("d0", layout(layers=4))}[address]

    async def scenario(bed: Any) -> None:
        while (await bed.metrics())["tidal_proxy_barred_pairs"] == 0:
            await asyncio.sleep(0.01)
        answer = await bed.post(stream=True)
        assert answer.status_code == 503
        line = answer.json()["error"]["message"]
        assert line.startswith("prefill engine 'p0' and decode engine 'd0' do not fit: regions: 6 of 6 layers at 'p0'")
        assert bed.prefill[0].requests == bed.decode[0].requests == []
        health = await bed.client.get("/health")
        assert health.status_code == 503
        assert (health.json()["status"], health.json()["barred"]) == (line, [line])
        assert (await bed.settled())['tidal_proxy_requests_total{outcome="unpaired"}'] == 1

    run_bed(scenario, ask=ask)


def test_fr_36_requests_go_to_the_pairs_that_fit(run_bed: Any, replies: Any) -> None:
    def ask(address: str, timeout_s: float) -> About:
        named = {"127.0.0.1:7000": "p0", "127.0.0.1:7001": "p1", "127.0.0.1:7100": "d0", "127.0.0.1:7101": "d1"}
        engine = named[address]
        return about(engine, layout(layers=4 if engine.endswith("1") else 6))

    async def scenario(bed: Any) -> None:
        while (await bed.metrics())["tidal_proxy_barred_pairs"] < 2:
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*(bed.post() for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        for here, there in zip(bed.prefill, bed.decode, strict=True):
            assert [seen.transfer for seen in here.requests]
            assert {seen.transfer for seen in here.requests} == {seen.transfer for seen in there.requests}
        assert (await bed.client.get("/health")).status_code == 200

    run_bed(scenario, [replies.ok, replies.ok], [replies.ok, replies.ok], ask=ask)
