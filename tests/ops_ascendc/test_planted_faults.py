# SPDX-License-Identifier: Apache-2.0
"""The bed sees each fault that the kernels could have: one line of their text is changed, compiled, and has to fail.

A fault says what the simulation or the comparison is expected to complain about, so that none is caught by accident.
All of them take some 25 s on two cores: unoptimised, and the simulation's headers are compiled once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.ops_ascendc.build import KERNELS, OPERATORS, QUICK, build, link, precompiled
from tests.ops_ascendc.tally import Tally

pytestmark = pytest.mark.timeout(300)  # half a minute of compiling in all; each test waits for its own library
ENTRY, MISSES = KERNELS
SYNC = Path("common/kernel/tidal_sync.h")
LISTS = Path("common/kernel/tidal_row_lists.h")
COPIER = Path("common/kernel/tidal_row_copier.h")
MEMORY = ENTRY.with_name("tidal_plan_memory.h")
PLANNER = ENTRY.with_name("tidal_row_planner.h")
HELD = ENTRY.with_name("tidal_held_slots.h")
COMMIT = ENTRY.with_name("tidal_row_commit.h")


@dataclass(frozen=True)
class Fault:
    """Text that stands once in a file, what stands there instead, the complaint, and the kernel that is compiled."""

    name: str
    file: Path
    text: str
    instead: str
    said: str
    kernel: Path = ENTRY


# What the comparison with the definition says, and the simulation of pipes and of caches.
DIFFERENT = r"^AssertionError: (?!core)"
UNORDERED = r"core \d+: .*: .*HardEvent::"
EITHER = r"^(AssertionError: (?!core)|Stopped: core \d+: .*buffer ')"
OUT_OF = r"buffer '{}' offset .* leave the buffer"
RACE = r"was written|SyncAll|barriers: expected 1|leave the buffer|differs|instead of"  # whatever comes first
WAIT = "Handshake<AscendC::HardEvent::{}>();"
FAULTS = [
    Fault("no SyncAll", ENTRY, "  AscendC::SyncAll<true>();\n", "", RACE),
    Fault("no cleaning of a head's line", MEMORY, "AscendC::DataCacheCleanAndInvalid<int32_t, "
          "AscendC::CacheLine::SINGLE_CACHE_LINE,\n                                      "
          "AscendC::DcciDst::CACHELINE_OUT>(gm_heads_[at]);", "", "DataCacheCleanAndInvalid is missing"),
    Fault("no wait for a row's arrays", MEMORY, WAIT.format("MTE2_S"), "", UNORDERED + "MTE2_S"),
    Fault("no wait for a plan before it leaves", MEMORY, WAIT.format("S_MTE3"), "", UNORDERED + "S_MTE3"),
    Fault("no wait until a plan has left", MEMORY, WAIT.format("MTE3_S"), "", UNORDERED + "MTE3_S"),
    Fault("no wait before the next row's arrays", MEMORY, WAIT.format("S_MTE2"), "", UNORDERED + "S_MTE2"),
    Fault("no wait for a status", COMMIT, WAIT.format("MTE2_MTE3"), "", UNORDERED + "MTE2_MTE3"),
    Fault("no wait for a length", COMMIT, WAIT.format("S_MTE3"), "", UNORDERED + "S_MTE3"),
    Fault("no wait before the next length", COMMIT, WAIT.format("MTE3_S"), "", UNORDERED + "MTE3_"),
    Fault("no wait for a list", LISTS, "tokens_[at], entries);\n    " + WAIT.format("MTE2_S"),
          "tokens_[at], entries);", UNORDERED + "MTE2_S"),
    Fault("no wait before the next list", LISTS, "first = end;\n      " + WAIT.format("S_MTE2"), "first = end;",
          UNORDERED + "S_MTE2", MISSES),
    Fault("no wait before the next counts", LISTS, "count_tile_ = tile;\n      " + WAIT.format("S_MTE2"),
          "count_tile_ = tile;", UNORDERED + "S_MTE2", MISSES),
    Fault("a flag that nobody waits for", SYNC, "  WaitFlag<kEvent>(id);\n", "", UNORDERED, MISSES),
    Fault("no freeing of a buffer", COPIER, "queue_.FreeTensor(buffer_);", "", "FreeTensor is missing", MISSES),
    Fault("a buffer used before its data came", COPIER, "    buffer_ = queue_.DeQue<int8_t>();\n", "", "DeQue", MISSES),
    Fault("no check of a selection page", PLANNER, "page >= 0 && page < tiling_.selection_blocks", "true",
          OUT_OF.format("selection_kv_cache")),
    Fault("no check of the pool's end", PLANNER, "page >= 0 && page < tiling_.full_blocks", "page >= 0",
          OUT_OF.format("full_kv_cache")),
    Fault("no check of a given row", LISTS, "whole.source < tiling_.full_rows", "true",
          OUT_OF.format("full_kv_cache"), MISSES),
    Fault("no check of a given count", LISTS, "ASSERT_MSG(count <= pitch_,", "ASSERT_MSG(true,",
          OUT_OF.format("miss_rows"), MISSES),
    Fault("a whole block for the tail", PLANNER,
          "return Smaller(tiling_.copy.block, length_ - id * tiling_.copy.block);", "return tiling_.copy.block;",
          EITHER),
    Fault("a rewritten draft is trusted", PLANNER, "* block > stable_)", "* block > stable_ + 1)", DIFFERENT),
    Fault("the old tail is trusted", PLANNER, "kByBlocks ? memory_.status.GetValue(topk) / block : topk", "topk",
          DIFFERENT),
    Fault("a row stands for its request", PLANNER, "request_ = row / tiling_.queries;", "request_ = row;", EITHER),
    Fault("ids as floats", HELD, "const int32_t id = status_.GetValue(slot);",
          "const int32_t id = static_cast<float>(status_.GetValue(slot));", DIFFERENT),
    Fault("an exchange one after the other", COPIER,
          "      if (b.tokens > 0) Load(1, b);\n      Turn();\n      if (a.tokens > 0) Store(0, a);",
          "      Turn();\n      if (a.tokens > 0) Store(0, a);\n      End();\n      Begin();\n"
          "      if (b.tokens > 0) Load(1, b);\n      Turn();", DIFFERENT + "|HardEvent"),
    Fault("hits are read from the pool, too", PLANNER, "return origin >= 0 ? ", "return false ? ", DIFFERENT),
    Fault("rows past the batch keep their length", COMMIT, "    int32_t held = 0;\n",
          "    int32_t held = 0;\n    if (row >= tiling_.rows) return;\n", DIFFERENT),
]  # fmt: skip


@dataclass(frozen=True)
class Bed:
    """Objects of the sources as they are, and those with a fault, which are being made."""

    library: Path
    faulty: dict[str, Future[Path]]


def plant(fault: Fault, folder: Path, objects: Path, flags: tuple[str, ...] = QUICK) -> Path:
    """Return the library in which one text of the kernels is another.

    Raises:
        ValueError: the text does not stand exactly once in its file.
    """
    copy = folder / "ops_ascendc"
    for part in ("common/kernel", str(ENTRY.parent), str(MISSES.parent)):
        shutil.copytree(OPERATORS / part, copy / part)
    text = (copy / fault.file).read_text()
    if text.count(fault.text) != 1:
        raise ValueError(f"{fault.file}: {fault.text!r} stands {text.count(fault.text)} times: expected once")
    (copy / fault.file).write_text(text.replace(fault.text, fault.instead))
    return link(folder, flags, copy, [fault.kernel], objects)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Bed]:
    """All faults that were asked for, compiled two at a time while the first ones run."""
    folder = tmp_path_factory.mktemp("faults")
    flags = precompiled(folder / "header", QUICK)
    library = build(folder / "honest", flags)
    wanted = {_fault(item) for item in request.session.items}
    with ThreadPoolExecutor(2) as workers:
        yield Bed(
            library,
            {
                fault.name: workers.submit(plant, fault, folder / f"fault-{number}", folder / "honest", flags)
                for number, fault in enumerate(FAULTS)
                if fault in wanted
            },
        )
        workers.shutdown(cancel_futures=True)


def _fault(item: pytest.Item) -> Fault | None:
    callspec = getattr(item, "callspec", None)  # only where a test has parameters
    return callspec.params.get("fault") if callspec else None


def battery(library: Path) -> tuple[int, str]:
    """Return the exit status and the last line of the battery."""
    command = [sys.executable, "-m", "tests.ops_ascendc.battery", str(library), "6"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=200)
    return done.returncode, (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]


def test_without_a_fault_the_battery_passes(bed: Bed) -> None:
    status, said = battery(bed.library)
    assert (status, said.endswith("steps passed")) == (0, True), said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(bed: Bed, tally: Tally, fault: Fault) -> None:
    status, said = battery(bed.faulty[fault.name].result(200))
    assert status == 1, said
    assert re.search(fault.said, said), said
    tally.faults.append(fault.name)


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """So that no fault is planted in vain once the kernels have changed."""
    with pytest.raises(ValueError, match="stands 0 times: expected once"):
        plant(Fault("no such text", SYNC, "PipeBarrier<PIPE_V>", "", ""), tmp_path, tmp_path)
