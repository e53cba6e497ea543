# SPDX-License-Identifier: Apache-2.0
"""``host:port`` and ``[ipv6]:port``, read and written, and of which family a host is.

Pure, but for :func:`addresses_of` and :func:`only_ipv6`, which ask the system's resolver for a name and may block.
"""

from __future__ import annotations

import ipaddress
import socket

from tidal_connector.errors import ConfigError


def parse_address(field: str, text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[ipv6]:port``.

    Raises:
        ConfigError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    plain = host[1:-1] if bracketed else host
    odd = not plain or any(char.isspace() or char in "/;,*[]@" for char in plain) or (":" in plain) != bracketed
    number = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or odd or not number or int(port) > 65535:
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise ConfigError(f'{field} = {shown!r}: expected "host:port", or "[address]:port" for IPv6')
    return plain, int(port)


def is_unspecified(host: str) -> bool:
    """Whether a host is ``0.0.0.0`` or ``::``, which one can listen on and nobody can call."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name


def join_address(host: str, port: int) -> str:
    """Join a host and a port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_host(field: str, text: str) -> tuple[str, int]:
    """Split ``host``, ``host:port``, ``ipv6``, ``[ipv6]`` or ``[ipv6]:port``; the port is 0 where there is none.

    Raises:
        ConfigError: it is none of these.
    """
    bracketed = text.startswith("[") and text.endswith("]")
    plain = text[1:-1] if bracketed else text
    try:
        return str(ipaddress.ip_address(plain)), 0
    except ValueError:
        pass
    if ":" in text:
        return parse_address(field, text)
    try:
        return parse_address(field, f"{text}:0")
    except ConfigError:
        raise ConfigError(f"{field} = {text!r}: expected a host or an address") from None


def addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a host; a name's in the resolver's order.

    Raises:
        OSError: the name cannot be looked up.
    """
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        return [ipaddress.ip_address(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def only_ipv6(host: str) -> bool:
    """Whether a host has no address of IPv4; a name that cannot be looked up is left to whoever goes on with it."""
    try:
        return not any(isinstance(address, ipaddress.IPv4Address) for address in addresses_of(host))
    except OSError:
        return False
