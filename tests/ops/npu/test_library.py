# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.tidal``: schemas, CPU and fake implementations, and what surrounds them."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.library import opcheck  # noqa: E402 - after torch is known to be there

from tests.ops.npu.test_aclnn import misses, rows_of, selections  # noqa: E402
from tidal_connector import ops  # noqa: E402
from tidal_connector.errors import DeviceMissing  # noqa: E402
from tidal_connector.ops.npu import alias, library  # noqa: E402
from tidal_connector.ops.npu.alias import alias_tensor  # noqa: E402
from tidal_connector.ops.npu.library import gather_miss_rows  # noqa: E402
from tidal_connector.ops.npu.rows import RowScatter  # noqa: E402
from tidal_connector.ops.npu.stream import SideStream  # noqa: E402


def test_both_operators_pass_torchs_own_checks() -> None:
    """Schema, fake implementation, tracing with dynamic shapes: all four of ``opcheck``."""
    passed = opcheck(torch.ops.tidal.gather_miss_rows, tuple(misses().values()))
    assert set(passed.values()) == {"SUCCESS"}
    passed = opcheck(
        torch.ops.tidal.gather_selection_kv_cache, tuple(selections(0).values()), {"selection_topk_block_size": 1}
    )
    assert set(passed.values()) == {"SUCCESS"}
    assert len(passed) == 4


def test_the_selection_operator_is_that_of_the_package() -> None:
    given, wanted = selections(0), selections(0)
    actual = torch.ops.tidal.gather_selection_kv_cache(*given.values(), selection_topk_block_size=1)
    expected = ops.gather_selection_kv_cache(*wanted.values(), selection_topk_block_size=1)
    assert torch.equal(actual, expected)
    assert all(torch.equal(given[name], wanted[name]) for name in given)


def test_miss_rows_by_a_loop() -> None:
    """The definition against the plainest possible words."""
    given, wanted = misses(), misses()
    gather_miss_rows(**given)
    for request, count in enumerate(wanted["miss_count"].tolist()):
        for entry in range(count):
            row, slot = int(wanted["miss_rows"][request, entry]), int(wanted["miss_slots"][request, entry])
            if row >= 0 and slot >= 0:
                for part in ("kv_cache", "k_rope"):
                    pool, cache = wanted[f"full_{part}"], wanted[f"selection_{part}"]
                    cache[slot // 128, slot % 128] = pool[row // 16, row % 16]
    assert all(torch.equal(given[name], wanted[name]) for name in given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("miss_rows", torch.zeros(5, 40), "miss_rows: dtype torch.float32: expected int32"),
        ("miss_slots", torch.zeros(5, 39, dtype=torch.int32), r"expected \[r, m\] twice, then \[r\]"),
        ("miss_count", torch.zeros(4, dtype=torch.int32), r"expected \[r, m\] twice, then \[r\]"),
        ("full_kv_cache", torch.zeros(9, 16, 512), "dtype torch.float32|expected torch.float32"),
        ("full_kv_cache", torch.zeros(9, 16, 500, dtype=torch.bfloat16), "with one dim"),
        ("full_k_rope", torch.zeros(9, 8, 64, dtype=torch.bfloat16), r"full_k_rope \(9, 8, 64\): expected \[9, 16\]"),
        ("selection_k_rope", torch.zeros(0, dtype=torch.bfloat16), "with one dim"),
        ("miss_rows", torch.full((5, 40), 144, dtype=torch.int32), "source_rows.* = 144: expected"),
        ("miss_count", torch.full((5,), 41, dtype=torch.int32), "miss_count: 41: expected at most 40"),
    ],
)
def test_the_definition_refuses_what_the_kernel_refuses(name: str, value: Any, message: str) -> None:
    given = {**misses(), name: value}
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        gather_miss_rows(**given)


def test_rows_are_scattered_where_there_is_a_place() -> None:
    rope, nope = torch.zeros(3, 4, 8), torch.zeros(3, 4, 16)
    new_rope, new_nope = torch.randn(5, 8), torch.randn(5, 16)
    where = torch.tensor([7, -1, 0, 11, -1], dtype=torch.int32)
    RowScatter(6, "cpu").scatter_rows(rope, nope, new_rope, new_nope, where)
    wanted_rope, wanted_nope = torch.zeros(12, 8), torch.zeros(12, 16)
    for index in (0, 2, 3):
        wanted_rope[where[index]], wanted_nope[where[index]] = new_rope[index], new_nope[index]
    assert torch.equal(rope.view(12, 8), wanted_rope)
    assert torch.equal(nope.view(12, 16), wanted_nope)
    with pytest.raises(ValueError, match="expected one length, at most 4"):
        RowScatter(4, "cpu").scatter_rows(rope, nope, new_rope, new_nope, where)


class TestAlias:
    """``alias_tensor`` over stand-ins of torch_npu's private functions, which wrap memory of the host here."""

    @pytest.fixture
    def memory(self) -> Any:
        return np.arange(4096, dtype=np.uint8)

    def at(self, memory: Any, length: int = 4096) -> SimpleNamespace:
        return SimpleNamespace(pointer=memory.ctypes.data, length=length, device=0)

    def install(self, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
        def tensor(facts: dict[str, Any], storage: Any) -> Any:
            empty = torch.empty(0, dtype=facts["dtype"], device=facts["device"])
            return empty.set_(storage, facts["storage_offset"], facts["size"], facts["stride"])

        functions = {
            "_construct_storage_from_data_pointer": torch._C._construct_storage_from_data_pointer,
            "_construct_NPU_Tensor_From_Storage_And_Metadata": tensor,
            **changed,
        }
        kept = SimpleNamespace(**{name: function for name, function in functions.items() if function is not None})
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(_C=kept, __version__="2.10.0.post4"))

    def test_it_is_the_memory_itself(self, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
        self.install(monkeypatch)
        tensor = alias_tensor(self.at(memory), (4, 8, 1, 16), torch.bfloat16, torch.device("cpu"))
        assert tensor.data_ptr() == memory.ctypes.data
        assert tensor.is_contiguous()
        tensor[3, 7, 0, 15] = 1.0
        assert memory[1022:1024].tobytes() == b"\x80\x3f"

    def test_a_tensor_beyond_the_alias_is_refused(self, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
        self.install(monkeypatch)
        with pytest.raises(ValueError, match=r"1024 bytes of torch.bfloat16: expected 1 to 1023 bytes"):
            alias_tensor(self.at(memory, 1023), (4, 8, 16), torch.bfloat16, torch.device("cpu"))
        with pytest.raises(ValueError, match="0 bytes"):
            alias_tensor(self.at(memory), (0, 8), torch.int8, torch.device("cpu"))

    def test_a_torch_npu_that_lacks_the_functions_is_named(self, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
        self.install(monkeypatch, _construct_NPU_Tensor_From_Storage_And_Metadata=None)
        with pytest.raises(DeviceMissing, match=r"2.10.0.post4: has no _C._construct_NPU_Tensor_From_Storage"):
            alias_tensor(self.at(memory), (4,), torch.int8, torch.device("cpu"))

    def test_a_torch_npu_that_copies_is_refused(self, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
        self.install(
            monkeypatch,
            _construct_NPU_Tensor_From_Storage_And_Metadata=lambda facts, _: torch.zeros(
                facts["size"], dtype=torch.int8
            ),
        )
        with pytest.raises(DeviceMissing, match=r"expected .* no copy"):
            alias_tensor(self.at(memory), (4,), torch.int8, torch.device("cpu"))

    def test_without_torch_npu_it_says_so(self, monkeypatch: pytest.MonkeyPatch, memory: Any) -> None:
        monkeypatch.setitem(sys.modules, "torch_npu", None)
        with pytest.raises(DeviceMissing, match="torch_npu cannot be imported"):
            alias_tensor(self.at(memory), (4,), torch.int8, torch.device("cpu"))
        assert alias.__doc__


class Recorder:
    """A device module as torch has one for each accelerator, which notes what streams and events are told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = "main"
        self.events = 0

    def Stream(self, device: Any) -> Any:
        return self.stream_named("side")

    def current_stream(self, device: Any) -> Any:
        return self.stream_named(self.now)

    def stream_named(self, name: str) -> Any:
        def record() -> str:
            self.events += 1
            self.log.append(f"{name} records {self.events}")
            return str(self.events)

        return SimpleNamespace(
            name=name, record_event=record, wait_event=lambda event: self.log.append(f"{name} waits for {event}")
        )

    def stream(self, which: Any) -> Any:
        recorder = self

        class Current:
            def __enter__(self) -> None:
                recorder.now = which.name

            def __exit__(self, *_: object) -> None:
                recorder.now = "main"

        return Current()


def test_the_side_waits_for_what_came_before_and_the_main_stream_for_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: recorder)
    side = SideStream(torch.device("meta"))
    with side.forked():
        recorder.log.append(f"leader on {recorder.now}")
        side.mark(3)
        recorder.log.append(f"follower on {recorder.now}")
        side.mark(4)
    assert side.unjoined == [3, 4]
    side.join(3)
    side.join(4)
    assert recorder.log == [
        "main records 1",
        "side waits for 1",
        "leader on side",
        "side records 2",
        "follower on side",
        "side records 3",
        "main waits for 2",
        "main waits for 3",
    ]
    with pytest.raises(KeyError):
        side.join(3)


def test_on_the_cpu_the_side_is_here() -> None:
    side, done = SideStream(torch.device("cpu")), []
    with side.forked():
        done.append("copied")
        side.mark(0)
    assert done == ["copied"]
    side.join(0)
    assert side.unjoined == []


def test_the_package_is_imported_without_torch() -> None:
    """Only who names ``ops.npu`` or ``selection.device`` needs torch."""
    program = "import sys, tidal_connector.ops, tidal_connector.selection.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_operators_are_defined_once() -> None:
    assert library.load_operators.cache_info().currsize == 0  # nothing of CANN is loaded by an import
    assert rows_of(2, 3).dtype == torch.bfloat16
