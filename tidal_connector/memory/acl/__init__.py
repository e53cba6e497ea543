# SPDX-License-Identifier: Apache-2.0
"""Host memory on Ascend NPUs: libascendcl loaded at run time, a region registered in chunks, aliases for kernels."""

from __future__ import annotations

from tidal_connector.memory.acl.addresses import DeviceAlias, HostAddress, device_number, host_number
from tidal_connector.memory.acl.chunks import Run
from tidal_connector.memory.acl.pool import DevicePool, open_device_pool
from tidal_connector.memory.acl.probe import AclProbe, probe
from tidal_connector.memory.acl.registration import HostRegistration, register_host
from tidal_connector.memory.acl.report import RegistrationReport
from tidal_connector.memory.acl.runtime import AclRuntime

__all__ = [
    "AclProbe",
    "AclRuntime",
    "DeviceAlias",
    "DevicePool",
    "HostAddress",
    "HostRegistration",
    "RegistrationReport",
    "Run",
    "device_number",
    "host_number",
    "open_device_pool",
    "probe",
    "register_host",
]
