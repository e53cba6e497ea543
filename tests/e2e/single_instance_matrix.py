# SPDX-License-Identifier: Apache-2.0
"""The engines that are compared with the plain one, and the runs of both. A pairwise cover, because each costs a start.

Two values of any two columns meet in some row: architecture, slots (top-k, twice and four times that), prefix caching,
``on`` or ``adaptive``, ample or tight blocks. A run takes 25 to 45 s of one core, most of it imports and warm-up, so
:class:`Runs` keeps as many at work as there are cores, two at most.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.e2e.single_instance import POOL_BYTES, EngineSettings, Order, Report, run_order
from tests.e2e.single_instance_batches import BATCHES, TOP_K, make_batch, often
from tests.e2e.single_instance_drafter import add_drafter
from tidal_connector.cluster.hugepages import extra_hugepages

LAYERS = 4  # one index group of the GLM-like model
ROW_BYTES = 576 * 4 * LAYERS
TIGHT = 49  # of 16 tokens: two or three requests of the batch ``pressure``
ROOMIER = 81  # the longest request of ``flood``, and little more


class Case(msgspec.Struct, frozen=True):
    """One engine with the connector.

    Attributes:
        arch: architecture of its checkpoint.
        slots: slots of a request.
        batches: what it is asked.
        cached: prefix caching.
        adaptive_rows: rows of the selection cache of an adaptive engine; 0: offload is simply on.
        blocks: a tight number of KV blocks; 0: ample.
        selection: further settings of the cache.
        draft_tokens: tokens that its drafter proposes per step; 0: no drafter.
    """

    arch: str
    slots: int
    batches: tuple[str, ...]
    cached: bool = False
    adaptive_rows: int = 0
    blocks: int = 0
    selection: dict[str, Any] = {}
    draft_tokens: int = 0

    def settings(self, model: Path) -> EngineSettings:
        """Return the engine for a checkpoint."""
        selection = {"slots": self.slots, **self.selection}
        if self.adaptive_rows:
            selection["bytes"] = self.adaptive_rows * ROW_BYTES
        mode = "adaptive" if self.adaptive_rows else "on"
        return EngineSettings(
            str(model),
            {"offload": mode, "selection": selection},
            self.blocks,
            self.cached,
            draft_tokens=self.draft_tokens,
        )


CASES = {
    "v32-64": Case("v32", TOP_K, ("short", *often("alone", 5), "few", "crowd")),
    "v32-128-cached-tight": Case("v32", 2 * TOP_K, ("pressure", "turns"), cached=True, blocks=TIGHT),
    "v32-256-cached": Case("v32", 4 * TOP_K, ("short", "few", "crowd", "turns"), cached=True),
    "v32-128-adaptive": Case("v32", 2 * TOP_K, ("alone", "flood", "switch"), adaptive_rows=1600),
    "glm-64-tight": Case("glm", TOP_K, ("pressure", "turns"), blocks=TIGHT),
    "glm-128-cached": Case(
        "glm", 2 * TOP_K, ("short", *often("alone", 5), "crowd", "turns"), cached=True, selection={"threads": 2}
    ),
    "glm-256": Case("glm", 4 * TOP_K, ("few", "crowd"), selection={"prefetch": False}),
    "glm-64-cached-adaptive": Case("glm", TOP_K, ("flood", "crowd", "switch"), cached=True, adaptive_rows=1600),
    "glm-256-cached-adaptive-tight": Case(
        "glm", 4 * TOP_K, ("pressure", "flood"), cached=True, adaptive_rows=1000, blocks=ROOMIER
    ),
    "v32-128-drafting-cached-tight": Case(
        "v32", 2 * TOP_K, ("pressure", "turns"), cached=True, blocks=TIGHT, draft_tokens=1
    ),
    "glm-128-drafting": Case("glm", 2 * TOP_K, ("short", "few", "crowd"), draft_tokens=1),
}


class Runs:
    """Runs of engines, started side by side; a context manager that waits for those under way."""

    def __init__(self, models: Callable[..., Path]) -> None:
        self._models = models
        self._workers = min(2, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._workers)
        self._started: dict[str, Future[Report]] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # For all at once: runs that added theirs side by side would count, and take away, each other's.
        self._held.enter_context(extra_hugepages(self._workers * POOL_BYTES))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._held.close()

    def start(self, names: Iterable[str]) -> None:
        """Start the runs of some cases, and of the plain engines that they are compared with."""
        chosen = {name: CASES[name] for name in names}
        for arch in sorted({case.arch for case in chosen.values()}):
            self._submit(arch, EngineSettings(str(self._model(arch))), BATCHES)
        for name, case in chosen.items():
            model = self._model(case.arch, drafter=case.draft_tokens > 0)
            self._submit(name, case.settings(model), case.batches)
            if case.draft_tokens and not case.blocks:
                plain = EngineSettings(str(model), draft_tokens=case.draft_tokens)
                self._submit(f"{name}, plain", plain, case.batches)

    def report(self, name: str) -> Report:
        """Return what an engine said, by its name: a case, an architecture for the plain engine, or a case that drafts
        with ``, plain`` behind it for an engine that drafts without our connector.
        """
        return self._started[name].result()

    def _model(self, arch: str, drafter: bool = False) -> Path:
        model = self._models(arch=arch, layers=LAYERS)
        if not drafter:
            return model
        folder = model.with_name(f"{model.name}-drafter")
        return folder if folder.exists() else add_drafter(model, folder)

    def _submit(self, name: str, settings: EngineSettings, batches: Iterable[str]) -> None:
        if name not in self._started:
            order = Order(settings, {batch: make_batch(batch) for batch in batches})
            self._started[name] = self._pool.submit(run_order, order)
