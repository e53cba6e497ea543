# SPDX-License-Identifier: Apache-2.0
"""The proxy's settings: engines, bounds of every wait, and how they are read from TOML or the command line.

Pure; read once at start by the command line.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from tidal_connector.address import parse_address
from tidal_connector.config import Positive
from tidal_connector.errors import ConfigError
from tidal_connector.proxy.wire import target_of
from tidal_connector.registry import settings as registry_settings
from tidal_connector.registry.settings import RegistryConfig
from tidal_connector.tables import convert_strict, read_toml

UVICORN_KEEPALIVE_S = 5.0
"""Seconds after which the engines' HTTP server closes an idle connection."""

KeepAlive = Annotated[float, msgspec.Meta(gt=0, lt=UVICORN_KEEPALIVE_S)]


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of every wait, in seconds.

    Attributes:
        connect_s: to open a connection to an engine, or to hand it the request.
        prefill_s: for the prefill engine's whole answer; choose it above the longest prompt's prefill and its
            queue.
        decode_s: for the decode engine's whole answer, from dispatch to the last byte.
        stall_s: between two pieces of a stream that has begun, and for the client to take one.
        keepalive_s: how long an idle connection is kept; below the engines' own bound, so that no request is
            sent into a connection that is just being closed.
        request_s: for a client's whole request, waiting included; a client may ask for less by the header
            ``x-request-timeout`` (seconds).
        queue_s: for which a request waits for its turn, and for a pair of engines that can serve it.
        health_s: for an engine's answer to a health check or a list of models.
        inquiry_s: for an engine's answer to the question who it is and how its KV is laid out.
        inquiry_every_s: between two rounds of that question.
        cooldown_s: how long an engine that could not be reached gets nothing, and then between two questions for its
            health; it is back when it answers, or when it announces a new life.
    """

    connect_s: Positive = 5.0
    prefill_s: Positive = 900.0
    decode_s: Positive = 3600.0
    stall_s: Positive = 300.0
    request_s: Positive = 3600.0
    queue_s: Positive = 30.0
    keepalive_s: KeepAlive = 3.0
    health_s: Positive = 2.0
    inquiry_s: Positive = 1.0
    inquiry_every_s: Positive = 3.0
    cooldown_s: Positive = 2.0


class PolicyKind(enum.StrEnum):
    """Ways to choose engines."""

    LEAST_TOKENS = "least_tokens"
    PREFIX_AFFINITY = "prefix_affinity"
    RANDOM = "random"


class Affinity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefix affinity: prompts with the same leading tokens go to the same engines while these are not overloaded.

    Attributes:
        prefix_tokens: how many leading tokens of a prompt count (of text, about four bytes each). Prompts that differ
            in them go to different engines, so it should be what prompts share: a system prompt, not a question.
        overload: an engine with more outstanding tokens than this many times the mean of its role gets nothing new; the
            next one in the prompt's own order does.
        spare_tokens: up to so many outstanding tokens no engine counts as overloaded.
    """

    prefix_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 256
    overload: Annotated[float, msgspec.Meta(ge=1)] = 1.25
    spare_tokens: Annotated[int, msgspec.Meta(ge=0)] = 8192


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prefill engine.

    Attributes:
        engine: its engine id.
        url: base URL of its HTTP server.
        control: ``host:port`` of its control channel, told to the decode engine, and asked whether the two fit;
            empty where the decode engine knows it by its own ``peers`` table.
    """

    engine: str
    url: str
    control: str = ""


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A decode engine.

    Attributes:
        engine: its engine id.
        url: base URL of its HTTP server.
        control: ``host:port`` of its control channel, asked whether it fits a prefill engine; empty leaves that to the
            engines' own handshake.
    """

    engine: str
    url: str
    control: str = ""


class ProxyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the proxy's file may hold.

    Attributes:
        listen: ``host:port`` to serve on.
        prefill, decode: engines that are there always; at least one of each where there is no registry.
        registry: where engines announce themselves; they come and go without a restart of the proxy.
        timeouts: bounds of every wait.
        policy: how engines are chosen among those that can serve.
        affinity: settings of ``prefix_affinity``.
        retries: further attempts after an engine broke off or answered 5xx before the client got a byte. One that could
            not even be reached does not count while ``queue_s`` is not over.
        max_in_flight: requests that engines work on at once.
        max_queue: requests that wait beside them; a further one is refused with 429.
        max_body_bytes: largest request body.
    """

    prefill: tuple[Prefill, ...] = ()
    decode: tuple[Decode, ...] = ()
    listen: str = "127.0.0.1:8000"
    registry: RegistryConfig | None = None
    timeouts: Timeouts = Timeouts()
    policy: PolicyKind = PolicyKind.LEAST_TOKENS
    affinity: Affinity = Affinity()
    retries: Annotated[int, msgspec.Meta(ge=0, le=10)] = 3
    max_in_flight: Annotated[int, msgspec.Meta(ge=1)] = 1024
    max_queue: Annotated[int, msgspec.Meta(ge=0)] = 1024
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 32 << 20

    def address(self) -> tuple[str, int]:
        """Return host and port of ``listen``.

        Raises:
            ConfigError: it is not ``host:port``.
        """
        return parse_address("listen", self.listen)


def read_config(path: Path) -> ProxyConfig:
    """Read the proxy's TOML file.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or holds an unknown key or a wrong value.
    """
    return convert_strict(ProxyConfig, read_toml(path, "proxy configuration"), f"proxy configuration {path}")


def parse_prefill(text: str) -> Prefill:
    """Turn ``ID=URL`` or ``ID=URL,HOST:PORT`` (control channel) into a prefill engine.

    Raises:
        ConfigError: the text has another form.
    """
    return Prefill(*_parse_engine("--prefill", text))


def parse_decode(text: str) -> Decode:
    """Turn ``ID=URL`` or ``ID=URL,HOST:PORT`` (control channel) into a decode engine.

    Raises:
        ConfigError: the text has another form.
    """
    return Decode(*_parse_engine("--decode", text))


def _parse_engine(option: str, text: str) -> tuple[str, str, str]:
    engine, separator, rest = text.partition("=")
    url, _, control = rest.partition(",")
    if not (engine and separator and url):
        raise ConfigError(f"{option} {text!r}: expected ID=URL or ID=URL,CONTROL_HOST:PORT")
    return engine, url, control


def check_config(config: ProxyConfig) -> ProxyConfig:
    """Return the configuration if it can be served.

    Raises:
        ConfigError: a kind of engine is missing and there is no registry, an id is used twice, or an address has a
            wrong form.
    """
    config.address()
    if config.registry is not None:
        registry_settings.check(config.registry)
    for kind, engines in (("prefill", config.prefill), ("decode", config.decode)):
        if not engines and config.registry is None:
            raise ConfigError(
                f"proxy: no {kind} engine; give [[{kind}]] in the file, --{kind} ID=URL, or a registry (--registry URL)"
            )
        _refuse_repeated(kind, [item.engine for item in engines])
        for item in engines:
            try:
                target_of(item.url)
            except ValueError:
                raise ConfigError(
                    f"proxy: {kind} {item.engine!r}: url = {item.url!r}, expected http://host:port"
                ) from None
            if item.control:
                parse_address(f"{kind} {item.engine!r}: control", item.control)
    return config


def _refuse_repeated(kind: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"proxy: {kind} engine {repeated[0]!r} is named twice; engine ids are unique")
