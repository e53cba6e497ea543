# SPDX-License-Identifier: Apache-2.0
"""A real pair under ``tidal serve``, found by the proxy in a real etcd: announced as it is, drained without a loss."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.cluster.serve_bed import Bed, Served, open_bed, port_of
from tests.cluster.standins import until
from tests.e2e.checks import assert_equal
from tests.e2e.conftest import QUICK_TIMERS, START_S
from tests.etcd import EtcdServer, free_port
from tidal_connector.cli.demo.client import ask, ask_many
from tidal_connector.cli.demo.compare import Generated
from tidal_connector.cli.demo.prompts import make_prompts
from tidal_connector.cli.main import app
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.listeners import listening_fault
from tidal_connector.cluster.overview import Overview, overview
from tidal_connector.cluster.serving import engine_environment
from tidal_connector.cluster.stack import MODEL_NAME, QUIET, StackSettings
from tidal_connector.config import child_environment
from tidal_connector.control.inquiry import inquire
from tidal_connector.errors import TidalError
from tidal_connector.registry.members import State

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.timeout(400)]

POOL_BYTES = 64 << 20
SEQUENCES = 4
LENGTHS = (17, 300)


class Pair(msgspec.Struct, frozen=True):
    """What runs."""

    bed: Bed
    prefill: Served
    decode: Served
    proxy: ServerProcess
    reference: ServerProcess


@pytest.fixture(scope="module")
def pair(
    models: Callable[..., Path],
    plain: Callable[[StackSettings], ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Both engines are told the same ports, as two configurations that were copied from one another do."""
    folder = tmp_path_factory.mktemp("registry")
    reference = plain(StackSettings(model=models(), logs=folder))
    args = (
        *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--block-size", "16", "--max-model-len", "4096", "--max-num-seqs", str(SEQUENCES)),
        *("--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(64 << 20), "--port", str(free_port())),
    )
    control = {"bind": f"127.0.0.1:{free_port()}", **QUICK_TIMERS["control"]}
    common: dict[str, Any] = {"command": [], "model": str(models()), "environment": {**engine_environment(), **QUIET}}
    with contextlib.ExitStack() as stack:
        stack.enter_context(extra_hugepages(POOL_BYTES))
        etcd = stack.enter_context(EtcdServer(folder))
        bed = stack.enter_context(open_bed(etcd, folder))
        prefill = bed.serve("prefill", "prefill-0", *args, tidal={"control": control}, **common)
        pool = {"control": control, "offload": "on", "pool": {"bytes": POOL_BYTES}}
        decode = bed.serve("decode", "decode-0", *args, tidal=pool, **common)
        proxy = stack.enter_context(proxy_of(bed, folder))
        for served in (prefill, decode):
            served.ready(START_S)
        wait_ready([reference, proxy], START_S)
        yield Pair(bed, prefill, decode, proxy, reference)


def proxy_of(bed: Bed, folder: Path) -> ServerProcess:
    listen = f"127.0.0.1:{free_port()}"
    file = folder / "proxy.toml"
    file.write_text(f'listen = "{listen}"\n[registry]\nurl = "{bed.etcd.url}"\ncluster = "{bed.name}"\n')
    command = [sys.executable, "-m", "tidal_connector.cli", "proxy", "--config", str(file)]
    return ServerProcess(
        "proxy", command, child_environment(), f"http://{listen}", folder / "proxy.log", probe="/ready"
    )


def status(pair: Pair) -> tuple[int, Overview]:
    where = ("--registry", pair.bed.etcd.url, "--cluster", pair.bed.name)
    done = CliRunner().invoke(app, ["status", *where, "--json"])
    return done.exit_code, msgspec.json.decode(done.stdout, type=Overview)


def test_the_pair_is_announced_as_it_is(pair: Pair) -> None:
    members = [served.ready() for served in (pair.prefill, pair.decode)]
    assert len({member.layout for member in members}) == 1
    for member, served in zip(members, (pair.prefill, pair.decode), strict=True):
        about = inquire(member.control, 10.0)
        assert (member.incarnation, member.transfer) == (about.identity.incarnation, about.endpoint)
        assert (member.requests, member.model) == (SEQUENCES, MODEL_NAME)
        assert member.kv_tokens > 1000
        assert port_of(member.transfer)
        for url in (member.http, member.control):
            assert listening_fault("it", "127.0.0.1", port_of(url), served.children()) == ""
    assert len({port_of(member.http) for member in members}) == 2
    assert len({port_of(member.control) for member in members}) == 2


def test_answers_through_the_registry_equal_those_of_one_engine(pair: Pair) -> None:
    prompts = make_prompts(LENGTHS, 31, shared_prefix=False)
    mine, reference = (ask_many(url, prompts, 8, 1) for url in (pair.proxy.url, pair.reference.url))
    assert_equal(mine, reference, LENGTHS)
    code, seen = status(pair)
    prefill, decode = (line.load for line in seen.engines)
    assert code == 0
    assert prefill is not None
    assert decode is not None
    assert prefill.transfers == decode.transfers == prefill.pool_pages == 0
    assert decode.pool_pages > 0
    assert decode.slots > 0
    assert decode.hits > 0


def test_a_drain_under_load_loses_nothing(pair: Pair) -> None:
    """Comes last: the decode engine is gone after it."""
    prompts = make_prompts(LENGTHS, 32, shared_prefix=False)
    reference = ask_many(pair.reference.url, prompts, 200, 1)
    answers: dict[int, Generated | TidalError] = {}

    def client(number: int) -> None:
        try:
            answers[number] = ask(pair.proxy.url, prompts[number], 200)
        except TidalError as error:
            answers[number] = error

    clients = [threading.Thread(target=client, args=(number,)) for number in range(len(prompts))]
    for each in clients:
        each.start()
    until(lambda: (load := overview(pair.bed.store).engines[1].load) and load.running == len(prompts))
    where = ("--registry", pair.bed.etcd.url, "--cluster", pair.bed.name)
    done = CliRunner().invoke(app, ["drain", "decode-0", *where, "--deadline", "120", "--wait"])
    for each in clients:
        each.join()
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "decode-0: it has stopped")
    assert "idle after" in pair.decode.said()
    found = [answers[number] for number in range(len(prompts))]
    assert_equal([item for item in found if isinstance(item, Generated)], reference, LENGTHS)
    assert pair.decode.ends() == 0
    assert status(pair)[0] == 1  # prefill alone serves nobody
    pair.prefill.signal_engine(signal.SIGKILL)
    assert pair.prefill.ends(30.0) == 1
    assert pair.bed.members() == {}
    assert State.READY not in {line.state for line in status(pair)[1].engines}
