# SPDX-License-Identifier: Apache-2.0
"""Keeping one entry alive: when to renew, when to put it back, and when it counts as lost. The same for every store.

A store gives a :class:`Lease` (three bounded calls); a :class:`Keeper` owns the thread that makes them and the timing:

* A lease runs from the moment at which its renewal was *sent*, so this side never believes in it for longer than the
  store does. The next renewal is due after a third of the TTL, counted from there.
* After a failure the next attempt comes within a third of the *remaining* time (FR-15: "half a TTL from now" can pass
  the expiry), and never later than a third of the TTL, or a second. Attempts are jittered, so that a hundred engines do
  not ask at once when a store comes back.
* An entry that is gone is put back at once. While another lease holds the key, it is looked at again every third of the
  TTL, at most a second.

Time is that of ``CLOCK_BOOTTIME``: steps of the wall clock do not move it, and it goes on while the machine sleeps.
"""

from __future__ import annotations

import abc
import random
import threading
import time

from tidal_connector.errors import RegistryLost
from tidal_connector.log import get_logger
from tidal_connector.registry.base import Hold

_log = get_logger(__name__)

_RETRY_S = 0.2  # first retry after a failure; doubled each time
_LONGEST_RETRY_S = 1.0
_JOIN_S = 15.0  # more than two bounded calls of a lease


def now() -> float:
    """Return seconds of the clock that leases run by: it never steps and counts the machine's sleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease(abc.ABC):
    """One held key, as its store keeps it. Called from one thread; every call ends within a bound of its own.

    Attributes:
        ttl_s: for how long a renewal lasts, at least.
    """

    ttl_s: float

    @abc.abstractmethod
    def put(self, value: bytes) -> bool:
        """Renew the lease (or begin a new one) and write the entry under it, unless another lease holds the key.

        Returns:
            Whether the entry stands.

        Raises:
            RegistryLost: the store does not answer.
        """

    @abc.abstractmethod
    def renew(self) -> bool:
        """Renew the lease and look whether the entry is still there; return whether both hold.

        Raises:
            RegistryLost: the store does not answer.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Remove the entry, if it is this lease's, and end the lease.

        Raises:
            RegistryLost: the store does not answer; the entry then goes within its TTL.
        """


def retry_after(failures: int, remaining_s: float, ttl_s: float) -> float:
    """Return the wait before the next attempt, without jitter.

    Args:
        failures: attempts that failed in a row, at least 1.
        remaining_s: until the lease ends; not positive where it has ended or none was had.
        ttl_s: of the lease.
    """
    wait = min(_RETRY_S * 2.0 ** min(failures - 1, 10), _LONGEST_RETRY_S, ttl_s / 3)
    return max(0.05, min(wait, remaining_s / 3)) if remaining_s > 0 else wait


class Keeper(Hold):
    """A hold: the thread that keeps one entry alive by its lease."""

    def __init__(self, key: str, value: bytes, lease: Lease) -> None:
        """Begin at once.

        Args:
            key: for messages and the thread's name.
            value: what shall stand.
            lease: how the store keeps it.
        """
        self._key = key
        self._ttl_s = lease.ttl_s
        self._lease = lease
        self._wake = threading.Condition()
        self._wanted = value  # by _wake, as all below
        self._standing: bytes | None = None  # the value under our key, None where it is not ours
        self._ends = 0.0  # when the lease ends unless it is renewed
        self._due = now()
        self._failures = 0
        self._last_said: str | None = None
        self._released = False
        self._thread = threading.Thread(target=self._run, name=f"tidal-hold-{key}", daemon=True)
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether the entry stands as far as this side knows."""
        with self._wake:
            return self._held()

    def _held(self) -> bool:
        return not self._released and self._standing is not None and now() < self._ends

    def update(self, value: bytes) -> None:
        """Replace the value as soon as the store answers; a value that was not yet written is skipped."""
        with self._wake:
            if self._wanted != value:
                self._wanted = value
                self._due = min(self._due, now()) if not self._failures else self._due
                self._wake.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the entry stands with its newest value; return whether it does."""
        with self._wake:
            self._wake.wait_for(lambda: self._released or self._done(), timeout_s)
            return self._done()

    def _done(self) -> bool:
        return self._held() and self._standing == self._wanted

    @property
    def released(self) -> bool:
        """Whether it was told to end."""
        with self._wake:
            return self._released

    def let_go(self) -> None:
        """Begin to release; does not wait."""
        with self._wake:
            self._released = True
            self._wake.notify_all()

    def release(self) -> None:
        """Remove the entry and end the thread, within the bounds of two calls."""
        self.let_go()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def abandon(self) -> None:
        """End the thread and leave the entry to its TTL, as a holder's death does (tests)."""
        with self._wake:
            self._lease = _Abandoned()
        self.release()

    def _run(self) -> None:
        while self._rest():
            self._step()
        try:
            self._lease.drop()
        except Exception as error:  # nobody waits for more than the end of this thread
            self._say(f"{self._key}: not withdrawn ({error}); it goes away by itself within {self._ttl_s:g} s")

    def _rest(self) -> bool:
        """Sleep until something is due; return whether to go on."""
        with self._wake:
            while not self._released:
                left = self._due - now()
                if left <= 0:
                    return True
                self._wake.wait(left)
            return False

    def _step(self) -> None:
        with self._wake:
            wanted, fresh = self._wanted, self._standing is not None and self._standing == self._wanted
        sent = now()
        try:
            stands = self._lease.renew() if fresh else self._lease.put(wanted)
        except RegistryLost as error:
            self._failed(str(error))
            return
        except Exception as error:  # whatever it is, an engine that can never come back would be worse
            if not self._failures:
                _log.exception("%s: a fault of the registry's own", self._key)
            self._failed(f"a fault of its own: {error}")
            return
        with self._wake:
            self._failures = 0
            if stands:
                self._standing, self._ends = wanted, sent + self._ttl_s
                self._due = sent + self._ttl_s / 3 if self._wanted == wanted else now()
            else:
                self._standing = None
                # A lost entry is put back at once; another's is looked at again later.
                self._due = now() if fresh else now() + _jittered(min(_LONGEST_RETRY_S, self._ttl_s / 3))
            self._wake.notify_all()
        if stands:
            self._say("")
        elif fresh:
            self._say(f"{self._key}: the entry was lost (expired, revoked, deleted or overwritten); putting it back")
        else:
            self._say(f"{self._key}: somebody else holds this key; waiting until they let go")

    def _failed(self, why: str) -> None:
        with self._wake:
            self._failures += 1
            wait = retry_after(self._failures, self._ends - now() if self._standing is not None else 0, self._ttl_s)
            self._due = now() + _jittered(wait)
        self._say(f"{self._key}: the registry does not answer, trying on ({why})")

    def _say(self, problem: str) -> None:
        """Log a change of state once; retries say nothing."""
        kind = problem.partition("(")[0]
        if kind == self._last_said:
            return
        self._last_said = kind
        if problem:
            _log.warning("%s", problem)
        else:
            _log.info("%s: stands in the registry", self._key)


class _Abandoned(Lease):
    """What a dead holder does: nothing."""

    ttl_s = 0.0

    def put(self, value: bytes) -> bool:
        return False

    def renew(self) -> bool:
        return False

    def drop(self) -> None:
        return


def _jittered(wait_s: float) -> float:
    return wait_s * random.uniform(0.75, 1.0)
