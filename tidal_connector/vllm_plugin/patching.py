# SPDX-License-Identifier: Apache-2.0
"""What we lean on in a host: named, checked against the signature it had, and replaced where that has to be.

Knows nothing of what is replaced; the tables are in ``cpu/patches.py`` and ``ascend/patches.py``. Any thread, before
the host uses what is replaced.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tidal_connector.errors import TidalError

CPU_HOST = "vLLM 0.32"
_MARK = "__tidal_patch__"


class HostChanged(TidalError):
    """The host lacks an attribute that we replace or call, or its signature is another one."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of the host that we override, call or replace.

    Attributes:
        name: short name for messages and tests.
        why: what fails without it.
        what: what we do there.
        verify: how to see that it is needed and works.
        module: dotted module of the host.
        owner: class within the module; empty for a module attribute.
        attribute: name of the attribute.
        parameters: parameter names of the host's function, in order.
        host: what to install, for messages.
    """

    name: str
    why: str
    what: str
    verify: str
    module: str
    owner: str
    attribute: str
    parameters: tuple[str, ...]
    host: str = field(default=CPU_HOST, kw_only=True)

    def target(self) -> Any:
        """Return the object that has the attribute.

        Raises:
            HostChanged: the module or the class is gone.
        """
        try:
            module = importlib.import_module(self.module)
            return getattr(module, self.owner) if self.owner else module
        except (ImportError, AttributeError) as error:
            raise HostChanged(f"patch {self.name}: {error}; use {self.host}") from error

    def found(self) -> Any:
        """Return the attribute as it is stored: a function, or the ``classmethod`` or ``staticmethod`` around one.

        Raises:
            HostChanged: it is gone.
        """
        target = self.target()
        stored = inspect.getattr_static(target, self.attribute, None)
        if stored is None:
            raise HostChanged(f"patch {self.name}: {self.module} has no {self.attribute}; use {self.host}")
        return stored

    def check(self, current: Any = None) -> None:
        """Compare the host's function with the signature that we were written for.

        Args:
            current: the function; None looks it up.

        Raises:
            HostChanged: they differ, or it is gone.
        """
        found = tuple(inspect.signature(_function(self.found()) if current is None else current).parameters)
        if found != self.parameters:
            raise HostChanged(
                f"patch {self.name}: {self.attribute} of {self.owner or self.module} takes {found}, "
                f"expected {self.parameters}; use {self.host}"
            )


@dataclass(frozen=True, slots=True)
class Patch(Seam):
    """One replaced attribute.

    Attributes:
        replacement: what takes its place.
        wraps: ``replacement`` makes the replacement out of the host's own function instead of being it.
    """

    replacement: Callable[..., Any]
    wraps: bool = False

    def applied(self) -> bool:
        """Tell whether the attribute is replaced already.

        Raises:
            HostChanged: it is gone.
        """
        current = _function(self.found())
        return current is self.replacement or getattr(current, _MARK, None) == self.name

    def apply(self) -> None:
        """Replace the attribute unless it is replaced already; a class or static method stays one.

        Raises:
            HostChanged: the host is not what the patch was written for.
        """
        if self.applied():
            return
        stored = self.found()
        current = _function(stored)
        self.check(current)
        new = self.replacement
        if self.wraps:
            new = self.replacement(current)
            setattr(new, _MARK, self.name)
        kept = stored if isinstance(stored, classmethod | staticmethod) else None
        setattr(self.target(), self.attribute, new if kept is None else type(kept)(new))


def _function(stored: Any) -> Any:
    return stored.__func__ if isinstance(stored, classmethod | staticmethod) else stored


@contextmanager
def replaced(owner: object, attribute: str, value: object, host: str = CPU_HOST) -> Iterator[None]:
    """Give an attribute of the host another value for the length of a block.

    Raises:
        HostChanged: the host has no such attribute.
    """
    if attribute not in vars(owner):
        raise HostChanged(f"{owner!r} has no {attribute}; use {host}")
    before = vars(owner)[attribute]
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)
