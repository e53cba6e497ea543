# SPDX-License-Identifier: Apache-2.0
"""One connector class serves vLLM 0.23 and 0.32: its methods take what either host passes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.host_signatures import Signatures, read_signatures

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from tidal_connector.vllm_plugin.connector import TidalConnector  # noqa: E402

TABLE: dict[str, Signatures] = json.loads((Path(__file__).parent / "host_signatures.json").read_text())


def own_methods(connector: type[Any] = TidalConnector) -> dict[str, list[str]]:
    found = {}
    for name, value in vars(connector).items():
        function = value.__func__ if isinstance(value, classmethod) else value
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            found[name] = [f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters]
    return found


def misfits(own: dict[str, list[str]], host: Signatures) -> list[str]:
    """Name each method that a host would call in vain, and each abstract one that is missing."""
    wrong = [f"{name} is missing" for name, item in host.items() if item["abstract"] and name not in own]
    for name, parameters in own.items():
        if name in host and parameters != host[name]["parameters"]:
            wrong.append(f"{name}{parameters} does not take {host[name]['parameters']}")
    return wrong


@pytest.mark.parametrize("version", sorted(TABLE))
def test_the_connector_fits_each_supported_host(version: str) -> None:
    assert misfits(own_methods(), TABLE[version]) == []


def test_a_misfit_is_found() -> None:
    own = own_methods()
    own["wait_for_save"] = ["self", "surprise"]
    del own["save_kv_layer"]
    assert len(misfits(own, TABLE["0.32"])) == 2


def test_the_table_describes_the_installed_host() -> None:
    version = ".".join(vllm.__version__.split(".")[:2])
    if version not in TABLE:
        pytest.fail(f"vLLM {version} is installed, but host_signatures.json has no table for it")
    assert read_signatures(Path(vllm.__file__).parent) == TABLE[version]


def test_nothing_of_the_facade_is_unknown_to_every_host() -> None:
    ours = {"scheduler", "worker", "adopt_pool"}
    ascend = {"on_kv_cache_written"}  # which vllm-ascend looks for in any connector
    known = {name for host in TABLE.values() for name in host} | ours | ascend
    assert set(own_methods()) - known == set()
