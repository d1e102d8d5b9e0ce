"""One turn of the loop, and what waits for the disk.

All puts of all connections that arrive in one turn are staged, then appended with one write at the turn's end. At MEMORY they
are answered then. At DISK they are parked until a sync covers them: one sync releases every put before it (group commit).
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from gevent.event import Event
from gevent.hub import Hub

from metaq.config import Settings
from metaq.errors import MetaqError, Overloaded, StoreError
from metaq.store.consumequeue import ConsumeQueue
from metaq.store.files import Run
from metaq.store.messagestore import MessageStore

logger = logging.getLogger(__name__)

NOT_STORED: Final = "was not stored"
IN_DOUBT: Final = "may be stored or not"


class Outcome(Protocol):
    """What one sender's puts of one turn lead to; exactly one of the three is called, once."""

    size: int
    """Bytes that wait; final when the turn ends."""

    def stored(self) -> None:
        """They are as durable as promised."""
        ...

    def refused(self, error: MetaqError, outcome: str) -> None:
        """They failed; ``outcome``, NOT_STORED or IN_DOUBT, goes on after "the message"."""
        ...

    def late(self) -> None:
        """They are stored, but not as durable as promised within the time."""
        ...


class Parked(NamedTuple):
    """An outcome that waits for the disk."""

    end: int
    """Log offset that must be durable first."""
    deadline: float
    outcome: Outcome
    failure: StoreError | None
    """Nothing of it was stored; it waits only because answers keep their order."""


class Turns:
    """Collects puts, appends them, and answers when the durability level is reached."""

    def __init__(
        self, store: MessageStore, settings: Settings, hub: Hub, run: Run, wake: Callable[[list[ConsumeQueue]], None]
    ) -> None:
        """``run`` takes system calls off the hub; ``wake`` is told the queues in which readers see more."""
        self._store = store
        self._clock = store.clock
        self._loop = hub.loop
        self._run = run
        self._wake = wake
        self._at_disk = settings.durability.on_disk
        self._sync_timeout = settings.sync_timeout_ms / 1000
        self._flush_messages = settings.flush_messages
        self._flush_interval = settings.flush_interval_ms / 1000
        self.max_waiting_bytes = settings.max_waiting_bytes
        self._outcomes: list[Outcome] = []
        self.number = 0
        """Of the current turn."""
        self._parked: deque[Parked] = deque()
        self.waiting_bytes = 0
        self._synced_messages = 0
        self._sync_due = Event()
        self._last_sync_ms = 1
        self._stopping = False

    # -- staging ------------------------------------------------------------------------------------------------------

    @property
    def overloaded(self) -> bool:
        """Whether too much waits for the disk already."""
        return self.waiting_bytes > self.max_waiting_bytes

    def check_load(self) -> None:
        """Raise ``Overloaded`` while too much waits for the disk."""
        if self.waiting_bytes > self.max_waiting_bytes:
            reason = f"{self.waiting_bytes} bytes of puts wait for the disk, the limit is {self.max_waiting_bytes}"
            measured = f"the oldest since {self.longest_wait_ms} ms, the last sync took {self._last_sync_ms} ms"
            raise Overloaded(f"{reason} (max_waiting_bytes); {measured}", retry_after_ms=self._last_sync_ms)

    @property
    def waiting(self) -> int:
        """Outcomes that wait for the disk."""
        return len(self._parked)

    @property
    def longest_wait_ms(self) -> int:
        """How long the oldest of them has been waiting."""
        if not self._parked:
            return 0
        return round(1000 * (self._clock.monotonic() - self._parked[0].deadline + self._sync_timeout))

    def staged(self, outcome: Outcome) -> None:
        """Take an outcome of this turn: its puts hold when the append at the end of the turn succeeds."""
        if not self._outcomes:
            self._loop.run_callback(self.finish)
        self._outcomes.append(outcome)

    def finish(self) -> None:
        """The end of the turn: append, then answer or park."""
        outcomes, self._outcomes = self._outcomes, []
        self.number += 1
        store = self._store
        failure: StoreError | None = None
        try:
            readable = store.append()
        except StoreError as error:
            logger.error("append failed reason=%s", error)
            failure, readable = error, []
        end = store.log.end
        deadline = self._clock.monotonic() + self._sync_timeout
        for outcome in outcomes:
            parked = Parked(end, deadline, outcome, failure)
            if self._at_disk and (self._parked or end > store.durable_end):
                self._parked.append(parked)
            else:
                self._settle(parked)
        if self._at_disk:
            if self._parked:
                self._sync_due.set()
        elif store.messages_put - self._synced_messages >= self._flush_messages:
            self._sync_due.set()
        if readable:
            self._wake(readable)

    def _settle(self, parked: Parked) -> None:
        """The promised level is reached."""
        self.waiting_bytes -= parked.outcome.size
        if parked.failure is not None:
            parked.outcome.refused(parked.failure, NOT_STORED)
        else:
            parked.outcome.stored()

    # -- syncing ------------------------------------------------------------------------------------------------------

    def sync_forever(self) -> None:
        """The greenlet that syncs: one at a time, the next at once when more has come meanwhile."""
        store = self._store
        reported: StoreError | None = None
        while not self._stopping:
            self._sync_due.wait(None if self._at_disk else self._flush_interval)
            self._sync_due.clear()
            self._synced_messages = store.messages_put
            started = self._clock.monotonic()
            try:
                readable = store.sync(self._run)
            except StoreError as error:
                if error is not reported:  # the store raises it again for every turn that wants a sync
                    logger.critical("sync failed, the broker is read-only until it is restarted reason=%s", error)
                    reported = error
                self._fail_parked(error)
                continue
            self._last_sync_ms = max(1, round((self._clock.monotonic() - started) * 1000))
            self._release()
            if readable:
                self._wake(readable)

    def _release(self) -> None:
        durable = self._store.durable_end
        while self._parked and self._parked[0].end <= durable:
            self._settle(self._parked.popleft())
        if self._parked:
            self._sync_due.set()

    def _fail_parked(self, error: StoreError) -> None:
        while self._parked:
            outcome = self._parked.popleft().outcome
            self.waiting_bytes -= outcome.size
            outcome.refused(error, IN_DOUBT)

    def expire(self) -> None:
        """Answer the puts that have waited too long: they are stored, but not yet as durable as asked."""
        now = self._clock.monotonic()
        while self._parked and self._parked[0].deadline <= now:
            parked = self._parked.popleft()
            if parked.failure is not None:
                self._settle(parked)
            else:
                self.waiting_bytes -= parked.outcome.size
                parked.outcome.late()

    def stop(self) -> None:
        """Let the syncing greenlet end after what it is doing."""
        self._stopping = True
        self._sync_due.set()

    def nothing_parked(self) -> bool:
        return not self._parked and not self._outcomes
