# SPDX-License-Identifier: Apache-2.0
"""Finding the library, in processes of their own because this one has loaded it, and versions that lack functions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.standins.ascendcl import Standin
from tests.standins.build import ascendcl
from tidal_connector.config import PageKind, PoolConfig
from tidal_connector.errors import DeviceFailed, DeviceMissing
from tidal_connector.memory import open_region
from tidal_connector.memory.acl import AclRuntime, register_host

OPEN = (
    "import ctypes, sys\nfrom tidal_connector.memory.acl import AclRuntime\n"
    "from tidal_connector.errors import TidalError\n"
    "for each in sys.argv[1:]:\n    ctypes.CDLL(each)\n"
    "try:\n    print(AclRuntime.open().path)\n"
    "except TidalError as error:\n    print(type(error).__name__, error)\n"
)


def opened(loaded: list[str] | None = None, **variables: str) -> str:
    """What a fresh process finds: the library's path, or the error."""
    names = ("TIDAL_ASCENDCL", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", OPEN, *(loaded or [])]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A folder as the toolkit's installer makes it."""
    folder = tmp_path / "toolkit" / f"{platform.machine()}-linux" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libascendcl.so").write_bytes(ascendcl().read_bytes())
    return tmp_path / "toolkit"


def test_without_the_library_one_line_names_every_place(tmp_path: Path) -> None:
    said = opened(ASCEND_HOME_PATH=str(tmp_path / "a"), ASCEND_TOOLKIT_HOME=str(tmp_path / "b"))
    assert said.startswith("DeviceMissing libascendcl.so cannot be loaded; tried this process: ")
    for place in (
        f"ASCEND_HOME_PATH: {tmp_path}/a/lib64/libascendcl.so: cannot open",
        f"ASCEND_TOOLKIT_HOME: {tmp_path}/b/{platform.machine()}-linux/lib64/libascendcl.so: cannot open",
        "the loader's path: libascendcl.so: cannot open",
        "source the toolkit's set_env.sh",
        "TIDAL_ASCENDCL",
    ):
        assert place in said
    assert "\n" not in said


def test_a_path_that_is_named_is_the_only_one_that_is_tried(tmp_path: Path, toolkit: Path) -> None:
    wrong = tmp_path / "libascendcl.so"
    wrong.write_text("no library")
    said = opened(TIDAL_ASCENDCL=str(wrong), ASCEND_HOME_PATH=str(toolkit))
    assert f"tried TIDAL_ASCENDCL: {wrong}: " in said
    assert "ASCEND_HOME_PATH" not in said
    with pytest.raises(DeviceMissing, match=f"tried the path that was given: {wrong}"):
        AclRuntime.open(str(wrong))


def test_the_toolkit_is_found_by_either_variable(toolkit: Path) -> None:
    file = f"{toolkit}/{platform.machine()}-linux/lib64/libascendcl.so"
    assert opened(ASCEND_TOOLKIT_HOME=str(toolkit)) == file
    assert opened(ASCEND_HOME_PATH=str(toolkit), ASCEND_TOOLKIT_HOME="missing") == file


def test_what_the_process_has_loaded_is_taken_before_the_toolkits(toolkit: Path) -> None:
    loaded = str(ascendcl())
    assert opened([loaded], ASCEND_HOME_PATH=str(toolkit)) == loaded


def test_the_loaders_path_is_searched_last(toolkit: Path) -> None:
    assert opened(LD_LIBRARY_PATH=str(ascendcl().parent)) == str(ascendcl())


def test_a_library_without_a_needed_function_is_named_with_it() -> None:
    path = ascendcl("STANDIN_WITHOUT_UNREGISTER")
    with pytest.raises(DeviceMissing, match=f"{path} has no aclrtHostUnregister: expected CANN 8.5 or newer"):
        AclRuntime.open(str(path))


def test_a_library_without_any_way_to_register_is_named_when_it_is_asked_to() -> None:
    runtime = AclRuntime.open(str(ascendcl("STANDIN_WITHOUT_V2", "STANDIN_WITHOUT_ANY_REGISTER")))
    with (
        open_region(1 << 20, PoolConfig(pages=PageKind.PLAIN)) as region,
        pytest.raises(DeviceFailed, match="has no aclrtHostRegister: expected CANN"),
    ):
        register_host(region, runtime, 0, PoolConfig())


def test_the_four_argument_call_serves_where_the_newer_one_is_absent() -> None:
    old = Standin(ascendcl("STANDIN_WITHOUT_V2"))
    runtime = AclRuntime.open(old.path)
    with (
        open_region(1 << 20, PoolConfig(pages=PageKind.PLAIN)) as region,
        register_host(region, runtime, 0, PoolConfig()) as registration,
    ):
        assert registration.alias(4096, 5).pointer == registration.alias(0, 1).pointer + 4096
        assert registration.report().how == ("aclrtHostRegister",)
    assert [call.name for call in old.calls("aclrtHostRegister", "aclrtHostUnregister")] == [
        "aclrtHostRegister",
        "aclrtHostUnregister",
    ]
    assert old.registrations == 0


def test_the_four_argument_call_without_an_alias_is_a_failure() -> None:
    old = Standin(ascendcl("STANDIN_WITHOUT_V2"))
    old.set("without_alias", 0x2)
    with (
        open_region(1 << 20, PoolConfig(pages=PageKind.PLAIN)) as region,
        pytest.raises(DeviceFailed, match=r"aclrtHostRegister of .*: no alias \(NULL\)"),
    ):
        register_host(region, AclRuntime.open(old.path), 0, PoolConfig())
    assert old.registrations == 0


def test_507899_of_the_four_argument_call_names_the_mend() -> None:
    old = Standin(ascendcl("STANDIN_WITHOUT_V2"))
    old.fail("aclrtHostRegister", 507899)
    with (
        open_region(1 << 20, PoolConfig(pages=PageKind.PLAIN)) as region,
        pytest.raises(DeviceFailed, match=r"507899, the driver failed inside.*upgrade CANN"),
    ):
        register_host(region, AclRuntime.open(old.path), 0, PoolConfig())
