# SPDX-License-Identifier: Apache-2.0
"""Every exception that the package raises on purpose, as one tree.

::

    TidalError
    ├── ConfigError            a setting is unknown, of a wrong type, or contradicts another
    ├── ParamsError            a request's kv_transfer_params cannot be used
    ├── LayoutMismatch         two engines, or an engine and its pool, disagree about bytes
    ├── ProtocolError          a peer sent something that no state accepts
    │   └── VersionMismatch    a peer speaks another protocol version
    ├── PoolExhausted          the host pool cannot be had as demanded, or a buffer of rows is too small for a step
    ├── TransferFailed         bytes could not be moved, or may have been moved only in part
    ├── PeerLost               a peer does not answer, or came back as another incarnation
    ├── RegistryLost           the registry does not answer, so nothing is known of the cluster
    ├── Conflict               somebody else changed, or holds, what was to be changed
    ├── NativeOpMissing        an operator has no implementation for this machine
    └── DeviceFailed           an accelerator's runtime refused a call, or answered with what cannot be used
        └── DeviceMissing      that runtime, or a function of it, is not on this machine

Lower floors raise; only ``vllm_plugin`` turns an error into what vLLM understands. Each message is one line
that names the field, the value, what was expected, and how to mend it.
"""

from __future__ import annotations


class TidalError(Exception):
    """Base of every error that the package raises on purpose."""


class ConfigError(TidalError, ValueError):
    """A setting is unknown, of a wrong type, or contradicts another one."""


class ParamsError(TidalError, ValueError):
    """A request's ``kv_transfer_params`` cannot be used; the request alone fails."""


class LayoutMismatch(TidalError):
    """Two sides disagree about the bytes of a row, a page or a layer."""


class ProtocolError(TidalError):
    """A peer sent a message that is malformed or that no state accepts."""


class VersionMismatch(ProtocolError):
    """A peer speaks another version of the protocol."""


class PoolExhausted(TidalError):
    """Host memory for the pool cannot be had as demanded, or a device buffer has fewer rows than a step needs."""


class TransferFailed(TidalError):
    """A transfer ended without the acknowledgement of all its bytes."""


class PeerLost(TidalError):
    """A peer does not answer within its deadline, or came back as another incarnation."""


class RegistryLost(TidalError):
    """The registry does not answer within its bound; whether a write reached it is not known."""


class Conflict(TidalError):
    """Somebody else changed or holds what was to be changed; nothing was written."""


class NativeOpMissing(TidalError):
    """An operator has no implementation on this machine."""


class DeviceFailed(TidalError):
    """An accelerator's runtime refused a call, or answered with what cannot be used.

    Attributes:
        call: the runtime's function; empty where none was reached.
        code: what it returned; 0 where the result, and not the call, was at fault.
    """

    def __init__(self, message: str, call: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.call = call
        self.code = code


class DeviceMissing(DeviceFailed):
    """The accelerator's runtime, or a function that is needed of it, is not on this machine."""
