# SPDX-License-Identifier: Apache-2.0
"""The proxy's routes. ``build_app`` makes one application from one configuration; it owns the HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tidal_connector.control.inquiry import inquire
from tidal_connector.errors import ParamsError
from tidal_connector.proxy.engines import Failure, kept_headers, name_of, open_client
from tidal_connector.proxy.legs import ClientRequest, parse_request
from tidal_connector.proxy.meters import Outcome
from tidal_connector.proxy.relay import Relay, refusal
from tidal_connector.proxy.settings import ProxyConfig
from tidal_connector.proxy.survey import Ask, Survey

ROUTES = ("/v1/completions", "/v1/chat/completions")


class RelayedResponse(Response):
    """A response that the relay writes itself, so that a client that leaves is noticed at once."""

    def __init__(self, relay: Relay, request: ClientRequest) -> None:
        super().__init__()
        self._relay = relay
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the response to the ASGI channel."""
        await self._relay.serve(self._request, receive, send)


def build_app(config: ProxyConfig, ask: Ask = inquire) -> FastAPI:
    """Return the ASGI application.

    Args:
        config: checked settings (``settings.check_config``).
        ask: asks one engine who it is.
    """
    client = open_client(config.timeouts)
    survey = Survey(config, ask)
    relay = Relay(config, client, survey)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with client, survey.running():
            yield

    app = FastAPI(title="tidal proxy", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    async def generate(request: Request) -> Response:
        try:
            raw = await _read_body(request, config.max_body_bytes)
            parsed = parse_request(request.url.path, raw, request.headers)
        except ParamsError as error:
            relay.meters.requests.labels(Outcome.REFUSED).inc()
            return _plain(refusal(400, str(error)))
        return RelayedResponse(relay, parsed)

    for route in ROUTES:
        app.add_api_route(route, generate, methods=["POST"])

    @app.get("/health")
    async def health() -> Response:
        bound_s = config.timeouts.health_s
        prefill = await asyncio.gather(*(_health(client, item.url, bound_s) for item in config.prefill))
        decode = await asyncio.gather(*(_health(client, item.url, bound_s) for item in config.decode))
        states = {
            "prefill": {item.engine: state for item, state in zip(config.prefill, prefill, strict=True)},
            "decode": {item.engine: state for item, state in zip(config.decode, decode, strict=True)},
        }
        missing = [kind for kind, engines in states.items() if "ok" not in engines.values()]
        text = f"no {' and no '.join(missing)} engine is healthy" if missing else survey.nothing_fits or "ok"
        body = {"status": text, **states, "barred": survey.reasons, "unknown": survey.unknown}
        return JSONResponse(body, status_code=200 if text == "ok" else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        for item in config.decode:
            try:
                async with asyncio.timeout(config.timeouts.health_s):
                    answer = await client.get(item.url.rstrip("/") + "/v1/models")
            except (httpx.TransportError, TimeoutError):
                continue
            return Response(answer.content, answer.status_code, kept_headers(answer))
        return _plain(refusal(502, "no decode engine can be reached"))

    @app.get("/metrics")
    async def metrics() -> Response:
        relay.meters.barred_pairs.set(len(survey.barred))
        return Response(relay.meters.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _read_body(request: Request, limit: int) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise ParamsError(f"request body is larger than max_body_bytes = {limit}")
    return body


async def _health(client: httpx.AsyncClient, url: str, bound_s: float) -> str:
    try:
        async with asyncio.timeout(bound_s):
            status = (await client.get(url.rstrip("/") + "/health")).status_code
    except TimeoutError:
        return f"no answer within {bound_s:g} s"
    except httpx.TransportError as error:
        return f"cannot be reached: {name_of(error)}"
    return "ok" if status == httpx.codes.OK else f"status {status}"


def _plain(how: Failure) -> Response:
    return Response(how.body, how.status, how.headers)
