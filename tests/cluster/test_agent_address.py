# SPDX-License-Identifier: Apache-2.0
"""An agent whose address others cannot use ends at its start, and names the setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidal_connector.cluster.agent_address import check_addresses
from tidal_connector.cluster.agent_settings import AgentConfig, check_agent_config
from tidal_connector.errors import ConfigError
from tidal_connector.registry.settings import RegistryConfig

ELSEWHERE = "192.0.2.7"  # an address for documentation, so that of no machine


def config(host: str, bind: str = "") -> AgentConfig:
    registry = RegistryConfig(url="etcd://10.9.9.9:2379")
    return check_agent_config(AgentConfig(registry=registry, node="n", host=host, bind=bind), "test")


@pytest.mark.parametrize(
    ("host", "bind", "said"),
    [
        ("0.0.0.0", "", "host = '0.0.0.0': nobody can connect to it"),
        ("::", "", "host = '::': nobody can connect to it"),
        ("localhost", "", "host = 'localhost': means another machine on every machine"),
        ("no-such-host.invalid", "", "host = 'no-such-host.invalid': does not resolve here"),
        (ELSEWHERE, "", "host = '192.0.2.7': is no address of this machine (Cannot assign requested address)"),
        (ELSEWHERE, "192.0.2.8", "bind = '192.0.2.8': engines cannot listen on it"),
        ("127.0.0.1", "no-such-host.invalid", "bind = 'no-such-host.invalid': engines cannot listen on it"),
    ],
)
def test_an_address_that_others_cannot_use_is_refused(host: str, bind: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_addresses(config(host, bind))
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(("host", "bind"), [("127.0.0.1", ""), (ELSEWHERE, "0.0.0.0"), (ELSEWHERE, "127.0.0.1")])
def test_an_address_of_this_machine_or_one_behind_translation_is_taken(host: str, bind: str) -> None:
    check_addresses(config(host, bind))


def test_the_agent_ends_before_it_does_anything(tmp_path: Path) -> None:
    words = ["agent", "--registry", f"file://{tmp_path}/registry", "--host", ELSEWHERE, "--state", str(tmp_path / "s")]
    ended = subprocess.run(
        [sys.executable, "-m", "tidal_connector.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TIDAL_LOG_LEVEL": "INFO"},
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("tidal: host = '192.0.2.7': is no address of this machine")
    assert not (tmp_path / "s").exists()
