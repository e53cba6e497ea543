# SPDX-License-Identifier: Apache-2.0
"""Every way in which rows are copied: the definition, each native path of this processor, and several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidal_connector.errors import NativeOpMissing
from tidal_connector.ops import native


def every_way(name: str, reference: Callable[..., int], operator: Callable[..., int]) -> Any:
    """Parametrize a test over all implementations of an operator.

    Args:
        name: the parameter.
        reference: the definition.
        operator: the native one, which takes ``threads`` and ``path`` after the arguments of the definition.
    """

    def by(path: native.CopyPath, threads: int = 1) -> Callable[..., int]:
        return lambda *arguments: operator(*arguments, threads, path)

    found: list[Any] = [pytest.param(reference, id="reference")]
    try:
        paths = native.paths()
    except NativeOpMissing as error:
        skip = pytest.mark.skip(reason=str(error))
        found.append(pytest.param(reference, id="native", marks=[pytest.mark.native, skip]))
    else:
        found += [pytest.param(by(path), id=f"native-{path.name.lower()}", marks=pytest.mark.native) for path in paths]
        found.append(pytest.param(by(paths[-1], threads=3), id="native-threads", marks=pytest.mark.native))
    return pytest.mark.parametrize(name, found)
