# SPDX-License-Identifier: Apache-2.0
"""How commands end at Ctrl-C: what they say is so, from their first moment on."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from tidal_connector import __version__
from tidal_connector.cli.ends import ALL_ENDED, clear_ends
from tidal_connector.cli.main import app
from tidal_connector.config import child_environment
from tidal_connector.ids import EngineId, Role
from tidal_connector.registry.members import Member, State, announce
from tidal_connector.registry.settings import RegistryConfig, open_store

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-c")
START = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

{before}
sys.meta_path.insert(0, Interrupt())
sys.argv = ["tidal", "version"]
from tidal_connector.cli.start import main
main()
"""


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """The URL of a registry in which decode-0 is announced, as an agent's engine."""
    url = f"file://{tmp_path}/registry"
    member = Member(engine=EngineId("decode-0"), role=Role.DECODE, state=State.READY, http="http://h:1", revision="r1")
    with open_store(RegistryConfig(url=url)) as store, announce(store, member, 10.0) as announced:
        assert announced.wait(10)
        yield url


def tidal(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "150"}).invoke(app, words)


def test_an_interrupted_wait_for_a_drain_says_that_the_order_stands(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidal_connector.cli.drain.await_end", interrupt)
    done = tidal("drain", "decode-0", "--registry", engine, "--wait")
    assert done.exit_code == 130
    assert done.stderr == (
        "tidal: interrupted; the order to decode-0 stands; tidal drain decode-0 --cancel withdraws it\n"
    )
    assert tidal("drain", "decode-0", "--registry", engine, "--cancel").stdout == "decode-0: withdrawn\n"


def test_the_order_to_an_engine_that_an_agent_keeps_says_until_when_it_stays_down(engine: str) -> None:
    done = tidal("drain", "decode-0", "--registry", engine)
    assert done.stdout == ("decode-0: ordered to drain and stop, and stays down until: tidal drain decode-0 --cancel\n")


def test_an_interrupted_wait_for_a_rollout_says_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.toml"
    group = '[[group]]\nrole = "{}"\ncount = 1\nnodes = ["a"]\nmodel = "m"\n'
    file.write_text("[cluster]\nallow_outage = true\n" + group.format("prefill") + group.format("decode"))
    url = f"file://{tmp_path}/registry"
    monkeypatch.setattr("tidal_connector.cli.rollout.wait_for", interrupt)
    done = tidal("rollout", "apply", str(file), "--registry", url, "--wait")
    assert (done.exit_code, ALL_ENDED in done.stderr) == (130, False)
    assert "the rollout goes on; look at it with: tidal rollout status --wait" in done.stderr


def test_only_who_ends_all_that_was_started_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in (("", "tidal: interrupted\n"), (ALL_ENDED, f"tidal: interrupted; {ALL_ENDED}\n")):
        with pytest.raises(typer.Exit) as ended, clear_ends(given):
            interrupt()
        assert (ended.value.exit_code, capsys.readouterr().err) == (130, said)


@pytest.mark.parametrize("loaded", ["typer", "tidal_connector.cli.bench.commands"])
def test_an_interruption_while_the_commands_are_loaded_ends_without_a_traceback(loaded: str) -> None:
    code = START.format(name=loaded, before="")
    done = subprocess.run([*PYTHON, code], check=False, capture_output=True, text=True, env=child_environment())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interruption_that_is_ignored_stays_ignored() -> None:
    code = START.format(name="typer", before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    done = subprocess.run([*PYTHON, code], check=False, capture_output=True, text=True, env=child_environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_the_tidal_script_begins_where_interruptions_are_clear() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {
        "tidal": "tidal_connector.cli.start:main"
    }
