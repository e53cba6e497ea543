# SPDX-License-Identifier: Apache-2.0
"""All checks in the order in which they are told. Pure: facts and wishes in, findings out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidal_connector.cli.doctor import (
    check_cluster,
    check_machine,
    check_memory,
    check_network,
    check_npu,
    check_npu_transport,
    check_software,
)
from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import Finding, State
from tidal_connector.cli.doctor.wishes import Wishes

Check = Callable[[Facts, Wishes], list[Finding]]

CHECKS: tuple[Check, ...] = (
    check_software.check_python,
    check_software.check_vllm,
    check_software.check_mooncake,
    check_software.check_native,
    check_npu.check_npu,
    check_npu_transport.check_transport,
    check_memory.check_hugepages,
    check_memory.check_memory,
    check_memory.check_memlock,
    check_memory.check_limits,
    check_machine.check_numa,
    check_machine.check_rdma,
    check_network.check_kernel,
    check_network.check_clock,
    check_network.check_files,
    check_network.check_addresses,
    check_network.check_ports,
    check_cluster.check_places,
    check_network.check_registry,
    check_cluster.check_nodes,
)


class Diagnosis(msgspec.Struct, frozen=True):
    """The report.

    Attributes:
        findings: in the order of the checks.
        passed, warned, failed: how many there are of each.
    """

    findings: tuple[Finding, ...]
    passed: int
    warned: int
    failed: int


def examine(facts: Facts, wishes: Wishes) -> Diagnosis:
    """Run every check."""
    found = tuple(line for check in CHECKS for line in check(facts, wishes))
    counts = [sum(line.state is state for line in found) for state in State]
    return Diagnosis(found, *counts)
