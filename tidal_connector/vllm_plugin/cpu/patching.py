# SPDX-License-Identifier: Apache-2.0
"""How an attribute of the host is replaced: checked, once, and for a block or for good.

Knows nothing of what is replaced; the table is in :mod:`.patches`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tidal_connector.errors import TidalError

_SUPPORTED = "0.32"


class HostChanged(TidalError):
    """vLLM lacks an attribute that a patch replaces, or its signature is another one."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute.

    Attributes:
        name: short name for messages and tests.
        why: what fails without it.
        what: what the replacement does.
        verify: how to see that it is needed and works.
        module: dotted module of the host.
        owner: class within the module; empty for a module attribute.
        attribute: name of the attribute.
        parameters: parameter names of the host's function, in order.
        replacement: what takes its place.
    """

    name: str
    why: str
    what: str
    verify: str
    module: str
    owner: str
    attribute: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]

    def target(self) -> Any:
        """Return the object whose attribute is replaced.

        Raises:
            HostChanged: the module or the class is gone.
        """
        try:
            module = importlib.import_module(self.module)
            return getattr(module, self.owner) if self.owner else module
        except (ImportError, AttributeError) as error:
            raise HostChanged(f"patch {self.name}: {error}; use vLLM {_SUPPORTED}") from error

    def check(self, current: Any) -> None:
        """Compare the host's function with the signature that the patch was written for.

        Raises:
            HostChanged: they differ.
        """
        found = tuple(inspect.signature(current).parameters)
        if found != self.parameters:
            raise HostChanged(
                f"patch {self.name}: {self.attribute} of {self.owner or self.module} takes {found}, "
                f"expected {self.parameters}; use vLLM {_SUPPORTED}"
            )

    def apply(self) -> None:
        """Replace the attribute unless it is replaced already.

        Raises:
            HostChanged: the host is not what the patch was written for.
        """
        target = self.target()
        current = getattr(target, self.attribute, None)
        if current is self.replacement:
            return
        if current is None:
            raise HostChanged(f"patch {self.name}: {self.module} has no {self.attribute}; use vLLM {_SUPPORTED}")
        self.check(current)
        setattr(target, self.attribute, self.replacement)


@contextmanager
def replaced(owner: object, attribute: str, value: object) -> Iterator[None]:
    """Give an attribute of the host another value for the length of a block.

    Raises:
        HostChanged: the host has no such attribute.
    """
    if attribute not in vars(owner):
        raise HostChanged(f"{owner!r} has no {attribute}; use vLLM {_SUPPORTED}")
    before = vars(owner)[attribute]
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)
