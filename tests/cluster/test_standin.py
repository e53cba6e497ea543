# SPDX-License-Identifier: Apache-2.0
"""Stand-ins hand over by the real protocol, and their answers can be checked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.standins import COMMAND, Standin, legs, standin, until
from tidal_connector.cluster.standin_answers import expected_text
from tidal_connector.config import child_environment
from tidal_connector.control.inquiry import inquire

BODY = {"model": "tidal", "prompt": "Where does the tide go?", "max_tokens": 7}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Standin, Standin]]:
    folder = tmp_path_factory.mktemp("pair")
    with (
        standin("prefill", "prefill-0", folder / "p.log") as prefill,
        standin("decode", "decode-0", folder / "d.log") as decode,
    ):
        yield prefill, decode


def both(prefill: Standin, decode: Standin, mine: dict[str, Any], theirs: dict[str, Any]) -> httpx.Response:
    side = threading.Thread(target=prefill.post, args=(mine,))
    side.start()
    try:
        return decode.post(theirs)
    finally:
        side.join()


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_they_say_who_they_are_and_how_much_they_serve(pair: tuple[Standin, Standin]) -> None:
    about = inquire(pair[1].control, 5.0)
    assert (about.identity.engine, about.sends, about.receives) == ("decode-0", False, True)
    assert (about.requests, about.kv_tokens, about.endpoint) == (256, 262144, "127.0.0.1:1")
    assert about.fingerprint == inquire(pair[0].control, 5.0).fingerprint


@pytest.mark.parametrize("late", ["prefill", "decode"])
def test_a_pair_answers_what_was_expected_whoever_is_asked_first(pair: tuple[Standin, Standin], late: str) -> None:
    prefill, decode = pair
    mine, theirs = legs(prefill, BODY)
    if late == "decode":
        assert prefill.post(mine).status_code == 200
        answer = decode.post(theirs)
    else:
        answer = both(prefill, decode, mine, theirs)
    assert answer.json()["choices"][0]["text"] == expected_text(BODY)
    assert answer.json()["usage"]["completion_tokens"] == 7


def test_a_stream_holds_the_same_tokens_one_by_one(pair: tuple[Standin, Standin]) -> None:
    stream = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    answer = both(*pair, *legs(pair[0], stream))
    *pieces, usage = events(answer.text)
    assert len(pieces) == 7
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected_text(BODY)
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 6 + ["length"]
    assert usage["usage"]["total_tokens"] == len(BODY["prompt"]) + 7


def test_chat_and_the_sequential_protocol(pair: tuple[Standin, Standin]) -> None:
    prefill, decode = pair
    body = {"model": "tidal", "messages": [{"role": "user", "content": "hm"}], "max_completion_tokens": 3}
    first = prefill.post(
        {**body, "max_completion_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}, "/v1/chat/completions"
    )
    second = decode.post({**body, "kv_transfer_params": first.json()["kv_transfer_params"]}, "/v1/chat/completions")
    assert second.json()["choices"][0]["message"]["content"] == expected_text(body)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prefill_engine": "prefill-9"}, "'prefill-9' was looked for"),
        ({"transfer_id": "xfer-other"}, "did not arrive"),
        ({"prefill_control": "127.0.0.1:1"}, "did not arrive"),
    ],
)
def test_another_engine_or_transfer_is_an_error(
    pair: tuple[Standin, Standin], tmp_path: Path, wrong: dict[str, str], words: str
) -> None:
    with standin("decode", "decode-1", tmp_path / "d.log", "--lease-s", "0.2") as decode:
        answer = both(pair[0], decode, *legs(pair[0], BODY, **wrong))
    assert answer.status_code == 500
    assert words in answer.json()["error"]["message"]


def test_another_prompt_is_an_error(pair: tuple[Standin, Standin]) -> None:
    mine, theirs = legs(pair[0], BODY)
    answer = both(*pair, mine, {**theirs, "prompt": "Where does the tide go!"})
    assert answer.status_code == 500
    assert "prompt" in answer.json()["error"]["message"]


def test_another_layout_is_an_error_also_in_a_stream(pair: tuple[Standin, Standin], tmp_path: Path) -> None:
    with standin("decode", "decode-1", tmp_path / "d.log", "--layout", "v2") as decode:
        _, theirs = legs(pair[0], BODY)
        answer = decode.post({**theirs, "stream": True})
        (error,) = events(answer.text)
    assert error["error"]["code"] == 500
    assert "weights: 'v1' here, 'v2' there" in error["error"]["message"]


def test_a_leg_of_the_other_role_is_refused(pair: tuple[Standin, Standin]) -> None:
    mine, theirs = legs(pair[0], BODY)
    assert pair[1].post(mine).status_code == pair[0].post(theirs).status_code == 400


def test_requests_wait_for_seats_and_leave_with_their_clients(tmp_path: Path) -> None:
    options = ("--max-num-seqs", "1", "--token-ms", "5000")
    with standin("both", "one", tmp_path / "one.log", *options) as engine:

        def hurried() -> None:
            with pytest.raises(httpx.ReadTimeout):
                engine.post({**BODY, "stream": True}, timeout_s=4.0)

        clients = [threading.Thread(target=hurried) for _ in range(2)]
        for client in clients:
            client.start()
        until(lambda: engine.metrics()["vllm:num_requests_waiting"] == 1)
        assert engine.metrics()["vllm:num_requests_running"] == 1
        for client in clients:
            client.join()
        until(lambda: engine.metrics()["vllm:num_requests_waiting"] == 0)
        until(lambda: engine.metrics()["vllm:num_requests_running"] == 0)


def test_it_takes_the_arguments_of_a_vllm_server_and_ends_at_sigterm(tmp_path: Path) -> None:
    transfer = {
        "kv_role": "kv_consumer",
        "engine_id": "decode-7",
        "kv_connector_extra_config": {"control": {"bind": "127.0.0.1:0"}, "weights": "w3"},
    }
    command = [*COMMAND, "--model", "m", "--dtype", "bfloat16", "--port", "0", "--enforce-eager"]
    process = subprocess.Popen(
        [*command, "--kv-transfer-config", json.dumps(transfer)],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said.startswith("decode stand-in decode-7: http 127.0.0.1:")
    assert inquire(said.split("control ")[1].split(",")[0], 5.0).layout.weights == "w3"
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    process.stdout.close()


@pytest.mark.parametrize("option", ["--model", "--served-model-name"])
def test_a_model_that_was_named_is_the_only_one_that_is_served(tmp_path: Path, option: str) -> None:
    with standin("both", "named", tmp_path / "named.log", option, "tidal") as engine:
        other = engine.post({**BODY, "model": "nope"})
        assert (other.status_code, other.json()["error"]["message"]) == (404, "The model `nope` does not exist.")
        unnamed = {name: value for name, value in BODY.items() if name != "model"}
        assert engine.post(BODY).status_code == engine.post(unnamed).status_code == 200


def test_rates_and_never_ready(tmp_path: Path) -> None:
    options = ("--fail-rate", "0.5", "--wrong-rate", "0.5", "--seed", "3")
    with standin("both", "odd", tmp_path / "odd.log", *options) as engine:
        answers = [engine.post(BODY) for _ in range(40)]
    good = [answer for answer in answers if answer.status_code == 200]
    right = [answer for answer in good if answer.json()["choices"][0]["text"] == expected_text(BODY)]
    assert {answer.status_code for answer in answers} == {200, 500}
    assert 0 < len(right) < len(good) < 40
    with standin("both", "mute", tmp_path / "mute.log", "--never-ready") as engine:
        assert httpx.get(engine.http + "/health", trust_env=False).status_code == 503
        assert engine.post(BODY).status_code == 503


def test_it_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, tidal_connector.cluster.standin; "
        "print([name for name in ('torch', 'vllm', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
