# SPDX-License-Identifier: Apache-2.0
"""The test's side of the stand-in for libascendcl: what was called, and what is to go wrong."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One call, with its arguments as text."""

    name: str
    arguments: tuple[str, ...]
    code: int

    def number(self, position: int) -> int:
        """An argument as a number."""
        return int(self.arguments[position], 0)


class Standin:
    """One built stand-in, in the state of a fresh process."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.standin_log.restype = ctypes.c_size_t
        self.library.standin_violations.restype = ctypes.c_size_t
        self.library.standin_registrations.restype = ctypes.c_size_t
        self.library.standin_host_of.restype = ctypes.c_uint64
        self.library.standin_host_of.argtypes = (ctypes.c_uint64,)
        self.library.standin_is_real.argtypes = (ctypes.c_uint64,)
        self.library.standin_set.argtypes = (ctypes.c_char_p, ctypes.c_int64)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.library.standin_reset()

    def fail(self, call: str, code: int, nth: int = 1, times: int = 1) -> None:
        """Let the nth call of a function from now on fail, and those after it until so many have."""
        self.library.standin_fail(call.encode(), nth, times, code)

    def set(self, name: str, value: int) -> None:
        """Set a switch; ascendcl_memory.cpp lists them."""
        self.library.standin_set(name.encode(), value)

    def calls(self, *names: str) -> list[Call]:
        """All calls of these functions in order; of all functions where none is named."""
        found = []
        for line in self._lines(self.library.standin_log):
            text, _, code = line.rpartition(" -> ")
            name, *arguments = text.split()
            found.append(Call(name, tuple(arguments), int(code)))
        return [call for call in found if not names or call.name in names]

    def violations(self) -> list[str]:
        """Broken rules that the real runtime does not check."""
        return self._lines(self.library.standin_violations)

    @property
    def registrations(self) -> int:
        """How many ranges are registered."""
        return int(self.library.standin_registrations())

    def _lines(self, function: ctypes._NamedFuncPointer) -> list[str]:
        text = ctypes.create_string_buffer(function(None, 0))
        function(text, len(text))
        return text.value.decode().splitlines()
