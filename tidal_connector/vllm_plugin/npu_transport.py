# SPDX-License-Identifier: Apache-2.0
"""The NPUs before the transfer plane: who they are, and whether our ports are in the way of theirs.

Used once at start, on the worker's main thread, which vLLM has given a device by then.
"""

from __future__ import annotations

from tidal_connector.address import parse_address
from tidal_connector.config import Protocol, TidalConfig, ascend_environment
from tidal_connector.errors import ConfigError
from tidal_connector.memory.acl.runtime import AclRuntime
from tidal_connector.transfer.ascend import AclNpu, Npu, base_port, port_conflicts


def npus(config: TidalConfig) -> Npu | None:
    """Return the NPUs if the transfer plane writes over their network, else None.

    Raises:
        NativeOpMissing: it should, and there is no libascendcl.
    """
    return AclNpu(AclRuntime.open()) if config.transfer.protocol is Protocol.ASCEND else None


def check_control_port(address: str, npu: Npu | None) -> None:
    """Verify that the control channel did not take a port that an NPU's listener may want later.

    Args:
        address: the control address that was bound, ``host:port``.
        npu: the NPUs; None if their network is not used.

    Raises:
        ConfigError: it did; the text names both ranges.
    """
    if npu is None:
        return
    port = parse_address("control.bind", address)[1]
    conflicts = port_conflicts({"control.bind": (port, port)}, npu.devices(), base_port(ascend_environment()))
    if conflicts:
        raise ConfigError(conflicts[0])
