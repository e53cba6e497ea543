# SPDX-License-Identifier: Apache-2.0
"""gather_selection_kv_cache over random histories: judged by the bytes of the pool, and against its definition."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.selection_world import Array, Mood, Operator, Sizes, World, judge
from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import Implementation, gather_selection_kv_cache, native

REFERENCE = partial(gather_selection_kv_cache, implementation=Implementation.REFERENCE)


def implementations() -> list[object]:
    found = [pytest.param(REFERENCE, id="reference")]
    marks = [pytest.mark.native]
    try:
        native.load()
    except NativeOpMissing as error:
        marks.append(pytest.mark.skip(reason=str(error)))
    return found + [
        pytest.param(
            partial(gather_selection_kv_cache, implementation=Implementation.NATIVE, threads=threads),
            id=f"native-{threads}",
            marks=marks,
        )
        for threads in (1, 4)
    ]


every = pytest.mark.parametrize("operator", implementations())


def call_and_compare(operator: Operator, world: World) -> Array:
    """Call the operator and, on copies of the same memory, its definition; they have to agree bit for bit."""
    arguments, before = world.arguments, world.copy()
    actual, traffic = world.call(operator), world.traffic
    world.arguments = before
    defined = world.call(REFERENCE)
    assert np.array_equal(actual, defined)
    for name, array in arguments.items():
        assert np.array_equal(array, before[name]), name
    assert traffic == world.traffic
    world.arguments = arguments
    return actual


def history(operator: Operator, sizes: Sizes, seed: int, moods: list[Mood]) -> None:
    """Run a history; compare each step with the definition, and judge it."""
    world = World(sizes, seed)
    for mood in moods:
        world.advance(mood)
        before = world.copy()
        judge(world, before, call_and_compare(operator, world))


@st.composite
def sizes_of_any_kind(draw: st.DrawFn) -> Sizes:
    topk = draw(st.one_of(st.integers(1, 33), st.sampled_from([31, 32, 33, 34, 40, 65])))
    block = draw(st.sampled_from([1, 2, 64])) if topk <= 32 else 1
    quantized = draw(st.booleans())
    return Sizes(
        requests=draw(st.integers(1, 3)),
        queries=draw(st.integers(1, 4)),
        topk=topk,
        block=block,
        selection_page=draw(st.integers(1, 4)),
        full_page=draw(st.integers(1, 3)),
        longest=draw(st.sampled_from([24, 96])) * (8 if block == 64 else block),
        dtype=draw(st.sampled_from(["int8", "uint8", "int16", "uint16"])),
        kv_dim=draw(st.integers(1, 9)),
        rope_dim=None if quantized else draw(st.integers(1, 4)),
        tnd=draw(st.booleans()),
    )


@every
@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes_of_any_kind(),
    seed=st.integers(0, 2**16),
    threads=st.integers(1, 4),
    moods=st.lists(st.sampled_from(Mood), min_size=2, max_size=7),
)
def test_any_history(operator: Operator, sizes: Sizes, seed: int, threads: int, moods: list[Mood]) -> None:
    history(partial(operator, threads=threads), sizes, seed, moods)


GROW, FEW = Mood.GROW, Mood.FEW
MOODS = [GROW, FEW, GROW, Mood.REJECT, Mood.HOLES, Mood.PAUSE, FEW, Mood.REPLACE, Mood.PERMUTE, Mood.NONE, GROW, FEW]


@every
@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize(("topk", "block"), [(31, 1), (32, 1), (33, 1), (32, 2), (6, 64), (64, 1)])
def test_a_long_history(operator: Operator, queries: int, topk: int, block: int) -> None:
    sizes = Sizes(requests=3, queries=queries, topk=topk, block=block, longest=12 * max(block, 8), tnd=queries == 2)
    history(operator, sizes, seed=topk, moods=MOODS)


@every
@pytest.mark.parametrize(
    ("dtype", "kv_dim", "rope_dim", "topk", "block"),
    [
        ("uint16", 512, 64, 256, 1),  # V3.2 in bfloat16
        ("int8", 656, None, 256, 1),  # V3.2 in int8, scales and rope in the row
        ("int16", 512, None, 256, 1),  # V4 in bfloat16
        ("uint8", 584, None, 4, 64),  # V4 in fp8
        ("uint16", 512, 64, 4, 64),
    ],
)
def test_rows_of_real_models(
    operator: Operator, dtype: str, kv_dim: int, rope_dim: int | None, topk: int, block: int
) -> None:
    sizes = Sizes(
        2, 2, topk, block, selection_page=128 // block, full_page=128 // block, longest=512, dtype=dtype,
        kv_dim=kv_dim, rope_dim=rope_dim,
    )  # fmt: skip
    history(operator, sizes, seed=3, moods=[GROW, GROW, Mood.REJECT, FEW, GROW])


@every
def test_one_request_whose_misses_are_enough_for_all_threads(operator: Operator) -> None:
    history(operator, Sizes(1, 1, 2048, 1, selection_page=128, full_page=128, longest=8192), 1, [GROW, GROW, FEW])


@every
def test_a_second_call_reads_only_what_was_not_selected_before(operator: Operator) -> None:
    world = World(Sizes(requests=1, topk=40, longest=4096, full_page=64))
    world.lengths[0] = 4000
    world.advance(GROW)
    ids = world.arguments["selection_topk_indices"].reshape(-1)
    for first, misses in ((0, 40), (0, 0), (10, 10), (50, 40), (89, 39)):
        ids[:] = np.arange(first, first + 40)
        before = world.copy()
        judge(world, before, world.call(operator))
        assert world.traffic.fetched == world.traffic.fetched_rows == misses
        assert world.traffic.fetched_bytes == misses * world.sizes.row_bytes


@every
def test_ids_that_a_float_cannot_tell_apart(operator: Operator) -> None:
    """From 2^24 on, neighbours are one number in float32."""
    world = World(Sizes(requests=1, topk=40, longest=64))
    big, table = 1 << 24, np.zeros((1, (1 << 23) + 64), np.int32)
    table[0, big // 2 :] = np.arange(64) % len(world.arguments["full_kv_cache"])
    world.arguments["full_kv_block_table"] = table
    world.arguments["full_kv_actual_seq"][:] = big + 100
    ids = world.arguments["selection_topk_indices"].reshape(-1)
    for shift in (0, 1):
        ids[:] = np.arange(big + shift, big + shift + 40)
        world.call(operator)
        assert world.traffic.fetched == (40 if shift == 0 else 1)
        pages, table_row = world.arguments["full_kv_cache"], world.arguments["selection_kv_block_table"][0]
        for slot, x in enumerate(world.status[0, :40]):
            assert np.array_equal(
                world.arguments["selection_kv_cache"][table_row[slot], 0], pages[table[0, x // 2], x % 2]
            )


@every
@pytest.mark.parametrize(("topk", "block"), [(8, 2), (40, 1)])
def test_an_id_given_twice_is_held_twice(operator: Operator, topk: int, block: int) -> None:
    sizes = Sizes(requests=1, topk=topk, block=block, longest=96)
    world = World(sizes)
    world.lengths[0] = 90
    world.advance(GROW)
    ids = world.arguments["selection_topk_indices"].reshape(-1)
    ids[:] = -1
    ids[:4] = [3, 5, 3, 7]
    for misses in (4, 0):
        assert call_and_compare(operator, world)[0] == 4 * block
        assert sorted(world.status[0, :4]) == [3, 3, 5, 7]
        # The second time one of the copies is found, and the other is fetched into its slot again.
        assert world.traffic.fetched == (misses or 1)
    ids[2:4] = -1
    assert call_and_compare(operator, world)[0] == 2 * block
    assert (world.traffic.fetched, world.traffic.moved) == (0, 0)  # of two copies, the first is the one that counts


@every
def test_garbage_in_status_is_no_hit(operator: Operator) -> None:
    for topk, block in ((6, 2), (40, 1)):
        world = World(Sizes(topk=topk, block=block))
        world.lengths[:] = 40
        world.advance(GROW)
        status = world.status
        status[:] = np.random.default_rng(1).choice([-(2**31), -7, 2**31 - 1, 1 << 24], status.shape)
        before = world.copy()
        judge(world, before, world.call(operator))
        assert world.traffic.hits == 0


@every
def test_gaps_between_pages_and_tokens_stay_as_they_are(operator: Operator) -> None:
    """One layer of a pool in which the layers of a page lie beside one another."""
    world = World(Sizes(topk=40, full_page=4))
    wide = {}
    for name in ("selection_kv_cache", "selection_k_rope", "full_kv_cache", "full_k_rope"):
        cache = world.arguments[name]
        wide[name] = np.full((cache.shape[0], 2, cache.shape[1] + 1, cache.shape[2] + 3), 0xAB, cache.dtype)
        inner = wide[name][:, 1, :-1, :-3]
        inner[:] = cache
        world.arguments[name] = inner
    world.advance(GROW)
    before = world.copy()
    judge(world, before, world.call(operator))
    for array in wide.values():
        assert (array[:, 0] == 0xAB).all()
        assert (array[:, 1, -1:] == 0xAB).all()
        assert (array[:, 1, :, -3:] == 0xAB).all()


@every
def test_torch_tensors_are_used_in_place(operator: Operator) -> None:
    torch = pytest.importorskip("torch")
    world = World(Sizes(topk=40, dtype="int16"))
    world.advance(GROW)
    before, arrays = world.copy(), dict(world.arguments)
    for name, array in arrays.items():
        tensor = torch.from_numpy(array)
        world.arguments[name] = tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor
    actual = world.call(operator)
    world.arguments = arrays
    assert isinstance(actual, torch.Tensor)
    judge(world, before, actual.numpy())
    world.arguments = {name: torch.from_numpy(array).to("meta") for name, array in arrays.items()}
    with pytest.raises(TypeError, match="selection_k_rope: a tensor on meta: expected one on the CPU"):
        world.call(operator)
    world.arguments = {**arrays, "full_kv_cache": torch.from_numpy(arrays["full_kv_cache"]).view(torch.float8_e5m2)}
    with pytest.raises(TypeError, match=r"full_kv_cache: dtype torch.float8_e5m2: expected one that numpy has"):
        world.call(operator)


@pytest.mark.native
def test_requests_of_different_caches_may_be_served_at_once() -> None:
    worlds = [
        World(Sizes(requests=4, topk=512, longest=2048, full_page=64, selection_page=64), seed) for seed in range(4)
    ]
    earlier, actuals = [], {}
    for world in worlds:
        world.advance(GROW)
        earlier.append(world.copy())

    def serve(at: int) -> None:
        actuals[at] = worlds[at].call(gather_selection_kv_cache, implementation=Implementation.NATIVE, threads=2)

    workers = [threading.Thread(target=serve, args=(at,)) for at in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for at, world in enumerate(worlds):
        judge(world, earlier[at], actuals[at])
