# SPDX-License-Identifier: Apache-2.0
"""What the doctor finds and says of NPUs: files of drivers, CANN and operators in a folder, and machines made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.machines import asks, machine, write
from tests.standins.build import ascendcl
from tidal_connector.cli.doctor import gather as gathering
from tidal_connector.cli.doctor.check_npu import check_npu
from tidal_connector.cli.doctor.check_npu_transport import check_transport
from tidal_connector.cli.doctor.examine import examine
from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import State
from tidal_connector.cli.doctor.gather_npu import NPU_IMPORTS, OPERATORS, read_ascend
from tidal_connector.cli.doctor.npu_facts import Ascend, OpPackage
from tidal_connector.cli.doctor.wishes import PoolWish, PortRange, PortWish, Wishes
from tidal_connector.config import DeviceAccess, Protocol
from tidal_connector.memory.report import GIB

HOME = "usr/local/Ascend/"
BOTH = frozenset(OPERATORS)
OURS = OpPackage("/opt/tidal/vendors/customize", BOTH, True)
THEIRS = OpPackage("/x/vllm_ascend/_cann_ops_custom/vendors/custom_transformer", frozenset(), True)
WELL = Ascend(
    devices=("davinci0", "davinci1"),
    manager=True,
    acl="/usr/local/Ascend/cann/lib64/libascendcl.so",
    driver="25.5.1",
    firmware="7.8.0.6.201",
    cann="9.1.0",
    packages=(OURS, THEIRS),
    hccn=2,
    variables={"HCCL_INTRA_ROCE_ENABLE": "1"},
)
PACKAGES = {
    "vllm": "0.23.0",
    "vllm-ascend": "0.23.0.post1",
    "mooncake-transfer-engine-npu": "0.3.11.post1",
    "torch-npu": "2.10.0.post4",
}
LARGE = PoolWish("decode.toml", 300 * GIB)
ON_NPU = frozenset({Protocol.ASCEND})


def npu(**changes: Any) -> Facts:
    """A machine with NPUs on which nothing is wrong, with changes."""
    facts = machine(
        packages=PACKAGES,
        imports=dict.fromkeys(("mooncake", "native module", *NPU_IMPORTS), ""),
        kernel=(6, 6),
        ascend=WELL,
    )
    return msgspec.structs.replace(facts, **changes)


def without(**changes: Any) -> Ascend:
    return msgspec.structs.replace(WELL, **changes)


def test_a_healthy_npu_machine_has_nothing_to_mend() -> None:
    wishes = asks(LARGE, protocols=ON_NPU)
    lines = [*check_npu(npu(), wishes), *check_transport(npu(), wishes)]
    assert [line for line in lines if line.state is not State.PASS] == []
    shown = {line.what: line.text for line in lines}
    assert shown["NPU driver"] == "25.5.1, firmware 7.8.0.6.201; registers up to 1 TB of host memory"
    assert shown["CANN"] == "9.1.0, /usr/local/Ascend/cann/lib64/libascendcl.so"
    assert shown["NPU operators"] == f"{OURS.folder}; beside {THEIRS.folder}"


def test_a_machine_without_an_npu_gets_one_line() -> None:
    assert [(line.state, line.what) for line in check_npu(machine(), asks())] == [(State.PASS, "NPU")]


# What is changed of the healthy machine, what of its settings, the line that must appear, its state, words of its text
# and of what mends it.
FAULTS: Mapping[str, tuple[dict[str, Any], Wishes, str, State, str, str]] = {
    "no manager": ({"ascend": without(manager=False)}, asks(), "NPU", State.FAIL, "davinci_manager", "mount"),
    "no CANN": ({"ascend": without(acl="")}, asks(), "CANN", State.FAIL, "libascendcl.so was not found", "set_env.sh"),
    "another CANN": ({"ascend": without(cann="8.5.0")}, asks(), "CANN", State.WARN, "8.5.0; written for 9.1", "9.1.0"),
    "CANN of no version": ({"ascend": without(cann="")}, asks(), "CANN", State.WARN, "unknown", "install.info"),
    "an old driver and a large pool": (
        {"ascend": without(driver="25.2.1")},
        asks(PoolWish("d", 30 * GIB)),
        "NPU driver",
        State.FAIL,
        "registers 20 GB of host memory at most, 30 GiB are asked for",
        "HDK 25.5.0",
    ),
    "an old driver": ({"ascend": without(driver="24.1.rc3")}, asks(), "NPU driver", State.WARN, "20 GB", "25.5.0"),
    "a driver of no version": ({"ascend": without(driver="")}, asks(), "NPU driver", State.WARN, "unknown", "npu-smi"),
    "CANN cannot be loaded": (
        {"imports": {"libascendcl": "DeviceMissing: libascendcl.so cannot be loaded; tried ...: cannot open"}},
        asks(),
        "libascendcl",
        State.FAIL,
        "cannot open",
        "set_env.sh",
    ),
    "torch_npu cannot be imported": (
        {"imports": {"torch_npu": "ImportError: libhccl.so: cannot open shared object file"}},
        asks(),
        "torch_npu",
        State.FAIL,
        "libhccl.so",
        "set_env.sh",
    ),
    "host memory cannot be registered": (
        {"imports": {"host registration": "aclrtHostRegisterV2 of 2 MiB at 0x1: 207001, memory cannot be had; lower"}},
        asks(),
        "host registration",
        State.FAIL,
        "207001",
        "tidal selftest npu",
    ),
    "torch-npu is another": (
        {"packages": {**PACKAGES, "torch-npu": "2.10.0.post2"}},
        asks(),
        "torch-npu",
        State.WARN,
        "2.10.0.post2",
        "2.10.0.post4",
    ),
    "no operators, and a pool": (
        {"ascend": without(packages=())},
        asks(LARGE),
        "NPU operators",
        State.FAIL,
        "no libcust_opapi.so was found",
        "ops_ascendc/README.md",
    ),
    "operators of others only": (
        {"ascend": without(packages=(THEIRS,))},
        asks(),
        "NPU operators",
        State.WARN,
        "custom_transformer holds GatherSelectionKvCache or GatherMissRows",
        "ops_ascendc",
    ),
    "the public operator in place of ours": (
        {"ascend": without(packages=(OpPackage("/v", frozenset({"GatherSelectionKvCache"}), True),))},
        asks(),
        "NPU operators",
        State.FAIL,
        "/v lacks GatherMissRows",
        "one package",
    ),
    "operators where nobody looks": (
        {"ascend": without(packages=(OpPackage("/v", BOTH, False),))},
        asks(),
        "NPU operators",
        State.FAIL,
        "does not look there",
        "export ASCEND_CUSTOM_OPP_PATH=/v:",
    ),
    "an old kernel": ({"kernel": (5, 10)}, asks(LARGE), "NPU kernel", State.WARN, "5.10: up to 5.10 ACL", "5.19"),
    "an old kernel and a pool that has to be of pages": (
        {"kernel": (5, 4)},
        asks(msgspec.structs.replace(LARGE, register=DeviceAccess.PAGES)),
        "NPU kernel",
        State.FAIL,
        'aclrtMallocHost, and pool.register = "pages"',
        'pool.register = "auto"',
    ),
    "a kernel between": ({"kernel": (5, 15)}, asks(), "NPU kernel", State.WARN, "below 5.19", "tidal selftest npu"),
    "no hccn.conf": (
        {"ascend": without(hccn=None)},
        asks(protocols=frozenset({Protocol.ASCEND})),
        "hccn.conf",
        State.FAIL,
        "is missing",
        "mount /etc/hccn.conf",
    ),
    "a control port in the way of the NPUs": (
        {},
        asks(protocols=ON_NPU, ports=(PortWish("decode.toml", "control.bind", "10.0.0.5", 21007),)),
        "NPU transport",
        State.FAIL,
        "control.bind of decode.toml: port 21007 meets 20000..21999",
        "ASCEND_BASE_PORT",
    ),
    "an agent's ports in the way of the NPUs": (
        {},
        asks(protocols=ON_NPU, ranges=(PortRange("agent.toml", 21000, 21999),)),
        "NPU transport",
        State.FAIL,
        "ports of agent.toml: 21000..21999 meets 20000..21999",
        "beyond that range",
    ),
    "connections in the way of the NPUs": (
        {"ascend": without(devices=tuple(f"davinci{at}" for at in range(16)), hccn=16)},
        asks(protocols=ON_NPU),
        "NPU transport",
        State.WARN,
        "ip_local_port_range = 32768 60999 meets 20000 to 35999",
        'ip_local_port_range="36000 60999"',
    ),
    "TCP forced": (
        {"ascend": without(variables={"MC_FORCE_TCP": "0"})},
        asks(protocols=ON_NPU),
        "NPU transport",
        State.FAIL,
        "unset it (0 counts as set)",
        "variable",
    ),
    "a link that does not reach host memory": (
        {"ascend": without(variables={})},
        asks(protocols=ON_NPU),
        "NPU transport",
        State.WARN,
        "over RoCE only",
        "HCCL_INTRA_ROCE_ENABLE=1",
    ),
    "fewer addresses than devices": (
        {"ascend": without(hccn=1)},
        asks(),
        "hccn.conf",
        State.WARN,
        "1 addr",
        "hccn_tool",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_mend(fault: str) -> None:
    changes, wishes, what, state, words, mend = FAULTS[fault]
    lines = examine(npu(**changes), wishes).findings
    hit = [
        line for line in lines if line.what == what and line.state is state and words in line.text and mend in line.fix
    ]
    assert hit, [line for line in lines if line.state is not State.PASS]
    assert all(bool(line.fix) == (line.state is not State.PASS) for line in lines)


def test_drivers_and_cann_are_read_where_their_installers_note_them_down(tmp_path: Path) -> None:
    files = {"dev/davinci0": "", "dev/davinci11": "", "dev/davinci_manager": "", "dev/davinci_x": ""}
    files |= {
        HOME + "driver/version.info": "Version=25.5.1\nascendhal_version=7.35.19\n",
        HOME + "firmware/version.info": "Version=7.8.0.6.201\nfirmware_version=1.0\n",
        HOME + "ascend-toolkit/latest/lib64/libascendcl.so": "",
        HOME + "ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info": "package_name=x\nversion=9.1.0\n",
        "etc/hccn.conf": "address_0=10.20.0.1\nnetmask_0=255.255.255.0\naddress_1=10.20.0.2\naddress_2=\n",
    }
    ascend = read_ascend(write(tmp_path, files), {})
    assert (ascend.devices, ascend.manager) == (("davinci0", "davinci11"), True)
    assert (ascend.driver, ascend.firmware, ascend.cann, ascend.hccn) == ("25.5.1", "7.8.0.6.201", "9.1.0", 2)
    assert ascend.acl == str(tmp_path / HOME / "ascend-toolkit/latest/lib64/libascendcl.so")
    assert read_ascend(tmp_path / "nothing", {}) == Ascend()
    given = {"MC_FORCE_TCP": "1", "LANG": "C"}
    assert read_ascend(tmp_path / "nothing", given) == Ascend(variables={"MC_FORCE_TCP": "1"})


def test_the_cann_of_the_environment_counts_before_others(tmp_path: Path) -> None:
    write(tmp_path, {HOME + "cann-9.0.1/lib64/libascendcl.so": "", "opt/cann-9.1.0/lib64/libascendcl.so": ""})
    named = read_ascend(tmp_path, {"ASCEND_HOME_PATH": "/opt/cann-9.1.0"})
    assert (named.cann, named.acl) == ("9.1.0", str(tmp_path / "opt/cann-9.1.0/lib64/libascendcl.so"))
    assert read_ascend(tmp_path, {}).cann == "9.0.1"


def test_operators_are_known_by_what_their_library_exports(tmp_path: Path) -> None:
    library = "op_api/lib/libcust_opapi.so"
    both = "\0".join(symbol.decode() for symbol in OPERATORS.values())
    write(
        tmp_path,
        {
            f"opt/mine/vendors/customize/{library}": f"\x7fELF\0{both}\0",
            f"opt/empty/{library}": "",
            f"cann/opp/vendors/public/{library}": "\0aclnnGatherSelectionKvCacheGetWorkspaceSize\0",
            f"{HOME}cann/opp/vendors/other/{library}": "\0aclnnSomething\0",
            f"site/vllm_ascend/_cann_ops_custom/vendors/custom_transformer/{library}": "\0aclnnX\0",
        },
    )
    (tmp_path / "again").symlink_to(tmp_path / "opt/mine/vendors/customize")
    environment = {
        "ASCEND_CUSTOM_OPP_PATH": "/opt/mine/vendors/customize::/opt/absent:/opt/empty:/again",
        "ASCEND_OPP_PATH": "/cann/opp",
    }
    packages = read_ascend(tmp_path, environment, tmp_path / "site/vllm_ascend").packages
    found = [(Path(each.folder).name, sorted(each.operators), each.searched) for each in packages]
    assert found == [
        ("customize", sorted(OPERATORS), True),
        ("empty", [], True),
        ("public", ["GatherSelectionKvCache"], True),
        ("custom_transformer", [], True),
        ("other", [], False),
    ]


def test_libraries_are_tried_where_there_is_an_npu_and_not_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "IMPORTS", {})
    assert gathering.gather(tmp_path, asks()).imports == {}
    facts = gathering.gather(
        write(tmp_path, {"dev/davinci0": "", "proc/sys/kernel/osrelease": "5.10.0-9.oe\n"}), asks()
    )
    assert set(facts.imports) == set(NPU_IMPORTS)
    for name in ("libascendcl", "host registration"):  # there is none here: what the loader says is handed on
        assert "libascendcl.so cannot be loaded; tried" in facts.imports[name]
    assert facts.kernel == (5, 10)


def test_a_hugepage_is_registered_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDAL_ASCENDCL", str(ascendcl()))
    assert [gathering._import(NPU_IMPORTS[name]) for name in ("libascendcl", "host registration")] == ["", ""]
    monkeypatch.setenv("TIDAL_ASCENDCL", str(ascendcl("STANDIN_WITHOUT_UNREGISTER")))
    assert "aclrtHostUnregister" in gathering._import(NPU_IMPORTS["host registration"])
