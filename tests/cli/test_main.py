# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, refuses and returns."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidal_connector import __version__
from tidal_connector.cli.main import app
from tidal_connector.cli.proxy import proxy_config
from tidal_connector.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "fastapi", "httpx", "mooncake", "zmq", "numpy")


def test_version_is_printed() -> None:
    for arguments in (["version"], ["--version"]):
        found = CliRunner().invoke(app, arguments)
        assert (found.exit_code, found.stdout) == (0, f"{__version__}\n")


def test_the_command_line_imports_nothing_heavy() -> None:
    script = f"import sys, tidal_connector.cli.main; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_serve_prints_the_plain_command_line() -> None:
    arguments = ["serve", "prefill", "--print", "--config", str(ROOT / "configs/prefill.toml")]
    found = CliRunner().invoke(app, [*arguments, "--", "--model", "m", "--port", "8100"])
    assert found.exit_code == 0
    line = found.stdout
    assert "vllm.entrypoints.openai.api_server --model m --port 8100 --kv-transfer-config '{" in line
    assert '"engine_id": "prefill-0"' in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["proxy"], "no prefill engine"),
        (["proxy", "--prefill", "x"], "expected ID=URL"),
        (["serve", "decode", "--config", "absent.toml"], "absent.toml"),
        (["demo", "--json", "absent/out.json"], "a folder that exists"),
        (["demo", "--model", "absent"], "absent/config.json"),
        (["bench", "transfer", "--json", "."], "--json ."),
        (["bench", "prefill-overhead", "--json", "absent/out.json"], "a folder that exists"),
        (["make-model", "/proc/absent", "--no-measure"], "/proc/absent cannot be made"),
        (
            [
                "serve",
                "decode",
                "--config",
                str(ROOT / "configs/decode.toml"),
                "--",
                "--kv-transfer-config",
                "{}",
            ],
            "written by tidal serve",
        ),
    ],
)
def test_errors_are_one_clear_line_and_status_2(arguments: list[str], words: str) -> None:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert found.stderr.startswith("tidal: ")
    assert words in found.stderr
    assert "Traceback" not in found.output


def test_a_port_in_use_is_one_clear_line_and_status_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["proxy", "--prefill", "p=http://h:1", "--decode", "d=http://h:2", "--listen", listen]
        found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert found.stderr.startswith(f"tidal: listen = '{listen}': Address already in use")


def test_a_log_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDAL_LOG", "loud")
    found = CliRunner().invoke(app, ["proxy", "--prefill", "p=http://h:1", "--decode", "d=http://h:2"])
    assert found.exit_code == 2
    assert "TIDAL_LOG = 'loud': expected 'DEBUG' or 'INFO'" in found.stderr


def test_options_add_engines_to_those_of_the_file() -> None:
    config = proxy_config(ROOT / "configs/proxy.toml", ["p1=http://h:1,h:2"], ["d1=http://h:3"], "127.0.0.1:9")
    assert [item.engine for item in config.prefill] == ["prefill-0", "p1"]
    assert [item.engine for item in config.decode] == ["decode-0", "d1"]
    assert config.listen == "127.0.0.1:9"


def test_an_engine_that_is_in_the_file_cannot_be_added_again() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        proxy_config(ROOT / "configs/proxy.toml", [], ["decode-0=http://h:1"], None)
