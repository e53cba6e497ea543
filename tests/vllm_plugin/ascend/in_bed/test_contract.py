# SPDX-License-Identifier: Apache-2.0
"""On the real host: what we declare to lean on is there, and what we override is declared.

The text of each function is compared in ``bed/test_upstream.py``, without importing it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

import tidal_connector.vllm_plugin.ascend as ours
from tidal_connector.vllm_plugin.ascend import patches
from tidal_connector.vllm_plugin.patching import HostChanged, Seam

HOSTS = ("vllm", "vllm_ascend")


def of_host(kind: type[Any]) -> bool:
    return kind.__module__.partition(".")[0] in HOSTS


def subclasses() -> Iterator[type[Any]]:
    """Yield each class of the package that has a base of the host's."""
    for found in pkgutil.iter_modules(ours.__path__, f"{ours.__name__}."):
        module = importlib.import_module(found.name)
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__ and any(map(of_host, value.__mro__)):
                yield value


def undeclared(kind: type[Any], seams: tuple[Seam, ...]) -> list[str]:
    """Name the methods that a class overrides without saying so."""
    declared = {(seam.owner, seam.attribute) for seam in seams}
    hosts = [base for base in kind.__mro__ if of_host(base)]
    return [
        f"{kind.__name__}.{name} overrides that of {[base.__name__ for base in hosts if name in vars(base)]}"
        for name, value in vars(kind).items()
        if (inspect.isroutine(value) or isinstance(value, property))
        and any(name in vars(base) for base in hosts)
        and not any((base.__name__, name) in declared for base in hosts)
    ]


def test_what_is_declared_is_there() -> None:
    patches.check()


def test_a_changed_signature_stops_a_start_with_the_name_of_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AscendSFAImpl, "rope_single", lambda self, x, cos_sin: None)
    with pytest.raises(HostChanged, match="patch attention-query-rope: rope_single of AscendSFAImpl takes"):
        patches.check()


def test_whatever_is_overridden_is_declared() -> None:
    kinds = list(subclasses())
    assert len(kinds) >= 4
    found = [line for kind in kinds for line in undeclared(kind, (*patches.PATCHES, *patches.SEAMS))]
    assert not found, "\n".join(found)


def test_an_override_that_nobody_declared_is_found() -> None:
    class Careless(AscendSFAImpl):
        """Overrides two methods, one of them declared."""

        def rope_single(self, *given: Any) -> Any:
            return given

        def exec_kv(self, *given: Any) -> Any:
            return given

    assert undeclared(Careless, patches.SEAMS) == ["Careless.exec_kv overrides that of ['AscendSFAImpl']"]
