# SPDX-License-Identifier: Apache-2.0
"""Operators of CANN through ctypes: descriptors of memory in, a task on a stream out. No torch, no CANN headers.

An operator ``X`` of CANN is two functions, ``aclnnXGetWorkspaceSize``, which checks the arguments and says how much
device memory the task needs, and ``aclnnX``, which puts the task on a stream. Both take ``aclTensor`` handles, which
``libnnopbase`` makes from an address, a shape and a dtype. Any thread whose current device is the arguments' device.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tidal_connector.config import ascendcl_path, cann_operator_folders
from tidal_connector.errors import DeviceFailed, DeviceMissing, NativeOpMissing

BASE_LIBRARY = "libnnopbase.so"
OPERATOR_LIBRARY = "libcust_opapi.so"
ALIGNMENT = 32
"""Bytes at whose multiples a tensor has to begin; what begins elsewhere gives undefined results."""

_FORMAT_ND = 2

# What the functions return, where the number alone says little: what it means, what to do.
_CODES = {
    161001: ("a required argument is null", "report it: the call lacks an argument"),
    161002: (
        "an argument has a shape, dtype or value that the operator does not take",
        "compare it with the text below",
    ),
    361001: ("the runtime failed", "look at the device's log (plog)"),
    561001: (
        "shapes of results could not be inferred",
        "install the operator package of this version of the connector",
    ),
    561002: ("the operator's host code refused the arguments (tiling)", "compare the shapes with its documentation"),
    561003: (
        "no kernel was found for this chip and dtype",
        "build the operator package for this chip (ops_ascendc/build.sh -c) and install it",
    ),
    561107: ("the folder of operator packages was not found", "source the set_env.sh of the CANN toolkit"),
}


class DataType(enum.IntEnum):
    """Element types, as ``aclDataType`` numbers them."""

    FLOAT = 0
    FLOAT16 = 1
    INT8 = 2
    INT32 = 3
    UINT8 = 4
    INT16 = 6
    UINT16 = 7
    INT64 = 9
    BFLOAT16 = 27


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A contiguous tensor on the device, as an operator sees it.

    Attributes:
        name: of the argument, for messages.
        address: of its first element, as kernels see it; 0 if it has none.
        shape: its dimensions.
        dtype: its elements.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    dtype: DataType

    def __post_init__(self) -> None:
        if self.address % ALIGNMENT:
            raise ValueError(
                f"{self.name}: begins at address {self.address:#x}: expected a multiple of {ALIGNMENT} bytes; "
                "take a view that begins with its memory"
            )
        if prod(self.shape) and not self.address:
            raise ValueError(f"{self.name}: shape {self.shape}: expected memory, got address 0")


class OperatorLibrary:
    """The operators of one library, and the base library that makes their arguments.

    Args:
        base: ``libnnopbase``.
        operators: candidates for ``libcust_opapi``: each vendor's package has one of that name.
        recent_message: returns CANN's text about the last error of this thread, empty if there is none.
    """

    def __init__(
        self, base: ctypes.CDLL, operators: Sequence[ctypes.CDLL], recent_message: Callable[[], str] = str
    ) -> None:
        self._operators = tuple(operators)
        self._recent_message = recent_message
        self._create = _function(base, "aclCreateTensor", ctypes.c_void_p)
        self._create.argtypes = [
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_uint64,
            ctypes.c_void_p,
        ]
        self._destroy = _function(base, "aclDestroyTensor", ctypes.c_int)
        self._destroy.argtypes = [ctypes.c_void_p]
        self._found: dict[str, tuple[Callable[..., int], Callable[..., int]]] = {}

    @classmethod
    def open(
        cls,
        *,
        base: str = BASE_LIBRARY,
        operators: Sequence[str] | None = None,
        recent_message: Callable[[], str] = str,
    ) -> OperatorLibrary:
        """Load the libraries.

        Args:
            base: name or path of ``libnnopbase``.
            operators: names or paths of operator libraries; None takes the installed packages' (``libraries``).
            recent_message: as in the constructor.

        Raises:
            DeviceMissing: the base library cannot be loaded.
            NativeOpMissing: no operator library can.
        """
        try:
            loaded = ctypes.CDLL(base)
        except OSError as error:
            raise DeviceMissing(
                f"{base} cannot be loaded: {error}; source the set_env.sh of the CANN toolkit"
            ) from error
        libraries, faults = [], []
        for path in installed() if operators is None else operators:
            try:
                libraries.append(ctypes.CDLL(path))
            except OSError as error:
                faults.append(str(error))
        if not libraries:
            raise NativeOpMissing(
                f"{OPERATOR_LIBRARY} cannot be loaded: {'; '.join(faults)}; build and install the operator package "
                "(ops_ascendc/build.sh) and source its set_env.bash"
            )
        return cls(loaded, libraries, recent_message)

    def run(
        self,
        operator: str,
        arguments: Sequence[TensorArgument | int],
        stream: int,
        workspace: Callable[[int], int],
    ) -> None:
        """Put a task on a stream.

        Args:
            operator: name without ``aclnn``: ``GatherMissRows``.
            arguments: in the order of the operator's function; an int is an ``int64_t`` attribute.
            stream: ``aclrtStream`` handle.
            workspace: returns the address of so many bytes of device memory that are the task's own until it has run.

        Raises:
            NativeOpMissing: no library has the operator.
            DeviceFailed: CANN refused it, or a tensor could not be described.
        """
        prepare, launch = self._functions(operator)
        with self._handles(operator, arguments) as handles:
            size, executor = ctypes.c_uint64(0), ctypes.c_void_p()
            code = prepare(*handles, ctypes.byref(size), ctypes.byref(executor))
            if code:
                raise self._failed(f"aclnn{operator}GetWorkspaceSize", code, arguments)
            address = workspace(size.value) if size.value else None
            code = launch(ctypes.c_void_p(address), size, executor, ctypes.c_void_p(stream))
            if code:
                raise self._failed(f"aclnn{operator}", code, arguments)

    def _functions(self, operator: str) -> tuple[Callable[..., int], Callable[..., int]]:
        known = self._found.get(operator)
        if known is not None:
            return known
        names = (f"aclnn{operator}GetWorkspaceSize", f"aclnn{operator}")
        library = next((each for each in self._operators if _has(each, names)), None)
        if library is None:
            searched = ", ".join(each._name for each in self._operators)
            raise NativeOpMissing(
                f"{names[1]}: not in {searched}; build and install the operator package of this version "
                "(ops_ascendc/build.sh)"
            )
        prepare, launch = (_function(library, name, ctypes.c_int) for name in names)
        self._found[operator] = prepare, launch
        return prepare, launch

    @contextmanager
    def _handles(self, operator: str, arguments: Sequence[TensorArgument | int]) -> Iterator[list[object]]:
        """Lend the arguments as ctypes passes them; the tensors' handles go once the task is on its stream."""
        made: list[int] = []
        try:
            handles: list[object] = []
            for argument in arguments:
                if isinstance(argument, int):
                    handles.append(ctypes.c_int64(argument))
                    continue
                made.append(self._describe(operator, argument))
                handles.append(ctypes.c_void_p(made[-1]))
            yield handles
        finally:
            for handle in made:
                self._destroy(handle)

    def _describe(self, operator: str, argument: TensorArgument) -> int:
        rank = len(argument.shape)
        dims = (ctypes.c_int64 * rank)(*argument.shape)
        strides = (ctypes.c_int64 * rank)(*(prod(argument.shape[axis + 1 :]) for axis in range(rank)))
        handle: int | None = self._create(
            dims, rank, argument.dtype, strides, 0, _FORMAT_ND, dims, rank, argument.address or None
        )
        if handle is None:
            raise DeviceFailed(
                f"aclnn{operator}: {argument.name}: {argument.dtype.name.lower()} {argument.shape} at "
                f"{argument.address:#x} was refused by aclCreateTensor{self._told()}",
                "aclCreateTensor",
            )
        return handle

    def _failed(self, call: str, code: int, arguments: Sequence[TensorArgument | int]) -> DeviceFailed:
        meaning, remedy = _CODES.get(code, ("", "look the code up in CANN's list of return codes"))
        shapes = ", ".join(
            f"{each.name} {each.dtype.name.lower()}{list(each.shape)}"
            for each in arguments
            if isinstance(each, TensorArgument)
        )
        means = f" ({meaning})" if meaning else ""
        return DeviceFailed(f"{call} returned {code}{means} for {shapes}; {remedy}{self._told()}", call, code)

    def _told(self) -> str:
        message = " ".join(self._recent_message().split())
        return f"; CANN says: {message}" if message else ""


def runtime_message() -> Callable[[], str]:
    """Return what reads the runtime's text about the last error of this thread; one that knows none without a runtime.

    The text only explains: that the runtime is missing is for whoever uses it to say.
    """
    try:
        read = ctypes.CDLL(ascendcl_path() or "libascendcl.so").aclGetRecentErrMsg
    except (OSError, AttributeError):
        return str
    read.restype = ctypes.c_char_p
    return lambda: (read() or b"").decode(errors="replace")


def installed() -> list[str]:
    """Return where operator libraries may be: those of installed packages, then whatever the loader finds."""
    paths = [
        str(path)
        for folder in cann_operator_folders()
        for path in (
            *sorted(Path(folder).glob(f"op_api/lib/{OPERATOR_LIBRARY}")),
            *sorted(Path(folder).glob(f"vendors/*/op_api/lib/{OPERATOR_LIBRARY}")),
        )
    ]
    return [*dict.fromkeys(paths), OPERATOR_LIBRARY]


def _has(library: ctypes.CDLL, names: Sequence[str]) -> bool:
    try:
        return all(library[name] for name in names)
    except AttributeError:
        return False


def _function(library: ctypes.CDLL, name: str, result: Any) -> Any:
    try:
        function = library[name]
    except AttributeError as error:
        raise DeviceMissing(f"{library._name}: has no {name}; expected CANN 8.0 or newer") from error
    function.restype = result
    return function
