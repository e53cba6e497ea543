# SPDX-License-Identifier: Apache-2.0
"""``tidal proxy`` as a process: where it listens, what it says, and how its options join."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.arch.source import ROOT
from tidal_connector.cli.proxy import listen_on, place_of, proxy_config
from tidal_connector.errors import ConfigError
from tidal_connector.proxy.settings import PolicyKind, ProxyConfig
from tidal_connector.registry.settings import RegistryConfig


@contextmanager
def running(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command; hand over the process and the base URL that its log names."""
    command = [sys.executable, "-m", "tidal_connector.cli", "proxy", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"proxy on (http://\S+) for", line)
        assert found, line
        for _ in range(200):
            try:
                httpx.get(found[1] + "/metrics", timeout=2, trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield process, found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        finally:
            process.kill()
            process.stderr.close()


@pytest.mark.parametrize(("listen", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]")])
def test_port_0_is_served_under_the_port_that_was_bound(tmp_path: Path, listen: str, host: str) -> None:
    with running("--listen", listen, "--registry", f"file://{tmp_path}/registry") as (process, url):
        assert re.fullmatch(rf"http://{re.escape(host)}:[1-9]\d+", url)
        ready = httpx.get(url + "/ready", timeout=5, trust_env=False)
        assert ready.status_code == 503
        assert ready.json()["registry"]["url"] == f"file://{tmp_path}/registry"
    assert process.returncode in (0, -signal.SIGTERM)


def test_the_proxy_takes_all_the_files_that_it_may_have() -> None:
    script = (
        "from resource import *; from tidal_connector.cli.proxy import raise_file_limit; "
        "_, hard = getrlimit(RLIMIT_NOFILE); setrlimit(RLIMIT_NOFILE, (200, hard)); "
        "print(raise_file_limit() == hard == getrlimit(RLIMIT_NOFILE)[0], raise_file_limit() == hard)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True True"


def test_any_address_of_ipv6_takes_ipv4_too() -> None:
    with listen_on(ProxyConfig(listen="[::]:0")) as listener:
        port = listener.getsockname()[1]
        assert place_of(listener) == f"[::]:{port}"
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=2).close()


def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    with listen_on(ProxyConfig(listen="127.0.0.1:0")) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match="choose a free port on an address of this machine"):
            listen_on(ProxyConfig(listen=taken))


def test_options_join_the_file() -> None:
    file = ROOT / "configs/proxy.toml"
    config = proxy_config(file, [], [], None, "etcd://h:2379", "random")
    assert config.registry == RegistryConfig(url="etcd://h:2379")
    assert config.policy is PolicyKind.RANDOM
    assert proxy_config(file, [], [], None).policy is PolicyKind.LEAST_TOKENS
    assert proxy_config(None, [], [], None, "file:///run/tidal").registry is not None
    with pytest.raises(ConfigError, match=r"no prefill engine; .* or a registry \(--registry URL\)"):
        proxy_config(None, [], [], None)
