# SPDX-License-Identifier: Apache-2.0
"""Ask a worker who it is, without being one: for proxies and tools that must know whether two engines fit.

Takes a control address; hands on what the worker says about itself. Blocks its caller for a bounded time and opens
nothing that outlives the call; any thread but the control thread.
"""

from __future__ import annotations

from tidal_connector.control.channel import ask
from tidal_connector.control.messages import About, Inquire, Refused, encode, open_envelope, read_body
from tidal_connector.errors import PeerLost, ProtocolError
from tidal_connector.ids import Incarnation

_NOBODY = Incarnation("")


def inquire(address: str, timeout_s: float) -> About:
    """Return what the worker at a control address says about itself.

    Args:
        address: ``host:port`` of its control channel.
        timeout_s: seconds that all of it may take.

    Raises:
        ConfigError: the address cannot be read.
        PeerLost: nobody answered in time.
        ProtocolError: something answered, but it is no worker of this protocol version.
    """
    frame = ask(address, encode(_NOBODY, _NOBODY, 0, Inquire()), timeout_s)
    if frame is None:
        raise PeerLost(
            f"nobody at {address} said within {timeout_s:g} s who it is: is an engine's control channel there?"
        )
    try:
        heard = read_body(open_envelope(frame))
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {address} is no engine that fits: {error}") from None
    if isinstance(heard, Refused):
        raise ProtocolError(f"the engine at {address} does not answer: {heard.reason}")
    if not isinstance(heard, About):
        raise ProtocolError(f"asked who it is, the engine at {address} answered {type(heard).__name__}")
    return heard
