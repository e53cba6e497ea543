# SPDX-License-Identifier: Apache-2.0
"""Every rule refuses a file that breaks it, and lets pass the nearest file that does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.arch import rules
from tests.arch.source import Module

SLASH = "/"  # spelled apart, because the rules read this file too

MODULE_CASES = {
    rules.floors: [
        (
            "transfer/a.py",
            "from tidal_connector.decode import arrivals",
            "from tidal_connector.memory import region",
        ),
        (
            "transfer/a.py",
            "from tidal_connector.control import messages",
            "from tidal_connector.transfer import runs",
        ),
        ("transfer/a.py", "from ..control import messages", "from .plane import Ticket"),
        ("prefill/a.py", "import tidal_connector.decode.arrivals", "import tidal_connector.control.messages"),
        (
            "decode/a.py",
            "def f():\n    from tidal_connector.selection import plan",
            "from tidal_connector.errors import TidalError",
        ),
        ("decode/a.py", "from tidal_connector import vllm_plugin", "from tidal_connector import config"),
        ("decode/a.py", "importlib.import_module('tidal_connector.cli')", "importlib.import_module('json')"),
        ("attic/a.py", "", None),
        ("errors.py", "from tidal_connector.config import X", "import enum"),
        (
            "proxy/a.py",
            "from tidal_connector.cli import main",
            "from tidal_connector.vllm_plugin import params",
        ),
        ("__init__.py", "from tidal_connector.config import X", "import sys"),
    ],
    rules.words_are_plain: [
        ("layout.py", "import torch", "import hashlib"),
        ("metrics.py", "from vllm.config import VllmConfig", "from collections import Counter"),
    ],
    rules.single_importers: [
        ("decode/a.py", "from vllm.config import VllmConfig", None),
        ("decode/a.py", "if TYPE_CHECKING:\n    import vllm_ascend", None),
        ("control/handshake.py", "import zmq", "import zlib"),
        ("transfer/loopback.py", "from mooncake.engine import TransferEngine", None),
        ("registry/memory.py", "import pyetcd", None),
        ("decode/a.py", "from tidal_connector import _native", "from tidal_connector import ops"),
    ],
    rules.nothing_executable: [
        ("control/a.py", "import pickle", "import msgspec"),
        ("control/a.py", "from cloudpickle import dumps", "from json import dumps"),
        ("control/a.py", "torch.load(path)", "safetensors.torch.load_file(path)"),
        ("control/a.py", "eval(text)", "model.eval()"),
        ("control/a.py", "socket.recv_pyobj()", "socket.recv()"),
        ("control/a.py", "numpy.load(path, allow_pickle=True)", "numpy.load(path)"),
    ],
    rules.environment_in_config_only: [
        ("log.py", "import os\nos.environ['A']", "import os\nos.getpid()"),
        ("log.py", "import os\nos.getenv('A')", None),
        ("log.py", "from os import environ", "from os import getpid"),
    ],
    rules.no_probing: [
        ("decode/a.py", "hasattr(x, 'y')", "isinstance(x, int)"),
        ("decode/a.py", "class A:\n    def __del__(self): ...", "class A:\n    def __exit__(self): ..."),
        ("decode/a.py", "try:\n    f()\nexcept:\n    pass", "try:\n    f()\nexcept OSError:\n    pass"),
        ("decode/a.py", "def f():\n    global x\n    x = 1", "def f():\n    x = 1"),
    ],
    rules.documented: [
        ("decode/a.py", "x = 1", '"""Doc."""'),
        ("decode/a.py", '"""Doc."""\ndef f(): ...', '"""Doc."""\ndef _f(): ...'),
        (
            "decode/a.py",
            '"""Doc."""\nclass _A:\n    pass\nclass B:\n    """Doc."""\n    def f(self): ...',
            None,
        ),
    ],
}

TEXT_CASES = [
    (rules.licensed, "import os\n", f"# {rules.SPDX}\nimport os\n"),
    (rules.licensed, "#!/bin/sh\necho\n", f"#!/bin/sh\n# {rules.SPDX}\n"),
    (rules.licensed, f"\n# {rules.SPDX}\n", f"// {rules.SPDX}\n"),
    (rules.no_machine_names, f"see {SLASH}root/x", "see root/x"),
    (rules.no_machine_names, f'path = "{SLASH}tmp/x"', "path = tmp_path / 'x'"),
    (rules.no_machine_names, f"{SLASH}work/main", "net/work/main"),
    (rules.no_machine_names, "https://pypi" + ".org/simple", "https://example.org/simple"),
    (rules.no_blanket_ignores, "# mypy: " + "ignore-errors", "x = y  # type: ignore[attr-defined]"),
    (rules.no_blanket_ignores, "x = y  # type: " + "ignore", "x = 1  # noqa: PLR2004"),
    (rules.no_blanket_ignores, "# ruff: " + "noqa", None),
    (rules.no_getenv_in_native_code, 'std::getenv("A");', "int environment;"),
]


@pytest.mark.parametrize(
    ("rule", "path", "bad", "good"), [(rule, *case) for rule, cases in MODULE_CASES.items() for case in cases]
)
def test_module_rule(rule: Callable[[Module], list[str]], path: str, bad: str, good: str | None) -> None:
    path = f"tidal_connector/{path}"
    assert rule(Module(path, bad))
    if good is not None:
        assert rule(Module(path, good)) == []


@pytest.mark.parametrize(("rule", "bad", "good"), TEXT_CASES)
def test_text_rule(rule: Callable[[str, str], list[str]], bad: str, good: str | None) -> None:
    assert rule("file", bad)
    if good is not None:
        assert rule("file", good) == []


def test_every_rule_has_a_case() -> None:
    public = {
        name
        for name, value in vars(rules).items()
        if callable(value) and value.__module__ == rules.__name__ and name[0] != "_"
    }
    assert public == {rule.__name__ for rule in (*MODULE_CASES, *(case[0] for case in TEXT_CASES))}


@pytest.mark.parametrize(
    ("foreign", "place"),
    [(f, p + "a.py" if p.endswith("/") else p) for f, p in rules.SINGLE_IMPORTERS.items()],
)
def test_the_one_importer_is_allowed(foreign: str, place: str) -> None:
    assert rules.single_importers(Module(f"tidal_connector/{place}", f"import {foreign}")) == []
    assert rules.single_importers(Module("tidal_connector/layout.py", f"import {foreign}"))
