# SPDX-License-Identifier: Apache-2.0
"""The result of ``tidal bench rollout`` and its table."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the cluster under load.

    Attributes:
        name: what was done.
        outcome: how the rollout ended.
        expected: how it should have ended.
        requests, failed, wrong: of the clients meanwhile.
        seconds: from the operator's word to the end.
        slowest_s: longest request.
        faults: the first failures.
        why: what the rollout says itself.
    """

    name: str
    outcome: str
    expected: str
    requests: int
    failed: int
    wrong: int
    seconds: float
    slowest_s: float
    faults: tuple[str, ...] = ()
    why: str = ""

    @property
    def good(self) -> bool:
        """Whether it ended as it should, and no client noticed."""
        return self.outcome == self.expected and not self.failed and not self.wrong and self.requests > 0


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """All scenarios.

    Attributes:
        requests, failed, wrong, seconds: sums.
        engines: stand-ins or vLLM.
        prefill, decode: engines of each role.
        clients: that asked at once.
        registry: etcd, or a folder.
        start_seconds: until the cluster served for the first time.
        scenarios: one by one.
        machine: where it ran.
    """

    requests: int
    failed: int
    wrong: int
    seconds: float
    engines: str
    prefill: int
    decode: int
    clients: int
    registry: str
    start_seconds: float
    scenarios: tuple[Scenario, ...]
    machine: MachineFacts

    def shortcomings(self) -> list[str]:
        """Return what is not as it should be."""
        return [
            f"{item.name}: {item.outcome} (expected {item.expected}), {item.failed} failed and {item.wrong} wrong of "
            f"{item.requests}"
            for item in self.scenarios
            if not item.good
        ]


def show(result: RolloutResult, console: Console) -> None:
    """Print the table."""
    table = Table("scenario", "outcome", "requests", "failed", "wrong", "seconds", "slowest request")
    for item in result.scenarios:
        table.add_row(
            item.name,
            item.outcome if item.outcome == item.expected else f"[red]{item.outcome}, expected {item.expected}",
            str(item.requests),
            f"[red]{item.failed}" if item.failed else "0",
            f"[red]{item.wrong}" if item.wrong else "0",
            f"{item.seconds:.1f}",
            f"{item.slowest_s:.2f} s",
        )
    console.print(table)
    console.print(
        f"{result.clients} clients, {result.prefill} prefill and {result.decode} decode {result.engines}, "
        f"{result.registry}: {result.requests} requests, {result.failed} failed, {result.wrong} wrong"
    )
    for item in result.scenarios:
        for fault in item.faults:
            console.print(f"  {item.name}: {fault}", style="red", markup=False, highlight=False)
