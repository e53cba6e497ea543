# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests ask for again and again: equal answers, engines alive, pages back."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tidal_connector.cli.demo.client import ask, ask_many
from tidal_connector.cli.demo.compare import Generated, compare
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.stack import Stack, read_metrics

LOGPROB_BOUND = 0.02
NEW_TOKENS = 16
SETTLE_S = 30.0


def assert_equal(mine: Sequence[Generated], reference: Sequence[Generated], lengths: Sequence[int]) -> None:
    """Every answer has the reference's tokens, and log-probabilities within the bound."""
    wrong = []
    for length, one, other in zip(lengths, mine, reference, strict=True):
        found = compare(one, other)
        if not found.tokens_equal or found.logprob > LOGPROB_BOUND:
            wrong.append(f"{length} tokens: equal {found.tokens_equal}, logprobs differ by {found.logprob:.2g}")
    assert wrong == []


def reference_answers(stack: Stack, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[Generated]:
    """Ask the plain engine, one prompt at a time."""
    assert stack.reference is not None
    return ask_many(stack.reference.url, prompts, new_tokens, 1)


def kv_usage(server: ServerProcess) -> float:
    """Share of an engine's KV blocks that is in use."""
    return read_metrics(server, "vllm:kv_cache_usage_perc")["vllm:kv_cache_usage_perc"]


def assert_at_rest(stack: Stack) -> None:
    """Within a bound, all pages are back on either side; then a fresh request is right."""
    assert_pages_back(stack)
    assert_fresh_request_is_right(stack)


def assert_pages_back(stack: Stack) -> None:
    """Within a bound, no block is in use and no transfer is open, on either side."""
    assert_idle((stack.prefill, stack.decode))


def assert_idle(servers: Sequence[ServerProcess]) -> None:
    """Within a bound, no block of these engines is in use and no transfer is open."""
    deadline = time.monotonic() + SETTLE_S
    rest: dict[str, float] = {}
    while time.monotonic() < deadline:
        rest = {}
        for server in servers:
            rest[f"{server.name} kv usage"] = kv_usage(server)
            metrics = read_metrics(server)
            for name in ("transfers_in_flight", "pages_held", "pages_quarantined"):
                rest[f"{server.name} {name}"] = metrics.get(f"tidal:{name}", 0.0)
        if not any(rest.values()):
            break
        time.sleep(0.3)
    assert {name: value for name, value in rest.items() if value} == {}


def assert_fresh_request_is_right(stack: Stack, seed: int = 99) -> None:
    """A new prompt of 130 tokens through the proxy equals the reference."""
    prompts = make_prompts((130,), seed, shared_prefix=False)
    assert_equal([ask(stack.proxy.url, prompts[0], NEW_TOKENS)], reference_answers(stack, prompts), [130])
