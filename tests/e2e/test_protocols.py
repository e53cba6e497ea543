# SPDX-License-Identifier: Apache-2.0
"""The sequential protocol of other proxies, and requests that cannot be served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.checks import NEW_TOKENS, assert_at_rest, assert_equal, reference_answers
from tests.e2e.conftest import Deploy
from tidal_connector.cli.demo.client import ask
from tidal_connector.cli.demo.compare import parse_completion
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.stack import MODEL_NAME, PREFILL_ENGINE, Stack, read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(300)]

SEQUENTIAL_LENGTHS = (1, 15, 16, 17, 33, 300)


@pytest.fixture(scope="module")
def stack(deploy: Deploy) -> Iterator[Stack]:
    with deploy(max_num_batched_tokens=64, max_model_len=1024, prefix_caching=True) as running:
        yield running


def post(url: str, **body: Any) -> httpx.Response:
    base = {
        "model": MODEL_NAME,
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    return httpx.post(url + "/v1/completions", json={**base, **body}, timeout=60.0, trust_env=False)


def toy_proxy(stack: Stack, prompt: list[int]) -> httpx.Response:
    """Do what vLLM's toy proxy does: prefill alone with one token, then decode with what prefill returned."""
    asked = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    first = post(stack.prefill.url, prompt=prompt, max_tokens=1, stream=False, kv_transfer_params=asked)
    assert first.status_code == httpx.codes.OK, first.text
    handed_on = first.json()["kv_transfer_params"]
    assert handed_on["do_remote_prefill"] is True
    assert handed_on["remote_engine_id"] == PREFILL_ENGINE
    return post(stack.decode.url, prompt=prompt, kv_transfer_params=handed_on)


def test_the_sequential_protocol_of_the_toy_proxy(stack: Stack) -> None:
    prompts = make_prompts(SEQUENTIAL_LENGTHS, 21, shared_prefix=False)
    reference = reference_answers(stack, prompts)
    for _ in range(2):  # the second time, decode finds whole prompts in its prefix cache
        answers = [parse_completion(toy_proxy(stack, prompt).json()) for prompt in prompts]
        assert_equal(answers, reference, SEQUENTIAL_LENGTHS)
    assert_at_rest(stack)


def test_fr_1_pages_of_a_prefill_that_nobody_asks_for_come_back(stack: Stack) -> None:
    prompt = make_prompts((300,), 22, shared_prefix=False)[0]
    for _ in range(5):
        post(stack.prefill.url, prompt=prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert read_metrics(stack.prefill)["tidal:pages_held"] > 0
    assert_at_rest(stack)


def push(**changes: Any) -> dict[str, Any]:
    leg = {"mode": "push", "role": "decode", "transfer_id": "xfer-1", "prefill_engine": PREFILL_ENGINE}
    return {**leg, "prefill_control": "127.0.0.1:1", **changes}


@pytest.mark.parametrize(
    ("engine", "params", "words"),
    [
        ("decode", push(rolle="x"), ("unknown key 'rolle'", "role")),
        ("decode", push(transfer_id=7), ("transfer_id = 7", "expected")),
        ("decode", push(prefill_control="nowhere"), ("'nowhere'", "host:port")),
        ("decode", {"do_remote_decode": True}, ("only decodes",)),
        ("decode", "push", ("kv_transfer_params",)),
        ("prefill", push(), ("only prefills",)),
        ("prefill", {"mode": "push", "role": "prefill"}, ("transfer_id = None",)),
    ],
)
def test_bad_parameters_get_400_and_one_clear_line(
    stack: Stack, engine: str, params: object, words: tuple[str, ...]
) -> None:
    url = stack.decode.url if engine == "decode" else stack.prefill.url
    answer = post(url, prompt=[1, 2, 3], kv_transfer_params=params)
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    for word in words:
        assert word in answer.text


def test_the_engines_go_on_after_bad_parameters(stack: Stack) -> None:
    assert_at_rest(stack)


def test_a_client_cannot_send_transfer_parameters_through_the_proxy(stack: Stack) -> None:
    prompt = make_prompts((40,), 23, shared_prefix=False)[0]
    (reference,) = reference_answers(stack, [prompt])
    forged = push(prefill_engine="evil", prefill_control="127.0.0.1:1")
    assert_equal([ask(stack.proxy.url, prompt, NEW_TOKENS, kv_transfer_params=forged)], [reference], [40])


def test_a_prompt_that_can_never_fit_is_refused_at_once(stack: Stack) -> None:
    answer = post(stack.proxy.url, prompt=[5] * 2000)
    assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
    assert "1024" in answer.text
    assert_at_rest(stack)


def test_an_engine_that_is_not_there_does_not_hang_its_request(stack: Stack) -> None:
    prompt = make_prompts((40,), 24, shared_prefix=False)[0]
    (reference,) = reference_answers(stack, [prompt])
    # Nobody listens on port 1: the request is recomputed here (load_failure_policy recompute), others go on.
    assert_equal([ask(stack.decode.url, prompt, NEW_TOKENS, kv_transfer_params=push())], [reference], [40])
    assert_at_rest(stack)


def test_another_engine_at_the_address_is_not_taken_for_the_one_that_was_named(stack: Stack) -> None:
    prompt = make_prompts((40,), 25, shared_prefix=False)[0]
    (reference,) = reference_answers(stack, [prompt])
    params = push(prefill_engine="prefill-9", prefill_control=stack.prefill_control)
    assert_equal([ask(stack.decode.url, prompt, NEW_TOKENS, kv_transfer_params=params)], [reference], [40])
    assert "prefill-9" in stack.decode.log.read_text()
    assert_at_rest(stack)
