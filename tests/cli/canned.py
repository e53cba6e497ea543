# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks, as if they had been measured."""

from __future__ import annotations

from typing import Any

import msgspec

from tidal_connector.cli.bench.capacity_report import Capacity, Sample, Served
from tidal_connector.cli.bench.decode_report import BatchCase, Decode, ModelCase, Moved, prefetch_gain, worst
from tidal_connector.cli.bench.figures import MachineFacts, Spread
from tidal_connector.cli.bench.gather_report import (
    ContextPoint,
    CopyCase,
    CostSplit,
    Gather,
    ResolveCase,
    gather_result,
)

MACHINE = MachineFacts(cores=2, cpu="some cpu", kernel="6", load_at_start=0.5, versions={"python": "3.11"})


def around(median: float) -> Spread:
    return Spread(median, 0.9 * median, 1.2 * median)


def copy_case(**changes: Any) -> CopyCase:
    found = CopyCase(
        row_bytes=1152,
        batch=8,
        threads=1,
        rows=16384,
        gather_gb_per_s=around(10.0),
        memcpy_gb_per_s=around(12.0),
        torch_copy_gb_per_s=around(13.0),
        index_select_gb_per_s=around(3.0),
        index_select_to_slots_gb_per_s=around(2.0),
        gather_over_memcpy=around(0.83),
        gather_over_torch_copy=around(0.77),
        gather_over_torch_index_select=around(5.0),
        gather_over_torch_index_select_dense=around(3.3),
    )
    return msgspec.structs.replace(found, **changes)


def resolve_case(**changes: Any) -> ResolveCase:
    found = ResolveCase(
        batch=8,
        threads=1,
        hits=0.9,
        us_per_row=around(30.0),
        split=CostSplit(1.0, 9.0, 12.0, 8.0),
        numpy_us_per_row=around(400.0),
        numpy_map_us_per_row=around(100.0),
        resolve_over_numpy=around(13.0),
        resolve_over_numpy_map=around(3.3),
    )
    return msgspec.structs.replace(found, **changes)


def gather(**changes: Any) -> Gather:
    cases: dict[str, Any] = {
        "copies": (copy_case(), copy_case(row_bytes=656, threads=2)),
        "resolves": (resolve_case(batch=1), resolve_case()),
        "contexts": tuple(ContextPoint(1 << power, around(30.0)) for power in (13, 15, 17, 19, 20)),
    }
    cases |= changes
    return gather_result(
        **cases,
        pool="pool of 2 GiB: 2 GiB on 2 MiB hugepages",
        pool_bytes=2 << 30,
        top_k=2048,
        slots=4096,
        hit_rate=0.9,
        repetitions=40,
        machine=MACHINE,
    )


def batch_case(batch: int = 4, **changes: Any) -> BatchCase:
    found = BatchCase(
        batch=batch,
        rounds=5,
        tpot_on_ms=around(20.0),
        tpot_off_ms=around(19.5),
        tpot_on_over_off=around(1.02),
        engine_tpot_on_over_off=around(1.01),
        tpot_no_prefetch_ms=None,
        prefetch_on_over_off=None,
        moved=Moved(
            steps=30.0,
            hit_rate=0.8,
            bytes_per_step=4e6,
            prefetched_share=0.7,
            hidden_share=0.6,
            prefetches_per_step=6.0,
            late_share=0.05,
            wait_ms_per_step=0.2,
            resolve_ms_per_step=0.3,
            gather_ms_per_step=0.5,
        ),
    )
    return msgspec.structs.replace(found, **changes)


def decode(**changes: Any) -> Decode:
    shared = batch_case(8, tpot_no_prefetch_ms=around(21.0), prefetch_on_over_off=around(0.95))
    models = (
        ModelCase("v32", 8, 8, 256, 512, 2304, 4096, (batch_case(1), batch_case(4))),
        ModelCase("glm", 8, 2, 256, 512, 2304, 4096, (shared,)),
    )
    found = Decode(
        tpot_on_over_off=worst(models),
        prefetch_on_over_off=prefetch_gain(models),
        bound=1.05,
        context=4096,
        tokens=33,
        repetitions=5,
        dtype="float32",
        off="an engine without the connector",
        threads="1",
        machine=MACHINE,
        models=models,
    )
    return msgspec.structs.replace(found, **changes)


def served(peak: int, seconds: float) -> Served:
    return Served(
        peak=peak,
        seconds=seconds,
        tokens_per_s=24 * 512 / seconds,
        preemptions=0,
        device_kv_bytes=20 << 20,
        index_bytes=12 << 20 if peak > 2 else 0,
        selection_bytes=8 << 20 if peak > 2 else 0,
        pool_bytes=110 << 20 if peak > 2 else 0,
        kv_blocks=257 * peak // 2,
        samples=tuple(Sample(at, min(peak, 2 * at), 24 - peak, 100 * at, 0) for at in range(int(seconds))),
    )


def capacity(**changes: Any) -> Capacity:
    found = Capacity(
        concurrent_requests_on_over_off=6.0,
        concurrent_requests_over_bound=0.953,
        bound=6.294,
        throughput_on_over_off=2.5,
        device_kv_on_over_off=1.0,
        budget_bytes=20 << 20,
        latent_bytes=1152.0,
        index_bytes=132.0,
        layers=4,
        top_k=64,
        slots=128,
        context=2048,
        prompt=1536,
        output=512,
        requests=24,
        max_num_seqs=12,
        arch="v32",
        dtype="bfloat16",
        machine=MACHINE,
        on=served(12, 40.0),
        off=served(2, 100.0),
    )
    return msgspec.structs.replace(found, **changes)
