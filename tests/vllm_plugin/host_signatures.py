# SPDX-License-Identifier: Apache-2.0
"""Reads the connector interface out of a vLLM source tree, without importing it.

``host_signatures.json`` keeps the table of each supported release. Print a new one when a release is added:
``python tests/vllm_plugin/host_signatures.py PATH/TO/vllm``.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

BASE = Path("distributed/kv_transfer/kv_connector/v1/base.py")
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")

Signatures = dict[str, dict[str, object]]


def read_signatures(package: Path) -> Signatures:
    """Return, for each method of the interface, its parameter names and whether it is abstract."""
    found: Signatures = {}
    for node in ast.parse((package / BASE).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    found[item.name] = {"parameters": _parameters(item), "abstract": _is_abstract(item)}
    return found


def _parameters(function: ast.FunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    if function.args.kwarg:
        names.append(f"**{function.args.kwarg.arg}")
    return names


def _is_abstract(function: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in function.decorator_list)


if __name__ == "__main__":
    json.dump(read_signatures(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
