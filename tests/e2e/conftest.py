# SPDX-License-Identifier: Apache-2.0
"""Deployments for the end-to-end tests: real engines, real transfers, shared by all tests of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.cluster.stack import Stack, StackSettings
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
def deploy(models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    """Return a function that makes a deployment, as a context manager.

    Keyword arguments are those of ``StackSettings``, and ``model``: the arguments of ``make_model``.
    """

    @contextlib.contextmanager
    def running(model: dict[str, Any] | None = None, **settings: Any) -> Iterator[Stack]:
        shape = model or {}
        base = StackSettings(
            model=models(**shape),
            logs=tmp_path_factory.mktemp("logs"),
            dtype=shape.get("dtype", "float32"),
            prefill_tidal=QUICK_TIMERS,
            decode_tidal={**QUICK_TIMERS, "allow_sabotage": True},
        )
        chosen = msgspec.structs.replace(base, **settings)
        with extra_hugepages(chosen.pool_bytes), Stack(chosen) as stack:
            yield stack

    return running
