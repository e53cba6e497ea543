# SPDX-License-Identifier: Apache-2.0
"""Which vllm-ascend is here, whether it is in charge, and which one we were written for.

Asks for installed versions first, so that elsewhere nothing of vLLM is imported. Any thread.
"""

from __future__ import annotations

from importlib import metadata

from tidal_connector.vllm_plugin.patching import HostChanged

SUPPORTED = "0.23.0.post1"
SUPPORTED_VLLM = "0.23.0"
HOST = f"vllm-ascend {SUPPORTED} with vLLM {SUPPORTED_VLLM}"


def installed(distribution: str = "vllm-ascend") -> str | None:
    """Return the installed version of a distribution without its local part, None where there is none."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def in_charge() -> bool:
    """Tell whether vLLM in this process runs on vllm-ascend's platform."""
    if installed() is None:
        return False
    from vllm.platforms import current_platform

    return type(current_platform).__module__.partition(".")[0] == "vllm_ascend"


def check_versions() -> None:
    """Refuse another host than the one that we were written for.

    Raises:
        HostChanged: vllm-ascend or vLLM is of another version.
    """
    for name, expected in (("vllm-ascend", SUPPORTED), ("vllm", SUPPORTED_VLLM)):
        found = installed(name)
        if found != expected:
            raise HostChanged(
                f"offload on Ascend leans on functions inside the host: {name} is {found}, expected {expected}; "
                f'install {HOST}, or set "offload": "off"'
            )
