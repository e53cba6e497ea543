# SPDX-License-Identifier: Apache-2.0
"""``tidal selftest npu`` from the command line to the exit status, on simulated kernels and a stand-in for ACL.

A fault that is put into the device must end it with 1 and a line that says where.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.arch.source import ROOT
from tests.cli.machines import write
from tests.cli.selftest.simulated import SimulatedDevice
from tests.standins.aclnn import StandIns
from tests.standins.ascendcl import Standin
from tests.standins.build import ascendcl
from tidal_connector.cli.main import app
from tidal_connector.cli.selftest import command, npu, operators, run
from tidal_connector.cli.selftest.npu import engine_needs
from tidal_connector.cli.selftest.report import AnswerCase
from tidal_connector.cli.selftest.run import SelfTestOptions, run_selftest
from tidal_connector.errors import TidalError
from tidal_connector.memory.acl import AclRuntime

QUICK = ("selftest", "npu", "--quick", "--pool", "16MiB")


@pytest.fixture
def standin() -> Iterator[Standin]:
    """The stand-in for libascendcl; nothing may stay registered in it, and no rule be broken."""
    found = Standin(ascendcl())
    yield found
    assert (found.registrations, found.violations()) == (0, [])


@pytest.fixture
def make(standin: Standin) -> Iterator[Callable[..., SimulatedDevice]]:
    """Makes the simulated device, of a class with a fault if one is given."""
    operators = StandIns()
    yield lambda kind=SimulatedDevice: kind(operators, AclRuntime.open(standin.path))
    assert operators.left_over() == (0, 0)


@pytest.fixture
def tidal(make: Callable[..., SimulatedDevice], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command on a simulated device."""

    def call(*arguments: str, kind: type[SimulatedDevice] = SimulatedDevice) -> Any:
        monkeypatch.setattr(command, "_open", lambda _: make(kind))
        return CliRunner().invoke(app, [*QUICK, *arguments], env={"COLUMNS": "200"})

    return call


class WrongRow(SimulatedDevice):
    """One element of one gathered row is wrong, in the last of several calls."""

    calls = 0

    def gather_selection(self, arguments: dict[str, Any], block: int) -> Any:
        actual = super().gather_selection(arguments, block)
        self.calls += 1
        if self.calls == 5:
            page = int(arguments["selection_kv_block_table"][0, 0])
            arguments["selection_kv_cache"][page, 3, 7] += 1
        return actual


class WrongStatus(SimulatedDevice):
    """A slot's id is not noted down."""

    def gather_selection(self, arguments: dict[str, Any], block: int) -> Any:
        actual = super().gather_selection(arguments, block)
        arguments["selection_kv_block_status"][0, 0, 0, 0] = -1
        return actual


class WritesItsInput(SimulatedDevice):
    """An argument that is only read is written."""

    def gather_miss_rows(self, *tensors: Any) -> None:
        super().gather_miss_rows(*tensors)
        tensors[3][-1, -1, -1] += 1


class Skips(SimulatedDevice):
    """The last row of every list is left out, as an operator does that counts wrongly."""

    def gather_miss_rows(self, *tensors: Any) -> None:
        super().gather_miss_rows(*tensors[:-1], tensors[-1] - 1)


class BeyondThePool(SimulatedDevice):
    """A list names a row that the pool does not have: the kernel's own check stops it."""

    def gather_miss_rows(self, *tensors: Any) -> None:
        tensors[4][0, 0] = 1 << 30
        super().gather_miss_rows(*tensors)


class Hangs(SimulatedDevice):
    """A call does not come back before the test is over."""

    ever = threading.Event()

    def finish(self) -> None:
        self.ever.wait(20)


def test_all_is_well_on_a_simulated_device(tidal: Callable[..., Any], tmp_path: Path) -> None:
    done = tidal("--only", "operators", "--only", "bandwidth", "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done.output
    assert "passed: operators, bandwidth on a simulated NPU" in done.output
    found = json.loads((tmp_path / "found.json").read_text())
    cases = {(case["operator"], case["case"]): case for case in found["operators"]}
    assert {case["wrong"] for case in found["operators"]} == {""}
    real = cases["GatherSelectionKvCache", "K 2048, 512 + 64"]
    assert min(real["hits"], real["misses"]) > 500
    assert real["bytes"] == real["misses"] * 1152
    assert all(case["hits"] and case["misses"] for key, case in cases.items() if key[0] == "GatherSelectionKvCache")
    assert [(case["lists"], case["rows"], case["wrong"]) for case in found["bandwidth"]] == [
        (1, 512, 0),
        (1, 2048, 0),
    ]
    assert all(case["gather_gb_s"] > 0 and case["copy_gb_s"] > 0 for case in found["bandwidth"])
    assert found["pool"].startswith("registered with NPU 0: 1 x ")
    assert found["machine"]["versions"]


# The device's fault, the part that has to find it, and words of what is said.
FAULTS = {
    "a wrong row": (WrongRow, "operators", "GatherSelectionKvCache, tokens: call 5: selection_kv_cache["),
    "a status that is not written": (WrongStatus, "operators", "call 1: selection_kv_block_status[0, 0, 0, 0] is -1"),
    "an input that is written": (WritesItsInput, "operators", "differ, which is only read"),
    "rows that are left out": (Skips, "operators", "GatherMissRows, one list: selection_k"),
    "rows that do not arrive from the pool": (Skips, "bandwidth", "1 of 512 rows did not arrive"),
    "a kernel that is stopped": (BeyondThePool, "bandwidth", "miss_rows: row 1073741824: expected one below"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_device_is_found(fault: str, tidal: Callable[..., Any]) -> None:
    kind, part, words = FAULTS[fault]
    done = tidal("--only", part, kind=kind)
    assert done.exit_code == 1, done.output
    assert words in " ".join(done.output.split())
    assert f"failed: {part} on a simulated NPU" in done.output


def test_a_device_that_hangs_is_given_up_and_not_asked_again(
    make: Callable[..., SimulatedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(operators, "CALL_S", 0.2)
    monkeypatch.setattr(Hangs, "ever", threading.Event())
    found = run_selftest(SelfTestOptions(quick=True, pool="16MiB"), lambda: make(Hangs), Console(quiet=True))
    errors = [part.error for part in found.parts]
    Hangs.ever.set()
    assert (found.stuck, found.passed) == (True, False)
    assert errors[0].startswith("tokens, call 1: no answer from the device within 0.2 s; look at npu-smi info")
    assert all("not tried" in error for error in errors[1:])


def test_the_process_is_left_without_waiting_for_a_device_that_hangs(
    tidal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left: list[int] = []
    monkeypatch.setattr(operators, "CALL_S", 0.2)
    monkeypatch.setattr(Hangs, "ever", threading.Event())
    monkeypatch.setattr(command, "_leave", left.append)
    tidal("--only", "operators", "--json", str(tmp_path / "found.json"), kind=Hangs)
    Hangs.ever.set()
    assert left == [1]
    assert json.loads((tmp_path / "found.json").read_text())["stuck"] is True


def test_answers_that_differ_too_much_are_a_fault(tidal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(*_: Any) -> tuple[list[AnswerCase], int]:
        return [AnswerCase(17, 1, True, 0.001), AnswerCase(300, 4, False, 0.5)], 0

    monkeypatch.setattr(run, "compare_answers", answers)
    done = tidal("--only", "answers")
    assert done.exit_code == 1
    assert "1 of 2 answers differ" in done.output
    assert "logprobs differ by up to 0.5, more than 0.02" in done.output
    assert "fetched no row from it, so the comparison proves nothing" in done.output


def test_an_engine_that_does_not_start_ends_that_part_alone(
    tidal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(*_: Any) -> tuple[list[AnswerCase], int]:
        raise TidalError("latents-in-the-pool ended before it served")

    monkeypatch.setattr(run, "compare_answers", answers)
    done = tidal("--only", "answers", "--only", "operators")
    assert done.exit_code == 1
    assert "not done: answers: TidalError: latents-in-the-pool ended before it served" in done.output
    assert "DIFFERENT" not in done.output


def test_a_machine_without_an_npu_is_told_what_is_missing() -> None:
    done = CliRunner().invoke(app, [*QUICK])
    assert done.exit_code == 2
    assert done.stderr.startswith("tidal: torch_npu cannot be imported: ")
    assert "install vllm-ascend and source the set_env.sh" in done.stderr


def told_beside(folder: Path, files: dict[str, str]) -> str:
    """The one line of error with which a selftest ends that finds these files before what is installed."""
    write(folder, files)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-m", "tidal_connector.cli", "selftest", "npu"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_a_python_without_torch_is_told_what_to_install(tmp_path: Path) -> None:
    error = "ModuleNotFoundError(\"No module named 'torch'\", name='torch')"  # as the import itself says it
    line = told_beside(tmp_path, {"torch/__init__.py": f"raise {error}"})
    assert line.startswith(f"tidal: No module named 'torch': {sys.executable} is not the Python of an engine; install")
    assert "vllm-ascend" in line
    assert "set_env.sh" not in line


def test_cann_that_was_not_sourced_is_a_line_and_no_traceback(tmp_path: Path) -> None:
    """torch loads torch_npu by itself, and then cannot be imported either."""
    line = told_beside(
        tmp_path,
        {
            "torch_npu/__init__.py": "raise ImportError('libhccl.so: cannot open shared object file')",
            "torch_npu-2.10.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.10.0\n",
            "torch_npu-2.10.0.dist-info/entry_points.txt": "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
        },
    )
    assert line.startswith("tidal: torch cannot be imported: ")
    assert line.endswith("source the set_env.sh of the CANN toolkit")


class Module:
    """torch_npu's part of torch, on a machine of one NPU that somebody else holds."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, _: int) -> None:
        raise RuntimeError("SetDevice:\n[ERROR] 507033 device 0 is occupied")


@pytest.mark.parametrize(
    ("index", "words"), [(0, "NPU 0 cannot be opened: SetDevice: [ERROR] 507033"), (1, "NPU 1: torch_npu sees 1; look")]
)
def test_an_npu_that_cannot_be_opened_is_named(index: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(npu.torch, "get_device_module", lambda _: Module())
    done = CliRunner().invoke(app, [*QUICK, "--device", str(index)])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "speed"), "--only speed: expected operators, bandwidth, answers"),
        (("--pool", "4GB"), "--pool = '4GB'"),
        (("--pool", "1MiB"), "--pool 1MiB: expected at least 2359296 bytes, the rows of one call"),
        (("--json", "/nowhere/x.json"), "expected a file in a folder that exists"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_opened(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_open", lambda _: pytest.fail("opened"))
    done = CliRunner().invoke(app, [*QUICK, *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.e2e
@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_an_engine_with_the_pool_answers_as_one_without(tidal: Callable[..., Any], tmp_path: Path) -> None:
    """Two engines of the CPU backend, one after the other, through the same code that starts them on an NPU."""
    done = tidal("--only", "answers", "--engine-pool", "64MiB", "--json", str(tmp_path / "found.json"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(case["length"], case["at_once"]) for case in found["answers"]] == [(17, 1), (300, 1), (17, 4), (300, 4)]
    assert all(case["tokens_equal"] for case in found["answers"])
    assert found["rows_fetched"] > 1000
    assert max(case["logprob_diff"] for case in found["answers"]) < found["logprob_bound"] == 0.02


def test_numpy_is_as_wide_as_the_elements() -> None:
    from tidal_connector.cli.selftest.sequences import miss_cases, selection_cases

    widths = {"bfloat16": 2, "float16": 2, "int8": 1}
    assert all(np.dtype(case.element).itemsize == widths[case.dtype] for case in (*selection_cases(), *miss_cases()))


@pytest.mark.parametrize(
    ("index", "visible", "wanted"), [(0, None, "0"), (3, None, "3"), (0, "4,5", "4"), (1, "4, 5", "5"), (0, "", "0")]
)
def test_engines_run_on_the_npu_that_is_tested(index: int, visible: str | None, wanted: str) -> None:
    environment = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    needs = engine_needs(index, environment)
    assert needs.environment == {"ASCEND_RT_VISIBLE_DEVICES": wanted}
    assert (needs.dtype, needs.block_size, needs.topk) == ("bfloat16", 128, 2048)
