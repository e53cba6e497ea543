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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

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


@dataclass(frozen=True)
class Module:
    """A module of the tree, parsed."""

    name: str
    package: str
    text: str
    tree: ast.Module


def read(roots: Sequence[Path], seam: Seam) -> Upstream:
    """Read the function that a patch or seam is about; a method may stand in a base of its class.

    Raises:
        Gone: it is not where it was.
    """
    module = _module(roots, seam.module)
    if seam.owner:
        module, function = _method(roots, module, seam.owner, seam.attribute)
    else:
        function = _function(module.tree, seam.attribute) or _gone(f"{seam.module} defines no {seam.attribute}")
    kinds = [f"@{ast.unparse(mark)} " for mark in function.decorator_list]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return Upstream(f"{''.join(kinds)}({ast.unparse(function.args)}){returns}", _digest(function, module.text))


def _gone(why: str) -> NoReturn:
    raise Gone(why)


def _module(roots: Sequence[Path], name: str) -> Module:
    inside = Path(*name.split("."))
    for root in roots:
        for path, package in (
            (root / inside.with_suffix(".py"), name.rpartition(".")[0]),
            (root / inside / "__init__.py", name),
        ):
            if path.is_file():
                text = path.read_text()
                return Module(name, package, text, _parsed(text))
    _gone(f"there is no module {name}")


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield what a module does when it is imported, whatever it depends on."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _method(roots: Sequence[Path], module: Module, owner: str, name: str) -> tuple[Module, Function]:
    """Find a method in a class or, first base first, in what the class is made of."""
    where, scope = _class(roots, module, owner)
    function = _function(scope, name)
    if function is not None:
        return where, function
    for base in scope.bases:
        try:
            return _method(roots, where, ast.unparse(base).split("[", 1)[0], name)
        except Gone:
            continue
    _gone(f"neither {owner} nor a base of it defines {name}")


def _class(roots: Sequence[Path], module: Module, name: str) -> tuple[Module, ast.ClassDef]:
    """Find a class in a module, or where the module imports it from."""
    for node in _statements(module.tree.body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _class(roots, _module(roots, _origin(module, node)), alias.name)
    _gone(f"{module.name} has no class {name}")


def _origin(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return str(node.module)
    parts = module.package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _function(scope: ast.Module | ast.ClassDef, name: str) -> Function | None:
    found = [node for node in scope.body if isinstance(node, Function) and node.name == name]
    return found[-1] if found else None


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
