# SPDX-License-Identifier: Apache-2.0
"""Joins the files of ``static/`` into one self-contained HTML text, and says what a browser may do with it.

The page's script and style are allowed by their digests, everything else is forbidden; nothing is fetched but the data.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

SCRIPTS = ("words.js", "draw.js", "feed.js", "charts.js", "topology.js", "engines.js", "verdict.js", "main.js")
STYLES = ("style.css", "parts.css")


class Page(msgspec.Struct, frozen=True):
    """The page as it is sent.

    Attributes:
        body: HTML.
        headers: of the answer.
    """

    body: bytes
    headers: Mapping[str, str]


GUARD = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
"""Headers of page and data alike."""


def build_page() -> Page:
    """Read the files of the package and join them."""
    folder = files(__package__).joinpath("static")
    style = _joined(folder, STYLES)
    script = "(() => {\n'use strict';\n" + _joined(folder, SCRIPTS) + "})();\n"
    for name, text in (("style", style), ("script", script)):
        if re.search(rf"</{name}", text, re.IGNORECASE):
            raise ValueError(f"dashboard: the page's {name} must not hold '</{name}'")
    body = folder.joinpath("index.html").read_text(encoding="utf-8")
    body = body.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(
        body.encode(),
        {
            **GUARD,
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "cache-control": "no-cache",
        },
    )


def _joined(folder: Traversable, names: tuple[str, ...]) -> str:
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
