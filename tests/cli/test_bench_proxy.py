# SPDX-License-Identifier: Apache-2.0
"""``tidal bench proxy`` counts what is late, wrong or missing, and says so by its exit status."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tidal_connector.cli.bench.figures import machine_facts
from tidal_connector.cli.bench.proxy_load import WrongAnswer, check_answer
from tidal_connector.cli.bench.proxy_report import BOUND_MS, Added, ProxyResult, Streams, added
from tidal_connector.cli.main import app
from tidal_connector.cluster.standin_answers import expected_text

BODY = {"model": "tidal", "prompt": "hello", "max_tokens": 3}
STREAM = BODY | {"stream": True}


def event(text: str) -> bytes:
    return b"data: " + msgspec.json.encode({"choices": [{"text": text}]}) + b"\n\n"


def words() -> list[str]:
    return [" " + word for word in expected_text(BODY).split()]


def test_right_answers_pass() -> None:
    check_answer(200, False, msgspec.json.encode({"choices": [{"text": expected_text(BODY)}]}), BODY)
    check_answer(200, True, b"".join(map(event, words())) + b"data: [DONE]\n\n", STREAM)


@pytest.mark.parametrize(
    ("status", "streams", "raw", "body", "what"),
    [
        (503, False, b"no", BODY, "503"),
        (200, False, b'{"choices": [{"text": "other"}]}', BODY, "'other', expected"),
        (200, False, b"{}", BODY, "no answer"),
        (200, True, b"".join(map(event, words())), STREAM, "the stream ends with"),
        (200, True, b"".join(map(event, words()[:2])) + b"data: [DONE]\n\n", STREAM, "expected"),
        (200, True, b'data: {"error": {}}\n\ndata: [DONE]\n\n', STREAM, "no answer"),
        (200, False, b"{}", STREAM, "a stream was asked for"),
    ],
)
def test_anything_else_is_wrong(status: int, streams: bool, raw: bytes, body: dict[str, object], what: str) -> None:
    with pytest.raises(WrongAnswer, match=what):
        check_answer(status, streams, raw, body)


def test_what_is_added_is_the_difference_of_the_quantiles() -> None:
    direct, proxy = [0.001] * 50 + [0.002] * 51, [0.003] * 50 + [0.005] * 51
    found = added(direct, proxy)
    assert (found.direct_p50, found.proxy_p50) == pytest.approx((2.0, 5.0))
    assert (found.added_p50, found.added_p99) == pytest.approx((3.0, 3.0))


def result(
    added_ms: float = 1.0, failed: int = 0, stream_faults: tuple[str, ...] = (), most_open: int = 10
) -> ProxyResult:
    item = Added(1, 2, 1 + added_ms, 3, added_ms, 1)
    streams = Streams(10, len(stream_faults), most_open, 100, 1.0, 5.0, 6.0, 0.1, stream_faults)
    return ProxyResult(
        answer=item,
        first_token=item,
        requests=10,
        proxy_cpu_ms=0.5,
        failed=failed,
        bound_ms=BOUND_MS,
        streams=streams,
        prefill=1,
        decode=1,
        prompt_tokens=16,
        tokens=4,
        policy="least_tokens",
        beside="",
        machine=machine_facts(),
    )


def test_every_shortcoming_is_said() -> None:
    assert result().shortcomings() == []
    assert len(result(added_ms=3.01).shortcomings()) == 2
    assert result(failed=1).shortcomings() == ["1 timed requests failed"]
    assert result(stream_faults=("WireError: x",)).shortcomings() == ["1 of 10 streams failed: WireError: x"]
    assert "only 9 of 10 streams were open at one moment" in result(most_open=9).shortcomings()[0]


def test_a_small_run_writes_its_result(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["bench", "proxy", "--requests", "3", "--streams", "10", "--engines", "1", "--tokens", "10"]
    found = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert found.exit_code in (0, 1), found.output  # on a busy machine the bound may be missed
    said = msgspec.json.decode(file.read_bytes(), type=ProxyResult)
    assert (said.failed, said.streams.failed, said.streams.asked, said.streams.tokens) == (0, 0, 10, 100)
    assert said.answer.direct_p50 > 0
