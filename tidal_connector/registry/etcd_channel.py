# SPDX-License-Identifier: Apache-2.0
"""How one endpoint of etcd is reached, and what its errors mean: gRPC's options, TLS, one line for each fault."""

from __future__ import annotations

import re
from pathlib import Path

import grpc

from tidal_connector.errors import RegistryLost
from tidal_connector.registry.settings import RegistryConfig

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),  # the default is two minutes
    ("grpc.min_reconnect_backoff_ms", 3000),  # despite its name the time that a connection may take to come about
    ("grpc.use_local_subchannel_pool", 1),  # a new connection begins without the back-off of the one that failed
    ("grpc.enable_http_proxy", 0),  # etcd is in the cluster, whatever the environment says of the internet
)

# etcd's own answers; after any other code the connection is not to be trusted.
_ANSWERS = {
    *(
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    ),
    *(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED),
}
_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:\S+: )?"
    r"Failed to connect to remote host: (?:connect: )?(?P<why>.*?)(?: \(\d+\))?$"
)
_NO_NAME = re.compile(r"DNS resolution failed|errors resolving ")
_NOBODY_THERE = ("Connection refused", "No route to host", "unreachable")
_LOG_IN = ("invalid auth token", "revision of auth store is old", "user name is empty")


def open_channel(config: RegistryConfig, target: str) -> grpc.Channel:
    """Return a channel to an endpoint, with TLS where an authority is given; nothing is connected yet.

    Raises:
        RegistryLost: a file of TLS cannot be read.
    """
    if not config.ca:
        return grpc.insecure_channel(target, options=_OPTIONS)
    try:
        ca, certificate, key = (
            Path(path).read_bytes() if path else None for path in (config.ca, config.certificate, config.key)
        )
    except OSError as error:
        raise RegistryLost(f"registry's TLS files: {error}") from None
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, certificate), options=_OPTIONS)


def is_answer(error: grpc.RpcError) -> bool:
    """Whether etcd itself said this, so that the connection is good."""
    return error.code() in _ANSWERS


def wants_login(error: grpc.RpcError) -> bool:
    """Whether to log in (again) and ask once more."""
    return any(text in _details(error) for text in _LOG_IN)


def knows_no_users(error: grpc.RpcError) -> bool:
    """Whether a login failed because etcd asks for none."""
    return "authentication is not enabled" in _details(error)


def said(error: grpc.RpcError) -> str:
    """Return an error as one line, without gRPC's words around what the network said."""
    text = " ".join(_details(error).split())
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    reason = _NO_CONNECTION.match(text)
    if reason is not None:
        return f"cannot be reached: {reason['why'][:300].lower()}"
    if _NO_NAME.match(text):
        return "cannot be reached: its name does not resolve"
    name = str(error.code().name).lower().replace("_", " ")
    return f"{name}: {text[:300]}" if text else name


def hint(error: grpc.RpcError, config: RegistryConfig) -> str:
    """Return what an operator can do about it, where the fault is one of settings; otherwise nothing."""
    details = _details(error)
    if "user name is empty" in details or "permission denied" in details:
        user = config.user
        return f"; give user {user!r} a role for this prefix" if user else "; set registry.user and password_file"
    if "invalid user ID or password" in details:
        return "; check registry.user and registry.password_file"
    if "space exceeded" in details:
        return "; compact and defragment etcd, then disarm its alarm"
    if error.code() is grpc.StatusCode.UNAVAILABLE and not config.ca and "losed" in details:
        return "; if etcd speaks TLS, set registry.ca"
    if _NO_NAME.match(details) or any(text in details for text in _NOBODY_THERE):
        return "; start etcd there, or correct registry.url"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "; see that it runs and that no firewall is between"
    return ""


def _details(error: grpc.RpcError) -> str:
    return str(error.details() or "")
