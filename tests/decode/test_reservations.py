# SPDX-License-Identifier: Apache-2.0
"""The receive machine, row by row of its table, and what a table cannot say."""

from __future__ import annotations

import pytest

from tests.control.tables import table_rows
from tidal_connector.control.messages import Aborted, Accepted, Failed, Landed, Parked, Progress
from tidal_connector.control.party import NEVER
from tidal_connector.decode import reservations as machine
from tidal_connector.decode.reservations import (
    Effect,
    Event,
    GivenUp,
    Heard,
    Phase,
    Receive,
    SessionLost,
    SessionUp,
    Tick,
    Timers,
    Withdrawn,
)
from tidal_connector.ids import Generation, TransferId

X, G = TransferId("xfer-1"), Generation(3)
TIMERS = Timers(accept_s=60.0, park_s=30.0, stall_s=10.0, quarantine_s=120.0, deliver_s=900.0, lease_s=9.0, retry_s=3.0)
WANTED = 100

UP = SessionUp()
PARKED, ACCEPTED = Heard(Parked(X, G)), Heard(Accepted(X, G, WANTED))
LANDED, PROGRESS = Heard(Landed(X, G, WANTED)), Heard(Progress(X, G, 40))
FAILED, TORN = Heard(Failed(X, G, "gone", True)), Heard(Failed(X, G, "reset", False))
ABORTED, ABORTED_TORN = Heard(Aborted(X, G, "asked", True)), Heard(Aborted(X, G, "asked", False))
LOST, LEFT = SessionLost("lease"), Withdrawn("client left")
RECEIVING: tuple[Event, ...] = (UP, ACCEPTED)
ABORTING: tuple[Event, ...] = (UP, ACCEPTED, LEFT)
QUARANTINE: tuple[Event, ...] = (UP, ACCEPTED, TORN)
RESERVE, ABORT = Effect.RESERVE, Effect.ABORT

EXAMPLES: dict[tuple[str, str, str], tuple[tuple[Event, ...], Event | tuple[float, Event], list[Effect]]] = {
    ("calling", "session up", "reserved"): ((), UP, [RESERVE]),
    ("calling", "P refuses or is lost", "released"): ((), LOST, []),
    ("calling", "accept_s is over", "released"): ((), (60.0, Tick()), []),
    ("calling", "request aborted", "released"): ((), LEFT, []),
    ("reserved", "Parked", "reserved"): ((UP,), PARKED, []),
    ("reserved", "no answer for a third of the lease", "reserved"): ((UP,), (3.0, Tick()), [RESERVE]),
    ("reserved", "Accepted, bytes as expected", "receiving"): ((UP,), ACCEPTED, []),
    ("reserved", "Accepted, other bytes", "aborting"): ((UP,), Heard(Accepted(X, G, 7)), [ABORT]),
    ("reserved", "accept_s, after Parked park_s + accept_s", "quarantine"): ((UP,), (60.0, Tick()), [ABORT]),
    ("receiving", "Progress", "receiving"): (RECEIVING, PROGRESS, []),
    ("reserved, receiving", "Landed, bytes as expected", "ready"): (RECEIVING, LANDED, []),
    ("reserved, receiving", "Landed, other bytes", "released"): (RECEIVING, Heard(Landed(X, G, 7)), []),
    ("reserved, receiving", "Failed, drained", "released"): (RECEIVING, FAILED, []),
    ("reserved, receiving", "Failed, not drained", "quarantine"): (RECEIVING, TORN, []),
    ("reserved, receiving", "P lost", "quarantine"): (RECEIVING, LOST, []),
    ("reserved, receiving", "Abort", "aborting"): (RECEIVING, GivenUp("stalled"), [ABORT]),
    ("reserved, receiving", "request aborted", "aborting"): (RECEIVING, LEFT, [ABORT]),
    ("reserved, receiving", "deliver_s is over", "aborting"): (
        (*RECEIVING, *(Heard(Progress(X, G, 1)),)),
        (900.0, Tick()),
        [ABORT],
    ),
    ("receiving", "no Progress for stall_s", "quarantine"): (RECEIVING, (10.0, Tick()), [ABORT]),
    ("aborting", "no answer for a third of the lease", "aborting"): (ABORTING, (3.0, Tick()), [ABORT]),
    ("aborting", "Aborted or Failed, drained; Landed", "released"): (ABORTING, ABORTED, []),
    ("aborting", "Aborted or Failed, not drained", "quarantine"): (ABORTING, ABORTED_TORN, []),
    ("aborting", "stall_s is over", "quarantine"): (ABORTING, (10.0, Tick()), [ABORT]),
    ("aborting", "P lost", "quarantine"): (ABORTING, LOST, []),
    ("quarantine", "Aborted or Failed, drained; Landed", "released"): (QUARANTINE, ABORTED, []),
    ("quarantine", "P drained, no connection of its host is left", "released"): (QUARANTINE, (1.0, Tick(0)), []),
    ("quarantine", "P drained, connections are left", "quarantine"): (QUARANTINE, (1.0, Tick(2)), []),
    ("quarantine", "P lost for two leases, no connection is left", "released"): (
        (*RECEIVING, LOST),
        (18.0, Tick(0)),
        [],
    ),
    ("quarantine", "P lost, its door is shut", "released"): ((*RECEIVING, LOST), (1.0, Tick(None, fenced=True)), []),
    ("quarantine", "quarantine_s since P drained, or since two leases", "released"): (QUARANTINE, (120.0, Tick()), []),
    ("quarantine", "twice quarantine_s, whatever P does", "released"): (
        (*ABORTING, Tick()),
        (10.0, Tick()),
        [ABORT],
    ),
    ("ready, released", "anything late", "ready, released"): ((*RECEIVING, LANDED), TORN, []),
}
NOT_ONE_STEP = {("quarantine", "twice quarantine_s, whatever P does", "released")}


def run(*events: Event | tuple[float, Event]) -> tuple[Receive, list[Effect]]:
    receive, effects = machine.new(X, G, WANTED, TIMERS, 0.0), []
    for item in events:
        at, event = item if isinstance(item, tuple) else (0.0, item)
        if at == 900.0:  # keep it alive until then
            receive, _ = machine.step(receive, PROGRESS, 899.0)
        receive, effects = machine.step(receive, event, at)
    return receive, effects


@pytest.mark.parametrize("row", [row for row in EXAMPLES if row not in NOT_ONE_STEP], ids=" / ".join)
def test_row_of_the_table(row: tuple[str, str, str]) -> None:
    before, event, expected = EXAMPLES[row]
    receive, _ = run(*before)
    assert receive.phase in row[0].split(", ")
    receive, effects = run(*before, event)
    assert receive.phase in row[2].split(", ")
    assert effects == expected


def test_the_documented_table_is_this_one() -> None:
    assert table_rows("Receive machine") == list(EXAMPLES)


def test_quarantine_ends_whatever_the_peer_does() -> None:
    receive, _ = run(*ABORTING, (10.0, Tick()))
    assert receive.phase is Phase.QUARANTINE
    receive, _ = machine.step(receive, Tick(5), 249.0)
    assert receive.phase is Phase.QUARANTINE
    receive, _ = machine.step(receive, Tick(5), 250.0)
    assert receive.phase is Phase.RELEASED


def test_a_lost_peer_may_still_write_for_its_own_lease() -> None:
    receive, _ = run(*RECEIVING, LOST, (17.9, Tick(0)))
    assert receive.phase is Phase.QUARANTINE


def test_parked_is_alive_but_not_for_ever() -> None:
    receive, _ = run(UP, PARKED, (89.0, Tick()))
    assert receive.phase is Phase.RESERVED
    receive, _ = run(UP, PARKED, (89.0, PARKED), (90.0, Tick()))
    assert receive.phase is Phase.QUARANTINE


@pytest.mark.parametrize("state", ["calling", "reserved", "receiving", "aborting", "quarantine"])
def test_every_state_ends_by_itself(state: str) -> None:
    start = {"calling": (), "reserved": (UP,), "receiving": RECEIVING, "aborting": ABORTING, "quarantine": QUARANTINE}
    receive, _ = run(*start[state])
    assert receive.phase == state
    now = 0.0
    while not machine.over(receive):
        now = machine.due(receive)
        assert now < NEVER
        assert now < 2000.0
        receive, _ = machine.step(receive, Tick(), now)


def test_progress_keeps_a_long_prefill_alive() -> None:
    events = [(float(at), PROGRESS) for at in range(5, 200, 5)]
    receive, _ = run(*RECEIVING, *events, (200.0, Tick()))
    assert receive.phase is Phase.RECEIVING
