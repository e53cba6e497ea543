# SPDX-License-Identifier: Apache-2.0
"""Checks of NPUs: devices, driver, CANN, torch-npu, our operators, what the kernel and the cards must have. Pure."""

from __future__ import annotations

import re

from tidal_connector.cli.doctor.check_software import VLLM_ASCEND
from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.gather_npu import NPU_IMPORTS, OPERATORS
from tidal_connector.cli.doctor.npu_facts import Ascend
from tidal_connector.cli.doctor.wishes import Wishes
from tidal_connector.config import DeviceAccess, Protocol
from tidal_connector.memory.acl.pool import LAST_WITHOUT_PAGES
from tidal_connector.memory.report import GIB, size_text

CANN = "9.1"
TORCH_NPU = "2.10.0.post4"
"""What vllm-ascend 0.23.0.post1 asks for."""

_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_HDK_OF_1TB = (25, 5)
_SMALL_HDK_POOL = 20 * GIB
_KERNEL_OF_MALLOC = (5, 19)  # older ones are not documented for memory of the system's own allocators


def check_npu(facts: Facts, wishes: Wishes) -> list[Finding]:
    """One line on a machine without an NPU, unless the settings ask for one; else everything that an engine needs."""
    ascend, asked = facts.ascend, Protocol.ASCEND in wishes.protocols
    if not ascend.devices:
        text = "no /dev/davinci*"
        if asked:
            fix = 'mount /dev/davinci* and /dev/davinci_manager into the container, or set transfer.protocol = "tcp"'
            return [fail("NPU", f'{text}, but transfer.protocol = "ascend"', fix)]
        if facts.cpu_backend and "vllm-ascend" not in facts.packages:
            return [good("NPU", f"{text}; the CPU backend needs none")]
        return [warn("NPU", text, "nothing, unless this machine should have one: then install its driver")]
    return [
        _devices(ascend),
        *_driver(ascend, wishes),
        _cann(ascend),
        *(_tried(name, facts) for name in NPU_IMPORTS),
        _torch_npu(facts.packages.get("torch-npu")),
        _operators(ascend, wishes),
        *_kernel(facts, wishes),
        _hccn(ascend, asked),
    ]


def _devices(ascend: Ascend) -> Finding:
    if not ascend.manager:
        text = "/dev/davinci_manager is missing, so no device can be opened"
        return fail("NPU", text, "mount /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc into the container")
    return good("NPU", f"{len(ascend.devices)} devices")


def _driver(ascend: Ascend, wishes: Wishes) -> list[Finding]:
    """How much host memory the driver registers: 20 GB below HDK 25.5.0, where it maps in pages of 4 KiB."""
    name, pool = "NPU driver", wishes.pool_bytes
    if not ascend.driver:
        fix = "mount /usr/local/Ascend/driver/version.info into the container, and look at npu-smi info"
        return [warn(name, "of unknown version: how large a pool it registers is not known", fix)]
    firmware = f", firmware {ascend.firmware}" if ascend.firmware else ""
    text = f"{ascend.driver}{firmware}"
    if _numbers(ascend.driver) >= _HDK_OF_1TB:
        return [good(name, f"{text}; registers up to 1 TB of host memory")]
    limit, fix = "registers 20 GB of host memory at most", "install HDK 25.5.0 or newer (1 TB), or lower pool.bytes"
    if pool > _SMALL_HDK_POOL:
        return [fail(name, f"{text} {limit}, {size_text(pool)} are asked for", fix)]
    return [warn(name, f"{text} {limit}", fix)]


def _cann(ascend: Ascend) -> Finding:
    if not ascend.acl:
        fix = f"install CANN {CANN} and {_SET_ENV}"
        return fail("CANN", "libascendcl.so was not found below /usr/local/Ascend", fix)
    if not ascend.cann:
        fix = f"look at ascend_toolkit_install.info; this package was written for CANN {CANN}"
        return warn("CANN", f"of unknown version, {ascend.acl}", fix)
    if ascend.cann.startswith(f"{CANN}."):
        return good("CANN", f"{ascend.cann}, {ascend.acl}")
    return warn("CANN", f"{ascend.cann}; written for {CANN}, as vllm-ascend {VLLM_ASCEND}", f"install CANN {CANN}.0")


def _tried(name: str, facts: Facts) -> Finding:
    """Whether a library loads, and whether host memory can be registered; what failed carries its own mend."""
    error = facts.imports.get(name, "it was not tried")
    if not error:
        return good(name, "one hugepage was registered and given back" if name == "host registration" else "loads")
    return fail(name, error, _SET_ENV if ".so" in error else "see the end of the line; then tidal selftest npu")


def _torch_npu(version: str | None) -> Finding:
    fix = f"pip install torch-npu=={TORCH_NPU} torch==2.10.0"
    if version is None:
        return warn("torch-npu", "not installed", fix)
    if version != TORCH_NPU:
        return warn("torch-npu", f"{version}; vllm-ascend {VLLM_ASCEND} pins {TORCH_NPU}", fix)
    return good("torch-npu", version)


def _operators(ascend: Ascend, wishes: Wishes) -> Finding:
    """Whether our operators are installed where CANN looks: decode from the pool needs them."""
    name = "NPU operators"
    build = "build and install them as ops_ascendc/README.md says"
    ours = [found for found in ascend.packages if found.operators]
    if not ours:
        others = ", ".join(found.folder for found in ascend.packages)
        text = f"none of {others} holds {' or '.join(OPERATORS)}" if others else "no libcust_opapi.so was found"
        say = fail if wishes.pools else warn
        return say(name, f"{text}: decode cannot attend from the host pool", build)
    found = next((each for each in ours if each.operators == OPERATORS.keys()), ours[0])
    lacking = ", ".join(sorted(OPERATORS.keys() - found.operators))
    if lacking:
        return fail(name, f"{found.folder} lacks {lacking}", f"{build}; both go into one package")
    if not found.searched:
        fix = f"{_SET_ENV}, or export ASCEND_CUSTOM_OPP_PATH={found.folder}:$ASCEND_CUSTOM_OPP_PATH"
        return fail(name, f"{found.folder} has them, but CANN does not look there", fix)
    beside = [each.folder for each in ascend.packages if each is not found]
    return good(name, found.folder + (f"; beside {', '.join(beside)}" if beside else ""))


def _kernel(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Whether the kernel lets ACL register a mapping: pool.register says what becomes of the pool where it does not."""
    if facts.kernel is None or facts.kernel >= _KERNEL_OF_MALLOC:
        return []
    version, fix = ".".join(map(str, facts.kernel)), "use a kernel of 5.19 or newer (openEuler 24.03 has 6.6)"
    if facts.kernel > LAST_WITHOUT_PAGES:
        text = f"{version}: below 5.19 the driver does not promise to map what the system allocated"
        return [warn("NPU kernel", text, f"tidal selftest npu --only bandwidth shows whether it does; else {fix}")]
    text = f"{version}: up to 5.10 ACL registers nothing but memory of aclrtMallocHost"
    if any(pool.register is DeviceAccess.PAGES for pool in wishes.pools):
        return [fail("NPU kernel", f'{text}, and pool.register = "pages"', f'pool.register = "auto", or {fix}')]
    return [warn("NPU kernel", f"{text}, which the pool is then made of: it is no hugepage that we reserve", fix)]


def _hccn(ascend: Ascend, asked: bool) -> Finding:
    fix = "mount /etc/hccn.conf into the container, and look at hccn_tool -i 0 -ip -g"
    if ascend.hccn is None:
        say = fail if asked else warn
        return say("hccn.conf", "/etc/hccn.conf is missing: Mooncake finds no address of an NPU's card in it", fix)
    if ascend.hccn < len(ascend.devices):
        text = f"{ascend.hccn} addresses for {len(ascend.devices)} devices; over RoCE each card needs one"
        return warn("hccn.conf", text, "hccn_tool -i N -ip -s address ...; nothing, if the cards talk over HCCS (A3)")
    return good("hccn.conf", f"{ascend.hccn} addresses")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
