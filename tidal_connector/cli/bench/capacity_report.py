# SPDX-License-Identifier: Apache-2.0
"""How many requests one device budget serves at once, with and without the host pool: a value, a table, JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from tidal_connector.cli.bench.figures import MachineFacts

BOUND_SHARE = 0.9
"""Least ratio of concurrent requests, as a share of what the layout allows."""
THROUGHPUT_BOUND = 2.0

_MIB = 1 << 20


class Sample(msgspec.Struct, frozen=True):
    """One look at an engine.

    Attributes:
        at: seconds since the requests were sent.
        running: requests that the scheduler runs.
        waiting: requests that wait for room.
        generated: output tokens so far.
        preempted: requests that lost their room so far.
    """

    at: float
    running: int
    waiting: int
    generated: int
    preempted: int


class Served(msgspec.Struct, frozen=True):
    """All requests through one engine.

    Attributes:
        peak: largest number of requests that ran at once.
        seconds: from the first request to the last answer.
        tokens_per_s: output tokens per second over that time.
        preemptions: requests that lost their room.
        device_kv_bytes: device memory that was allocated for KV: the cache, or index keys and selection cache.
        index_bytes: of these, index keys (with the pool).
        selection_bytes: of these, the selection cache.
        pool_bytes: host memory for latents.
        kv_blocks: KV blocks of the engine.
        samples: what was seen over the time.
    """

    peak: int
    seconds: float
    tokens_per_s: float
    preemptions: int
    device_kv_bytes: int
    index_bytes: int
    selection_bytes: int
    pool_bytes: int
    kv_blocks: int
    samples: tuple[Sample, ...]


class Capacity(msgspec.Struct, frozen=True):
    """Everything that was found; its fields are the JSON's keys.

    Attributes:
        concurrent_requests_on_over_off: peak with the latents in the host pool over that with all on the device.
        concurrent_requests_over_bound: that ratio as a share of ``bound``.
        bound: what the layout allows, :func:`layout_bound`.
        throughput_on_over_off: output tokens per second over the whole run.
        device_kv_on_over_off: device bytes that were allocated; not above 1, or the comparison is not fair.
        budget_bytes: device KV budget that both engines were given.
        latent_bytes, index_bytes: bytes of one token's rows in one layer, as the engine reports them.
        context: tokens of a request, prompt and answer.
        prompt, output: tokens of each.
        requests: that were sent at once.
        max_num_seqs: vLLM's limit, for both engines: as many requests as the layout lets the budget hold.
        on, off: what each engine did.
    """

    concurrent_requests_on_over_off: float
    concurrent_requests_over_bound: float
    bound: float
    throughput_on_over_off: float
    device_kv_on_over_off: float
    budget_bytes: int
    latent_bytes: float
    index_bytes: float
    layers: int
    top_k: int
    slots: int
    context: int
    prompt: int
    output: int
    requests: int
    max_num_seqs: int
    arch: str
    dtype: str
    machine: MachineFacts
    on: Served
    off: Served

    def shortcomings(self) -> list[str]:
        """Return what is not as it must be, one line each; empty if all is well."""
        found = []
        if self.concurrent_requests_over_bound < BOUND_SHARE:
            found.append(
                f"{self.concurrent_requests_on_over_off:.2f} x as many requests run at once, "
                f"{self.concurrent_requests_over_bound:.2f} of what the layout allows; expected at least {BOUND_SHARE}"
            )
        if self.throughput_on_over_off < THROUGHPUT_BOUND:
            found.append(
                f"throughput is {self.throughput_on_over_off:.2f} x as large; expected at least {THROUGHPUT_BOUND:g}"
            )
        if self.device_kv_on_over_off > 1:
            found.append(f"device KV takes {self.device_kv_on_over_off:.3f} x as many bytes; expected at most 1")
        if self.on.preemptions:
            found.append(f"{self.on.preemptions} requests lost their room with the host pool; expected none")
        return found


def layout_bound(latent: float, index: float, slots: int, context: int) -> float:
    """Return how many times as many requests the same device memory holds when the latents are elsewhere.

    Args:
        latent, index: bytes of one token's rows in one layer.
        slots: rows of the selection cache that a request has in each layer.
        context: tokens of a request.
    """
    return (latent + index) * context / (latent * slots + index * context)


def served(
    samples: Sequence[Sample],
    seconds: float,
    tokens: int,
    *,
    index_bytes: int,
    selection_bytes: int,
    device_kv_bytes: int,
    pool_bytes: int,
    kv_blocks: int,
) -> Served:
    """Sum up what was seen of one engine.

    Raises:
        ValueError: nothing was seen.
    """
    if not samples:
        raise ValueError("no samples: expected at least one look at the engine")
    return Served(
        peak=max(each.running for each in samples),
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        preemptions=samples[-1].preempted - samples[0].preempted,
        device_kv_bytes=device_kv_bytes,
        index_bytes=index_bytes,
        selection_bytes=selection_bytes,
        pool_bytes=pool_bytes,
        kv_blocks=kv_blocks,
        samples=tuple(samples),
    )


def show(found: Capacity, console: Console) -> None:
    """Print the table and the verdict."""
    on, off = found.on, found.off
    table = Table(
        title=f"{found.requests} requests of {found.prompt:,} + {found.output:,} tokens in "
        f"{found.budget_bytes / _MIB:.1f} MiB of device KV",
        caption=f"{found.arch}, {found.layers} layers, {found.dtype}, top-k {found.top_k}, {found.slots} slots, "
        f"max_num_seqs {found.max_num_seqs} for both. {found.machine.line()}.",
    )
    table.add_column("figure")
    for heading in ("on the device", "latents in the pool", "ratio"):
        table.add_column(heading, justify="right")
    table.add_row(
        "requests at once (peak)", str(off.peak), str(on.peak), f"{found.concurrent_requests_on_over_off:.2f}"
    )
    table.add_row("  by the layout", "", "", f"{found.bound:.2f}")
    table.add_row("  share of it", "", "", f"{found.concurrent_requests_over_bound:.2f}")
    table.add_row(
        "output tokens per second",
        f"{off.tokens_per_s:.1f}",
        f"{on.tokens_per_s:.1f}",
        f"{found.throughput_on_over_off:.2f}",
    )
    table.add_row("seconds", f"{off.seconds:.1f}", f"{on.seconds:.1f}", f"{on.seconds / off.seconds:.2f}")
    table.add_row("preemptions", str(off.preemptions), str(on.preemptions), "")
    table.add_section()
    table.add_row(
        "device KV allocated, MiB",
        f"{off.device_kv_bytes / _MIB:.2f}",
        f"{on.device_kv_bytes / _MIB:.2f}",
        f"{found.device_kv_on_over_off:.3f}",
    )
    table.add_row("  index keys", "", f"{on.index_bytes / _MIB:.2f}", "")
    table.add_row("  selection cache", "", f"{on.selection_bytes / _MIB:.2f}", "")
    table.add_row("host pool, MiB", "", f"{on.pool_bytes / _MIB:.1f}", "")
    table.add_row("KV blocks", str(off.kv_blocks), str(on.kv_blocks), f"{on.kv_blocks / off.kv_blocks:.2f}")
    console.print(table)
    for line in found.shortcomings():
        console.print(f"[bold red]not as it must be:[/] {line}")
    if not found.shortcomings():
        console.print(
            f"[bold green]within the bounds[/]: {found.concurrent_requests_over_bound:.2f} of what the layout allows, "
            f"{found.throughput_on_over_off:.2f} x the throughput"
        )
