# SPDX-License-Identifier: Apache-2.0
"""TLS and logins, against an etcd that demands them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from tests.certificates import Authority, token_keys
from tests.etcd import EtcdServer, needs_etcd
from tests.registry.beds import Seen, eventually
from tidal_connector.errors import RegistryLost
from tidal_connector.registry.base import Put, Store
from tidal_connector.registry.settings import RegistryConfig, open_store

pytestmark = needs_etcd

TTL = 2.0  # a login takes etcd a tenth of a second of computing
LOCAL = ("127.0.0.1", "localhost")

Opened = Callable[..., Store]


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(open_store(RegistryConfig(ttl_s=TTL, **settings)))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def password_file(folder: Path, password: str) -> str:
    path = folder / "password"
    path.write_text(f"{password}\n")
    return str(path)


def works(store: Store) -> None:
    store.write([Put("k", b"1")])
    assert store.read("k").entries["k"].value == b"1"
    hold = store.hold("h", b"v", TTL)
    assert hold.wait(5)
    seen = Seen()
    with store.watch("", seen):
        assert seen.values({"k": b"1", "h": b"v"})
        store.write([Put("k", b"2")])
        assert seen.values({"k": b"2", "h": b"v"}, 0.5)
    hold.release()


# --- TLS ---


def test_tls_and_a_client_s_certificate(tmp_path: Path, authority: Authority, opened: Opened) -> None:
    certificate, key = authority.issue("client")
    with EtcdServer(tmp_path, tls=authority.server_options(*LOCAL, clients=True)) as etcd:
        works(opened(url=etcd.url, ca=str(authority.ca), certificate=str(certificate), key=str(key)))
        by_name = f"etcd://localhost:{etcd.port}"
        works(opened(url=by_name, ca=str(authority.ca), certificate=str(certificate), key=str(key)))
        with pytest.raises(RegistryLost, match=r"^etcd at 127[^\n]*$"):
            opened(url=etcd.url, ca=str(authority.ca)).read("")


def test_tls_refuses_whom_it_does_not_know(tmp_path: Path, authority: Authority, opened: Opened) -> None:
    stranger = Authority(tmp_path / "stranger")
    with EtcdServer(tmp_path, tls=authority.server_options("localhost")) as etcd:
        with pytest.raises(RegistryLost, match=r"CERTIFICATE_VERIFY_FAILED[^\n]*$"):
            opened(url=f"etcd://localhost:{etcd.port}", ca=str(stranger.ca)).read("")
        with pytest.raises(RegistryLost, match=r"(?i)verif"):  # its certificate is not for this address
            opened(url=etcd.url, ca=str(authority.ca)).read("")
        with pytest.raises(RegistryLost, match=r"if etcd speaks TLS, set registry\.ca$"):
            opened(url=etcd.url).read("")
        works(opened(url=f"etcd://localhost:{etcd.port}", ca=str(authority.ca)))


def test_new_certificates_need_no_restart(tmp_path: Path, authority: Authority, opened: Opened) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.ca.read_bytes())
    with EtcdServer(tmp_path, tls=authority.server_options(*LOCAL)) as etcd:
        hold = opened(url=etcd.url, ca=str(ca)).hold("h", b"v", TTL)
        assert hold.wait(5)
        etcd.stop()
        successor = Authority(tmp_path / "successor")
        etcd.tls = successor.server_options(*LOCAL)
        etcd.start()
        assert eventually(lambda: not hold.held, TTL * 2)
        ca.write_bytes(successor.ca.read_bytes())
        assert eventually(lambda: hold.held, 5)


# --- logins ---


def test_a_login_and_its_limits(tmp_path: Path, authority: Authority, opened: Opened) -> None:
    with EtcdServer(tmp_path, tls=authority.server_options(*LOCAL)) as etcd:
        credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        users = {"engine": ("secret", "/tidal/"), "guest": ("guest", "/other/")}
        etcd.enable_auth(users, credentials)
        common = {"url": etcd.url, "ca": str(authority.ca)}
        works(opened(**common, user="engine", password_file=password_file(tmp_path, "secret")))
        with pytest.raises(RegistryLost, match=r"set registry\.user and password_file$"):
            opened(**common).read("")
        (tmp_path / "wrong").mkdir()
        with pytest.raises(RegistryLost, match=r"check registry\.user and registry\.password_file$"):
            opened(**common, user="engine", password_file=password_file(tmp_path / "wrong", "guess")).read("")
        (tmp_path / "guest").mkdir()
        guest = opened(**common, user="guest", password_file=password_file(tmp_path / "guest", "guest"))
        for call in (lambda: guest.read(""), lambda: guest.write([Put("k", b"")])):
            with pytest.raises(RegistryLost, match=r"permission denied; give user 'guest' a role for this prefix$"):
                call()
        seen = Seen()
        guest.watch("", seen)
        assert not guest.hold("h", b"", TTL).wait(1)
        assert not seen.all


def test_a_user_for_an_etcd_that_knows_none(tmp_path: Path, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    with EtcdServer(tmp_path) as etcd:
        store = opened(url=etcd.url, user="engine", password_file=password_file(tmp_path, "secret"))
        works(store)
        assert len([each for each in caplog.records if "knows no users" in each.getMessage()]) == 1
        hold = store.hold("h", b"v", TTL)
        assert hold.wait(5)
        etcd.enable_auth({"engine": ("secret", "/tidal/")})  # and is told to know them now
        time.sleep(TTL * 1.2)
        assert hold.held
        works_after = store.read("h").entries["h"]
        assert works_after.value == b"v"


@pytest.mark.faults
def test_tokens_that_end_are_renewed(tmp_path: Path, opened: Opened) -> None:
    public, private = token_keys(tmp_path)
    token = f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=2s"
    with EtcdServer(tmp_path, options=["--auth-token", token]) as etcd:
        etcd.enable_auth({"engine": ("secret", "/tidal/")})
        store = opened(url=etcd.url, user="engine", password_file=password_file(tmp_path, "secret"))
        hold = store.hold("h", b"v", TTL)
        assert hold.wait(5)
        seen = Seen()
        store.watch("", seen)
        assert seen.values({"h": b"v"})
        version = store.read("h").entries["h"].version
        over = time.monotonic() + 3.5
        while time.monotonic() < over:
            assert hold.held
            time.sleep(0.1)
        store.write([Put("k", b"1")])
        assert seen.values({"h": b"v", "k": b"1"}, 1)
        assert store.read("h").entries["h"].version == version  # it was never put back
        assert all(each.fresh for each in seen.all)


@pytest.mark.faults
def test_a_restart_forgets_tokens_and_passwords_change(tmp_path: Path, opened: Opened) -> None:
    with EtcdServer(tmp_path) as etcd:
        etcd.enable_auth({"engine": ("secret", "/tidal/")})
        file = password_file(tmp_path, "secret")
        store = opened(url=etcd.url, user="engine", password_file=file)
        hold = store.hold("h", b"v", TTL)
        assert hold.wait(5)
        seen = Seen()
        store.watch("", seen)
        assert seen.values({"h": b"v"})
        etcd.kill()
        etcd.start()
        assert eventually(lambda: hold.held, TTL * 2)
        etcd.change_password("engine", "better")
        password_file(tmp_path, "better")
        etcd.kill()
        etcd.start()
        assert eventually(lambda: hold.held, TTL * 2)
        store.write([Put("k", b"1")])
        assert seen.values({"h": b"v", "k": b"1"}, TTL * 2)
