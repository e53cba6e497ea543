# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tidal_connector.transfer.sockets import count_connections

HEAD = "  sl  local_address rem_address   st\n"


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_real_connections_are_counted_until_they_are_gone(family: socket.AddressFamily, host: str) -> None:
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")
    with server:
        port = server.getsockname()[1]
        assert count_connections(port, host) == 0  # listening is no connection
        with socket.create_connection((host, port)) as link, server.accept()[0] as taken:
            assert count_connections(port, host) == 1
            assert count_connections(port, "192.0.2.1", others=[host]) == 0
            assert count_connections(port + 1, host) == 0
            link.close()
            assert count_connections(port, host) == 1  # half closed: unread bytes may still be there
            taken.close()


def test_an_ipv4_peer_of_an_ipv6_socket_is_found() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert count_connections(port, "127.0.0.1") == 1


def test_a_connection_from_an_address_that_nobody_is_called_by_may_be_anyones() -> None:
    """Of a host with several addresses, or behind a translation of them: its pages must not be given back early."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.9", 0)), server.accept()[0]:
            assert count_connections(port, "127.0.0.1") == 1
            assert count_connections(port, "127.0.0.1", others=["127.0.0.2"]) == 1
            assert count_connections(port, "127.0.0.1", others=["127.0.0.9"]) == 0


def test_dead_and_listening_sockets_do_not_count(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    rows = [f"   0: 0100007F:1F90 0100007F:{n:04X} {state}\n" for n, state in enumerate(("01", "06", "07", "0A", "08"))]
    table.write_text(HEAD + "".join(rows))
    assert count_connections(0x1F90, "127.0.0.1", [table]) == 2  # established, and waiting for our close


def test_what_cannot_be_known_is_none(tmp_path: Path) -> None:
    assert count_connections(1, "127.0.0.1", [tmp_path / "missing"]) is None
    assert count_connections(1, "no.such.host.invalid") is None
