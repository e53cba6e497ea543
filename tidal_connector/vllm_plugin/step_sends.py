# SPDX-License-Identifier: Apache-2.0
"""What a step tells the sender: which requests have which pages, which layers are written, which prompts are complete.

Takes the scheduler's intents and vLLM's hooks; hands on words to the sender, in order, on a device only once it has
written the rows that they are about (see :mod:`.timeline`). vLLM's thread; it never waits for a peer, with one bounded
exception: a preemption, whose pages vLLM is about to give to somebody else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from tidal_connector.ids import DevicePageId, RequestId, TransferId
from tidal_connector.log import get_logger
from tidal_connector.prefill.sender import Sender
from tidal_connector.vllm_plugin.metadata import SendChunk, SendEnd, TidalMetadata
from tidal_connector.vllm_plugin.timeline import Timeline

logger = get_logger(__name__)


class StepSends:
    """The sending half of the steps of one worker.

    Args:
        sender: the prefill room.
        layers: decoder layers that have caches, in order.
        timeline: passes words on once they are true.
        stall_s: longest wait for pages of preempted requests to fall quiet.
    """

    def __init__(self, sender: Sender, layers: Iterable[int], timeline: Timeline, stall_s: float) -> None:
        self._sender = sender
        self._layers = tuple(dict.fromkeys(layers))
        self._timeline = timeline
        self._stall_s = stall_s
        self._chunks: list[SendChunk] = []
        self._saved: set[int] = set()

    def preempted(self, requests: Iterable[str]) -> None:
        """Stop reading the pages that vLLM has just taken back, before the forward pass that may write them."""
        taken = [RequestId(request) for request in requests]
        if not taken:
            return
        # What was said of them must not come after this.
        settled = self._timeline.settle(self._stall_s)
        for request in taken:
            self._sender.unready(request, 0)
        if self._sender.quiesce(taken, self._stall_s) and settled:
            return
        logger.error("preempted pages are still being read after %.1f s; their transfers fail", self._stall_s)
        for request in taken:
            self._sender.give_up(request, "its pages were taken by a preemption")

    def bind(self, metadata: TidalMetadata) -> None:
        """Take the step's intents."""
        self._chunks = list(metadata.chunks)
        self._saved.clear()
        for chunk in metadata.chunks:
            self._open(chunk)
        for end in metadata.ends:
            self._end(end)

    def _open(self, chunk: SendChunk) -> None:
        request, sender = RequestId(chunk.request), self._sender

        def word() -> None:
            sender.open(request, TransferId(chunk.transfer), chunk.hold_s, chunk.prompt)
            sender.pages(request, [DevicePageId(page) for page in chunk.pages])

        self._timeline.say(word)

    def _end(self, end: SendEnd) -> None:
        request, sender = RequestId(end.request), self._sender

        def word() -> None:
            if not end.scheduled:
                sender.reject(TransferId(end.transfer), end.reason)
            elif end.reason:
                sender.abort(request, end.reason)
            else:
                sender.finish(request, end.total)

        self._timeline.say(word)

    def layer_saved(self, layer: int) -> None:
        """Announce that a layer's rows of this step are written, in all its regions; once, whichever hook is first."""
        if layer in self._saved or not self._chunks:
            return
        self._saved.add(layer)
        sender, rows = self._sender, [(RequestId(c.request), c.first, c.end) for c in self._chunks]
        self._timeline.say_written(lambda: sender.ready_many((layer,), rows))

    def step_saved(self) -> None:
        """Announce the layers that no hook announced, and note which prompts are now complete."""
        sender = self._sender
        if sys.exc_info()[0] is not None:
            # vLLM comes here in a finally clause, too: of a forward pass that raised, the other layers are not written.
            for chunk in self._chunks:
                sender.give_up(RequestId(chunk.request), "the forward pass of prefill broke")
            return
        for layer in self._layers:
            self.layer_saved(layer)
        done = [RequestId(chunk.request) for chunk in self._chunks if chunk.done]

        def word() -> None:
            at = time.monotonic()
            for request in done:
                sender.prefill_done(request, at)

        if done:
            self._timeline.say_written(word)
