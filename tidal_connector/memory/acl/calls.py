# SPDX-License-Identifier: Apache-2.0
"""The runtime's functions with their C types, bound once; those that a version lacks are known to be absent.

Takes a loaded library; hands on calls that raise for every return code but success. A host pointer is passed as
:class:`~tidal_connector.memory.acl.addresses.HostAddress` and nothing else. Calls may come from any thread, but the
runtime's device context belongs to one.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tidal_connector.errors import DeviceMissing
from tidal_connector.memory.acl.addresses import host_number
from tidal_connector.memory.acl.codes import refused


class _Host:
    """The argument type of a host pointer: ctypes asks it to convert, and it refuses all but a host address."""

    @classmethod
    def from_param(cls, value: object) -> ctypes.c_void_p:
        return ctypes.c_void_p(host_number(value))


_OUT = ctypes.POINTER(ctypes.c_void_p)
_INT32 = ctypes.POINTER(ctypes.c_int32)

# By name: the arguments. All return an int, 0 for success, but those of _TEXTS.
_CALLS: dict[str, tuple[Any, ...]] = {
    "aclInit": (ctypes.c_char_p,),
    "aclrtGetVersion": (_INT32, _INT32, _INT32),
    "aclrtGetDeviceCount": (ctypes.POINTER(ctypes.c_uint32),),
    "aclrtSetDevice": (ctypes.c_int32,),
    "aclrtGetDevice": (_INT32,),
    "aclrtHostRegister": (_Host, ctypes.c_uint64, ctypes.c_int, _OUT),
    "aclrtHostRegisterV2": (_Host, ctypes.c_uint64, ctypes.c_uint32),
    "aclrtHostGetDevicePointer": (_Host, _OUT, ctypes.c_uint32),
    "aclrtHostUnregister": (_Host,),
    "aclrtMallocHost": (_OUT, ctypes.c_size_t),
    "aclrtFreeHost": (_Host,),
}
_TEXTS = ("aclGetRecentErrMsg", "aclrtGetSocName")
_NEEDED = ("aclInit", "aclrtSetDevice", "aclrtGetDevice", "aclrtHostUnregister")


class Calls:
    """The functions of one loaded library.

    Raises:
        DeviceMissing: a function is not there without which nothing can be registered.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._bound: dict[str, Any] = {}
        for name, arguments in _CALLS.items():
            self._bind(library, name, ctypes.c_int, arguments)
        for name in _TEXTS:
            self._bind(library, name, ctypes.c_char_p, ())
        self.need(*_NEEDED)

    def has(self, *names: str) -> bool:
        """Say whether the library has all of these functions."""
        return all(name in self._bound for name in names)

    def need(self, *names: str) -> None:
        """Raise where one of these functions is absent.

        Raises:
            DeviceMissing: names them, and the library.
        """
        absent = [name for name in names if name not in self._bound]
        if absent:
            raise DeviceMissing(f"{self.path} has no {', '.join(absent)}: expected CANN 8.5 or newer; upgrade CANN")

    def __call__(self, name: str, *arguments: object, about: str = "") -> None:
        """Call a function.

        Args:
            name: the function.
            arguments: as its C types want them.
            about: what it is called with, for the error's text.

        Raises:
            DeviceFailed: it returned anything but success.
            DeviceMissing: the library lacks it.
            TypeError: a host pointer is no host address.
        """
        self.need(name)
        code = int(self._bound[name](*arguments))
        if code:
            raise refused(name, code, self.text("aclGetRecentErrMsg"), about)

    def text(self, name: str) -> str:
        """Return what a function that returns text says; empty where there is none, or nothing to say."""
        found = self._bound[name]() if name in self._bound else None
        return found.decode(errors="replace") if found else ""

    def _bind(self, library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function = library[name]
        except AttributeError:
            return
        function.restype, function.argtypes = result, arguments
        self._bound[name] = function
