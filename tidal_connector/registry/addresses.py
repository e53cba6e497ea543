# SPDX-License-Identifier: Apache-2.0
"""Addresses are checked before they are published: what nobody else can reach is refused at start, in one line.

Binding and advertising are two things. A server binds an address of its own machine, or all of them; what it advertises
is where *others* reach it, with the port that was really bound. So:

========================= ======================================= ====================================
given                     as an address to bind                   as an address to advertise
========================= ======================================= ====================================
``10.0.0.5``              binds that one                          published
``fe80::1%eth0``          binds that one                          refused: a zone means something only here
``0.0.0.0``, ``::``       binds all                               refused: it means "here" to everybody
``127.0.0.1``, ``::1``    binds loopback                          published, as a bare IP is set on purpose
``localhost``             binds loopback                          refused: every machine has its own
a name                    must resolve                            must resolve, and not to the former three
empty                     refused                                 refused, unless what is bound can be advertised
========================= ======================================= ====================================

:func:`advertised` is the one for a socket that listens; :func:`check_host` is for an address that was given whole.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading

from tidal_connector.address import join_address, parse_address
from tidal_connector.errors import ConfigError

_RESOLVE_S = 5.0  # the resolver's own bound may be half a minute
_NUMBERS = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)(\.(0[xX][0-9a-fA-F]+|[0-9]+)){0,3}")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def advertised(field: str, given: str, bound: tuple[str, int]) -> str:
    """Return the ``host:port`` to publish for a socket that listens.

    Args:
        field: the setting's name, for messages, such as ``serve.advertise``.
        given: what the operator set: a host, ``host:port`` (behind address translation), or empty for what is bound.
        bound: host that was bound, and the port read back from the socket.

    Raises:
        ConfigError: others could not connect to it.
    """
    host, port = split(field, given) if given else (bound[0], None)
    if not given and _is_unusable(host):
        raise ConfigError(
            f"{field} is not set, and {join_address(*bound)} is bound: nobody else can connect to that; "
            f"set {field} to an address of this machine, such as {suggestion()}"
        )
    check_host(field, host)
    published = port if port is not None else bound[1]
    if not 1 <= published <= 65535:
        raise ConfigError(f"{field}: port {published} cannot be connected to; expected the port that was bound")
    return join_address(host, published)


def check_host(field: str, host: str) -> None:
    """Check that a host means this machine to others.

    Raises:
        ConfigError: it means "any" or each machine itself, or does not resolve.
    """
    if not host:
        raise ConfigError(f"{field} is not set: expected an address that others reach, such as {suggestion()}")
    ip = _parsed(host)
    if ip is not None:
        if ip.is_unspecified or ip.is_multicast or ip == ipaddress.ip_address("255.255.255.255"):
            raise ConfigError(
                f"{field} = {host!r}: nobody can connect to it; expected an address of this machine, such as "
                f"{suggestion()} (what is bound may be {host}, what is advertised may not)"
            )
        if isinstance(ip, ipaddress.IPv6Address) and ip.is_link_local:
            raise ConfigError(
                f"{field} = {host!r}: a link-local address works only with a zone of one's own; expected one such as "
                f"{suggestion()}"
            )
        return
    if _is_localhost(host):
        raise ConfigError(
            f"{field} = {host!r}: means another machine on every machine; expected an address that others reach, such "
            f"as {suggestion()} (127.0.0.1 is taken as set on purpose, where all runs on one machine)"
        )
    addresses = resolve(field, host)
    useless = [text for text in addresses if (found := ipaddress.ip_address(text)).is_loopback or found.is_unspecified]
    if useless:
        raise ConfigError(
            f"{field} = {host!r}: resolves to {useless[0]} here, which others cannot connect to; mend /etc/hosts, or "
            f"give an address such as {suggestion()}"
        )


def split(field: str, text: str) -> tuple[str, int | None]:
    """Split a host, ``host:port``, an IPv6 address or ``[IPv6]:port``; the port is None where there is none.

    Raises:
        ConfigError: it is none of them.
    """
    if _parsed(text) is not None:
        return text, None
    if text.startswith("[") and text.endswith("]") and _parsed(text[1:-1]) is not None:
        return text[1:-1], None
    if ":" in text:
        return parse_address(field, text)
    return parse_address(field, f"{text}:1")[0], None


def resolve(field: str, host: str) -> list[str]:
    """Return the addresses of a name, within seconds.

    Raises:
        ConfigError: it has none.
    """
    found: list[str] = []
    problem: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            problem.append(str(error.strerror if isinstance(error, OSError) else "no host name"))
        else:
            found.extend(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))

    thread = threading.Thread(target=ask, name=f"tidal-resolve-{host[:40]}", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    if not found:
        why = problem[0] if problem else f"no answer within {_RESOLVE_S:g} s"
        raise ConfigError(
            f"{field} = {host[:200]!r}: does not resolve here ({why}); mend the name, or give an address such as "
            f"{suggestion()}"
        )
    return found


def suggestion() -> str:
    """Return the address by which this machine reaches others, for messages; nothing is sent."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((far, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "10.0.0.5"


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or ``localhost``, which each machine has for itself."""
    ip = _parsed(host)
    return ip.is_loopback if ip is not None else _is_localhost(host)


def _is_unusable(host: str) -> bool:
    """Whether a bound host says nothing of where others find it: loopback counts, as nobody set it on purpose."""
    ip = _parsed(host)
    return not host or _is_localhost(host) or (ip is not None and (ip.is_unspecified or ip.is_loopback))


def _is_localhost(host: str) -> bool:
    name = host.lower().rstrip(".")
    return name in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback") or name.endswith(
        ".localhost"
    )


def _parsed(host: str) -> IPAddress | None:
    """The address that a text is, as the system's own functions read it; None for a name."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return _legacy(host)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip  # ::ffff:0.0.0.0 is 0.0.0.0


def _legacy(host: str) -> IPAddress | None:
    """``0``, ``127.1`` and ``0x7f000001`` are addresses to ``connect``, though no name has such a form."""
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host)) if _NUMBERS.fullmatch(host) else None
    except OSError:
        return None
