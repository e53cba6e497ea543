# SPDX-License-Identifier: Apache-2.0
"""The architecture as functions: each takes one file and returns a line per violation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.arch.source import PACKAGE, Module, imports_of

FLOORS = {
    "cli": 5, "proxy": 5, "cluster": 5, "modelmaker": 5,
    "vllm_plugin": 4,
    "prefill": 3, "decode": 3, "selection": 3,
    "transfer": 2, "control": 2, "registry": 2,
    "memory": 1, "ops": 1, "_native": 1,
    "errors": 0, "ids": 0, "address": 0, "tables": 0, "config": 0, "layout": 0, "metrics": 0, "log": 0,
}  # fmt: skip

# Within a floor only these look sideways.
SIDEWAYS = {
    "cli": {"proxy", "cluster", "modelmaker"},
    "ops": {"_native"},
    "address": {"errors"},
    "tables": {"errors"},
    "config": {"address", "errors", "ids", "tables"},
    "layout": {"errors", "ids"},
    "metrics": {"errors"},
}

# A foreign package, and the only place (a file, or a folder ending in /) that may import it.
SINGLE_IMPORTERS = {
    "vllm": "vllm_plugin/",
    "vllm_ascend": "vllm_plugin/",
    "mooncake": "transfer/mooncake.py",
    "zmq": "control/channel.py",
    "pyetcd": "registry/etcd.py",
    f"{PACKAGE}._native": "ops/",
}

EXECUTABLE_FORMATS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
SPDX = "SPDX-License-Identifier: Apache-2.0"

_MACHINE_PATH = re.compile(r"(?<![\w.})])/(?:root|home|work|workspace|tmp|Users|mnt|data)(?:/|\b)")
_REGISTRY_HOST = re.compile(r"\b(?:pypi|pythonhosted|npmjs|debian)\.org\b")
_BLANKET_IGNORE = re.compile(r"#\s*(?:mypy:\s*ignore-errors|ruff:\s*noqa|flake8:\s*noqa|type:\s*ignore\s*$|noqa\s*$)")


def floors(module: Module) -> list[str]:
    """A module imports from lower floors only, and from the siblings that are listed."""
    if not module.room:
        return (
            []
            if not [i for i in imports_of(module) if i.target.startswith(PACKAGE)]
            else [f"{module.path}: imports a room"]
        )
    if module.room not in FLOORS:
        return [f"{module.path}: {module.room!r} stands on no floor; add it to FLOORS or move it"]
    found = []
    for each in imports_of(module):
        parts = each.target.split(".")
        if parts[0] != PACKAGE or len(parts) < 2 or parts[1] in {module.room, "__version__"}:
            continue
        other = parts[1]
        if other not in FLOORS:
            found.append(f"{module.path}:{each.line}: {each.target} stands on no floor")
        elif FLOORS[other] >= FLOORS[module.room] and other not in SIDEWAYS.get(module.room, set()):
            found.append(
                f"{module.path}:{each.line}: {module.room} (floor {FLOORS[module.room]}) "
                f"imports {other} (floor {FLOORS[other]})"
            )
    return found


def words_are_plain(module: Module) -> list[str]:
    """Floor 0 knows neither torch nor numpy nor vllm."""
    if FLOORS.get(module.room) != 0:
        return []
    heavy = {"torch", "numpy", "vllm", "mooncake", "zmq"}
    return [
        f"{module.path}:{i.line}: floor 0 imports {i.target}"
        for i in imports_of(module)
        if i.target.split(".")[0] in heavy
    ]


def single_importers(module: Module) -> list[str]:
    """Each foreign package has one importer."""
    found = []
    inside = module.path.removeprefix(PACKAGE + "/")
    for each in imports_of(module):
        for foreign, place in SINGLE_IMPORTERS.items():
            if each.target == foreign or each.target.startswith(foreign + "."):
                allowed = inside.startswith(place) if place.endswith("/") else inside == place
                if not allowed:
                    found.append(f"{module.path}:{each.line}: {foreign} may be imported only in {PACKAGE}/{place}")
    return found


def nothing_executable(module: Module) -> list[str]:
    """Bytes from elsewhere never choose a class or run as code."""
    found = [
        f"{module.path}:{i.line}: {i.target} can execute what it reads"
        for i in imports_of(module)
        if i.target.split(".")[0] in EXECUTABLE_FORMATS or i.target == "torch.load"
    ]
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in {"eval", "exec", "builtins.eval", "builtins.exec", "torch.load"} or called.endswith(
            ("_pyobj", ".read_pickle")
        ):
            found.append(f"{module.path}:{node.lineno}: {called}() can execute what it reads")
        if any(word.arg == "allow_pickle" for word in node.keywords):
            found.append(f"{module.path}:{node.lineno}: allow_pickle can execute what it reads")
    return found


def environment_in_config_only(module: Module) -> list[str]:
    """The environment is read and written in config.py alone."""
    if module.path == f"{PACKAGE}/config.py":
        return []
    found = [
        f"{module.path}:{i.line}: {i.target}; add a function to {PACKAGE}/config.py instead"
        for i in imports_of(module)
        if i.target.split(".")[0] == "os" and i.target.split(".")[-1] in ENVIRONMENT
    ]
    found += [
        f"{module.path}:{node.lineno}: os.{node.attr}; add a function to {PACKAGE}/config.py instead"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ENVIRONMENT
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    return found


def no_probing(module: Module) -> list[str]:
    """State is explicit: no hasattr, no ``__del__``, no bare except, no global."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            found.append(f"{module.path}:{node.lineno}: hasattr() probes; say in a type what is there")
        elif isinstance(node, ast.FunctionDef) and node.name == "__del__":
            found.append(f"{module.path}:{node.lineno}: __del__ runs at no known time; be a context manager")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{module.path}:{node.lineno}: a bare except hides every fault")
        elif isinstance(node, ast.Global):
            found.append(f"{module.path}:{node.lineno}: module-level state; build an object and pass it down")
    return found


def documented(module: Module) -> list[str]:
    """A module, a public class and a public function each begin with a docstring."""
    found = [] if ast.get_docstring(module.tree) else [f"{module.path}:1: the module has no docstring"]
    if module.path.endswith(".pyi"):
        return found
    return found + [
        f"{module.path}:{node.lineno}: {node.name} has no docstring"
        for node in _public(module.tree)
        if _lacks_docstring(node)
    ]


def licensed(path: str, text: str) -> list[str]:
    """A source file names its licence in its first line, or in the second after a #! line."""
    head = text.splitlines()[:2]
    named = head[:1] if not text.startswith("#!") else head[1:]
    return [] if named and SPDX in named[0] else [f"{path}:1: the first line lacks '{SPDX}'"]


def no_machine_names(path: str, text: str) -> list[str]:
    """No tracked file names a folder or a package registry of the machine that it was written on."""
    return [
        f"{path}:{number}: {kind} {match.group()!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for kind, pattern in (("path of one machine", _MACHINE_PATH), ("package registry", _REGISTRY_HOST))
        if (match := pattern.search(line))
    ]


def no_blanket_ignores(path: str, text: str) -> list[str]:
    """An exemption names its rule and covers one line."""
    return [
        f"{path}:{number}: {match.group()!r} exempts too much; name the rule"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := _BLANKET_IGNORE.search(line))
    ]


def no_getenv_in_native_code(path: str, text: str) -> list[str]:
    """Native code takes its settings as arguments."""
    return [f"{path}:{n}: getenv in native code" for n, line in enumerate(text.splitlines(), 1) if "getenv(" in line]


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _public(parent: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    for node in parent.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def _lacks_docstring(node: Definition) -> bool:
    marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
    return ast.get_docstring(node) is None and not marks & {"overload", "override", "setter", "deleter"}
