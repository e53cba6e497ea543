# SPDX-License-Identifier: Apache-2.0
"""Checks of what Mooncake's ``ascend`` transport demands: ports, variables, deadlines and links. Pure.

``transfer.ascend`` has the rules; an engine that breaks one is refused at its start, here it is told before.
"""

from __future__ import annotations

from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.wishes import Wishes
from tidal_connector.config import Protocol, TidalConfig, TransferConfig
from tidal_connector.errors import ConfigError
from tidal_connector.transfer import ascend

_NAME = "NPU transport"


def check_transport(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Nothing, unless the settings ask for the transport on a machine with NPUs."""
    count, found = len(facts.ascend.devices), facts.ascend.variables
    if Protocol.ASCEND not in wishes.protocols or not count:
        return []
    quarantine = TidalConfig(transfer=TransferConfig(protocol=Protocol.ASCEND)).quarantine_s
    lines = []
    try:
        ascend.check_environment(found)
        ascend.check_deadlines(found, quarantine)
        base = ascend.base_port(found)
    except ConfigError as error:
        return [fail(_NAME, str(error), "change that variable, as the line says")]
    if note := ascend.link_note(found):
        lines.append(warn(_NAME, note, "export HCCL_INTRA_ROCE_ENABLE=1 on both sides"))
    ports = {f"{each.field} of {each.file}": (each.port, each.port) for each in wishes.ports}
    ports |= {f"ports of {each.file}": (each.first, each.last) for each in wishes.ranges}
    for line in ascend.port_conflicts(ports, count, base):
        lines.append(fail(_NAME, line, "choose ports beyond that range, or set ASCEND_BASE_PORT"))
    last = base + ascend.PORTS_PER_NPU * count - 1
    lines += _connecting(facts, base, last)
    return lines or [good(_NAME, f"ports {base} to {last} are left to the NPUs' listeners")]


def _connecting(facts: Facts, first: int, last: int) -> list[Finding]:
    """Whether connections of this machine may take a port that a listener of an NPU wants."""
    low, _, high = facts.sysctl.get("net.ipv4.ip_local_port_range", "").partition(" ")
    if not (low.isdigit() and high.strip().isdigit()) or int(low) > last or int(high) < first:
        return []
    text = f"net.ipv4.ip_local_port_range = {low} {high.strip()} meets {first} to {last} of the NPUs' listeners"
    return [warn(_NAME, text, f'sysctl -w net.ipv4.ip_local_port_range="{last + 1} {high.strip()}"')]
