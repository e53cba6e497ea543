# SPDX-License-Identifier: Apache-2.0
"""What the architecture rules look at: the project's tracked files, and Python modules as syntax trees."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tidal_connector"


@dataclass(frozen=True)
class Module:
    """One Python file: its path from the project's root, its dotted name, and its text."""

    path: str
    text: str

    @property
    def name(self) -> str:
        parts = list(Path(self.path).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The first name below the package, such as ``memory``; empty for the package itself."""
        return self.name.split(".")[1] if self.name.startswith(PACKAGE + ".") else ""

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


@dataclass(frozen=True)
class Import:
    """One imported dotted name and the line it stands on."""

    target: str
    line: int


def imports_of(module: Module) -> Iterator[Import]:
    """Yield each import by its absolute name, also inside functions, TYPE_CHECKING and import_module()."""
    package = module.name.split(".") if module.path.endswith("__init__.py") else module.name.split(".")[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{origin}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield Import(node.args[0].value, node.lineno)


def tracked_files() -> list[str]:
    """Paths that git tracks or would track (a file is checked before its first commit), less deleted ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    return sorted({path for path in listed.split("\0") if path and (ROOT / path).is_file()})


def modules(*folders: str) -> list[Module]:
    """Python files below the named folders of the project."""
    return [
        Module(path, (ROOT / path).read_text(encoding="utf-8"))
        for path in tracked_files()
        if path.endswith((".py", ".pyi")) and path.split("/")[0] in folders
    ]
