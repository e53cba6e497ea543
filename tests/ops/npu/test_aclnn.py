# SPDX-License-Identifier: Apache-2.0
"""From torch tensors through ctypes and the two-phase calls to the kernels in simulation, and back in place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.standins.aclnn import StandIns, base_library, operator_library  # noqa: E402 - after torch is known
from tidal_connector.errors import DeviceFailed, DeviceMissing, NativeOpMissing  # noqa: E402
from tidal_connector.ops.npu import aclnn  # noqa: E402
from tidal_connector.ops.npu.aclnn import DataType, OperatorLibrary, TensorArgument, installed  # noqa: E402
from tidal_connector.ops.npu.arguments import GATHER_MISS_ROWS, GATHER_SELECTION_KV_CACHE  # noqa: E402
from tidal_connector.ops.npu.calls import AscendOperators, Workspaces  # noqa: E402
from tidal_connector.ops.npu.miss_rows import copy_miss_rows  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

STREAM = 0x5EA


@pytest.fixture
def standins() -> Iterator[StandIns]:
    libraries = StandIns()
    yield libraries
    assert libraries.left_over() == (0, 0)


@pytest.fixture
def operators(standins: StandIns) -> AscendOperators:
    return AscendOperators(standins.library, lambda _device: STREAM)


def rows_of(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def misses(dtype: torch.dtype = torch.bfloat16, rope: bool = True) -> dict[str, torch.Tensor]:
    """Return arguments with padding, skipped entries and lists that end early."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 9 * 16, (5, 40), dtype=torch.int32, generator=generator)
    slots = torch.randperm(5 * 128, generator=generator)[: 5 * 40].to(torch.int32).view(5, 40).contiguous()
    rows[0, 3], slots[1, 4], rows[2, 0] = -1, -1, -7
    rows[3, 20:], slots[4, :] = 1 << 30, 1 << 30  # past the count
    return {
        "selection_k_rope": torch.zeros(5, 128, 64, dtype=dtype) if rope else torch.zeros(0, dtype=dtype),
        "selection_kv_cache": torch.zeros(5, 128, 512, dtype=dtype),
        "full_k_rope": rows_of(9, 16, 64, dtype=dtype, seed=1) if rope else torch.zeros(0, dtype=dtype),
        "full_kv_cache": rows_of(9, 16, 512, dtype=dtype, seed=2),
        "miss_rows": rows,
        "miss_slots": slots,
        "miss_count": torch.tensor([40, 40, 1, 20, 0], dtype=torch.int32),
    }


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rope", [True, False])
def test_miss_rows_come_out_as_by_the_definition(
    operators: AscendOperators, standins: StandIns, dtype: torch.dtype, rope: bool
) -> None:
    given, wanted = misses(dtype, rope), misses(dtype, rope)
    before = copies(given)
    operators.gather_miss_rows(given)
    copy_miss_rows(**wanted)
    assert all(torch.equal(given[name], wanted[name]) for name in GATHER_MISS_ROWS)
    assert not torch.equal(given["selection_kv_cache"], before["selection_kv_cache"])
    assert standins.calls() == [
        "aclnnGatherMissRowsGetWorkspaceSize -> 0",
        f"aclnnGatherMissRows on stream {STREAM:#x} -> 0",
    ]


def selections(step: int, state: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Return two requests of two queries that select 40 of 300 tokens; later steps go on from a state."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.stack([torch.randperm(250, generator=generator)[:40] for _ in range(4)]).to(torch.int32)
    fresh = {
        "selection_k_rope": torch.zeros(16, 16, 64, dtype=torch.bfloat16),
        "selection_kv_cache": torch.zeros(16, 16, 512, dtype=torch.bfloat16),
        "selection_kv_block_table": torch.arange(16, dtype=torch.int32).view(4, 4).contiguous(),
        "selection_kv_block_status": torch.full((4, 1, 41), -1, dtype=torch.int32),
    }
    return {
        **(state or fresh),
        "selection_topk_indices": ids.view(4, 1, 40),
        "full_k_rope": rows_of(40, 16, 64, seed=1),
        "full_kv_cache": rows_of(40, 16, 512, seed=2),
        "full_kv_block_table": torch.arange(40, dtype=torch.int32).view(2, 20).contiguous(),
        "full_kv_actual_seq": torch.tensor([280 + step, 300 + step], dtype=torch.int32),
        "full_q_actual_seq": torch.tensor([2, 2], dtype=torch.int32),
    }


def test_a_selection_cache_goes_on_as_by_the_definition(operators: AscendOperators) -> None:
    """Three steps, each from what the last one left: data, status and lengths."""
    from tidal_connector import ops

    mine: dict[str, torch.Tensor] | None = None
    wanted: dict[str, torch.Tensor] | None = None
    for step in range(3):
        given, defined = selections(step, mine), selections(step, wanted)
        actual = operators.gather_selection_kv_cache(given, 1)
        expected = ops.gather_selection_kv_cache(*defined.values(), selection_topk_block_size=1)
        assert torch.equal(actual, expected)
        assert all(torch.equal(given[name], defined[name]) for name in GATHER_SELECTION_KV_CACHE)
        mine, wanted = ({name: each[name] for name in GATHER_SELECTION_KV_CACHE[:4]} for each in (given, defined))
    assert actual.tolist() == [40, 40, 40, 40]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.update(miss_rows=t["miss_rows"].long()), DeviceFailed, "161002 .*argument 4: dtype"),
        (lambda t: t.update(miss_rows=t["miss_rows"].double()), TypeError, "miss_rows: dtype torch.float64"),
        (lambda t: t.update(miss_slots=t["miss_slots"].t()), ValueError, "miss_slots: shape .*expected it contiguous"),
        (lambda t: t.update(miss_count=t["miss_count"].repeat(3)[1:6]), ValueError, "expected a multiple of 32 bytes"),
        (lambda t: t.update(miss_count=t["miss_count"][:4]), DeviceFailed, "561002 .*miss_count.*expected"),
        (lambda t: t["miss_rows"].__setitem__((0, 0), 144), DeviceFailed, "361001 .*miss_rows"),
        (lambda t: t.update(miss_count=t["miss_count"].to("meta")), ValueError, "expected one device"),
    ],
    ids=["dtype", "unknown dtype", "strides", "alignment", "shape", "row", "device"],
)
def test_what_cann_or_the_kernel_refuses_is_said(
    operators: AscendOperators, change: Callable[[dict[str, torch.Tensor]], None], error: type[Exception], message: str
) -> None:
    given = misses()
    change(given)
    with pytest.raises(error, match=message):
        operators.gather_miss_rows(given)


@pytest.mark.parametrize("call", ["aclnnGatherMissRowsGetWorkspaceSize", "aclnnGatherMissRows"])
def test_a_code_becomes_an_error_that_says_what_to_do(
    operators: AscendOperators, standins: StandIns, call: str
) -> None:
    standins.fail(call, 561003)
    with pytest.raises(DeviceFailed, match="no kernel was found for this chip") as caught:
        operators.gather_miss_rows(misses())
    assert (caught.value.call, caught.value.code) == (call, 561003)
    text = str(caught.value)
    assert text.startswith(f"{call} returned 561003 (")
    assert "selection_kv_cache bfloat16[5, 128, 512]" in text
    assert "ops_ascendc/build.sh" in text
    assert text.endswith(f"CANN says: {call}: planned by a test")


def test_an_operator_is_taken_from_the_package_that_has_it() -> None:
    without = str(base_library())  # as another vendor's package, which has its own operators only
    both = OperatorLibrary.open(base=str(base_library()), operators=[without, str(operator_library())])
    given, wanted = misses(), misses()
    AscendOperators(both, lambda _device: STREAM).gather_miss_rows(given)
    copy_miss_rows(**wanted)
    assert torch.equal(given["selection_kv_cache"], wanted["selection_kv_cache"])
    alone = OperatorLibrary.open(base=str(base_library()), operators=[without])
    with pytest.raises(NativeOpMissing, match=r"aclnnGatherMissRows: not in .*libnnopbase.so; build and install"):
        AscendOperators(alone, lambda _device: STREAM).gather_miss_rows(given)


def test_libraries_that_are_not_there_are_named() -> None:
    with pytest.raises(DeviceMissing, match=r"libmissing.so: .*source the set_env.sh"):
        OperatorLibrary.open(base="libmissing.so")
    with pytest.raises(NativeOpMissing, match=r"libcust_opapi.so cannot be loaded: .*nowhere.so.*ops_ascendc/build.sh"):
        OperatorLibrary.open(base=str(base_library()), operators=["nowhere.so"])
    with pytest.raises(DeviceMissing, match="has no aclCreateTensor"):
        OperatorLibrary.open(base=str(operator_library()), operators=[str(operator_library())])


def test_packages_are_looked_for_where_cann_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom, toolkit = tmp_path / "custom", tmp_path / "opp"
    wanted = [
        custom / "op_api/lib/libcust_opapi.so",
        toolkit / "vendors/customize/op_api/lib/libcust_opapi.so",
        toolkit / "vendors/other/op_api/lib/libcust_opapi.so",
    ]
    for path in wanted:
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{custom}:{tmp_path / 'gone'}")
    monkeypatch.setenv("ASCEND_OPP_PATH", str(toolkit))
    assert installed() == [*map(str, wanted), "libcust_opapi.so"]
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH")
    monkeypatch.delenv("ASCEND_OPP_PATH")
    assert installed() == ["libcust_opapi.so"]


def test_a_workspace_is_kept_for_graphs_that_remember_it() -> None:
    workspaces, device = Workspaces(), torch.device("cpu")
    small = workspaces.address(100, device, 1)
    assert workspaces.address(50, device, 1) == small
    large = workspaces.address(5000, device, 1)
    assert workspaces.address(100, device, 1) == large != small
    assert len(workspaces._kept[device, 1]) == 2
    assert workspaces.address(100, device, 2) not in (small, large)


def test_a_description_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="expected memory, got address 0"):
        TensorArgument("pool", 0, (2, 3), DataType.INT8)
    assert TensorArgument("rope", 0, (0,), DataType.INT8).shape == (0,)


def test_a_runtime_without_texts_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDAL_ASCENDCL", "missing.so")
    assert aclnn.runtime_message()() == ""
