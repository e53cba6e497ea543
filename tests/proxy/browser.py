# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven over its own pipe: no driver program, no package, no port.

Commands and events of Chromium's DevTools protocol are JSON texts with a zero byte after each, on the browser's file
descriptors 3 and 4. Everything that the page asks for, logs, or throws is kept. One thread.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_S = 20.0


def chromium() -> str | None:
    """Return the path of an installed Chromium."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page of a running browser."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to = write_to
        self._read_from = read_from
        self._rest = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Open a page and listen to what it asks for and says."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return a command's result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            heard = self._next(until - time.monotonic())
            if heard is None:
                raise TimeoutError(f"the browser did not answer {method} within {ANSWER_S:g} s")
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                return dict(heard["result"])

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def window(self, width: int, height: int, scheme: str = "light", touch_scale: float = 1.0) -> None:
        """Set the size of the window and the colour scheme that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=touch_scale,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression comes to."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"].get("exception", found["exceptionDetails"])))
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Return what an expression comes to as soon as it is true in JavaScript's eyes."""
        until = time.monotonic() + timeout_s
        while True:
            if value := self.value(expression):
                return value
            if time.monotonic() > until:
                text = self.value("document.body ? document.body.innerText.slice(0, 1500) : ''")
                raise TimeoutError(
                    f"not within {timeout_s:g} s: {expression}; the page says: {text}; {self.complaints()}"
                )
            self._next(0.1)

    def key(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, full: bool = False) -> Path:
        """Save what the window shows (or the whole page) as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def asked(self) -> list[str]:
        """Return the address of everything that the page has asked for."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return uncaught errors and what the browser logged as one, such as a breach of the content policy."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(str(details.get("exception", {}).get("description", details["text"])))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        until = time.monotonic() + timeout_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._read_from, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        raw, self._rest = self._rest.split(b"\0", 1)
        heard: dict[str, Any] = json.loads(raw)
        if "method" in heard:
            self.events.append(heard)
        return heard


@contextmanager
def browsing(program: str) -> Iterator[Browser]:
    """Run a browser with an empty profile; end it, and all its processes, on the way out."""
    to_browser, write_to = os.pipe()
    read_from, from_browser = os.pipe()

    with tempfile.TemporaryDirectory(prefix="tidal-browser-", ignore_cleanup_errors=True) as profile:
        # A shell puts the pipe where the browser looks for it; after that it is the browser.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            browser = Browser(write_to, read_from)
            browser.attach()
            yield browser
        finally:
            os.close(write_to)  # the browser ends with its pipe
            os.close(read_from)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
