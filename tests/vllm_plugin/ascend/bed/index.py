# SPDX-License-Identifier: Apache-2.0
"""Finds the address of one release file in the package index that pip is set up with.

``pip download`` of a source distribution builds its metadata, which for vLLM and vllm-ascend needs CUDA or CANN; so
the index is asked directly, in the form of PEP 691 (JSON) or PEP 503 (HTML). Imports neither torch nor vLLM.
"""

from __future__ import annotations

import ast
import base64
import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_SOCKET_SECONDS = 30.0
_CHUNK = 1 << 20


class SourcesUnavailable(Exception):
    """The index or the file cannot be reached from here: nothing is known to be wrong with it."""


class SourcesWrong(Exception):
    """What came from the index is not what is pinned."""


@dataclass(frozen=True)
class Deadline:
    """A moment by which a download has to be over."""

    at: float
    seconds: float

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds, seconds)

    def check(self, what: str) -> None:
        """Raise SourcesUnavailable when the time is up."""
        if time.monotonic() > self.at:
            raise SourcesUnavailable(f"{what}: not done after {self.seconds:.0f} s")

    @property
    def left(self) -> float:
        return max(0.1, min(_SOCKET_SECONDS, self.at - time.monotonic()))


def index_addresses() -> list[str]:
    """Return the addresses of pip's indexes: the main one first, then the extra ones that are reached over HTTP."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return addresses_in(listing) or [_default_index()]


def addresses_in(listing: str) -> list[str]:
    """Pick the indexes out of what ``pip config list`` prints; empty where the main one is pip's own default."""
    settings = dict(line.split("=", 1) for line in listing.splitlines() if "=" in line)
    main, extra = (_setting(settings, name) for name in ("index-url", "extra-index-url"))
    found = [*main[:1], *extra] if main else [*([_default_index()] if extra else []), *extra]
    return [address.rstrip("/") + "/" for address in found if address.startswith(("http://", "https://"))]


def _setting(settings: dict[str, str], name: str) -> list[str]:
    for section in (":env:", "download", "install", "global"):
        value = settings.get(f"{section}.{name}")
        if value is not None:
            return str(ast.literal_eval(value)).split()
    return []


def _default_index() -> str:
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url).rstrip("/") + "/"


def find_file(project: str, filename: str, deadline: Deadline, indexes: list[str] | None = None) -> str:
    """Return the address of a release file.

    Raises:
        SourcesUnavailable: no index answered.
        SourcesWrong: an index answered, and none lists the file.
    """
    failures, answered = [], 0
    for index in indexes or index_addresses():
        page = urllib.parse.urljoin(index, project + "/")
        try:
            with open_address(page, deadline, accept=_ACCEPT) as answer:
                kind, body = answer.headers.get_content_type(), b"".join(read_chunks(answer, deadline, page))
        except SourcesUnavailable as error:
            failures.append(str(error))
            continue
        answered += 1
        for name, address in _files(kind, body):
            if name == filename:
                return urllib.parse.urljoin(page, address)
    if answered:
        raise SourcesWrong(f"{answered} package index(es) know {project}, and none has {filename}")
    raise SourcesUnavailable("; ".join(failures))


def _files(kind: str, body: bytes) -> Iterator[tuple[str, str]]:
    if kind == _JSON:
        for file in json.loads(body)["files"]:
            yield file["filename"], file["url"]
        return
    parser = _Anchors()
    parser.feed(body.decode(errors="replace"))
    for address in parser.found:
        yield urllib.parse.unquote(urllib.parse.urlsplit(address).path.rsplit("/", 1)[-1]), address


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def open_address(address: str, deadline: Deadline, accept: str = "*/*") -> HTTPResponse:
    """Open an address for reading; a name and password in it go into a header.

    Raises:
        SourcesUnavailable: it cannot be reached or does not answer with what was asked for.
    """
    deadline.check(_shown(address))
    parts = urllib.parse.urlsplit(address)
    headers = {"Accept": accept}
    if parts.username is not None:
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
    try:
        request = urllib.request.Request(_without_secret(parts), headers=headers)
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=deadline.left)
    except (OSError, HTTPException) as error:
        raise SourcesUnavailable(f"{_shown(address)}: {error}") from error
    return answer


def read_chunks(answer: HTTPResponse, deadline: Deadline, what: str) -> Iterator[bytes]:
    """Yield what an open address holds, piece by piece.

    Raises:
        SourcesUnavailable: the connection broke, or the deadline has passed.
    """
    expected, received = answer.headers.get("Content-Length"), 0
    while True:
        deadline.check(what)
        try:
            chunk = answer.read1(_CHUNK)
        except (OSError, HTTPException) as error:
            raise SourcesUnavailable(f"{what}: {error}") from error
        if not chunk:
            break
        received += len(chunk)
        yield chunk
    if expected is not None and received != int(expected):
        raise SourcesUnavailable(f"{what}: the connection ended after {received} of {expected} bytes")


def _without_secret(parts: urllib.parse.SplitResult) -> str:
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[-1]))


def _shown(address: str) -> str:
    return _without_secret(urllib.parse.urlsplit(address))
