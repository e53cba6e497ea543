# SPDX-License-Identifier: Apache-2.0
"""What a proxy adds to a request, and how many streams it carries, as values, as a table and as JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts

BOUND_MS = 3.0
"""Most milliseconds that the median request may take longer through the proxy."""

BESIDE = (
    "One request at a time, direct and through the proxy in turn; client, proxy and engine stand-ins are processes on "
    "the same cores. A direct client sends both legs itself, the client of a proxy one request."
)


class Added(msgspec.Struct, frozen=True):
    """Milliseconds of one kind of request, both ways.

    Attributes:
        direct_p50, direct_p99: by a direct connection to the engines.
        proxy_p50, proxy_p99: through the proxy.
        added_p50, added_p99: the difference of the two.
    """

    direct_p50: float
    direct_p99: float
    proxy_p50: float
    proxy_p99: float
    added_p50: float
    added_p99: float


class Streams(msgspec.Struct, frozen=True):
    """Streams at the same time through the proxy.

    Attributes:
        asked: streams that were begun at once.
        failed: without a whole answer, or with a wrong one.
        most_open: answers that had begun and not ended at one moment.
        tokens: of all answers, each looked at.
        seconds: until the last one ended.
        first_p50_ms, first_p99_ms: until a stream's first token.
        proxy_cpu_s: processor seconds of the proxy.
        faults: the first failures.
    """

    asked: int
    failed: int
    most_open: int
    tokens: int
    seconds: float
    first_p50_ms: float
    first_p99_ms: float
    proxy_cpu_s: float
    faults: tuple[str, ...] = ()


class ProxyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found; its fields are the JSON's keys.

    Attributes:
        answer: whole answers, to their last byte.
        first_token: streams, to their first byte.
        requests: timed requests of each kind, each way.
        proxy_cpu_ms: processor milliseconds of the proxy per request.
        failed: timed requests that failed or were answered wrongly.
        bound_ms: most for the median.
        prefill, decode: engine stand-ins of each role.
        prompt_tokens, tokens: of a timed request.
    """

    answer: Added
    first_token: Added
    requests: int
    proxy_cpu_ms: float
    failed: int
    bound_ms: float
    streams: Streams
    prefill: int
    decode: int
    prompt_tokens: int
    tokens: int
    policy: str
    beside: str
    machine: MachineFacts

    def shortcomings(self) -> list[str]:
        """Return what is not as it must be, one line each; empty if all is well."""
        found = [
            f"{what} takes {added.added_p50:.2f} ms longer through the proxy; expected at most {self.bound_ms:g} ms"
            for what, added in (("the median answer", self.answer), ("the median first token", self.first_token))
            if added.added_p50 > self.bound_ms
        ]
        if self.failed:
            found.append(f"{self.failed} timed requests failed")
        if self.streams.failed:
            found.append(f"{self.streams.failed} of {self.streams.asked} streams failed: {self.streams.faults[0]}")
        if self.streams.most_open < self.streams.asked:
            found.append(
                f"only {self.streams.most_open} of {self.streams.asked} streams were open at one moment: raise --tokens"
            )
        return found


def added(direct_s: Sequence[float], proxy_s: Sequence[float]) -> Added:
    """Compare two ways to ask.

    Args:
        direct_s, proxy_s: seconds of each request; at least two each.
    """
    (one, two), (three, four) = quantiles(direct_s), quantiles(proxy_s)
    return Added(one, two, three, four, three - one, four - two)


def quantiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return cuts[49] * 1000, cuts[98] * 1000


def show(found: ProxyResult, console: Console) -> None:
    """Print the tables and the verdict."""
    table = Table(
        title=f"{found.requests} requests each way, {found.prompt_tokens} + {found.tokens} tokens, milliseconds",
        caption=f"{found.machine.line()}. {found.beside}",
    )
    for name in ("figure", "direct p50", "proxy p50", "added p50", "direct p99", "proxy p99", "added p99"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for name, item in (("to the whole answer", found.answer), ("to the first token", found.first_token)):
        values = (item.direct_p50, item.proxy_p50, item.added_p50, item.direct_p99, item.proxy_p99, item.added_p99)
        table.add_row(name, *(f"{value:.2f}" for value in values))
    console.print(table)
    console.print(f"processor time of the proxy: {found.proxy_cpu_ms:.2f} ms per request")
    streams = found.streams
    console.print(
        f"{streams.asked} streams at once ({streams.most_open} open at one moment): {streams.failed} failed, "
        f"{streams.tokens} tokens checked, {streams.seconds:.1f} s, first token after {streams.first_p50_ms:.0f} ms "
        f"(p99 {streams.first_p99_ms:.0f} ms), {streams.proxy_cpu_s:.1f} s of the proxy's processor time"
    )
    for line in found.shortcomings():
        console.print(f"[bold red]not as it must be:[/] {line}")
    if not found.shortcomings():
        worst = max(found.answer.added_p50, found.first_token.added_p50)
        console.print(f"[bold green]within the bound[/]: {worst:.2f} ms <= {found.bound_ms:g} ms, no stream failed")
