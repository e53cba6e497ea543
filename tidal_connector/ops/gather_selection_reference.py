# SPDX-License-Identifier: Apache-2.0
"""The definition of ``gather_selection_kv_cache``, row by row in plain Python; the native one has to agree with it.

Takes a checked call. Plans all rows before it writes anything. Any thread; keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidal_connector.ops.gather_selection_call import SelectionCall, SelectionTraffic


@dataclass(frozen=True)
class _Rule:
    """Which copies of a row may be used again, and how many tokens an id has."""

    call: SelectionCall
    length: int  # tokens that the row sees
    stable: int  # tokens of the request before those of this step; drafts at and after it are written anew
    old: int  # tokens that the row held after the last call

    @property
    def last(self) -> int:
        """The largest id that exists."""
        return (self.length - 1) // self.call.block

    def tokens(self, x: int) -> int:
        """Return the tokens of id x: a block, or what there is of the last one."""
        block = self.call.block
        return self.length - x * block if x == self.last else block

    def trusted(self, x: int, slot: int) -> bool:
        """Return whether the copy of id x in a slot still has the bytes that the pool has."""
        block = self.call.block
        if (x + 1) * block > self.stable:
            return False
        if not self.call.by_blocks:
            return True
        # Only whole blocks of the last call count; the partial one, if any, was its last.
        return slot < self.old // block


@dataclass(frozen=True)
class _Plan:
    """One row: the id of each used slot, and where its bytes come from (a slot of the row, or None: the pool)."""

    row: int
    rule: _Rule
    ids: list[int]
    sources: list[int | None]


def gather_selection_kv_cache(call: SelectionCall) -> SelectionTraffic:
    """Bring the selected rows into the selection cache; write status and ``call.actual``.

    Raises:
        IndexError: an id that has to be fetched lies in a page outside the full pool; nothing was written.
    """
    traffic = SelectionTraffic()
    plans = [plan for row in range(call.rows) if (plan := _plan(call, row, traffic)) is not None]
    for plan in plans:
        _copy(call, plan)
        _commit(call, plan)
    return traffic


def _plan(call: SelectionCall, row: int, traffic: SelectionTraffic) -> _Plan | None:
    request, query = divmod(row, call.queries)
    length = int(call.lengths[request]) - (call.queries - 1 - query)
    if length <= 0:
        return None
    status = [int(x) for x in call.status[row]]
    rule = _Rule(call, length, int(call.lengths[request]) - call.queries, status[call.topk])
    valid: list[int] = []
    for x in call.ids[row].tolist():
        if x < 0 and call.by_blocks:
            break
        if 0 <= x <= rule.last:
            valid.append(x)

    first_slot: dict[int, int] = {}
    for slot, x in enumerate(status[: call.topk]):
        first_slot.setdefault(x, slot)
    found: list[int | None] = []
    for x in valid:  # an id given twice finds its slot once
        at = first_slot.pop(x, -1)
        found.append(at if at >= 0 and rule.trusted(x, at) else None)

    count = len(valid)
    stays = {slot for slot in found if slot is not None and slot < count}
    free = iter([slot for slot in range(count) if slot not in stays])
    ids: list[int] = [-1] * count
    sources: list[int | None] = [None] * count
    for x, source in zip(valid, found, strict=True):
        target = source if source is not None and source in stays else next(free)
        ids[target], sources[target] = x, source
        if source is not None:
            traffic.hits += 1
            continue
        page = int(call.full_table[request, x * call.block // call.full_kv.shape[1]])
        if not 0 <= page < call.full_kv.shape[0]:
            raise call.page_error(row, x)
        traffic.fetched += 1
        traffic.fetched_rows += rule.tokens(x)
        traffic.fetched_bytes += rule.tokens(x) * call.row_bytes
    if call.by_blocks and ids:
        _largest_last(ids, sources)
    traffic.moved += sum(origin is not None and origin != target for target, origin in enumerate(sources))
    return _Plan(row, rule, ids, sources)


def _largest_last(ids: list[int], sources: list[int | None]) -> None:
    """Exchange the largest id with the last used slot, so that a partial block is the last of the row."""
    at = ids.index(max(ids))
    ids[at], ids[-1] = ids[-1], ids[at]
    sources[at], sources[-1] = sources[-1], sources[at]


def _copy(call: SelectionCall, plan: _Plan) -> None:
    """Write the used slots; an id's tokens alone are written, what follows them in its slot stays."""
    for selection, full in ((call.selection_kv, call.full_kv), (call.selection_rope, call.full_rope)):
        read = []
        for x, source in zip(plan.ids, plan.sources, strict=True):
            tokens = plan.rule.tokens(x)
            if source is None:
                page, offset = divmod(x * call.block, full.shape[1])
                page = int(call.full_table[plan.row // call.queries, page])
                read.append(full[page, offset : offset + tokens])
            else:
                read.append(selection[_place(call, plan.row, source, tokens)].copy())
        for slot, rows in enumerate(read):
            selection[_place(call, plan.row, slot, len(rows))] = rows


def _commit(call: SelectionCall, plan: _Plan) -> None:
    count = len(plan.ids)
    held = sum(plan.rule.tokens(x) for x in plan.ids)
    call.status[plan.row, :count] = plan.ids
    call.status[plan.row, count : call.topk] = -1
    call.status[plan.row, call.topk] = call.actual[plan.row] = held


def _place(call: SelectionCall, row: int, slot: int, tokens: int) -> tuple[int, slice]:
    """Return the page and the offsets of a slot's first tokens."""
    page, offset = divmod(slot * call.block, call.selection_kv.shape[1])
    return int(call.selection_table[row, page]), slice(offset, offset + tokens)
