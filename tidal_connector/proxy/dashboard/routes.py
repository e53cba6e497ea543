# SPDX-License-Identifier: Apache-2.0
"""``/dashboard`` and ``/dashboard/data``. ``add_dashboard`` puts both on an application; they only ever read."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from tidal_connector.proxy.dashboard.page import GUARD, build_page
from tidal_connector.proxy.dashboard.sampler import Sampler
from tidal_connector.proxy.view import View

_DATA = {**GUARD, "content-type": "application/json", "cache-control": "no-store"}


def add_dashboard(app: FastAPI, view: View) -> Sampler:
    """Add the two routes; the caller opens the returned sampler's ``running`` while it serves.

    Args:
        app: the proxy's application.
        view: what the page shows.
    """
    page = build_page()
    sampler = Sampler(view)

    @app.get("/dashboard")
    async def dashboard() -> Response:
        return Response(page.body, headers=dict(page.headers))

    @app.get("/dashboard/data")
    async def data(request: Request) -> Response:
        since = request.query_params.get("since", "")
        answer = await sampler.answer(
            int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0,
            request.query_params.get("boot", ""),
        )
        if answer is None:
            return Response(b'{"starting": true}', 503, {**_DATA, "retry-after": "1"})
        return Response(msgspec.json.encode(answer), headers=_DATA)

    return sampler
