# SPDX-License-Identifier: Apache-2.0
"""``tidal doctor`` as it is typed: exit status, text, JSON, and a real etcd with engines in it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.etcd import EtcdServer
from tidal_connector.cli.doctor import gather as gathering
from tidal_connector.cli.doctor.ask_registry import ask_registry
from tidal_connector.cli.doctor.examine import Diagnosis
from tidal_connector.cli.doctor.finding import Finding, State
from tidal_connector.cli.main import app
from tidal_connector.ids import EngineId, Role
from tidal_connector.registry import members
from tidal_connector.registry.base import Put
from tidal_connector.registry.members import Member, announce
from tidal_connector.registry.settings import RegistryConfig, open_store

ENGINE = 'engine = "e"\n[tidal]\noffload = "on"\n[tidal.pool]\nbytes = "{}"\npages = "2m"\n'


@pytest.fixture(autouse=True)
def nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "IMPORTS", {})


def diagnose(*arguments: str) -> tuple[int, Diagnosis]:
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return done.exit_code, msgspec.json.decode(done.stdout, type=Diagnosis)


def about(found: Diagnosis, what: str) -> list[Finding]:
    return [line for line in found.findings if line.what.startswith(what)]


def test_this_machine_can_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # this once, for real
    status, found = diagnose()
    assert status == (1 if found.failed else 0)
    assert [line.state for line in about(found, "Mooncake import")] == [State.PASS]
    assert [line.state for line in about(found, "native module")] == [State.PASS]
    assert about(found, "registry") == []


def test_a_pool_that_this_machine_cannot_hold_fails_with_the_line_for_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(ENGINE.format("16TiB"))
    done = CliRunner().invoke(app, ["doctor", "--config", str(file)], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    assert "hugepages 2 MiB" in done.stdout
    assert "hugepagesz=2M hugepages=" in done.stdout
    assert "fail memory" in done.stdout


def test_a_wrong_key_is_a_line_and_a_missing_file_is_wrong_use(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(ENGINE.format("2MiB").replace("bytes", "byte"))
    status, found = diagnose("--config", str(file))
    assert status == 1
    assert [line.state for line in about(found, f"file {file}")] == [State.FAIL]
    missing = CliRunner().invoke(app, ["doctor", "--config", "absent.toml"])
    assert (missing.exit_code, missing.stderr) == (2, "tidal: configuration absent.toml: no such file\n")


@contextmanager
def engine(date: str) -> Iterator[str]:
    """An HTTP server that answers anything, and tells a date of its own."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            self.send_header("Date", date)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_real_etcd_is_asked_and_its_engines_are_looked_at(tmp_path: Path) -> None:
    with EtcdServer(tmp_path) as etcd, engine("Sat, 01 Jan 2000 00:00:00 GMT") as url:
        config = RegistryConfig(url=etcd.url, cluster="here")
        entry = Member(engine=EngineId("old"), role=Role.DECODE, state=members.State.READY, http=url)
        gone = msgspec.structs.replace(entry, engine=EngineId("gone"), http="http://127.0.0.1:9")
        with open_store(config) as store, announce(store, entry, 10) as one, announce(store, gone, 10) as other:
            assert one.wait(10)
            assert other.wait(10)
            store.write([Put("members/odd", b"[]")])
            before = set(store.read("").entries)
            facts = ask_registry(config)
            assert set(store.read("").entries) == before  # what was written is deleted
            assert (facts.error, facts.writable) == ("", "")
            assert 0 < max(facts.latencies_s) < 5
            assert facts.skews_s["old"] < -20 * 365 * 86400
            assert set(facts.unreachable) == {"gone"}
            assert facts.agents == frozenset()
            store.write([Put("agents/node-a", b"{}")])
            assert ask_registry(config).agents == {"node-a"}

            file = tmp_path / "e.toml"
            file.write_text(f'{ENGINE.format("2MiB")}[registry]\nurl = "{etcd.url}"\ncluster = "here"\n')
            status, found = diagnose("--config", str(file))
        assert status == 1
        engines = [(line.state, line.text) for line in about(found, "engines")]
        assert (State.PASS, "2 ready") in engines
        assert any(state is State.FAIL and "gone cannot be reached" in text for state, text in engines)
        assert any(state is State.WARN and "members/odd" in text for state, text in engines)
        assert any("engine old" in line.text for line in about(found, "clock"))


def test_an_etcd_that_is_not_there_is_a_failing_line() -> None:
    status, found = diagnose("--registry", "etcd://127.0.0.1:9")
    assert status == 1
    (line,) = about(found, "registry")
    assert (line.state, "etcdctl endpoint health" in line.fix) == (State.FAIL, True)
    assert line.text.startswith("etcd at 127.0.0.1:9: cannot be reached: connection refused;")


@pytest.mark.parametrize("url", ["http://127.0.0.1:2379", "etcd://host", "file://relative"])
def test_a_registry_s_address_that_cannot_be_meant_is_not_said_to_be_silent(url: str) -> None:
    status, found = diagnose("--registry", url)
    (line,) = about(found, "registry")
    assert (status, line.state, line.fix) == (1, State.FAIL, "correct this setting, or --registry")
    assert "expected" in line.text


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    _, found = diagnose("--registry", f"file://{tmp_path}/r")
    (line,) = about(found, "registry")
    assert (line.state, "no such folder" in line.text) == (State.WARN, True)
    assert list(tmp_path.iterdir()) == []
