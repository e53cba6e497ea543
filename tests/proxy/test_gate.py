# SPDX-License-Identifier: Apache-2.0
"""Nobody gets in beyond the slots, nobody waits beyond the places, and no slot is ever lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidal_connector.proxy.gate import Gate, QueueFull, WaitedInVain, retry_after


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 20))


def always() -> str:
    return "pair"


def never() -> None:
    return None


def test_a_free_slot_is_taken_at_once_and_a_full_line_refuses_at_once() -> None:
    async def story() -> None:
        gate: Gate[str] = Gate(1, 1, lambda _: None)
        assert await gate.enter(always, 5) == "pair"
        waiting = asyncio.create_task(gate.enter(always, 5))
        await asyncio.sleep(0)
        assert (gate.inside, gate.waiting) == (1, 1)
        with pytest.raises(QueueFull):
            await gate.enter(always, 5)
        gate.leave()
        assert await waiting == "pair"
        assert (gate.inside, gate.waiting) == (1, 0)

    run(story())


def test_those_in_line_go_in_the_order_in_which_they_came() -> None:
    async def story() -> None:
        gate: Gate[int] = Gate(1, 10, lambda _: None)
        await gate.enter(lambda: 0, 5)
        order: list[int] = []

        async def one(number: int) -> None:
            order.append(await gate.enter(lambda: number, 5))
            gate.leave()

        tasks = [asyncio.create_task(one(number)) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        gate.leave()
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3]
        assert (gate.inside, gate.waiting) == (0, 0)

    run(story())


def test_who_cannot_be_served_is_overtaken_and_goes_on_when_it_can() -> None:
    async def story() -> None:
        gate: Gate[str] = Gate(2, 10, lambda _: None)
        there: list[str] = []
        first = asyncio.create_task(gate.enter(lambda: there[0] if there else None, 5))
        await asyncio.sleep(0)
        assert await gate.enter(always, 5) == "pair"
        gate.wake()
        assert not first.done()
        there.append("late pair")
        gate.wake()
        assert await first == "late pair"

    run(story())


def test_waiting_is_bounded_inside_and_outside() -> None:
    async def story() -> None:
        gate: Gate[str] = Gate(1, 1, lambda _: None)
        with pytest.raises(WaitedInVain):
            await gate.enter(never, 0.02)
        assert (gate.inside, gate.waiting) == (0, 0)
        await gate.enter(always, 1)
        with pytest.raises(WaitedInVain):
            await gate.again(never, 0.02)
        assert (gate.inside, gate.waiting) == (1, 0)

    run(story())


def test_who_is_inside_goes_before_the_line_and_takes_no_second_slot() -> None:
    async def story() -> None:
        gate: Gate[str] = Gate(2, 5, lambda _: None)
        there: list[str] = []

        def take() -> str | None:
            return there.pop() if there else None

        await gate.enter(always, 5)
        line = asyncio.create_task(gate.enter(take, 5))
        again = asyncio.create_task(gate.again(take, 5))
        await asyncio.sleep(0)
        there.append("one")
        gate.wake()
        assert await again == "one"
        assert not line.done()
        assert gate.inside == 1
        line.cancel()

    run(story())


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_granted_to_somebody_who_is_gone_is_given_back(inside: bool) -> None:
    async def story() -> None:
        undone: list[str] = []
        gate: Gate[str] = Gate(2, 5, undone.append)
        there: list[str] = []
        await gate.enter(always, 5)
        wait = gate.again if inside else gate.enter
        task = asyncio.create_task(wait(lambda: there.pop() if there else None, 5))
        await asyncio.sleep(0)
        there.append("pair")
        gate.wake()
        task.cancel()  # granted in the same moment, before it could take it
        with pytest.raises(asyncio.CancelledError):
            await task
        assert undone == ["pair"]
        assert (gate.inside, gate.waiting) == (1, 0)

    run(story())


@settings(deadline=None)  # an event loop of its own for each example
@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel", "open", "shut"]), st.integers(0, 30)), max_size=60),
)
def test_slots_and_places_hold_and_come_back_whatever_happens(
    slots: int, places: int, acts: list[tuple[str, int]]
) -> None:
    async def story() -> None:
        granted = 0

        def undo(_: str) -> None:
            nonlocal granted
            granted -= 1

        gate: Gate[str] = Gate(slots, places, undo)
        is_open = True
        tasks: list[asyncio.Task[None]] = []
        leaving: list[asyncio.Event] = []

        def take() -> str | None:
            nonlocal granted
            if not is_open:
                return None
            granted += 1
            return "pair"

        async def one(leave: asyncio.Event) -> None:
            nonlocal granted
            try:
                await gate.enter(take, 10)
            except QueueFull:
                return
            try:
                await leave.wait()
            finally:
                granted -= 1
                gate.leave(0.1)

        for act, number in acts:
            if act == "come":
                leaving.append(asyncio.Event())
                tasks.append(asyncio.create_task(one(leaving[-1])))
            elif act in ("open", "shut"):
                is_open = act == "open"
                gate.wake()
            elif tasks and act == "leave":
                leaving[number % len(leaving)].set()
            elif tasks:
                tasks[number % len(tasks)].cancel()
            if number % 3:
                await asyncio.sleep(0)
            assert gate.inside <= slots
            assert gate.waiting <= places
        is_open = True
        gate.wake()
        for event in leaving:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (gate.inside, gate.waiting, granted) == (0, 0, 0)

    run(story())


@pytest.mark.parametrize(
    ("waiting", "slots", "mean_s", "expected"),
    [(0, 10, 1.0, 1), (19, 10, 4.0, 8), (10**6, 1, 30.0, 60), (0, 1, 0.0, 1)],
)
def test_the_estimate_follows_the_line_and_stays_within_a_minute(
    waiting: int, slots: int, mean_s: float, expected: int
) -> None:
    assert retry_after(waiting, slots, mean_s) == expected


def test_the_estimate_follows_what_requests_take() -> None:
    async def story() -> None:
        gate: Gate[str] = Gate(1, 5, lambda _: None)
        for _ in range(60):
            await gate.enter(always, 1)
            gate.leave(20.0)
        assert gate.retry_after_s() == 20
        await gate.enter(always, 1)
        gate.leave(None)  # what was refused says nothing
        assert gate.retry_after_s() == 20

    run(story())
