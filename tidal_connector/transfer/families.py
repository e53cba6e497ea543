# SPDX-License-Identifier: Apache-2.0
"""IPv4 and IPv6 before Mooncake: how an engine has to be told of a peer.

Mooncake decides once for each process. Sockets of IPv6 take callers of both kinds, and call a peer of IPv4 only by the
form of its address that IPv6 has for it; sockets of IPv4 reach IPv4 alone. Names are looked up here, so that both
sides of a name with addresses of both kinds mean the same one. Looking up blocks; only carrier threads do it.
"""

from __future__ import annotations

import ipaddress

from tidal_connector.address import addresses_of, join_address, parse_address
from tidal_connector.errors import ConfigError, PeerLost


def as_called(endpoint: str, *, ipv6: bool) -> str:
    """Return a peer's ``host:port`` in the form in which this process's engines can call it.

    Args:
        endpoint: as the peer said it.
        ipv6: whether our sockets are of IPv6.

    Raises:
        PeerLost: its name cannot be looked up, or it is out of reach of an engine of IPv4.
    """
    try:
        host, port = parse_address("endpoint", endpoint)
        found = addresses_of(host)
    except (OSError, ConfigError) as error:
        raise PeerLost(f"peer {endpoint}: {error}") from None
    of_four = [address for address in found if isinstance(address, ipaddress.IPv4Address)]
    if of_four:
        return join_address(f"::ffff:{of_four[0]}" if ipv6 else str(of_four[0]), port)
    if not ipv6:
        raise PeerLost(
            f"peer {endpoint} has an address of IPv6, and this engine's data ports are of IPv4: set transfer.host (or "
            "control.advertise) here to an address of IPv6; such an engine reaches peers of both kinds"
        )
    return join_address(str(found[0]), port)
