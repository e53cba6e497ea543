# SPDX-License-Identifier: Apache-2.0
"""The vLLM project's own router, as it is published, in front of our engines: the sequential protocol."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.arch.source import ROOT
from tests.e2e.checks import NEW_TOKENS, assert_equal, assert_idle, reference_answers
from tests.e2e.nodes import HTTP_PORT, QUICK_S, Cluster
from tests.e2e.test_two_nodes import moved
from tidal_connector.cli.demo.client import ask_many
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.stack import MODEL_NAME, read_metrics
from tidal_connector.config import child_environment

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(400)]

ROUTER = ROOT / ".venv/router"
LOCK = ROOT / "requirements/router.lock"
LENGTHS = (1, 15, 16, 17, 129, 300)


def installed() -> str | None:
    """Return the version that is installed beside the locked packages, or None."""
    found = importlib.metadata.distributions(name="vllm-router", path=[str(ROUTER)])
    return next((item.version for item in found), None)


@pytest.fixture(scope="module")
def router(nodes: Cluster) -> Iterator[ServerProcess]:
    if installed() is None:
        pytest.skip(f"vllm-router is not in {ROUTER.relative_to(ROOT)}; make setup says why, and how to install it")
    node = nodes.network["router"]
    command = [
        *(sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--policy", "round_robin"),
        *("--prefill", nodes.prefill.url),
        *(word for decode in nodes.decodes for word in ("--decode", decode.url)),
        *("--host", node.address(nodes.family), "--port", str(HTTP_PORT)),
        *("--prometheus-host", node.address(nodes.family), "--worker-startup-check-interval", "1"),
    ]
    environment = child_environment({"PYTHONPATH": str(ROUTER)})
    url, log = f"http://{node.at(nodes.family, HTTP_PORT)}", nodes.settings.logs / "router.log"
    with node.server("router", command, url, log, environment=environment) as server:
        wait_ready([server], QUICK_S)
        yield server


def test_what_is_installed_is_what_is_locked() -> None:
    version = installed()
    if version is None:
        pytest.skip("vllm-router is not installed")
    assert f"vllm-router=={version}" in LOCK.read_text().splitlines()


def test_answers_through_the_router_equal_those_of_one_engine(nodes: Cluster, router: ServerProcess) -> None:
    prompts = make_prompts(LENGTHS, 221, shared_prefix=False)
    reference = reference_answers(nodes, prompts)
    before = read_metrics(nodes.prefill)["tidal:bytes_pushed_total"]
    received = [read_metrics(decode) for decode in nodes.decodes]
    assert_equal(ask_many(router.url, prompts, NEW_TOKENS, 3), reference, LENGTHS)
    # Every prompt came over the network: none was computed anew.
    for decode, was in zip(nodes.decodes, received, strict=True):
        now = read_metrics(decode)
        for name in ("transfers_failed_total", "leases_expired_total", "handshakes_refused_total"):
            assert now.get(f"tidal:{name}", 0.0) == was.get(f"tidal:{name}", 0.0), f"{decode.name}: {name}"
        assert now["tidal:bytes_received_total"] > was["tidal:bytes_received_total"]
    assert read_metrics(nodes.prefill)["tidal:bytes_pushed_total"] - before == moved(nodes, LENGTHS)
    assert_idle([nodes.prefill, *nodes.decodes])


def test_a_stream_and_a_chat_through_the_router_equal_those_of_one_engine(
    nodes: Cluster, router: ServerProcess
) -> None:
    base = {"model": MODEL_NAME, "max_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
    (prompt,) = make_prompts((130,), 222, shared_prefix=False)
    completion = {**base, "prompt": prompt}
    chat = {**base, "messages": [{"role": "user", "content": "The tide comes in, the tide goes out."}]}
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        expected = httpx.post(nodes.reference.url + path, json=body, timeout=QUICK_S, trust_env=False).json()
        assert streamed(router.url + path, body) == text_of(expected["choices"][0])
    assert_idle([nodes.prefill, *nodes.decodes])


def text_of(choice: dict[str, Any]) -> str:
    """Return the text of a completion, of a chat, or of a piece of either."""
    return choice["text"] if "text" in choice else choice.get("message", choice.get("delta")).get("content") or ""


def streamed(url: str, body: dict[str, object]) -> str:
    """Ask for a stream and put its pieces together."""
    text = ""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=QUICK_S, trust_env=False) as answer:
        assert answer.status_code == httpx.codes.OK
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += text_of(json.loads(line.removeprefix("data: "))["choices"][0])
    return text
