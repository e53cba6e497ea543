# SPDX-License-Identifier: Apache-2.0
"""``tidal agent``: keeps one node's engines until it is ended; the engines live on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import msgspec

from tidal_connector.cluster.agent import Agent
from tidal_connector.cluster.agent_address import check_addresses
from tidal_connector.cluster.agent_folder import AgentFolder
from tidal_connector.cluster.agent_settings import AgentConfig, check_agent_config, read_agent_config
from tidal_connector.cluster.conductor import Conductor
from tidal_connector.config import log_level
from tidal_connector.errors import ConfigError
from tidal_connector.log import configure, get_logger
from tidal_connector.registry.settings import RegistryConfig, open_store

_log = get_logger(__name__)


def agent_config(file: Path | None, registry: str, node: str, host: str, state: Path | None) -> AgentConfig:
    """Return the settings of a file with what the command line says instead.

    Raises:
        ConfigError: they cannot be meant, or neither names a registry.
    """
    if file is not None:
        config = read_agent_config(file)
        if registry:
            config = msgspec.structs.replace(config, registry=msgspec.structs.replace(config.registry, url=registry))
    elif registry:
        config = AgentConfig(registry=RegistryConfig(url=registry))
    else:
        raise ConfigError("give --config FILE (configs/agent.toml), or at least --registry etcd://host:2379")
    config = msgspec.structs.replace(
        config,
        node=node or config.node,
        host=host or config.host,
        bind=config.bind if file is not None and not host else "",
        state=str(state) if state is not None else config.state,
    )
    return check_agent_config(config, f"agent configuration {file}" if file else "agent")


def run_agent(config: AgentConfig) -> None:
    """Keep this node's engines until SIGTERM or SIGINT.

    Raises:
        ConfigError: a setting cannot be used, or another agent works in the same folder or as the same node.
    """
    check_addresses(config)
    configure(log_level() or "INFO")
    until = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        until.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with AgentFolder(Path(config.state)) as folder, open_store(config.registry) as store:
        _log.info("agent of node %s at %s, registry %s", config.node, config.host, config.registry.url)
        with Agent(config, store, folder) as agent:
            agent.await_place(until)
            with Conductor(store, config.node, config.registry.ttl_s):
                agent.run(until)
    _log.info("the agent ends; its engines live on")
