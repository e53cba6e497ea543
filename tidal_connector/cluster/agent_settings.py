# SPDX-License-Identifier: Apache-2.0
"""The agent's own settings (``configs/agent.toml``), and what it writes for each engine that it starts."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.address import join_address
from tidal_connector.cluster.rollout_records import Assignment
from tidal_connector.cluster.serving import SuperviseConfig
from tidal_connector.cluster.spec import ClusterSpec, filled, names_of, slot_of
from tidal_connector.errors import ConfigError
from tidal_connector.registry.keys import is_name
from tidal_connector.registry.settings import RegistryConfig, check, on_one_machine
from tidal_connector.tables import convert_strict, read_toml

_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})")


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One node's agent.

    Attributes:
        registry: of the cluster.
        node: this machine's name, as cluster.toml has it; empty: its host name.
        host: address under which other machines reach this one's engines; empty only where all is on one machine.
        bind: address on which its engines listen; empty: that of ``host``.
        state: folder for records, logs and engines' files; must survive a restart of the agent.
        ports: range from which ports are taken that cluster.toml leaves open; keep it out of the kernel's own range
            for outgoing connections (``net.ipv4.ip_local_port_range``).
        environment: further variables of every engine on this node.
        supervise: how engines are watched; ``drain_s`` and ``start_s`` come from cluster.toml.
    """

    registry: RegistryConfig
    node: str = ""
    host: str = ""
    bind: str = ""
    state: str = "/var/lib/tidal"
    ports: str = "21000-21999"
    environment: dict[str, str] = {}
    supervise: SuperviseConfig = SuperviseConfig()

    def port_range(self) -> range:
        """Return the ports that may be taken.

        Raises:
            ConfigError: ``ports`` is no range.
        """
        found = _PORTS.fullmatch(self.ports)
        first, last = (int(found[1]), int(found[2])) if found else (1, 0)
        if not 1 <= first < last <= 65535:
            raise ConfigError(f'ports = {self.ports!r}: expected "FIRST-LAST" within 1 to 65535')
        return range(first, last + 1)


def read_agent_config(path: Path) -> AgentConfig:
    """Read and check the TOML file of an agent.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or cannot be meant.
    """
    where = f"agent configuration {path}"
    return check_agent_config(convert_strict(AgentConfig, read_toml(path, "agent configuration"), where), where)


def check_agent_config(config: AgentConfig, where: str) -> AgentConfig:
    """Return the settings with what they leave open filled in.

    Raises:
        ConfigError: they cannot be meant.
    """
    try:
        check(config.registry)
        config.port_range()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    node = config.node or socket.gethostname()
    if not is_name(node):
        raise ConfigError(f"{where}: node = {node!r}: expected letters, digits and . _ : @ + ~ = -")
    host = config.host
    if not host:
        if not on_one_machine(config.registry):
            raise ConfigError(
                f"{where}: host is missing; give the address under which other machines reach this one's engines"
            )
        host = "127.0.0.1"
    return msgspec.structs.replace(config, node=node, host=host, bind=config.bind or host)


def serve_settings(
    agent: AgentConfig, spec: ClusterSpec, assignment: Assignment, ports: tuple[int, int]
) -> dict[str, Any]:
    """Return the settings of one engine, in the shape of ``configs/decode.toml``.

    Args:
        agent: this node.
        spec: the revision that the engine is made from.
        assignment: which engine.
        ports: of its HTTP server and its control channel.
    """
    group = spec.groups()[assignment.group]
    names = names_of(group, assignment.slot)
    tidal = filled(group.tidal, names)
    advertise = {"advertise": agent.host} if agent.host != agent.bind else {}
    control = {**tidal.get("control", {}), "bind": join_address(agent.bind, ports[1]), **advertise}
    supervise = msgspec.to_builtins(agent.supervise)
    return {
        "engine": assignment.engine,
        "load_failure_policy": group.load_failure_policy,
        "node": assignment.node,
        "revision": assignment.revision,
        "admission": not assignment.admitted,  # one that has passed its probe comes back by itself after a crash
        "command": filled(list(group.command), names),
        "http": {"bind": join_address(agent.bind, ports[0]), **advertise},
        "supervise": {
            **supervise,
            "drain_s": spec.cluster.drain_deadline_s,
            "start_s": spec.cluster.ready_deadline_s,
        },
        "registry": registry_table(agent.registry),
        "tidal": {**tidal, "control": control},
    }


def registry_table(registry: RegistryConfig) -> dict[str, Any]:
    """Return the ``[registry]`` table of a file that is written for others, without what is left open."""
    return {key: item for key, item in msgspec.to_builtins(registry).items() if item != ""}


def serve_command(spec: ClusterSpec, assignment: Assignment, file: Path) -> list[str]:
    """Return the command line of one engine's supervisor."""
    group = spec.groups()[assignment.group]
    names = names_of(group, assignment.slot)
    arguments = [*(("--model", group.model) if group.model else ()), *group.vllm]
    serve = [sys.executable, "-m", "tidal_connector.cli", "serve", str(assignment.role), "--config", str(file)]
    return [*serve, "--", *filled(arguments, names)]


def serve_environment(agent: AgentConfig, spec: ClusterSpec, assignment: Assignment) -> dict[str, str]:
    """Return the variables that one engine has beyond the agent's own."""
    group = spec.groups()[assignment.group]
    return {**agent.environment, **filled(group.environment, names_of(group, assignment.slot))}


def wanted_ports(spec: ClusterSpec, assignment: Assignment) -> tuple[int, int]:
    """Return the ports that cluster.toml fixes for an engine; 0 where it leaves the choice to the agent."""
    group = spec.groups()[assignment.group]
    place = slot_of(group, assignment.slot).place
    return (
        group.port + place if group.port else 0,
        group.control_port + place if group.control_port else 0,
    )


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table of texts, numbers, truth values, lists and tables as TOML; None is left out."""
    return "".join(
        f"{json.dumps(key, ensure_ascii=False)} = {_toml(value)}\n" for key, value in table.items() if value is not None
    )


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {_toml(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's texts, numbers and truth values are TOML's, but for one character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
