# SPDX-License-Identifier: Apache-2.0
"""Checks of the hardware: RDMA devices and NUMA nodes, against what the settings name. Pure."""

from __future__ import annotations

from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.wishes import Wishes
from tidal_connector.config import Protocol
from tidal_connector.memory.report import size_text

_ACTIVE = "ACTIVE"


def check_rdma(facts: Facts, wishes: Wishes) -> list[Finding]:
    """RDMA devices and the state of their ports; without any, transfers go over TCP."""
    asked = Protocol.RDMA in wishes.protocols
    if not facts.rdma:
        if asked:
            fix = 'install the driver (rdma-core), mount /dev/infiniband into the container, or set protocol = "tcp"'
            # Mooncake would take TCP without a word; a slow cluster is found late.
            return [fail("RDMA", 'no device in /sys/class/infiniband, but transfer.protocol = "rdma"', fix)]
        if wishes.protocols:
            return [good("RDMA", "no device; transfers go over tcp, as the settings say")]
        return [warn("RDMA", "no device: transfers go over TCP", "nothing, if TCP is fast enough")]
    active = [device for device in facts.rdma if _ACTIVE in device.states]
    shown = ", ".join(
        f"{device.name} ({'/'.join(device.layers)} {'/'.join(device.states)}, node {device.node})"
        for device in facts.rdma
    )
    if not active:
        say = fail if asked else warn
        return [
            say("RDMA", f"no port is ACTIVE: {shown}", "ip link set ... up; check cable, switch and subnet manager")
        ]
    lines = [good("RDMA", shown)]
    if not asked and wishes.protocols == {Protocol.TCP}:
        names = ",".join(device.name for device in active)
        text = "there are RDMA devices, and the settings use tcp"
        lines.append(warn("RDMA", text, f'[tidal.transfer] protocol = "rdma", device = "{names}"'))
    return lines


def check_numa(facts: Facts, wishes: Wishes) -> list[Finding]:
    """NUMA nodes and distances, whether the pool's node exists, and whether the network card is near it."""
    nodes = {node.number: node for node in facts.nodes}
    chosen = sorted({pool.node for pool in wishes.pools if pool.node is not None})
    lines = []
    for number in chosen:
        if number not in nodes:
            there = ", ".join(map(str, nodes)) or "none"
            lines.append(fail("NUMA", f"pool.numa = {number}: no such node; there are: {there}", "correct pool.numa"))
    if len(nodes) <= 1:
        return lines or [good("NUMA", "one node")]
    shown = "; ".join(
        f"node {node.number}: {size_text(node.memory)}, cpus {node.cpus}, "
        f"distances {' '.join(map(str, node.distances))}"
        for node in facts.nodes
    )
    if wishes.pools and not chosen:
        cards = sorted({device.node for device in facts.rdma if device.node >= 0})
        near = f"{cards[0]}, where the network card is" if cards else "the node of the device and the network card"
        fix = f"set pool.numa to {near}, and bind the engine to its cpus"
        lines.append(warn("NUMA", f"{shown}; pool.numa is not set, so pages may lie on any node", fix))
    for device in facts.rdma:
        far = [number for number in chosen if number in nodes and device.node >= 0 and number != device.node]
        if far:
            text = f"the pool is on node {far[0]}, {device.name} on node {device.node}"
            fix = f"set pool.numa = {device.node}, or name a nearer card in transfer.device"
            lines.append(warn("NUMA", text, fix))
    return lines or [good("NUMA", shown)]
