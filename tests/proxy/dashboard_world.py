# SPDX-License-Identifier: Apache-2.0
"""A proxy for the dashboard to look at that does and answers what a test says, with a clock that a test moves."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tidal_connector.proxy.view import EngineView, PairView, ProxyState, RegistryView, Sample


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Scene:
    """A view whose every part can be set."""

    engines: list[EngineView] = field(default_factory=list)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    """``/metrics`` of each engine, by series name."""
    silent: set[str] = field(default_factory=set)
    sick: set[str] = field(default_factory=set)
    requests: dict[str, int] = field(default_factory=lambda: {"ok": 0, "engine_error": 0})
    recent: list[Sample] = field(default_factory=list)
    traffic: list[PairView] = field(default_factory=list)
    barred: tuple[str, ...] = ()
    registry: RegistryView | None = None
    ready: bool = True
    why_not: str = ""
    in_flight: int = 0
    queued: int = 0
    retries: int = 0
    silent_s: float = 0.0
    reads: list[tuple[str, str]] = field(default_factory=list)

    def add(self, engine: str, role: str = "decode", state: str = "ready", **more: object) -> EngineView:
        given = {"reachable": True, "source": "registry", "http": f"http://{engine}.example:8000", **more}
        view = msgspec.convert({"engine": engine, "role": role, "state": state, **given}, EngineView)
        self.engines = [*(each for each in self.engines if (each.engine, each.role) != (engine, role)), view]
        self.numbers.setdefault(engine, {})
        return view

    def drop(self, engine: str) -> None:
        self.engines = [each for each in self.engines if each.engine != engine]

    def count(self, engine: str, **numbers: float) -> None:
        """Set series of an engine: ``bytes_pushed_total=7`` is ``tidal:bytes_pushed_total 7``."""
        self.numbers[engine].update(numbers)

    def finish(self, outcome: str = "ok", first_byte_s: float = 0.1, event_s: float = 0.02, events: int = 9) -> None:
        self.requests[outcome] = self.requests.get(outcome, 0) + 1
        at = float(len(self.recent))
        self.recent.append(Sample(at, outcome, 0.0, first_byte_s, 1.0, events, event_s, "prefill-0", "decode-0", 1))

    def state(self) -> ProxyState:
        return ProxyState(
            at=0.0,
            started_at=0.0,
            listen="127.0.0.1:8000",
            policy="least-tokens",
            ready=self.ready,
            why_not=self.why_not,
            engines=tuple(self.engines),
            registry=self.registry,
            pairs=1,
            barred=self.barred,
            in_flight=self.in_flight,
            max_in_flight=512,
            queued=self.queued,
            max_queue=100,
            requests=dict(self.requests),
            attempts=sum(self.requests.values()) + self.retries,
            retries=self.retries,
            recent=tuple(self.recent[-1000:]),
            traffic=tuple(self.traffic),
            silent_s=self.silent_s,
        )

    async def read(self, engine: str, path: str) -> bytes | None:
        self.reads.append((engine, path))
        if engine in self.silent:
            return None
        if path == "/health":
            return None if engine in self.sick else b""
        lines = []
        for name, value in self.numbers[engine].items():
            prefix = "vllm" if name.startswith(("num_", "kv_")) else "tidal"
            lines.append(f'{prefix}:{name}{{engine="0",model_name="a}} b"}} {value}')
        return "\n".join(lines).encode()
