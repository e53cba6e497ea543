# SPDX-License-Identifier: Apache-2.0
"""CANN's operator libraries as stand-ins over the simulated kernels, and what tests ask them."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path

from tests.ops_ascendc.build import HARNESS, INCLUDES, KERNELS, OPERATORS
from tests.standins.build import build
from tidal_connector.ops.npu.aclnn import OperatorLibrary


@cache
def base_library() -> Path:
    """Return the stand-in for libnnopbase."""
    return build("libnnopbase.so", ["nnopbase.cpp"])


@cache
def operator_library() -> Path:
    """Return the stand-in for libcust_opapi."""
    digest = hashlib.blake2b(digest_size=8)
    for header in sorted(OPERATORS.rglob("*.h")):
        digest.update(header.read_bytes())
    return build(
        "libcust_opapi.so",
        ["opapi.cpp", *(OPERATORS / source for source in (*KERNELS, HARNESS))],
        [f"STANDIN_HEADERS=0x{digest.hexdigest()}"],
        ["-Wno-unused-parameter", *(f"-I{OPERATORS / include}" for include in INCLUDES)],
    )


class StandIns:
    """Both libraries, opened, and their accounts."""

    def __init__(self) -> None:
        base, operators = str(base_library()), str(operator_library())
        self._base, self._operators = ctypes.CDLL(base), ctypes.CDLL(operators)
        self._base.standin_tensors_alive.restype = ctypes.c_int64
        self._operators.standin_opapi_executors.restype = ctypes.c_int64
        self._operators.standin_opapi_message.restype = ctypes.c_char_p
        self._operators.standin_opapi_calls.restype = ctypes.c_char_p
        self.library = OperatorLibrary.open(base=base, operators=[operators], recent_message=self.message)
        self.calls()

    def message(self) -> str:
        """Return the text of the last error."""
        return str(self._operators.standin_opapi_message().decode())

    def calls(self) -> list[str]:
        """Return the calls since this was last asked."""
        return str(self._operators.standin_opapi_calls().decode()).splitlines()

    def fail(self, call: str, code: int) -> None:
        """Let the next call of a function return a code."""
        self._operators.standin_opapi_fail(call.encode(), code)

    def left_over(self) -> tuple[int, int]:
        """Return the tensor descriptions and executors that nobody destroyed or used."""
        return int(self._base.standin_tensors_alive()), int(self._operators.standin_opapi_executors())
