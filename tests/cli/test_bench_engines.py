# SPDX-License-Identifier: Apache-2.0
"""Timed requests against a small server that streams as vLLM does, in pieces that end anywhere."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tidal_connector.cli.bench.engines import Arrival, arrival, at_once, complete, single_engine, token_times
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.stack import StackSettings
from tidal_connector.errors import TidalError


class Streaming(BaseHTTPRequestHandler):
    """Answers with as many tokens as are asked for, less ``short``; the prompt's length is the pause in ms."""

    short = 0
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        tokens = body["max_tokens"] - self.short
        if len(body["prompt"]) > 50:
            return self._send(400, b"too long")
        if not body["stream"]:
            return self._send(200, json.dumps({"usage": {"completion_tokens": tokens}}).encode())
        self.send_response(200)
        self.end_headers()
        for number in range(1, tokens + 1):
            event = {"choices": [{"text": "\x85\u2028"}], "usage": {"completion_tokens": number}}
            line = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
            for part in (line[:9], line[9:-1], line[-1:]):
                self.wfile.write(part)
                self.wfile.flush()
            time.sleep(len(body["prompt"]) / 1000)
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 99}}\n\ndata: [DONE]\n\n')

    def _send(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """A client that gave up, because the other answer was refused, is no news."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    monkeypatch.setattr(Streaming, "asked", [])
    monkeypatch.setattr(Streaming, "short", 0)
    with Server(("127.0.0.1", 0), Streaming) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ServerProcess("engine", [], {}, f"http://127.0.0.1:{server.server_port}", tmp_path / "log")
        server.shutdown()


def test_every_token_has_its_time_however_the_bytes_are_cut(engine: ServerProcess) -> None:
    begun: list[int] = []
    found = at_once(engine, [[1] * 20, [2] * 30], 5, lambda: begun.append(len(Streaming.asked)))
    assert begun == [2], "told once, when both answers had begun"
    assert [each.counts for each in found] == [(1, 2, 3, 4, 5)] * 2
    assert all(list(each.times) == sorted(each.times) and each.asked < each.times[0] for each in found)
    assert min(token_times(found)) > 0.005
    assert all(body["ignore_eos"] and body["stream_options"]["continuous_usage_stats"] for body in Streaming.asked)


def test_answers_that_are_not_streamed_are_counted(engine: ServerProcess) -> None:
    answered: list[int] = []
    complete(engine, [[1], [2], [3]], 7, lambda: answered.append(1))
    assert len(answered) == 3


@pytest.mark.parametrize("prompt", [[1], [1] * 60])
def test_a_short_or_refused_answer_is_one_error_that_names_the_engine(
    engine: ServerProcess, monkeypatch: pytest.MonkeyPatch, prompt: list[int]
) -> None:
    monkeypatch.setattr(Streaming, "short", 2)
    words = "engine: 400 for 60 tokens: too long" if len(prompt) == 60 else "engine: 3 of 5 tokens came"
    with pytest.raises(TidalError, match=words):
        at_once(engine, [prompt, prompt], 5)
    with pytest.raises(TidalError, match=words):
        complete(engine, [prompt, prompt], 5)


def test_an_engine_that_is_gone_is_an_error(tmp_path: Path) -> None:
    gone = ServerProcess("gone", [], {}, "http://127.0.0.1:9", tmp_path / "log")
    with pytest.raises(TidalError, match="gone: no answer to a prompt of 3 tokens"):
        at_once(gone, [[1, 2, 3]], 2)


def event(count: int, choices: int = 1) -> bytes:
    return b"data: " + json.dumps({"choices": [{}] * choices, "usage": {"completion_tokens": count}}).encode()


def test_pieces_without_a_new_token_are_left_out() -> None:
    events = [event(0), event(1), event(1), event(3), event(3, choices=0), b"data: [DONE]"]
    found = arrival(0.5, [1, 2, 3, 4, 5, 6], events, 3, "engine")
    assert found == Arrival(0.5, (2, 4), (1, 3))


def test_only_tokens_of_the_full_batch_count_and_a_piece_shares_its_time() -> None:
    early = Arrival(0.0, (1.0, 2.0, 3.0, 4.0, 5.0), (1, 2, 3, 4, 5))
    late = Arrival(0.0, (2.5, 3.5, 4.1), (1, 3, 5))
    # Of the early one 3.0 to 4.0 lies within the late one's 2.5 to 4.1; of the late one everything does.
    assert token_times([early, late]) == pytest.approx([1.0, 0.5, 0.5, 0.3, 0.3])


def test_a_burst_has_no_token_times() -> None:
    with pytest.raises(TidalError, match="no two tokens came"):
        token_times([Arrival(0.0, (1.0,), (5,)), Arrival(0.0, (1.0, 2.0), (1, 2))])


def test_an_engine_takes_the_connector_only_when_told(tmp_path: Path) -> None:
    settings = StackSettings(model=tmp_path, logs=tmp_path)
    alone = single_engine("off", settings)
    offload = single_engine("on", settings, {"offload": "on", "selection": {"prefetch": False}})
    assert "--kv-transfer-config" not in alone.command
    config = json.loads(offload.command[offload.command.index("--kv-transfer-config") + 1])
    assert (config["kv_role"], config["engine_id"]) == ("kv_both", "on")
    assert config["kv_connector_extra_config"]["selection"] == {"prefetch": False}
    assert (alone.log.name, offload.log.name) == ("off.log", "on.log")
    assert alone.url != offload.url
