# SPDX-License-Identifier: Apache-2.0
"""Real engines are killed, stopped and left by their clients while KV is on its way.

After each fault: every client has an answer or an error within a bound, the surviving engine is alive, a fresh request
equals the reference, and all pages are back on both sides.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.e2e.checks import NEW_TOKENS, assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.stack import MODEL_NAME, Stack, read_metrics
from tidal_connector.errors import TidalError

pytestmark = [pytest.mark.faults, pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTH = 2000  # with chunks of 64 tokens its prefill takes seconds, and the first layers land after a fraction of one
BOUND_S = 60.0
START_S = 240.0


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    with deploy(max_num_batched_tokens=64) as running:
        yield running


def under_way(stack: Stack, pool: ThreadPoolExecutor, seed: int) -> tuple[list[int], Future[Generated]]:
    """Send a long prompt and return once some of its bytes have landed, well before all have."""
    (prompt,) = make_prompts((LENGTH,), seed, shared_prefix=False)
    before = read_metrics(stack.prefill).get("tidal:descriptors_submitted_total", 0.0)
    answer = pool.submit(ask, stack.proxy.url, prompt, NEW_TOKENS)
    deadline = time.monotonic() + BOUND_S
    while read_metrics(stack.prefill).get("tidal:descriptors_submitted_total", 0.0) <= before:
        assert time.monotonic() < deadline, "the transfer did not begin"
        time.sleep(0.05)
    assert not answer.done()
    return prompt, answer


def ends_truthfully(stack: Stack, prompt: list[int], answer: Future[Generated]) -> None:
    """The client gets an error, or an answer that equals the reference, within the bound."""
    try:
        found = answer.result(BOUND_S)
    except TidalError:
        return
    assert_equal([found], reference_answers(stack, [prompt]), [len(prompt)])


def restart(server: ServerProcess) -> None:
    server.start()
    wait_ready([server], START_S)


def test_fr_6_a_client_leaves_while_kv_is_on_its_way(stack: Stack) -> None:
    for moment, seed in (("sent", 31), ("carried", 32), ("answered", 33)):
        (prompt,) = make_prompts((LENGTH,), seed, shared_prefix=False)
        before = read_metrics(stack.prefill).get("tidal:descriptors_submitted_total", 0.0)
        with leaving_client(stack, prompt) as connection:
            deadline = time.monotonic() + BOUND_S
            while moment == "carried" and before >= read_metrics(stack.prefill).get(
                "tidal:descriptors_submitted_total", 0.0
            ):
                assert time.monotonic() < deadline, "the transfer did not begin"
                time.sleep(0.02)
            if moment == "answered":
                assert connection.recv(1)
    assert_at_rest(stack)


@contextlib.contextmanager
def leaving_client(stack: Stack, prompt: list[int]) -> Iterator[socket.socket]:
    """Send a request for a stream, and hang up at the end, whatever has come back by then."""
    body = json.dumps({"model": MODEL_NAME, "prompt": prompt, "max_tokens": 64, "stream": True, "ignore_eos": True})
    url = urlsplit(stack.proxy.url)
    assert url.hostname is not None
    with socket.create_connection((url.hostname, url.port), timeout=BOUND_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield connection


def test_fr_10_prefill_is_killed_during_a_transfer(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        prompt, answer = under_way(stack, pool, 41)
        stack.prefill.kill()
        ends_truthfully(stack, prompt, answer)
    # Decode alone serves meanwhile, and its pages are back before the other returns.
    (alone,) = make_prompts((70,), 42, shared_prefix=False)
    assert_equal([ask(stack.decode.url, alone, NEW_TOKENS)], reference_answers(stack, [alone]), [70])
    restart(stack.prefill)
    assert_at_rest(stack)


def test_decode_is_killed_during_a_transfer(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as pool:
        prompt, answer = under_way(stack, pool, 51)
        stack.decode.kill()
        ends_truthfully(stack, prompt, answer)
    restart(stack.decode)
    assert_at_rest(stack)


@pytest.mark.parametrize("frozen", ["prefill", "decode"])
def test_an_engine_freezes_longer_than_its_lease_and_comes_back(stack: Stack, frozen: str) -> None:
    server = stack.prefill if frozen == "prefill" else stack.decode
    with ThreadPoolExecutor(1) as pool:
        prompt, answer = under_way(stack, pool, 61 + len(frozen))
        server.signal(signal.SIGSTOP)
        try:
            time.sleep(8.0)
        finally:
            server.signal(signal.SIGCONT)
        ends_truthfully(stack, prompt, answer)
    assert_at_rest(stack)
