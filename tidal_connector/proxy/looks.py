# SPDX-License-Identifier: Apache-2.0
"""The running proxy's own ``view.View``: gathers what its parts know into one frozen state. Event loop's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tidal_connector.proxy.attempt import Attempts
from tidal_connector.proxy.gate import Gate
from tidal_connector.proxy.meters import Meters
from tidal_connector.proxy.picker import Picker
from tidal_connector.proxy.roster import Engine, Roster
from tidal_connector.proxy.settings import ProxyConfig
from tidal_connector.proxy.survey import Survey
from tidal_connector.proxy.view import EngineView, PairView, ProxyState, RegistryView
from tidal_connector.proxy.wire import Client, WireError

_MOST_BYTES = 4 << 20


class Looks:
    """Looks at the parts of one proxy.

    Args:
        config: of the proxy.
        listen: where it serves.
        silent_s: says how long the request that waits longest for its first byte has waited.
    """

    def __init__(
        self,
        config: ProxyConfig,
        listen: str,
        *,
        client: Client,
        roster: Roster,
        survey: Survey,
        picker: Picker,
        gate: Gate[Any],
        attempts: Attempts,
        meters: Meters,
        silent_s: Callable[[], float],
    ) -> None:
        self._config = config
        self._listen = listen
        self._client = client
        self._roster = roster
        self._survey = survey
        self._picker = picker
        self._gate = gate
        self._attempts = attempts
        self._meters = meters
        self._silent_s = silent_s
        self._started_at = time.time()

    def state(self) -> ProxyState:
        """Return everything as it is now."""
        why_not = self._picker.why_none(self._survey.nothing_fits)
        return ProxyState(
            at=time.time(),
            started_at=self._started_at,
            listen=self._listen,
            policy=str(self._config.policy),
            ready=not why_not,
            why_not=why_not,
            engines=tuple(self._engine(engine) for engine in self._roster.engines),
            registry=self.registry(),
            pairs=self._picker.pairs(),
            barred=tuple(self._survey.reasons),
            in_flight=self._gate.inside,
            max_in_flight=self._config.max_in_flight,
            queued=self._gate.waiting,
            max_queue=self._config.max_queue,
            requests=dict(self._meters.outcomes),
            attempts=int(self._meters.attempts_made),
            retries=int(self._meters.retries_made),
            recent=tuple(self._meters.recent),
            traffic=self._traffic(),
            silent_s=self._silent_s(),
        )

    def registry(self) -> RegistryView | None:
        """Return where engines are read from, None where they all come from the file."""
        if self._config.registry is None:
            return None
        return RegistryView(self._config.registry.url, self._roster.fresh, self._roster.age_s, self._roster.odd)

    def _traffic(self) -> tuple[PairView, ...]:
        busy, barred = self._attempts.traffic, self._survey.barred
        pairs = dict.fromkeys((*busy, *barred))
        return tuple(PairView(*pair, busy.get(pair, 0), barred.get(pair, "")) for pair in pairs)

    def _engine(self, engine: Engine) -> EngineView:
        ledger = self._picker.ledgers[engine.side]
        served, failures = self._meters.engine_counts(engine)
        return EngineView(
            engine=engine.engine,
            role=engine.side,
            state=engine.state,
            reachable=self._picker.reachable(engine),
            source="registry" if engine.registered else "file",
            http=engine.url,
            control=engine.control,
            incarnation=engine.incarnation,
            revision=engine.revision,
            node=engine.node,
            model=engine.model,
            layout=engine.layout,
            note=engine.note,
            requests=ledger.requests(engine.engine),
            tokens=ledger.tokens(engine.engine),
            served=served,
            failures=failures,
        )

    async def read(self, engine: str, path: str) -> bytes | None:
        """Return the body of an engine's answer to ``GET path``; None where there is no good one."""
        found = self._roster.find("prefill", engine) or self._roster.find("decode", engine)
        return None if found is None else await self.read_of(found, path)

    async def read_of(self, engine: Engine, path: str) -> bytes | None:
        """Return the body of this engine's answer; None where there is no good one."""
        try:
            status, body = await self._client.get(engine.url, path, self._config.timeouts.health_s, _MOST_BYTES)
        except (WireError, TimeoutError):
            return None
        return body if status == 200 else None
