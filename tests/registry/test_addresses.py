# SPDX-License-Identifier: Apache-2.0
"""FR-18 and FR-20: an address is checked before it is published, and what is published is what is bound."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidal_connector.address import join_address, parse_address
from tidal_connector.errors import ConfigError
from tidal_connector.registry import addresses
from tidal_connector.registry.addresses import advertised, check_host, split


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that resolve as told, and no question to a name server."""
    known = {
        "node-a": ["10.0.0.5"],
        "node-six": ["2001:db8::5"],
        "debian": ["127.0.1.1"],
        "both": ["10.0.0.5", "::1"],
        "any": ["0.0.0.0"],
    }
    real = socket.getaddrinfo

    def resolve(host: str, port: object, *rest: object, **more: object) -> object:
        if host in known:
            return [(0, 0, 0, "", (text, 0)) for text in known[host]]
        if host == "slow":
            time.sleep(1)
        if any(char.isalpha() for char in host) and ":" not in host:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, port, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize(
    "host", ["10.0.0.5", "192.168.1.1", "2001:db8::1", "fd00::1", "node-a", "node-six", "127.0.0.1", "127.0.0.2", "::1"]
)
def test_fr_18_what_others_reach_is_taken(host: str) -> None:
    check_host("f", host)
    assert advertised("f", host, ("0.0.0.0", 7000)) == join_address(host, 7000)


REFUSED = {
    "0.0.0.0": "nobody can connect to it",
    "::": "nobody can connect to it",
    "0": "nobody can connect to it",
    "0x0": "nobody can connect to it",
    "::ffff:0.0.0.0": "nobody can connect to it",
    "224.0.0.1": "nobody can connect to it",
    "ff02::1": "nobody can connect to it",
    "255.255.255.255": "nobody can connect to it",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local",
    "localhost": "means another machine on every machine",
    "LocalHost": "means another machine on every machine",
    "localhost.": "means another machine on every machine",
    "x.localhost": "means another machine on every machine",
    "ip6-localhost": "means another machine on every machine",
    "debian": r"resolves to 127\.0\.1\.1 here",
    "both": "resolves to ::1 here",
    "any": r"resolves to 0\.0\.0\.0 here",
    "no-such-name": "does not resolve here",
    "x" * 300: "does not resolve here",
}


@pytest.mark.parametrize("host", REFUSED)
def test_fr_18_what_others_cannot_reach_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[host]) as caught:
        check_host("serve.advertise", host)
    text = str(caught.value)
    assert text.startswith("serve.advertise = ")
    assert "\n" not in text
    assert len(text) < 500
    assert "such as" in text  # how to mend it


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "127.0.0.1", "::1", "localhost"])
def test_fr_18_nothing_set_and_nothing_to_be_derived(bound: str) -> None:
    with pytest.raises(ConfigError, match=r"f is not set, and .*:7000 is bound: nobody else can connect"):
        advertised("f", "", (bound, 7000))


def test_fr_18_what_is_bound_is_derived_where_others_reach_it() -> None:
    assert advertised("f", "", ("10.0.0.5", 7000)) == "10.0.0.5:7000"
    assert advertised("f", "", ("fd00::5", 7000)) == "[fd00::5]:7000"
    assert advertised("f", "", ("node-a", 7000)) == "node-a:7000"


def test_fr_20_the_port_is_the_one_that_was_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port
        assert advertised("f", "127.0.0.1", ("127.0.0.1", port)) == f"127.0.0.1:{port}"
    with pytest.raises(ConfigError, match="expected the port that was bound"):
        advertised("f", "10.0.0.5", ("0.0.0.0", 0))


def test_fr_18_bind_and_advertise_differ_behind_translation() -> None:
    assert advertised("f", "203.0.113.7:9000", ("10.0.0.5", 7000)) == "203.0.113.7:9000"
    assert advertised("f", "203.0.113.7", ("10.0.0.5", 7000)) == "203.0.113.7:7000"
    assert advertised("f", "[2001:db8::7]:9000", ("::", 7000)) == "[2001:db8::7]:9000"
    assert advertised("f", "[2001:db8::7]", ("::", 7000)) == "[2001:db8::7]:7000"
    assert advertised("f", "2001:db8::7", ("::", 7000)) == "[2001:db8::7]:7000"


@pytest.mark.parametrize(
    "text", ["", "10.0.0.5:", ":7000", "10.0.0.5:70000", "a b", "http://x", "[::1", "10.0.0.5:x", "a/b"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="f = "):
        split("f", text)


@given(st.ip_addresses(), st.integers(1, 65535))
def test_an_address_is_joined_and_split_without_loss(ip: object, port: int) -> None:
    assert split("f", join_address(str(ip), port)) == (str(ip), port)
    assert split("f", str(ip)) == (str(ip), None)
    assert parse_address("f", join_address(str(ip), port)) == (str(ip), port)


@given(st.text(max_size=20))
def test_no_text_breaks_the_check(text: str) -> None:
    with contextlib.suppress(ConfigError):
        split("f", text)


def test_a_slow_resolver_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_RESOLVE_S", 0.2)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"no answer within 0\.2 s"):
        check_host("f", "slow")
    assert time.monotonic() - began < 0.8


def test_the_suggestion_is_an_address() -> None:
    check_host("f", addresses.suggestion())
