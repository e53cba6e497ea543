# SPDX-License-Identifier: Apache-2.0
"""Engines on machines of their own, over IPv4 and IPv6: equal answers, slow and late links, links that go down.

Prefill, decode (two of them over IPv4), etcd and the proxy each have a network namespace and 100 Mbit/s.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.checks import (
    NEW_TOKENS,
    assert_equal,
    assert_fresh_request_is_right,
    assert_idle,
    reference_answers,
)
from tests.e2e.conftest import RATE_MBIT
from tests.e2e.nodes import CONTROL_PORT, HTTP_PORT, Cluster
from tidal_connector.cli.demo.client import ask, ask_many
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.cli.demo.expect import row_bytes
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cluster.agent_settings import to_toml
from tidal_connector.cluster.launch import ServerProcess
from tidal_connector.cluster.stack import read_metrics
from tidal_connector.config import child_environment
from tidal_connector.errors import TidalError
from tidal_connector.registry.members import Member, State, peers
from tidal_connector.registry.settings import RegistryConfig, open_store
from tidal_connector.vllm_plugin.params import decode_params

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(400)]

LENGTHS = (1, 16, 17, 129, 300)
LONG = 2000
BOUND_S = 60.0
OUTAGE_S = 5.0
LATE_S = 0.002


def metric(server: ServerProcess, name: str) -> float:
    return read_metrics(server).get(f"tidal:{name}", 0.0)


def moved(cluster: Cluster, lengths: Sequence[int]) -> int:
    """Return the bytes of KV that prompts move, computed from the checkpoint."""
    rows = row_bytes(cluster.settings.model, cluster.settings.dtype)
    return sum(rows.prompt(length) for length in lengths)


def members(cluster: Cluster) -> dict[str, Member]:
    with open_store(RegistryConfig(url=cluster.registry)) as store:
        return {str(engine): member for engine, member in peers(store).engines.items()}


def assert_at_rest(cluster: Cluster) -> None:
    assert_idle([cluster.prefill, *cluster.decodes])
    assert_fresh_request_is_right(cluster)


def test_answers_equal_those_of_one_engine(nodes: Cluster) -> None:
    prompts = make_prompts(LENGTHS, 201, shared_prefix=False)
    reference = reference_answers(nodes, prompts)
    before = metric(nodes.prefill, "bytes_pushed_total")
    assert_equal(ask_many(nodes.proxy.url, prompts, NEW_TOKENS, 1), reference, LENGTHS)
    assert_equal(ask_many(nodes.proxy.url, prompts, NEW_TOKENS, 5), reference, LENGTHS)
    assert metric(nodes.prefill, "bytes_pushed_total") - before == 2 * moved(nodes, LENGTHS)
    assert all(metric(decode, "bytes_received_total") > 0 for decode in nodes.decodes)
    assert_at_rest(nodes)


def test_everybody_is_announced_where_others_reach_it(nodes: Cluster) -> None:
    found = members(nodes)
    assert sorted(found) == [server.name for server in (*nodes.decodes, nodes.prefill)]
    for name, member in found.items():
        node = nodes.network[name]
        assert (member.state, member.node) == (State.READY, name)
        assert member.http == f"http://{node.at(nodes.family, HTTP_PORT)}"
        assert member.control == node.at(nodes.family, CONTROL_PORT)
        assert member.transfer.rpartition(":")[0] == node.at(nodes.family, 0).rpartition(":")[0]
    assert len({member.layout for member in found.values()}) == 1
    status = [sys.executable, "-m", "tidal_connector.cli", "status", "--registry", nodes.registry]
    wide = child_environment({"COLUMNS": "200"})
    shown = subprocess.run(status, env=wide, capture_output=True, text=True, timeout=BOUND_S, check=True).stdout
    assert [name for name, member in found.items() if member.http.removeprefix("http://") not in shown] == []


def test_a_transfer_is_as_fast_as_the_link(nodes: Cluster) -> None:
    (prompt,) = make_prompts((LONG,), 202, shared_prefix=False)
    expected = moved(nodes, [LONG])
    links = [nodes.network[server.name] for server in nodes.decodes]
    before, sent = sum(link.traffic().received for link in links), nodes.network["prefill"].traffic().sent
    began = time.monotonic()
    answer = ask(nodes.proxy.url, prompt, NEW_TOKENS)
    seconds = time.monotonic() - began
    assert_equal([answer], reference_answers(nodes, [prompt]), [LONG])
    assert seconds > 0.95 * expected * 8 / (RATE_MBIT * 1_000_000)
    assert expected < sum(link.traffic().received for link in links) - before < 1.2 * expected
    assert expected < nodes.network["prefill"].traffic().sent - sent < 1.2 * expected


@pytest.mark.parametrize("nodes", [6], indirect=True, ids=["ipv6"])
def test_answers_are_the_same_over_a_late_link(nodes: Cluster) -> None:
    prompts = make_prompts(LENGTHS, 203, shared_prefix=False)
    reference = reference_answers(nodes, prompts)
    nodes.network["prefill"].delay(LATE_S)
    try:
        assert_equal(ask_many(nodes.proxy.url, prompts, NEW_TOKENS, 5), reference, LENGTHS)
    finally:
        nodes.network["prefill"].delay(0.0)
    assert_at_rest(nodes)


def under_way(nodes: Cluster, pool: ThreadPoolExecutor, seed: int) -> tuple[list[int], Future[Generated], str]:
    """Send a long prompt; return once its bytes are on their way, with the name of the engine that takes them."""
    (prompt,) = make_prompts((LONG,), seed, shared_prefix=False)
    before = metric(nodes.prefill, "descriptors_submitted_total")
    answer = pool.submit(ask, nodes.proxy.url, prompt, NEW_TOKENS)
    deadline = time.monotonic() + BOUND_S
    takers: list[str] = []
    while not takers or metric(nodes.prefill, "descriptors_submitted_total") <= before:
        assert time.monotonic() < deadline, "the transfer did not begin"
        time.sleep(0.05)
        takers = [decode.name for decode in nodes.decodes if metric(decode, "transfers_in_flight")]
    (taker,) = takers
    assert not answer.done()
    return prompt, answer, taker


def ends_truthfully(nodes: Cluster, prompt: list[int], answer: Future[Generated]) -> None:
    """Within the bound the client has an error of the proxy's, or an answer that equals the reference."""
    try:
        found = answer.result(BOUND_S)
    except TidalError as error:
        if not re.search(r" 50[234] for a prompt", str(error)):
            raise
    else:
        assert_equal([found], reference_answers(nodes, [prompt]), [LONG])


def test_decodes_link_goes_down_during_a_transfer_and_comes_back(nodes: Cluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        prompt, answer, taker = under_way(nodes, pool, 205)
        with nodes.network[taker].unplugged():
            time.sleep(OUTAGE_S)
        ends_truthfully(nodes, prompt, answer)
    assert_at_rest(nodes)


@pytest.mark.parametrize("nodes", [4], indirect=True, ids=["ipv4"])
def test_prefills_link_goes_down_during_a_transfer_and_comes_back(nodes: Cluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        prompt, answer, _ = under_way(nodes, pool, 206)
        with nodes.network["prefill"].unplugged():
            time.sleep(OUTAGE_S)
        ends_truthfully(nodes, prompt, answer)
    assert_at_rest(nodes)


def test_fr_18_a_decode_engine_that_reaches_itself_counts_it_and_gives_the_right_answer(nodes: Cluster) -> None:
    loopback = "[::1]" if nodes.family == 6 else "127.0.0.1"
    (prompt,) = make_prompts((40,), 210, shared_prefix=False)
    before = metric(nodes.decode, "handshakes_refused_total")
    params = decode_params("xfer-loopback", "prefill", f"{loopback}:{CONTROL_PORT}")
    answer = ask(nodes.decode.url, prompt, NEW_TOKENS, kv_transfer_params=params)
    assert_equal([answer], reference_answers(nodes, [prompt]), [40])
    assert metric(nodes.decode, "handshakes_refused_total") > before
    assert nodes.decode.log is not None
    assert "engine 'prefill'" in nodes.decode.log.read_text()
    assert_at_rest(nodes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unset": ({}, "control.advertise is not set"),
    "any": ({"bind": "0.0.0.0:7100"}, "0.0.0.0"),
    "any6": ({"bind": "[::]:7100"}, "[::]"),
    "advertised-any": ({"advertise": "0.0.0.0"}, "control.advertise"),
    "advertised-any6": ({"advertise": "::"}, "control.advertise"),
    "localhost": ({"advertise": "localhost"}, "means another machine on every machine"),
    "no-name": ({"advertise": "no-such-host.invalid"}, "does not resolve"),
}


@pytest.mark.parametrize("nodes", [4], indirect=True, ids=["ipv4"])
@pytest.mark.parametrize("case", list(REFUSED))
def test_fr_18_an_address_of_no_use_is_refused_at_start(nodes: Cluster, tmp_path: Path, case: str) -> None:
    control, words = REFUSED[case]
    node = nodes.network["router"]
    file = tmp_path / "engine.toml"
    http = {"bind": node.at(nodes.family, HTTP_PORT)}
    registry = {"url": nodes.registry}
    tidal = {"control": control}
    file.write_text(to_toml({"engine": "astray", "http": http, "registry": registry, "tidal": tidal}))
    command = [
        sys.executable,
        "-m",
        "tidal_connector.cli",
        "serve",
        "prefill",
        "--config",
        str(file),
        "--",
        "--model=x",
    ]
    done = subprocess.run(node.inside(command), capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "astray" not in members(nodes)
