# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot work together: the proxy says so in one line, the handshake guards, and both go on alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.checks import NEW_TOKENS, assert_equal, assert_pages_back
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask, ask_many
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.stack import MODEL_NAME, PREFILL_ENGINE, Stack, read_metrics
from tidal_connector.errors import TidalError
from tidal_connector.ids import new_transfer_id
from tidal_connector.vllm_plugin.params import decode_params, prefill_params

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(300)]

LENGTHS = (17, 130)
FOUND_S = 20.0  # several rounds of the proxy's question

# What differs, what the decode engine does with a request whose KV does not come, and what the one line must say.
MISFITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers": ("fail", ("regions: 12 of 6 layers at 'prefill-0', 8 of 4 layers at 'decode-0'",)),
    "dtype": ("recompute", ("row_bytes 2304 at 'prefill-0', 1152 at 'decode-0'", "'bfloat16' at 'decode-0'")),
}


class Pair:
    """A deployment whose engines differ, and what each of them answers alone."""

    def __init__(self, stack: Stack, words: tuple[str, ...]) -> None:
        self.stack = stack
        self.words = words
        self.prompts = make_prompts(LENGTHS, 81, shared_prefix=False)
        self.alone: list[list[Generated]] = self.ask_alone()

    def ask_alone(self) -> list[list[Generated]]:
        """Ask each engine without transfer parameters."""
        return [ask_many(server.url, self.prompts, NEW_TOKENS, 1) for server in (self.stack.prefill, self.stack.decode)]


@pytest.fixture(scope="module", params=list(MISFITS))
def pair(request: pytest.FixtureRequest, deploy: Deploy, models: Callable[..., Path]) -> Iterator[Pair]:
    policy, words = MISFITS[request.param]
    settings: dict[str, Any] = {"reference": False, "max_model_len": 1024, "load_failure_policy": policy}
    if request.param == "layers":
        settings["decode_model"] = models(layers=4)
    else:
        settings["decode_args"] = ("--dtype", "bfloat16")
    with deploy(**settings) as stack:
        yield Pair(stack, words)


def health(stack: Stack) -> httpx.Response:
    return httpx.get(stack.proxy.url + "/health", timeout=10.0, trust_env=False)


def test_fr_36_the_proxy_forms_no_such_pair_and_says_why(pair: Pair) -> None:
    stack = pair.stack
    deadline = time.monotonic() + FOUND_S
    while not (lines := health(stack).json()["barred"]):
        assert time.monotonic() < deadline, "the proxy has not found out"
        time.sleep(0.2)
    (line,) = lines
    assert line.startswith("prefill engine 'prefill-0' and decode engine 'decode-0' do not fit: ")
    assert [word for word in pair.words if word not in line] == []
    assert health(stack).status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert stack.proxy.log.read_text().count(line) == 1
    body = {"model": MODEL_NAME, "prompt": pair.prompts[0], "max_tokens": NEW_TOKENS}
    answer = httpx.post(stack.proxy.url + "/v1/completions", json=body, timeout=30.0, trust_env=False)
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert answer.json()["error"]["message"] == line
    for server in (stack.prefill, stack.decode):
        assert read_metrics(server).get("tidal:transfers_started_total", 0.0) == 0.0


def test_fr_36_the_handshake_refuses_what_reaches_the_engines_all_the_same(pair: Pair) -> None:
    stack, prompt = pair.stack, pair.prompts[1]
    transfer = new_transfer_id()
    prefill = prefill_params(transfer)
    decode = decode_params(transfer, PREFILL_ENGINE, stack.prefill_control)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, stack.prefill.url, prompt, 1, kv_transfer_params=prefill)
        if stack.settings.load_failure_policy == "fail":
            with pytest.raises(TidalError, match=": 500 for a prompt of 130 tokens"):
                ask(stack.decode.url, prompt, NEW_TOKENS, kv_transfer_params=decode)
        else:
            answer = ask(stack.decode.url, prompt, NEW_TOKENS, kv_transfer_params=decode)
            assert_equal([answer], [pair.alone[1][1]], [130])
        assert first.result().tokens == pair.alone[0][1].tokens[:1]
    assert_pages_back(stack)
    for server in (stack.prefill, stack.decode):
        assert read_metrics(server)["tidal:handshakes_refused_total"] >= 1
    (reason, *_) = [line for line in stack.decode.log.read_text().splitlines() if "its KV did not arrive" in line]
    assert "layouts of 'prefill-0' (here) and 'decode-0' (there) differ: regions" in reason
    for word in pair.words:
        assert word.replace("at 'prefill-0'", "here").replace("at 'decode-0'", "there") in reason


def test_both_engines_go_on_alone(pair: Pair) -> None:
    for before, after in zip(pair.alone, pair.ask_alone(), strict=True):
        assert_equal(after, before, LENGTHS)
    assert_pages_back(pair.stack)
