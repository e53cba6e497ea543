# SPDX-License-Identifier: Apache-2.0
"""Reads functions out of a source tree without importing it, and says what differs from what we were written for.

``upstream.json`` holds, for each patch and seam of ``tidal_connector.vllm_plugin.ascend.patches``, the signature of the
host's function and a digest of its body. After moving to another release, read each function that is reported again;
then ``python -m tests.vllm_plugin.ascend.bed.upstream`` prints the new table. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.vllm_plugin.ascend.bed.sources import ensure_sources
from tidal_connector.vllm_plugin.ascend.patches import PATCHES, SEAMS
from tidal_connector.vllm_plugin.patching import Seam

TABLE = Path(__file__).with_name("upstream.json")
ENTRIES: tuple[Seam, ...] = (*PATCHES, *SEAMS)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Upstream:
    """A function of the host: its signature as text, kind included, and a digest of its body."""

    signature: str
    body: str


class Gone(Exception):
    """The tree has no such module, class or function."""


def read(roots: Sequence[Path], seam: Seam) -> Upstream:
    """Read the function that a patch or seam is about.

    Raises:
        Gone: it is not where it was.
    """
    path, text = _module(roots, seam.module)
    tree = ast.parse(text, str(path))
    scope = _class(tree, seam.owner, seam.module) if seam.owner else tree
    function = _function(scope, seam.attribute, seam.owner or seam.module)
    kinds = [f"@{ast.unparse(mark)} " for mark in function.decorator_list]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return Upstream(f"{''.join(kinds)}({ast.unparse(function.args)}){returns}", _digest(function, text))


def _module(roots: Sequence[Path], name: str) -> tuple[Path, str]:
    inside = Path(*name.split("."))
    for root in roots:
        for path in (root / inside.with_suffix(".py"), root / inside / "__init__.py"):
            if path.is_file():
                return path, path.read_text()
    raise Gone(f"there is no module {name}")


def _class(scope: ast.Module, name: str, where: str) -> ast.ClassDef:
    found = [node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(found) != 1:
        raise Gone(f"{where} defines {len(found)} classes {name}")
    return found[0]


def _function(scope: ast.Module | ast.ClassDef, name: str, where: str) -> Function:
    found = [node for node in scope.body if isinstance(node, Function) and node.name == name]
    if len(found) != 1:
        raise Gone(f"{where} defines {len(found)} functions {name}")
    return found[0]


def _digest(function: Function, text: str) -> str:
    """Digest the code of a body: docstring, comments on lines of their own and blank lines do not count."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return ""
    lines = text.splitlines()[body[0].lineno - 1 : function.end_lineno]
    kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def recorded() -> dict[str, Upstream]:
    """Return the table, by name of the patch or seam."""
    return {name: Upstream(**entry) for name, entry in json.loads(TABLE.read_text()).items()}


def changes(roots: Sequence[Path], entries: Iterable[Seam], table: dict[str, Upstream]) -> list[str]:
    """Return a line for each function that is not what its patch or seam was written for."""
    found = []
    for seam in entries:
        where = f"patch {seam.name}: {seam.attribute} of {seam.owner or seam.module}"
        expected = table.get(seam.name)
        if expected is None:
            found.append(f"{where} is not in {TABLE.name}; read it, then record it")
            continue
        try:
            current = read(roots, seam)
        except Gone as error:
            found.append(f"{where} is gone: {error}. Why we need it: {seam.why}")
            continue
        if current.signature != expected.signature:
            found.append(f"{where} is now {current.signature}, was {expected.signature}. What we do there: {seam.what}")
        elif current.body != expected.body:
            found.append(f"{where} has another body; read it again. What we do there: {seam.what}")
    return found + [f"{TABLE.name} has {name}, and no patch does" for name in table.keys() - {s.name for s in entries}]


if __name__ == "__main__":
    sources = ensure_sources()
    functions = {seam.name: asdict(read([sources.vllm_ascend, sources.vllm], seam)) for seam in ENTRIES}
    json.dump(functions, sys.stdout, indent=1, sort_keys=True)
    print()
