# SPDX-License-Identifier: Apache-2.0
"""The operators' host sources, compiled against a stand-in of CANN's host interface: the interface, word by word.

The stand-in is ours (fake_cann/). It shows that the sources are consistent, not that CANN takes them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ops_ascendc.build import OPERATORS, compiler

HERE = Path(__file__).parent
OPS = ("gather_selection_kv_cache", "gather_miss_rows")
ROWS = "required contiguous float16 bfloat16 int8 3 3"
NUMBERS = "required contiguous int32 int32 int32 3 3"
INTERFACE = f"""\
op GatherMissRows ascend910b ascend910_93
input selection_k_rope {ROWS}
input selection_kv_cache {ROWS}
input full_k_rope {ROWS}
input full_kv_cache {ROWS}
input miss_rows {NUMBERS}
input miss_slots {NUMBERS}
input miss_count {NUMBERS}
output selection_k_rope {ROWS}
output selection_kv_cache {ROWS}
op GatherSelectionKvCache ascend910b ascend910_93
input selection_k_rope {ROWS}
input selection_kv_cache {ROWS}
input selection_kv_block_table {NUMBERS}
input selection_kv_block_status {NUMBERS}
input selection_topk_indices {NUMBERS}
input full_k_rope {ROWS}
input full_kv_cache {ROWS}
input full_kv_block_table {NUMBERS}
input full_kv_actual_seq {NUMBERS}
input full_q_actual_seq {NUMBERS}
output selection_k_rope {ROWS}
output selection_kv_cache {ROWS}
output selection_kv_block_table {NUMBERS}
output selection_kv_block_status {NUMBERS}
output selection_kv_actual_seq {NUMBERS}
attribute selection_topk_block_size 1 64
"""


INCLUDES = [HERE / "fake_cann", *(OPERATORS / part for part in ("common/host", "common/kernel"))]
INCLUDES += [OPERATORS / op / "op_kernel" for op in OPS]
SOURCES = [path for op in OPS for path in sorted((OPERATORS / op / "op_host").glob("*.cpp"))]


def command(*more: str) -> list[str]:
    """Return how to compile the host sources; CANN's registration leaves names behind that nobody uses."""
    options = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", *(f"-I{include}" for include in INCLUDES)]
    return [compiler(), *options, *map(str, SOURCES), *more]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """What the program prints: its lines, and its complaints."""
    program = tmp_path_factory.mktemp("host") / "host_cases"
    building = command("-std=c++17", "-O0", str(HERE / "host_cases.cpp"), "-o", str(program))
    built = subprocess.run(building, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], check=True, capture_output=True, text=True, timeout=30)
    return done.stdout.splitlines(), done.stderr


def test_the_oldest_cpp_that_cann_compiles_host_sources_with() -> None:
    """CANN's own scripts compile definitions as C++11; the other sources may be built beside such ones."""
    done = subprocess.run(
        command("-std=c++11", "-pedantic", "-fsyntax-only"), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_public_interface(said: tuple[list[str], str]) -> None:
    lines = [line for line in said[0] if line.split()[0] in {"op", "input", "output", "attribute"}]
    assert "\n".join(lines) + "\n" == INTERFACE


def test_shapes_and_types_of_the_outputs(said: tuple[list[str], str]) -> None:
    assert [line for line in said[0] if line.startswith("infer")] == [
        "infer GatherSelectionKvCache 0 0 bfloat16[32,128,64,] bfloat16[32,128,512,] bfloat16[2,16,] "
        "bfloat16[2,1,2049,] int32[2,]",
        "infer GatherMissRows 0 0 bfloat16[32,128,64,] bfloat16[32,128,512,]",
    ]


def test_tiling_as_cann_calls_it(said: tuple[list[str], str]) -> None:
    """Batch scheduling where there is a barrier; and what is wrong comes as one line, with the operator's name."""
    lines, complaints = said
    tilings = [line.split() for line in lines if line.startswith("tiling")]
    workspace = [int(words[words.index("workspace") + 1]) for words in tilings]
    assert [" ".join(words[1:9]) for words in tilings] == [
        "GatherSelectionKvCache 0 key 2 blocks 40 schedule 1",
        "GatherMissRows 0 key 0 blocks 40 schedule 0",
        "GatherSelectionKvCache 1 key 0 blocks 0 schedule 0",
    ]
    assert [" ".join(words[-6:]) for words in tilings[:2]] == ["data 1 rows 2 kv 1024"] * 2
    assert workspace[0] > 2 * 3 * 4 * 2048 + 1000
    assert workspace[1] == 1000
    assert "small 1" in lines
    assert complaints.splitlines() == [
        "GatherSelectionKvCache: full_q_actual_seq: shape [3]: expected [2], one for each request",
        "GatherSelectionKvCache: no room for the tiling data",
    ]
