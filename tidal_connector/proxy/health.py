# SPDX-License-Identifier: Apache-2.0
"""What the proxy says of itself and its engines to probes: ``/health``, ``/ready``, ``/v1/models``.

``/ready`` asks nobody: it says whether this proxy could dispatch a request now. ``/health`` asks every engine that
should be ready. Event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from tidal_connector.proxy.looks import Looks
from tidal_connector.proxy.roster import SIDES, Engine, Roster
from tidal_connector.proxy.settings import Timeouts
from tidal_connector.proxy.survey import Survey
from tidal_connector.proxy.wire import Client, WireError
from tidal_connector.registry.members import State

Said = tuple[int, dict[str, Any]]
"""HTTP status and JSON object."""

_MOST_BYTES = 1 << 20


class Health:
    """Answers of one proxy.

    Args:
        client: asks the engines.
        timeouts: how long.
        roster: the engines.
        survey: which of them do not fit.
        looks: at the proxy.
    """

    def __init__(self, client: Client, timeouts: Timeouts, roster: Roster, survey: Survey, looks: Looks) -> None:
        self._client = client
        self._bound_s = timeouts.health_s
        self._roster = roster
        self._survey = survey
        self._looks = looks

    def ready(self) -> Said:
        """Whether a pair of engines can be formed now."""
        state = self._looks.state()
        said: dict[str, Any] = {"ready": state.ready, "pairs": state.pairs, "why": state.why_not}
        return (200 if state.ready else 503), said | self._registry()

    async def health(self) -> Said:
        """What every engine says of its health, and whether one of each kind is well and they fit."""
        engines = self._roster.engines
        said = await asyncio.gather(*(self._health(engine) for engine in engines))
        states = {
            side: {engine.engine: text for engine, text in zip(engines, said, strict=True) if engine.side == side}
            for side in SIDES
        }
        missing = [side for side in SIDES if "ok" not in states[side].values()]
        text = f"no {' and no '.join(missing)} engine is healthy" if missing else self._survey.nothing_fits or "ok"
        body = {"status": text, **states, "barred": self._survey.reasons, "unknown": self._survey.unknown}
        return (200 if text == "ok" else 503), body | self._registry()

    async def models(self) -> Said:
        """The models that ready decode engines serve, each once."""
        decode = self._roster.ready("decode")
        answers = await asyncio.gather(*(self._models(engine) for engine in decode))
        models: dict[str, Any] = {}
        for answer in answers:
            for model in answer or ():
                models.setdefault(model["id"], model)
        if decode and all(answer is None for answer in answers):
            return 502, {"error": "no decode engine can be reached"}
        return 200, {"object": "list", "data": list(models.values())}

    def _registry(self) -> dict[str, Any]:
        registry = self._looks.registry()
        return {} if registry is None else {"registry": msgspec.to_builtins(registry)}

    async def _health(self, engine: Engine) -> str:
        if engine.state is not State.READY:
            return f"{engine.state}: {engine.note}" if engine.note else str(engine.state)
        try:
            status, _ = await self._client.get(engine.url, "/health", self._bound_s, _MOST_BYTES)
        except TimeoutError:
            return f"no answer within {self._bound_s:g} s"
        except WireError as error:
            return f"cannot be reached: {error}"
        return "ok" if status == HTTPStatus.OK else f"status {status}"

    async def _models(self, engine: Engine) -> Sequence[dict[str, Any]] | None:
        body = await self._looks.read_of(engine, "/v1/models")
        if body is None:
            return None
        try:
            data = msgspec.json.decode(body)["data"]
            return [model for model in data if isinstance(model["id"], str)]
        except (msgspec.DecodeError, KeyError, TypeError):
            return None
