# SPDX-License-Identifier: Apache-2.0
"""build.sh of the operators: its refusals, and what it asks of CANN. CANN itself is a stand-in (fake_cann/)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops_ascendc.build import OPERATORS

HERE = Path(__file__).parent
OPS = {"GatherSelectionKvCache": "gather_selection_kv_cache", "GatherMissRows": "gather_miss_rows"}


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """A folder in which CANN seems to be installed, its compiler in bin/."""
    home = tmp_path / "cann"
    modules = home / "compiler/tikcpp/ascendc_kernel_cmake"
    modules.mkdir(parents=True)
    shutil.copy(HERE / "fake_cann/ASCConfig.cmake", modules)
    for tool in ("tools/opbuild/op_build", "bin/bisheng"):
        (home / tool).parent.mkdir(parents=True, exist_ok=True)
        (home / tool).write_text("#!/bin/sh\nexit 0\n")
        (home / tool).chmod(0o755)
    return home


def run(tmp_path: Path, *arguments: str, path: str = "", script: Path = OPERATORS / "build.sh") -> tuple[int, str]:
    """Return the exit status and all that was said."""
    environment = {"PATH": f"{path}:{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"TIDAL_RECORD": str(tmp_path / "record"), "TIDAL_STUBS": str(HERE / "fake_cann")}
    done = subprocess.run(
        ["bash", str(script), *arguments], check=False, capture_output=True, text=True, env=environment, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["-n", "gather_everything", "-c", "ascend910b"],
            "unknown operator 'gather_everything': expected one of gather_",
        ),
        (["-n", "gather_miss_rows;x", "-c", "ascend910b"], "unknown operator 'x'"),
        (["-n", "gather_miss_rows"], "no SoC: say -c ascend910b (A2) or -c ascend910_93 (A3)"),
        (["-c", "ascend310p"], "unknown SoC 'ascend310p': expected one of ascend910b ascend910_93"),
        (["-c", "ascend910b"], "no CANN: say -p PATH, or source CANN's set_env.sh"),
        (["-c", "ascend910b", "-p", "/no/such/cann"], "no CANN in /no/such/cann: there is no such folder"),
        (["-c", "ascend910b", "-p", "/usr"], "no CANN in /usr: tools/opbuild/op_build is missing"),
        (["-c"], "-c: expected a value behind it"),
        (["--fast"], "unknown option --fast: build.sh --help lists them"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    status, words = run(tmp_path, *arguments)
    assert status == 1
    assert words.startswith(f"build.sh: {said}")
    assert words.count("\n") == 1


def test_without_the_compiler(tmp_path: Path, cann: Path) -> None:
    status, words = run(tmp_path, "-c", "ascend910b", "-p", str(cann))
    assert status == 1
    assert words.startswith("build.sh: bisheng, the compiler of CANN, is not on PATH: source the set_env.sh beside")


def test_help(tmp_path: Path) -> None:
    status, words = run(tmp_path, "--help")
    assert status == 0
    for option in ("--op-name", "--compute-unit", "--package-path", "--build", "--ops-compile-options", "--verbose"):
        assert option in words
    assert "set -euo" not in words


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script in a copy of the operators' folder, so that a test leaves nothing in the project."""
    copy = tmp_path / "ops_ascendc"
    shutil.copytree(OPERATORS, copy, ignore=shutil.ignore_patterns("sim", "harness", "build", "out"))
    assert os.stat(copy / "build.sh").st_mode & stat.S_IXUSR
    return copy / "build.sh"


def test_a_whole_build(tmp_path: Path, cann: Path, script: Path) -> None:
    arguments = ["-n", "gather_selection_kv_cache;gather_miss_rows", "-c", "ascend910_93", "-p", str(cann)]
    status, words = run(tmp_path, *arguments, path=str(cann / "bin"), script=script)
    assert status == 0, words
    (package,) = (script.parent / "out").glob("CANN-custom_ops-ascend910_93-linux.*.run")
    assert package.stat().st_mode & stat.S_IXUSR
    calls = dict[str, list[str]]()
    for line in (tmp_path / "record").read_text().splitlines():
        name, _, rest = line.replace(str(script.parent), ".").partition(";" if ";" in line else " ")
        calls.setdefault(name, []).append(rest)
    build = "./build/ascend910_93"
    assert calls["home"] == [str(cann)]
    assert calls["npu_op_package"][0].startswith("customize;TYPE;RUN;")
    definitions = [f"./{op}/op_host/{op}_def.cpp" for op in OPS.values()]
    assert calls["npu_op_code_gen"][0].startswith(f"SRC;{';'.join(definitions)};PACKAGE;customize;")
    assert "OPS_PROJECT_NAME;aclnn" in calls["npu_op_code_gen"][0]
    assert calls["npu_op_library"] == [
        f"cust_opapi;ACLNN;{build}/autogen/aclnn_made.cpp",
        "cust_optiling;TILING;" + ";".join(path.replace("_def", "_tiling") for path in definitions),
        "cust_opproto;GRAPH;"
        + ";".join(path.replace("_def", "_proto") for path in definitions)
        + f";{build}/autogen/op_proto.cc",
    ]
    assert [call.split(";")[:4] for call in calls["npu_op_kernel_options"]] == [
        ["ascendc_kernels", kind, "OPTIONS", "--cce-auto-sync=off"] for kind in OPS
    ]
    assert calls["npu_op_kernel_sources"] == [
        f"ascendc_kernels;OP_TYPE;{kind};KERNEL_DIR;{op};KERNEL_FILE;{op}.cpp"
        for kind, op in (
            ("GatherSelectionKvCache", "gather_selection_kv_cache"),
            ("GatherMissRows", "gather_miss_rows"),
        )
    ]
    assert calls["npu_op_kernel_library"] == [
        f"ascendc_kernels;SRC_BASE;{build}/op_kernel;TILING_LIBRARY;cust_optiling"
    ]
    # Each kernel's folder is complete: whatever it includes with quotes lies beside it, but for CANN's own header.
    for op in OPS.values():
        folder = script.parent / "build/ascend910_93/op_kernel" / op
        included = {
            line.split('"')[1]
            for path in folder.iterdir()
            for line in path.read_text().splitlines()
            if line.startswith('#include "')
        }
        assert included - {path.name for path in folder.iterdir()} == {"kernel_operator.h"}
        assert (folder / f"{op}.cpp").is_file()


def test_one_operator_and_its_host_part(tmp_path: Path, cann: Path, script: Path) -> None:
    """The host libraries are compiled for real, against the stand-in's headers."""
    arguments = ["-n", "gather_miss_rows", "-c", "ascend910b", "-p", str(cann), "-b", "host"]
    arguments += ["--ops-compile-options", "-O2;-g", "--op_debug_config", "oom"]
    status, words = run(tmp_path, *arguments, path=str(cann / "bin"), script=script)
    assert status == 0, words
    record = (tmp_path / "record").read_text()
    assert "gather_selection_kv_cache" not in record
    assert ";-O2;-g;--op_debug_config=oom\n" in record
    assert not (script.parent / "out").exists()
    assert list((script.parent / "build/ascend910b").rglob("gather_miss_rows_tiling.cpp.o"))


def test_a_cann_without_the_package_asc(tmp_path: Path, cann: Path, script: Path) -> None:
    (cann / "compiler/tikcpp/ascendc_kernel_cmake/ASCConfig.cmake").unlink()
    status, words = run(tmp_path, "-c", "ascend910b", "-p", str(cann), path=str(cann / "bin"), script=script)
    assert status == 1
    assert words.splitlines()[-1] == f"build.sh: CMake could not be configured for ascend910b with CANN in {cann}"
    assert "ASCConfig.cmake" in words
