# SPDX-License-Identifier: Apache-2.0
"""The dashboard as a person sees it: a real browser, the real proxy, engine stand-ins with real transfers.

One story after the other on one proxy, so that the whole takes seconds; each waits for what it expects.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cluster.standins import Standin, standin, until
from tests.proxy.browser import Browser, browsing, chromium
from tidal_connector.config import child_environment

PROGRAM = chromium()

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium on this machine: apt-get install chromium, or make setup as root"
)

EVIL = "<script>window.hurt()</script><b>decode"
"""An engine id that would run, and be bold, on a page that does not escape it."""

REQUESTS = 24

CONTRAST = """(() => {
  const channel = (value) => { const c = value / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const light = (name) => {
    paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = paint.getImageData(0, 0, 1, 1).data;
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  return [['--ink', '--bg'], ['--ink', '--panel'], ['--muted', '--panel'], ['--muted', '--bg'], ['--muted', '--raised'],
    ['--warning', '--warning-soft'], ['--critical', '--critical-soft'], ['--prefill', '--panel', 3],
    ['--decode', '--panel', 3], ['--critical-mark', '--panel', 3]]
    .map(([one, other, least]) => {
      const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
      return [one, other, (a + 0.05) / (b + 0.05), least || 4.5];
    });
})()"""


@dataclass
class Cluster:
    """Stand-ins, and a proxy that can be ended and begun again on its port."""

    engines: list[Standin]
    port: int
    log: Path
    proxies: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        command = [sys.executable, "-m", "tidal_connector.cli", "proxy", "--listen", f"127.0.0.1:{self.port}"]
        for engine in self.engines:
            side = "--prefill" if engine.engine.startswith("prefill") else "--decode"
            command += [side, f"{engine.engine}={engine.http},{engine.control}"]
        with self.log.open("ab") as log:
            self.proxies.append(subprocess.Popen(command, stdout=log, stderr=log, env=child_environment()))
        until(self.answers, what=f"the proxy ({self.log})")

    def answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200
        return False

    def end(self) -> None:
        for proxy in self.proxies:
            proxy.send_signal(signal.SIGTERM)
            try:
                proxy.wait(15)
            except subprocess.TimeoutExpired:
                proxy.kill()
                proxy.wait()
        self.proxies.clear()

    def work(self, number: int) -> list[int]:
        def one(index: int) -> int:
            body = {
                "model": "tidal",
                "prompt": "How high is the tide? " * (index + 1),
                "max_tokens": 12,
                "stream": True,
            }
            answer = httpx.post(self.url + "/v1/completions", json=body, timeout=30, trust_env=False)
            return answer.status_code if b'"error"' not in answer.content else 500

        with ThreadPoolExecutor(6) as pool:
            return list(pool.map(one, range(number)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("dashboard")
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as free:
        names = ["prefill-0", "prefill-1", "decode-0", EVIL]
        engines = [
            stack.enter_context(
                standin("prefill" if number < 2 else "decode", name, folder / f"{number}.log", "--token-ms", "20")
            )
            for number, name in enumerate(names)
        ]
        port = free.getsockname()[1]
        free.close()
        running = Cluster(engines, port, folder / "proxy.log")
        stack.callback(running.end)
        running.begin()
        yield running


@pytest.fixture(scope="module")
def page(cluster: Cluster) -> Iterator[Browser]:
    assert PROGRAM is not None
    with browsing(PROGRAM) as browser:
        browser.window(1440, 1000)
        browser.open(cluster.url + "/dashboard")
        browser.wait("document.querySelectorAll('tbody tr[data-state=ready]').length === 4", 30)
        yield browser


def cell(engine: str, label: str) -> str:
    """Return JavaScript for the text of a cell of the table of engines."""
    return (
        f"[...document.querySelectorAll('tbody tr')].find((row) => row.dataset.engine === {engine!r})"
        f".querySelector('[data-label=\"{label}\"]').innerText"
    )


def test_traffic_shows_in_states_and_numbers(cluster: Cluster, page: Browser) -> None:
    assert cluster.work(REQUESTS) == [200] * REQUESTS
    page.wait(f"document.getElementById('foot').innerText.includes('requests since then: {REQUESTS} ok')")
    page.wait("document.querySelector('[data-chart=first] .value').innerText.match(/^[0-9.]+ ?(ms|s)$/)")
    assert page.value("document.querySelector('[data-chart=token] .value').innerText.match(/^[0-9.]+ ?ms$/) !== null")
    page.wait("document.querySelector('[data-chart=bytes] .sub').innerText.match(/· [0-9.]+ [KMG]B in all/)")
    assert page.value("document.querySelector('[data-chart=hits] .value').innerText").startswith("90")
    pushed = sum(engine.metrics()["tidal:bytes_pushed_total"] for engine in cluster.engines[:2])
    answer = httpx.get(cluster.url + "/dashboard/data", timeout=5, trust_env=False).json()
    assert sum(row["bytes"] for row in answer["engines"] if row["role"] == "prefill") == pushed > 0
    assert page.value("document.getElementById('verdict').dataset.level") == "ok"
    assert page.value("document.getElementById('headline').innerText").startswith("All is well: 2 prefill engines")
    nodes = "[...document.querySelectorAll('.node')].map((node) => [node.dataset.role, node.dataset.state].join(' '))"
    assert sorted(page.value(nodes)) == ["decode ready"] * 2 + ["prefill ready"] * 2


def test_requests_in_flight_are_drawn_between_their_engines(cluster: Cluster, page: Browser) -> None:
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(
            httpx.post,
            cluster.url + "/v1/completions",
            json={"model": "tidal", "prompt": "x", "max_tokens": 200, "stream": True},
            timeout=60,
            trust_env=False,
        )
        page.wait("document.querySelector('.current[data-requests=\"1\"]')")
        ends = page.value("document.querySelector('.current').dataset.pair")
        assert ends.startswith("prefill-")
        assert page.value("document.querySelector('[data-chart=inside] .value').innerText.trim()") == "1"
        assert work.result().status_code == 200
    page.wait("document.querySelectorAll('.current').length === 0")


def test_a_name_with_markup_in_it_is_only_a_name(page: Browser) -> None:
    names = page.value("[...document.querySelectorAll('tbody th')].map((cell) => cell.textContent)")
    assert EVIL in names
    assert page.value("document.querySelectorAll('tbody script, tbody b, .node script, #findings script').length") == 0
    assert page.value("typeof window.hurt") == "undefined"


def test_nothing_is_asked_of_anybody_else_and_nothing_complains(cluster: Cluster, page: Browser) -> None:
    asked = [urlsplit(url) for url in page.asked() if not url.startswith(("data:", "about:"))]
    assert {(url.scheme, url.netloc) for url in asked} == {("http", f"127.0.0.1:{cluster.port}")}
    assert {url.path for url in asked} == {"/dashboard", "/dashboard/data"}
    assert page.complaints() == []


def test_the_policy_stops_what_the_page_would_never_do(cluster: Cluster, page: Browser) -> None:
    """The browser itself refuses another host, another script and inline handlers."""
    assert page.value("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
    page.value(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.ran = 1' }))"
    )
    page.value("document.body.insertAdjacentHTML('beforeend', '<img class=odd src=x onerror=\"window.ran = 1\">')")
    until(
        lambda: len([text for text in page.complaints() if "Content Security Policy" in text]) >= 3 or page.value("0")
    )
    assert page.value("typeof window.ran") == "undefined"
    page.value("document.querySelector('.odd').remove()")
    page.events.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_in_both_colour_schemes(page: Browser, scheme: str) -> None:
    page.window(1440, 1000, scheme)
    pairs = page.value(CONTRAST)
    assert [pair for pair in pairs if pair[2] < pair[3]] == []
    ground = page.value("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 420, 800, 1100, 1440, 2200])
def test_no_width_makes_the_page_scroll_sideways(page: Browser, width: int) -> None:
    page.window(width, 900)
    page.wait(f"innerWidth === {width}")
    page.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.value("document.documentElement.scrollWidth") <= width
    page.window(1440, 1000)


def test_keys_reach_the_charts_and_the_engines(page: Browser) -> None:
    page.value("document.querySelector('[data-chart=requests] .plot').focus()")
    page.key("ArrowLeft")
    page.wait("document.querySelector('[data-chart=bytes] .at').innerText.endsWith('ago')")
    assert "Requests" in page.value("document.getElementById('say').textContent")
    page.key("Escape")
    page.wait("document.querySelector('[data-chart=bytes] .at').innerText === ''")
    page.value("document.querySelector('.node[data-engine=\"decode-0\"]').focus()")
    assert page.value("document.querySelector('.chart-sea svg').classList.contains('dim')")
    page.key("Enter")
    page.wait("document.activeElement.dataset.engine === 'decode-0' && document.activeElement.localName === 'tr'")
    page.value("document.activeElement.blur()")


def test_whoever_cannot_see_it_is_told_the_same(page: Browser) -> None:
    nodes: list[dict[str, Any]] = page.call("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node.get("ignored") and node.get("role", {}).get("value") in {"button", "image", "img", "radio", "table"}
    ]
    assert [role for role, name in named if role != "table" and not name.strip()] == []
    names = " | ".join(name for _, name in named)
    assert "decode-0, decode, ready for" in names
    assert "Time to first token:" in names


def test_an_engine_that_dies_is_the_first_thing_on_the_page(cluster: Cluster, page: Browser) -> None:
    victim = cluster.engines[3]
    victim.process.kill()
    page.wait("document.getElementById('verdict').dataset.level === 'warning'")
    assert f"Decode engine {EVIL} cannot be reached" in page.value("document.getElementById('findings').innerText")
    assert page.value("document.querySelector('tbody tr').dataset.state") == "unreachable"
    assert page.value(f"{cell(EVIL, 'State')}").startswith("not reachable")
    assert page.value("document.title").startswith("(1) warning")
    assert page.value("typeof window.hurt") == "undefined"
    assert cluster.work(4) == [200] * 4


def test_a_proxy_that_is_away_is_said_to_be_and_comes_back(cluster: Cluster, page: Browser) -> None:
    cluster.end()
    page.wait("document.getElementById('headline').innerText === 'The proxy does not answer.'")
    assert page.value("document.body.classList.contains('stale')")
    assert page.value("document.getElementById('pulse').dataset.feed") == "lost"
    assert page.value("document.querySelectorAll('tbody tr').length") == 4, "what was last heard stays"
    cluster.begin()
    page.wait("document.getElementById('pulse').dataset.feed === 'live'", 30)
    assert not page.value("document.body.classList.contains('stale')")
    page.wait("document.querySelectorAll('.plot .restart').length > 0")
    page.wait("document.getElementById('foot').innerText.includes('requests since then: none')")


def test_proxies_that_share_an_address_are_not_taken_for_restarts(cluster: Cluster, page: Browser) -> None:
    page.value("""(() => {
      const real = window.fetch;
      let turn = 0;
      window.fetch = async (...all) => {
        const said = await (await real(...all)).json();
        turn += 1;
        return new Response(JSON.stringify({ ...said, boot: `life ${turn % 2}` }));
      };
    })()""")
    page.wait("document.getElementById('findings').innerText.includes('More than one proxy answers')")
    assert page.value("document.querySelectorAll('.plot .restart').length") == 0
    page.open(cluster.url + "/dashboard")
    page.wait("document.querySelectorAll('tbody tr').length === 4")


def test_a_picture_can_be_taken(page: Browser, tmp_path: Path) -> None:
    shot = page.screenshot(tmp_path / "dashboard.png")
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert 20_000 < shot.stat().st_size < 400_000
