# SPDX-License-Identifier: Apache-2.0
"""The demo's result as a value, as a table and as JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.modelmaker.report import tolerance_of

LOGPROB_BOUND = 0.02
"""Largest difference of float32 log-probabilities (nats) that rounding in another order of work may cause."""

LANDED_BOUND = 0.8
"""Least share of the longest prompt's bytes that must have landed when its prefill ended."""

_MIB = 1 << 20


class Row(msgspec.Struct, frozen=True):
    """One request beside the reference.

    Attributes:
        length: prompt tokens.
        batch: ``one by one`` or ``N at once``.
        tokens_equal: as the reference's.
        logprob_diff: largest difference of log-probabilities.
    """

    length: int
    batch: str
    tokens_equal: bool
    logprob_diff: float


class Result(msgspec.Struct, frozen=True):
    """Everything the demo found; its fields are the JSON's keys.

    Attributes:
        requests, identical: compared requests, and those whose tokens equal the reference's.
        max_logprob_diff: over all requests.
        bytes_pushed: acknowledged by the transport for these requests.
        bytes_expected: computed from the checkpoint; None where prefix caching makes it depend on history.
        landed_before_prefill_end: share for the longest prompt, if it had several chunks.
        pool_bytes, hugepage_bytes: the decode engine's host pool, and what of it lies on hugepages.
        device_bytes_per_token_layer, baseline_bytes_per_token_layer: device KV with and without the host pool.
        sabotage_detected: a corrupted pool row changed the answer.
        sabotage_logprob_diff: by how much.
        transfers_failed: on either side.
        seconds, start_seconds: of the whole run, and until all servers were ready.
    """

    requests: int
    identical: int
    max_logprob_diff: float
    bytes_pushed: int
    bytes_expected: int | None
    landed_before_prefill_end: float | None
    pool_bytes: int
    hugepage_bytes: int
    device_bytes_per_token_layer: float
    baseline_bytes_per_token_layer: float
    sabotage_detected: bool
    sabotage_logprob_diff: float
    transfers_failed: int
    arch: str
    dtype: str
    block_size: int
    max_num_batched_tokens: int
    prefix_caching: bool
    seconds: float
    start_seconds: float
    rows: tuple[Row, ...]

    def shortcomings(self) -> list[str]:
        """Return what is not as it must be, one line each; empty if all is well."""
        found = []
        bound = logprob_bound(self.dtype)
        if self.identical != self.requests and tolerance_of(self.dtype).equal_tokens:
            found.append(f"{self.requests - self.identical} of {self.requests} requests differ from the reference")
        if self.max_logprob_diff > bound:
            found.append(f"logprobs differ by up to {self.max_logprob_diff:.4g}, more than {bound:g}")
        if self.bytes_expected is not None and self.bytes_pushed != self.bytes_expected:
            found.append(f"{self.bytes_pushed} bytes were pushed, {self.bytes_expected} are the prompts' rows")
        if self.landed_before_prefill_end is not None and self.landed_before_prefill_end < LANDED_BOUND:
            found.append(f"only {self.landed_before_prefill_end:.0%} had landed when prefill ended")
        if self.transfers_failed:
            found.append(f"{self.transfers_failed} transfers failed")
        if not self.sabotage_detected:
            found.append("a corrupted pool row went unnoticed, so the comparison proves nothing")
        return found


def logprob_bound(dtype: str) -> float:
    """Return how far two right answers may be apart: 0.02 nats, in bfloat16 the noise that its rounding alone makes."""
    return LOGPROB_BOUND if dtype == "float32" else tolerance_of(dtype).noise


def show(result: Result, console: Console) -> None:
    """Print the result as tables and one closing line."""
    table = Table(title="Every answer beside a single engine's")
    for name in ("prompt tokens", "sent", "tokens", "largest logprob difference"):
        table.add_column(name, justify="right")
    for row in result.rows:
        verdict = "[green]equal[/]" if row.tokens_equal else "[red]DIFFERENT[/]"
        table.add_row(f"{row.length:,}", row.batch, verdict, f"{row.logprob_diff:.2g}")
    console.print(table)
    facts = Table(show_header=False)
    facts.add_column()
    facts.add_column()
    for name, value in _facts(result):
        facts.add_row(name, value)
    console.print(facts)
    wrong = result.shortcomings()
    for line in wrong:
        console.print(f"[red]not as it must be:[/] {line}")
    good = "all identical" if result.identical == result.requests else "within bounds"
    verdict = "[red]failed[/]" if wrong else f"[green]{good}[/]"
    console.print(f"{verdict}: {result.identical} of {result.requests} requests, {result.seconds:.0f} s")


def _facts(result: Result) -> list[tuple[str, str]]:
    expected = "" if result.bytes_expected is None else f", {result.bytes_expected:,} computed from the checkpoint"
    landed = result.landed_before_prefill_end
    with_pool, without = result.device_bytes_per_token_layer, result.baseline_bytes_per_token_layer
    share = result.hugepage_bytes / result.pool_bytes if result.pool_bytes else 0.0
    return [
        ("tokens equal", f"{result.identical} of {result.requests} requests"),
        ("largest logprob difference", f"{result.max_logprob_diff:.2g}"),
        ("KV bytes pushed", f"{result.bytes_pushed:,}{expected}"),
        ("landed when prefill ended", "no prompt of several chunks" if landed is None else f"{landed:.0%}"),
        ("host pool", f"{result.pool_bytes / _MIB:,.0f} MiB, {share:.0%} on hugepages"),
        ("device KV per token and layer", f"{with_pool:,.0f} B with the host pool, {without:,.0f} B without"),
        ("one corrupted row", f"changes logprobs by {result.sabotage_logprob_diff:.2g}"),
        ("engines ready after", f"{result.start_seconds:.0f} s"),
    ]
