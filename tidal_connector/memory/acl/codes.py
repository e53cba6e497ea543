# SPDX-License-Identifier: Apache-2.0
"""What the Ascend runtime's return codes mean here, and how each is mended. Pure."""

from __future__ import annotations

from typing import NamedTuple

from tidal_connector.errors import DeviceFailed

INITIALIZED_BEFORE = 100002
BAD_PARAMETER = 107000
NO_CONTEXT = 107002
NOT_SUPPORTED = 207000
NO_MEMORY = 207001
REGISTERED = 507910
NOT_REGISTERED = 507911


class Meaning(NamedTuple):
    """A return code in words: what happened, and what to do."""

    text: str
    mend: str


MEANINGS = {
    100001: Meaning("the runtime is not initialised", "aclInit was not called, or the process is ending"),
    BAD_PARAMETER: Meaning(
        "a parameter is wrong",
        "the memory must be mapped, begin on a 4 KiB border and, for an alias, be registered before",
    ),
    107001: Meaning("there is no NPU of this number", "see npu-smi info and ASCEND_RT_VISIBLE_DEVICES"),
    NO_CONTEXT: Meaning("this thread has no device context", "call torch.npu.set_device on the thread before"),
    NOT_SUPPORTED: Meaning(
        "this NPU, driver or machine cannot do it",
        "host memory can be mapped on A2, A3 and 950, not on 310 and 910, and not inside every virtual machine; "
        "upgrade driver and CANN",
    ),
    NO_MEMORY: Meaning(
        "memory cannot be had",
        "drivers before 25.5.0 map 20 to 32 GB for each NPU in all: upgrade, or lower pool.bytes (none takes more than "
        "200 GB at once, but a refused registration is tried in halves: a lower pool.register_chunk does not help)",
    ),
    207006: Meaning(
        "permission is denied",
        "run as the user, or in the group, that owns /dev/davinci* (HwHiAiUser), and give the container those devices",
    ),
    507015: Meaning("a kernel failed on an AI core", "an earlier kernel is at fault: see its plog"),
    507035: Meaning("a kernel failed on a vector core", "an earlier kernel is at fault: see its plog"),
    507057: Meaning(
        "remote memory is suspect: a kernel reached outside a mapped range, or the memory behind it is faulty",
        "the pool was unmapped or unregistered under a kernel, or an address is wrong; restart the engine",
    ),
    507899: Meaning(
        "the driver failed inside",
        "the four-argument aclrtHostRegister of CANN 8.5.0 does so: upgrade CANN, and see the driver's log (dmesg)",
    ),
    REGISTERED: Meaning(
        "the memory is registered already",
        "another component of this process registered part of it: a transport or a second KV connector; let the pool "
        "be registered before it, or turn that one off",
    ),
    NOT_REGISTERED: Meaning(
        "the memory is not registered, or this is not the start of a registration",
        "it was unregistered elsewhere; nothing but the pool's registration may do so",
    ),
}
"""By return code."""

_LONGEST = 400  # characters of the runtime's own account, which can hold a trace of many lines


def refused(call: str, code: int, account: str, about: str = "") -> DeviceFailed:
    """Return the error for a call that was refused, in one line.

    Args:
        call: function of the runtime.
        code: what it returned.
        account: the runtime's own words; may be empty or of many lines.
        about: what it was called with, in words.
    """
    meaning = MEANINGS.get(code, Meaning("the runtime says no more", "see the plog of this process"))
    words = " ".join(account.split())
    said = f' (the runtime: "{words[:_LONGEST]}")' if words else ""
    return DeviceFailed(f"{call}{about and ' of ' + about}: {code}, {meaning.text}{said}; {meaning.mend}", call, code)
