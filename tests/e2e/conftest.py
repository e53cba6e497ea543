# SPDX-License-Identifier: Apache-2.0
"""Deployments for the end-to-end tests: real engines, real transfers, shared by all tests of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.net import Network, skip_without_namespaces
from tests.e2e.nodes import Cluster, running_cluster
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.cluster.launch import ServerProcess, wait_ready
from tidal_connector.cluster.stack import Stack, StackSettings, plain_engine
from tidal_connector.modelmaker.api import make_model

Deploy = Callable[..., contextlib.AbstractContextManager[Stack]]

# A minute of timers would be a minute of test; the relations between them are those of the defaults.
QUICK_TIMERS = {
    "control": {
        "lease_s": 2.0,
        "accept_s": 20.0,
        "park_s": 20.0,
        "hold_s": 5.0,
        "stall_s": 4.0,
        "quarantine_s": 3.0,
    }
}


START_S = 240.0
# An outage of five seconds ends the lease, a busy machine does not.
NODES_TIMERS = {"control": {**QUICK_TIMERS["control"], "lease_s": 4.0, "hold_s": 20.0}}
RATE_MBIT = 100
"""Speed of every link between the nodes."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes each checkpoint once: ``models(arch="glm", layers=4)``."""
    made: dict[str, Path] = {}

    def get(**shape: Any) -> Path:
        name = "-".join(f"{key}_{shape[key]}" for key in sorted(shape)) or "default"
        if name not in made:
            folder = tmp_path_factory.mktemp("models") / name
            make_model(folder, **shape)
            made[name] = folder
        return made[name]

    return get


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[StackSettings], ServerProcess]]:
    """Return a function that gives the plain engine of a checkpoint: one process for all deployments that are compared
    with it, whatever their geometry, because no geometry may change an answer.
    """
    running: dict[tuple[Path, str], ServerProcess] = {}
    with contextlib.ExitStack() as stack:

        def get(settings: StackSettings) -> ServerProcess:
            key = (settings.model, settings.dtype)
            if key not in running:
                common = StackSettings(
                    model=settings.model, logs=tmp_path_factory.mktemp("plain"), dtype=settings.dtype
                )
                running[key] = stack.enter_context(plain_engine(common))
            return running[key]

        yield get


@pytest.fixture(scope="session")
def deploy(
    models: Callable[..., Path],
    plain: Callable[[StackSettings], ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Deploy:
    """Return a function that makes a deployment, as a context manager.

    Keyword arguments are those of ``StackSettings``; ``model``: the arguments of ``make_model``; ``decode``: settings
    of the decode engine's connector that are added to those that all deployments have.
    """

    @contextlib.contextmanager
    def running(
        model: dict[str, Any] | None = None,
        *,
        reference: bool = True,
        decode: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[Stack]:
        shape = model or {}
        base = StackSettings(
            model=models(**shape),
            logs=tmp_path_factory.mktemp("logs"),
            dtype=shape.get("dtype", "float32"),
            prefill_tidal=QUICK_TIMERS,
            decode_tidal={**QUICK_TIMERS, "allow_sabotage": True, **(decode or {})},
            reference=False,
        )
        chosen = msgspec.structs.replace(base, **settings)
        compared = plain(chosen) if reference else None  # starts beside the others
        with extra_hugepages(chosen.pool_bytes), Stack(chosen) as stack:
            if compared is not None:
                wait_ready([compared], START_S)
                stack.reference = compared
            yield stack

    return running


@pytest.fixture(scope="session", params=[4, 6], ids=["ipv4", "ipv6"])
def nodes(
    request: pytest.FixtureRequest,
    models: Callable[..., Path],
    plain: Callable[[StackSettings], ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """A cluster whose engines, etcd and proxy have a machine each; the frames to and from prefill can be delayed."""
    skip_without_namespaces()
    settings = StackSettings(
        model=models(),
        logs=tmp_path_factory.mktemp("nodes"),
        max_num_batched_tokens=256,
        kv_bytes=128 << 20,
        pool_bytes=128 << 20,
        prefill_tidal=NODES_TIMERS,
    )
    reference = plain(settings)  # starts beside the others
    # Two nodes with engines in one family, three in the other.
    decodes = ["decode-0", "decode-1"] if request.param == 4 else ["decode-0"]
    names = ["prefill", *decodes, "etcd", "proxy", "router"]
    with (
        extra_hugepages(len(decodes) * settings.pool_bytes),
        Network(names, rate=f"{RATE_MBIT}mbit", relayed=["prefill"]) as network,
        running_cluster(network, request.param, settings, reference) as cluster,
    ):
        yield cluster
