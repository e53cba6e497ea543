# SPDX-License-Identifier: Apache-2.0
"""Attention from the selection cache gives what the stock run gives, and what dense attention gives; what breaks the
cache shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_ascend.attention import sfa_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.sfa_v1 import AscendSFAImpl
from vllm_ascend.device.device_op import DeviceOperator

from tests.vllm_plugin.ascend.bed.case import Bed, Case, Run, bed, run_case
from tests.vllm_plugin.ascend.bed.dense import differences
from tests.vllm_plugin.ascend.patched import PatchedBed, patched_bed, run_patched

V32 = Case(contexts=(2300, 150), steps=3, layers=("own", "own"), padding=1)
GLM = Case(contexts=(2400, 40), steps=3, layers=("own", "shared", "shared", "own"))
DRAFTS = Case(contexts=(2250, 300), steps=2, layers=("own", "shared"), queries=2)
SHORT = Case(contexts=(150, 40), steps=3, layers=("own", "shared"))

CLOSE = 0.01
"""Half floats differ by less after a few layers: a last bit changes which of two equal scores is selected."""


def worst(one: Run, other: Run) -> float:
    """Return the largest difference of two runs, relative to the size of the output."""
    found = 0.0
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            error = (a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1)
            found = max(found, float("inf") if error.isnan().any() else float(error.max()))
    return found


@pytest.mark.parametrize(("case", "slots"), [(V32, 2176), (GLM, 2176), (DRAFTS, 4224)], ids=["v32", "glm", "drafts"])
def test_a_decode_from_the_selection_cache_equals_stock_and_dense_attention(case: Case, slots: int) -> None:
    ours = run_patched(case, slots)
    assert worst(ours, run_case(AscendSFAImpl, case)) < CLOSE
    assert differences(ours, slice(-case.steps, None))[0].relative < CLOSE


def wrong_slot(opened: PatchedBed) -> None:
    arrive = opened.cache.arrive

    def shifted(layer: int) -> Any:
        view = arrive(layer)
        return view._replace(slots=torch.where(view.slots >= 0, (view.slots + 1) % 2176, -1))

    opened.cache.arrive = shifted  # type: ignore[method-assign]


def stale_row(opened: PatchedBed) -> None:
    arrive = opened.cache.arrive

    def spoilt(layer: int) -> Any:
        view = arrive(layer)
        if layer == 1:
            view.nope[view.block_table[1, 0].item(), view.slots[1, 0, 0].item() % 128] = 3.0
        return view

    opened.cache.arrive = spoilt  # type: ignore[method-assign]


def skipped_miss(opened: PatchedBed) -> None:
    gather = opened.cache._gather

    def lossy(rope: Any, nope: Any, pool_rope: Any, pool_nope: Any, rows: Any, slots: Any, count: Any) -> None:
        gather(rope, nope, pool_rope, pool_nope, rows, slots, torch.where(count > 1, count - 1, count))

    for arena in opened.cache._arenas:
        arena.nope.fill_(3.0)
    opened.cache._gather = lossy  # type: ignore[method-assign]


@pytest.mark.parametrize("breaks", [wrong_slot, stale_row, skipped_miss])
def test_what_breaks_the_cache_shows(breaks: Callable[[PatchedBed], None]) -> None:
    broken = run_patched(SHORT, before_decode=breaks)
    assert worst(broken, run_case(AscendSFAImpl, SHORT)) > 5 * CLOSE


Batch = Sequence[tuple[int, int]]
DECODE, MIXED = AscendAttentionState.DecodeOnly, AscendAttentionState.ChunkedPrefill
SPECULATIVE = AscendAttentionState.SpecDecoding


def story(opened: Bed, steps: Sequence[tuple[Batch, AscendAttentionState, dict[int, int]]]) -> Run:
    """Run steps of (request, tokens), each followed by how many tokens of a request turn out not to count."""
    for batch, state, rejected in steps:
        opened.step(batch, state)
        for request, tokens in rejected.items():
            opened.lengths[request] -= tokens
    return opened.run


# A mixed batch runs on the pool; what it wrote there is fetched afterwards. Requests swap rows of the batch.
SWAPS = (
    ([(0, 300)], MIXED, {}),
    ([(1, 60)], MIXED, {}),
    ([(0, 1), (1, 1)], DECODE, {}),
    ([(1, 1), (0, 90)], MIXED, {}),
    ([(1, 1), (0, 1)], DECODE, {}),
    ([(0, 1), (1, 1)], DECODE, {}),
)
# Drafts that were rejected leave rows of positions which later steps write anew, on the pool's side too.
REJECTIONS = (
    ([(0, 200)], MIXED, {}),
    ([(1, 50)], MIXED, {}),
    ([(0, 3), (1, 3)], SPECULATIVE, {0: 2, 1: 1}),
    ([(0, 3), (1, 3)], SPECULATIVE, {0: 2}),
    ([(0, 3), (1, 40)], MIXED, {}),
    ([(1, 3), (0, 3)], SPECULATIVE, {}),
    ([(0, 2), (1, 3)], SPECULATIVE, {}),
)


def told(queries: int, steps: Any, before: Callable[[PatchedBed], None]) -> float:
    """Return how far our run of a story is from a stock one."""
    case = replace(SHORT, contexts=(500, 200), queries=queries)
    with patched_bed(case, slots=-(-queries * 2049 // 128) * 128) as opened:
        before(opened)
        ours = story(opened, steps)
        assert opened.served == sum(state is not MIXED for _, state, _ in steps)
        opened.cache.check()
    with bed(case, AscendSFAImpl) as stock:
        return worst(ours, story(stock, steps))


@pytest.mark.parametrize(("queries", "steps"), [(1, SWAPS), (3, REJECTIONS)], ids=["swaps", "rejections"])
def test_steps_past_the_cache_and_rejected_drafts_leave_nothing_stale(queries: int, steps: Any) -> None:
    assert told(queries, steps, lambda opened: None) < CLOSE


def test_a_step_past_the_cache_of_which_it_is_not_told_shows() -> None:
    def silence(opened: PatchedBed) -> None:
        opened.cache.elsewhere = lambda request, start: None  # type: ignore[method-assign]

    assert told(3, REJECTIONS, silence) > 5 * CLOSE


def test_rows_are_announced_before_the_selection_and_the_query_is_projected_while_missing_rows_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return function(*args, **kwargs)

        return noted

    both = SimpleNamespace(is_kv_producer=True, is_kv_consumer=True, kv_connector="TidalConnector", kv_role="kv_both")
    with patched_bed(SHORT, kv_transfer=both) as opened:
        opened.prefill()
        monkeypatch.setattr(sfa_v1, "notify_kv_cache_written", lambda name: done.append(f"written {name[13]}"))
        monkeypatch.setattr(AscendSFAImpl, "rope_single", noting("project", AscendSFAImpl.rope_single))
        for name in ("plan", "arrive"):
            setattr(opened.cache, name, noting(name, getattr(opened.cache, name)))
        opened.decode()
        assert done == ["written 0", "plan", "project", "arrive", "project", "written 1", "arrive"]
        done.clear()
        opened.step([(0, 2)], MIXED)
        assert done == ["project", "written 0", "project", "written 1"]


def test_attention_takes_slots_as_they_are_up_to_the_last_one_of_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the causal mode the kernel would take slots for positions, which shows only in seats that are full."""
    attend, seen = DeviceOperator.execute_sparse_flash_attention_process, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs.get("sparse_mode"), args[-1].tolist()))
        return attend(*args, **kwargs)

    with patched_bed(SHORT) as opened:
        opened.prefill()
        monkeypatch.setattr(DeviceOperator, "execute_sparse_flash_attention_process", watched)
        opened.decode()
    assert seen == [(0, [2176, 2176])] * 2


def test_a_pass_of_padding_alone_changes_nothing() -> None:
    with patched_bed(SHORT) as opened:
        opened.prefill()
        opened.decode()
        held = [state.positions.clone() for state in opened.cache._states]
        opened.selection.idle(2, 1)
        assert opened.selection.seated
        assert opened.cache.seats.seated() == ["request-0", "request-1"]
        opened.cache.plan(
            0, torch.full((2, 2048), -1, dtype=torch.int32), torch.zeros(2).int(), torch.zeros(2, 4).int()
        )
        for layer in range(2):
            view = opened.cache.arrive(layer)
            assert int(view.slots.max()) == -1
        after = [state.positions for state in opened.cache._states]
        assert all(torch.equal(a[:2], b[:2]) for a, b in zip(held, after, strict=True))
