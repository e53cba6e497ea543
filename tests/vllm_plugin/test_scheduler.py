# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from tidal_connector.config import TidalConfig  # noqa: E402
from tidal_connector.vllm_plugin.metadata import SendChunk, TidalMetadata  # noqa: E402
from tidal_connector.vllm_plugin.scheduler import TidalScheduler  # noqa: E402

BLOCK = 16
PUSH_D = {
    "mode": "push",
    "role": "decode",
    "transfer_id": "xfer-1",
    "prefill_engine": "prefill-0",
    "prefill_control": "127.0.0.1:7100",
}
PUSH_P = {"mode": "push", "role": "prefill", "transfer_id": "xfer-1"}


def half() -> TidalScheduler:
    made = TidalScheduler(TidalConfig(), "e", BLOCK, producer=True, consumer=True)
    made.control_bound("127.0.0.1:7200")
    return made


def request(params: object, prompt: int, name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=prompt,
        prompt_token_ids=list(range(prompt)),
        num_computed_tokens=prompt,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )


def blocks(*ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def output(
    *,
    new: tuple[tuple[str, tuple[int, ...], int, int], ...] = (),
    cached: tuple[tuple[str, tuple[int, ...], int, int, bool], ...] = (),
    preempted: tuple[str, ...] = (),
) -> Any:
    scheduled = {item[0]: item[3] for item in (*new, *cached)}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, block_ids=(list(b),), num_computed_tokens=c) for r, b, c, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[item[0] for item in cached],
            new_block_ids=[(list(item[1]),) if item[1] else None for item in cached],
            num_computed_tokens=[item[2] for item in cached],
            resumed_req_ids={item[0] for item in cached if item[4]},
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=set(preempted),
    )


EMPTY = output()


def report(scheduler: TidalScheduler, **ids: set[str]) -> KVConnectorOutput:
    made = KVConnectorOutput(**ids)
    scheduler.filter_output(made)
    return made


# --- decode ---


@pytest.mark.parametrize(
    ("prompt", "computed", "expected"),
    [(1, 0, (0, False)), (2, 0, (1, True)), (16, 0, (15, True)), (17, 16, (0, False)), (33, 16, (16, True))],
)
def test_all_but_the_last_prompt_token_comes_from_outside(prompt: int, computed: int, expected: object) -> None:
    assert half().matched_tokens(request(PUSH_D, prompt), computed) == expected


def test_a_reservation_names_the_blocks_from_the_first_missing_token_on() -> None:
    scheduler, asked = half(), request(PUSH_D, 50)
    scheduler.blocks_allocated(asked, blocks(7, 3, 9, 5), 49 - 16)
    (receive,) = scheduler.build(EMPTY).receives
    assert (receive.first, receive.end, receive.pages) == (16, 49, (3, 9, 5))
    assert (receive.transfer, receive.engine, receive.control) == ("xfer-1", "prefill-0", "127.0.0.1:7100")


@pytest.mark.parametrize(("prompt", "external"), [(1, 0), (17, 0)])
def test_nothing_to_transfer_is_still_told(prompt: int, external: int) -> None:
    scheduler = half()
    scheduler.blocks_allocated(request(PUSH_D, prompt), blocks(1, 2), external)
    metadata = scheduler.build(EMPTY)
    (receive,) = metadata.receives
    assert receive.first == receive.end == prompt - 1
    assert receive.pages == ()
    assert not metadata.waiting


def test_a_request_reserves_once_however_often_vllm_schedules_it() -> None:
    scheduler, asked = half(), request(PUSH_D, 50)
    for _ in range(2):
        scheduler.blocks_allocated(asked, blocks(1, 2, 3, 4), 49)
    assert len(scheduler.build(EMPTY).receives) == 1
    assert scheduler.build(EMPTY).receives == []
    assert scheduler.matched_tokens(asked, 0) == (0, False)


def test_an_abort_is_told_and_the_request_stays_until_no_write_can_arrive() -> None:
    scheduler, asked = half(), request(PUSH_D, 50)
    scheduler.blocks_allocated(asked, blocks(1, 2, 3, 4), 49)
    scheduler.build(EMPTY)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(asked, aborted=True) == (False, None)
    metadata = scheduler.build(EMPTY)
    assert [r for r, _ in metadata.aborts] == ["r"]
    assert metadata.waiting
    assert scheduler.pending()
    assert report(scheduler, finished_recving={"r"}).finished_recving == {"r"}
    assert not scheduler.pending()


def test_fr_2_a_request_rejected_before_admission_is_declined() -> None:
    scheduler, asked = half(), request(PUSH_D, 50)
    asked.status = RequestStatus.FINISHED_ABORTED
    scheduler.finished(asked, aborted=True)
    assert scheduler.pending()
    (decline,) = scheduler.build(EMPTY).declines
    assert (decline.transfer, decline.engine, decline.control) == ("xfer-1", "prefill-0", "127.0.0.1:7100")


def test_a_request_that_ends_well_after_its_transfer_declines_nothing() -> None:
    scheduler, asked = half(), request(PUSH_D, 50)
    scheduler.blocks_allocated(asked, blocks(1, 2, 3, 4), 49)
    scheduler.build(EMPTY)
    report(scheduler, finished_recving={"r"})
    scheduler.finished(asked, aborted=False)
    metadata = scheduler.build(EMPTY)
    assert metadata.declines == []
    assert metadata.aborts == []


def test_vllm_hears_an_id_once_and_never_one_it_does_not_track() -> None:
    scheduler = half()
    scheduler.blocks_allocated(request(PUSH_D, 50), blocks(1, 2, 3, 4), 49)
    assert report(scheduler, finished_recving={"r", "ghost"}, finished_sending={"ghost"}).finished_recving == {"r"}
    again = report(scheduler, finished_recving={"r"}, finished_sending={"r"})
    assert again.finished_recving is None
    assert again.finished_sending is None


def test_both_legs_digest_the_prompt_so_that_rows_of_another_one_are_never_taken() -> None:
    def digests(ids: list[int] | None) -> tuple[str, str]:
        scheduler, sends, asks = half(), request(PUSH_P, 40, "p"), request(PUSH_D, 40, "d")
        sends.prompt_token_ids = asks.prompt_token_ids = ids
        scheduler.new_request(sends)
        scheduler.blocks_allocated(asks, blocks(1, 2, 3), 39)
        metadata = scheduler.build(output(new=(("p", (4, 8, 9), 0, 40),)))
        return chunk(metadata).prompt, metadata.receives[0].prompt

    here, there = digests([7] * 40)
    assert here == there
    assert here != digests([7] * 39 + [8])[0]
    assert digests(None) == ("", "")


# --- prefill ---


def started(prompt: int, params: object = PUSH_P) -> tuple[TidalScheduler, Any]:
    scheduler, asked = half(), request(params, prompt)
    scheduler.new_request(asked)
    return scheduler, asked


def chunk(metadata: TidalMetadata) -> SendChunk:
    (found,) = metadata.chunks
    return found


def test_fr_27_every_chunk_knows_all_blocks_so_far() -> None:
    scheduler, _ = started(50)
    first = chunk(scheduler.build(output(new=(("r", (4, 8), 0, 32),))))
    assert (first.first, first.end, first.pages, first.done) == (0, 32, (4, 8), False)
    second = chunk(scheduler.build(output(cached=(("r", (2, 6), 32, 18, False),))))
    assert (second.first, second.end, second.pages, second.done) == (32, 50, (4, 8, 2, 6), True)


def test_a_prefix_hit_is_announced_with_the_first_chunk() -> None:
    scheduler, _ = started(50)
    found = chunk(scheduler.build(output(new=(("r", (4, 8, 2, 6), 32, 18),))))
    assert (found.first, found.end) == (0, 50)


def test_decoded_tokens_are_not_part_of_the_prompt() -> None:
    scheduler, _ = started(20)
    scheduler.build(output(new=(("r", (4, 8), 0, 20),)))
    assert scheduler.build(output(cached=(("r", (), 20, 1, False),))).chunks == []


def test_a_preempted_prefill_starts_over_with_its_new_blocks() -> None:
    scheduler, _ = started(50)
    scheduler.build(output(new=(("r", (4, 8), 0, 32),)))
    assert scheduler.build(output(preempted=("r",))).preempted == ["r"]
    found = chunk(scheduler.build(output(cached=(("r", (1, 2), 16, 16, True),))))
    assert (found.first, found.end, found.pages) == (0, 32, (1, 2))


def test_pages_stay_until_the_worker_says_that_nothing_reads_them() -> None:
    scheduler, asked = started(20)
    scheduler.build(output(new=(("r", (4, 8), 0, 20),)))
    assert scheduler.finished(asked, aborted=False) == (True, None)
    (end,) = scheduler.build(EMPTY).ends
    assert (end.request, end.transfer, end.total, end.reason) == ("r", "xfer-1", 20, "")
    assert scheduler.pending()
    assert report(scheduler, finished_sending={"r"}).finished_sending == {"r"}
    assert not scheduler.pending()


def test_a_send_cannot_end_before_vllm_finished_the_request() -> None:
    scheduler, _ = started(20)
    scheduler.build(output(new=(("r", (4, 8), 0, 20),)))
    assert report(scheduler, finished_sending={"r"}).finished_sending is None


def test_an_aborted_prefill_says_why() -> None:
    scheduler, asked = started(20)
    scheduler.build(output(new=(("r", (4,), 0, 16),)))
    asked.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(asked, aborted=True) == (True, None)
    (end,) = scheduler.build(EMPTY).ends
    assert "FINISHED_ABORTED" in end.reason


def test_a_prefill_that_never_ran_holds_nothing_and_tells_its_peer() -> None:
    scheduler, asked = started(20)
    asked.status = RequestStatus.FINISHED_ABORTED
    assert scheduler.finished(asked, aborted=True) == (False, None)
    (end,) = scheduler.build(EMPTY).ends
    assert not end.scheduled
    assert not scheduler.pending()


def test_sequential_mode_returns_what_the_decode_side_needs() -> None:
    scheduler, asked = started(20, {"do_remote_decode": True})
    found = chunk(scheduler.build(output(new=(("r", (4, 8), 0, 20),))))
    assert found.hold_s == TidalConfig().control.hold_s
    held, answer = scheduler.finished(asked, aborted=False)
    assert held
    assert answer is not None
    assert answer["transfer_id"] == found.transfer
    assert (answer["remote_engine_id"], answer["remote_host"], answer["remote_port"]) == (
        "e",
        "127.0.0.1",
        7200,
    )
    other = half()
    assert other.matched_tokens(request(answer, 20, "d"), 0) == (19, True)


def test_bad_parameters_that_slip_through_never_raise_in_the_scheduler() -> None:
    scheduler, asked = half(), request({"mode": "push", "nonsense": 1}, 20)
    scheduler.new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)
    scheduler.blocks_allocated(asked, blocks(1), 0)
    assert scheduler.finished(asked, aborted=False) == (False, None)
    assert scheduler.build(EMPTY).receives == []
