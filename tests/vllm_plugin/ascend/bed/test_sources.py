# SPDX-License-Identifier: Apache-2.0
"""Sources are found in the index that pip is set up with, checked, unpacked once, and refused with one clear line."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_plugin.ascend.bed.index import Deadline, SourcesUnavailable, SourcesWrong, addresses_in
from tests.vllm_plugin.ascend.bed.sources import Release, unpacked

pytestmark = pytest.mark.contract

NAME = "some-thing"
FILE = "some_thing-1.0.tar.gz"


def archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("some_thing/__init__.py", "docs/long.md"):
            info = tarfile.TarInfo(f"some_thing-1.0/{name}")
            info.size = 2
            tar.addfile(info, io.BytesIO(b"x\n"))
    return packed.getvalue()


BYTES = archive()
RELEASE = Release(NAME, "1.0", hashlib.sha256(BYTES).hexdigest(), ("some_thing/",))


class Index:
    """A package index with one file; counts requests and can be told to misbehave."""

    def __init__(self) -> None:
        self.html = False
        self.content = BYTES
        self.cut = 0
        self.drip = 0.0
        self.asked: list[str] = []
        self.secrets: list[str | None] = []

    def page(self) -> tuple[str, bytes]:
        if self.html:
            return "text/html", f'<a href="../../files/{FILE}#sha256=0">{FILE}</a>'.encode()
        files = [{"filename": FILE, "url": f"../../files/{FILE}"}]
        return "application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        self.secrets.append(request.headers["Authorization"])
        kind, body = self.page() if request.path == f"/simple/{NAME}/" else ("application/gzip", self.content)
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if self.drip and "files" in request.path:
            for byte in body:
                request.wfile.write(bytes([byte]))
                time.sleep(self.drip)
            return
        request.wfile.write(body[: len(body) - self.cut] if "files" in request.path else body)


@pytest.fixture
def index() -> Iterator[tuple[Index, str]]:
    found = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                found.answer(self)
            except ConnectionError:
                return  # the other side gave up, as it should

        def log_message(self, *ignored: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield found, f"127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()


def fetch(address: str, folder: Path, seconds: float = 20.0) -> Path:
    return unpacked(RELEASE, folder, Deadline.within(seconds), [f"http://{address}"])


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_what_is_wanted_is_unpacked_once(index: tuple[Index, str], tmp_path: Path, html: bool) -> None:
    served, address = index
    served.html = html
    folder = fetch(address, tmp_path)
    assert (folder / "some_thing" / "__init__.py").read_text() == "x\n"
    assert not (folder / "docs").exists()
    assert fetch(address, tmp_path) == folder
    assert served.asked == [f"/simple/{NAME}/", f"/files/{FILE}"]


def test_a_damaged_folder_is_unpacked_again_without_a_download(index: tuple[Index, str], tmp_path: Path) -> None:
    served, address = index
    folder = fetch(address, tmp_path)
    (folder / ".unpacked").write_text("another release")
    (folder / "some_thing" / "__init__.py").unlink()
    assert (fetch(address, tmp_path) / "some_thing" / "__init__.py").is_file()
    assert len(served.asked) == 2


def test_another_file_under_the_name_is_refused(index: tuple[Index, str], tmp_path: Path) -> None:
    served, address = index
    served.content = BYTES + b"more"
    with pytest.raises(SourcesWrong, match=f"{FILE}: sha256 is .*, expected {RELEASE.sha256}"):
        fetch(address, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_connection_that_ends_early_is_not_called_another_file(index: tuple[Index, str], tmp_path: Path) -> None:
    served, address = index
    served.cut = 10
    with pytest.raises(SourcesUnavailable, match=f"{len(BYTES) - 10} of {len(BYTES)} bytes"):
        fetch(address, tmp_path)


def test_a_server_that_drips_runs_into_the_deadline(index: tuple[Index, str], tmp_path: Path) -> None:
    served, address = index
    served.drip = 0.05
    with pytest.raises(SourcesUnavailable, match=f"{FILE}: not done after 0 s"):
        fetch(address, tmp_path, seconds=0.3)


def test_an_index_without_the_file_is_not_offline(index: tuple[Index, str], tmp_path: Path) -> None:
    _, address = index
    with pytest.raises(SourcesWrong, match=r"none has some_thing-2\.0"):
        unpacked(Release(NAME, "2.0", "", ("some_thing/",)), tmp_path, Deadline.within(20), [f"http://{address}"])


def test_an_index_that_is_down_is_said_with_its_address(tmp_path: Path) -> None:
    with pytest.raises(SourcesUnavailable, match=f"127.0.0.1:9/simple/{NAME}/: .*refused"):
        fetch("127.0.0.1:9/simple/", tmp_path)


def test_a_password_goes_into_a_header_and_never_into_a_message(index: tuple[Index, str], tmp_path: Path) -> None:
    served, address = index
    fetch(f"me:secret@{address}", tmp_path)
    assert served.secrets[0] == "Basic bWU6c2VjcmV0"
    with pytest.raises(SourcesUnavailable) as caught:
        fetch("me:secret@127.0.0.1:9/simple/", tmp_path / "other")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("global.index-url='https://one/simple'\n", ["https://one/simple/"]),
        ("global.index-url='https://one/simple'\n:env:.index-url='https://two/simple/'\n", ["https://two/simple/"]),
        (
            "global.index-url='https://one/simple'\nglobal.extra-index-url='file:///x https://three/'\n",
            ["https://one/simple/", "https://three/"],
        ),
        ("global.timeout='60'\n", []),
    ],
)
def test_the_index_is_the_one_that_pip_is_set_up_with(listing: str, expected: list[str]) -> None:
    assert addresses_in(listing) == expected
