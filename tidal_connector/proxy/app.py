# SPDX-License-Identifier: Apache-2.0
"""The proxy's routes. ``build_app`` makes one application from one configuration; it owns all that the proxy holds.

The two routes that carry requests are plain ASGI, because a framework's handling would cost more than all else here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidal_connector.control.inquiry import inquire
from tidal_connector.errors import ParamsError
from tidal_connector.proxy.attempt import Attempts
from tidal_connector.proxy.dashboard.routes import add_dashboard
from tidal_connector.proxy.discovery import targets_of
from tidal_connector.proxy.engines import error_body, refusal
from tidal_connector.proxy.gate import Gate
from tidal_connector.proxy.health import Health, Said
from tidal_connector.proxy.legs import engine_request_id, parse_request, safe_request_id
from tidal_connector.proxy.looks import Looks
from tidal_connector.proxy.meters import Meters, Outcome
from tidal_connector.proxy.picker import Picked, Picker
from tidal_connector.proxy.policy import policy_of
from tidal_connector.proxy.relay import Relay, send_whole
from tidal_connector.proxy.roster import Roster
from tidal_connector.proxy.settings import ProxyConfig
from tidal_connector.proxy.survey import Ask, Survey
from tidal_connector.proxy.watching import following
from tidal_connector.proxy.wire import Client
from tidal_connector.registry.base import Store

ROUTES = ("/v1/completions", "/v1/chat/completions")


class _ClientLeft(Exception):
    """Before its request was complete."""


class Generate:
    """The ASGI application of the routes that generate.

    Args:
        relay: runs requests.
        meters: counts those that are refused here.
        max_body_bytes: largest request body.
    """

    def __init__(self, relay: Relay, meters: Meters, max_body_bytes: int) -> None:
        self._relay = relay
        self._meters = meters
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, check it, and have it answered."""
        headers = Headers(scope=scope)
        try:
            raw = await _read_body(receive, self._max_body_bytes)
            request = parse_request(scope["path"], raw, headers)
        except _ClientLeft:
            self._meters.ended(Outcome.DISCONNECTED)
        except ParamsError as error:
            self._meters.ended(Outcome.REFUSED)
            how = refusal(400, str(error))
            request_id = engine_request_id(safe_request_id(headers.get("x-request-id", "")))
            await send_whole(send, how.status, how.headers | {"x-request-id": request_id}, how.body)
        else:
            await self._relay.serve(request, receive, send)


def build_app(config: ProxyConfig, ask: Ask = inquire, store: Store | None = None, listen: str = "") -> FastAPI:
    """Return the ASGI application.

    Args:
        config: checked settings (``settings.check_config``).
        ask: asks one engine who it is.
        store: of the registry that the settings name; the application closes it when it ends.
        listen: where it really serves, for people.
    """
    client = Client(config.timeouts.connect_s, config.timeouts.keepalive_s)
    roster = Roster(config)
    meters = Meters()
    gate: Gate[Picked] = Gate(config.max_in_flight, config.max_queue, Picked.close)
    survey = Survey(roster, config.timeouts, ask, gate.wake)
    policy = policy_of(config.policy, config.affinity)
    picker = Picker(config, roster, policy, client, lambda: survey.barred, gate.wake)
    attempts = Attempts(client, config.timeouts, roster, picker, meters)
    relay = Relay(config, gate, picker, attempts, survey, meters)
    looks = Looks(
        config,
        listen or config.listen,
        client=client,
        roster=roster,
        survey=survey,
        picker=picker,
        gate=gate,
        attempts=attempts,
        meters=meters,
        silent_s=lambda: relay.silent_s,
    )
    health = Health(client, config.timeouts, roster, survey, looks)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for part in (client, picker.running(), attempts.running(), survey.running(), following(store, roster)):
                await stack.enter_async_context(part)
            await stack.enter_async_context(dashboard.running())
            yield

    app = FastAPI(title="tidal proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    generate = Generate(relay, meters, config.max_body_bytes)
    for route in ROUTES:
        app.router.routes.append(Route(route, generate, methods=["POST"]))

    dashboard = add_dashboard(app, looks)

    @app.get("/health")
    async def tell_health() -> Response:
        return _json(await health.health())

    @app.get("/ready")
    async def tell_ready() -> Response:
        return _json(health.ready())

    @app.get("/v1/models")
    async def tell_models() -> Response:
        status, said = await health.models()
        if "error" in said:
            return Response(error_body(status, said["error"]), status, media_type="application/json")
        return _json((status, said))

    @app.get("/metrics")
    async def tell_metrics() -> Response:
        return Response(meters.text(looks.state()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/engines/sd")
    async def tell_targets() -> Response:
        return Response(msgspec.json.encode(targets_of(looks.state().engines)), media_type="application/json")

    return app


async def _read_body(receive: Receive, limit: int) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        body += message.get("body", b"")
        if len(body) > limit:
            raise ParamsError(f"request body is larger than max_body_bytes = {limit}")
        if not message.get("more_body", False):
            return body


def _json(said: Said) -> Response:
    status, body = said
    content: Any = msgspec.json.encode(body)
    return Response(content, status, media_type="application/json")
