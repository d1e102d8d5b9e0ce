"""One turn of the loop, and what waits for the disk.

All puts of all connections that arrive in one turn are staged, then appended with one write at the turn's end. At MEMORY they
are answered then. At DISK they are parked until a sync covers them: one sync releases every put before it (group commit). At
REPLICA they are parked until the replicas in sync hold them.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from gevent.event import Event
from gevent.hub import Hub

from metaq.config import Settings
from metaq.engine.figures.metrics import Histogram
from metaq.errors import Fenced, MetaqError, Overloaded, StoreError
from metaq.message import Durability
from metaq.protocol.remoting.codes import Response
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

NOT_STORED: Final = "was not stored"
IN_DOUBT: Final = "may be stored or not"
# not of a fixed length, by its type: the compiled form takes such a tuple of floats for one that was never set
SYNC_BOUNDS: Final[tuple[float, ...]] = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SEND_BOUNDS: Final[tuple[float, ...]] = (0.0001, *SYNC_BOUNDS)


class Short(NamedTuple):
    """What a put lacks that is stored, but not as durable as promised."""

    code: Response
    level: str
    """Goes on after "stored at …, not yet"."""
    lacks: str
    """Goes on after "stored, but not"."""


NOT_ON_DISK: Final = Short(Response.FLUSH_DISK_TIMEOUT, Durability.DISK, "yet on the disk")
NOT_ON_REPLICAS: Final = Short(Response.FLUSH_SLAVE_TIMEOUT, Durability.REPLICA, "yet on all replicas in sync")
TOO_FEW_REPLICAS: Final = Short(
    Response.SLAVE_NOT_AVAILABLE,
    f"{Durability.REPLICA}: too few replicas are in sync (min_in_sync)",
    "on enough replicas: too few are in sync (min_in_sync)",
)


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

    def late(self, short: Short) -> None:
        """They are stored, but not as durable as promised within the time."""
        ...


class Copies(Protocol):
    """The log's copies on other replicas."""

    @property
    def held_end(self) -> int:
        """Log offset before which enough replicas hold everything, this one included. It never goes back."""
        ...

    @property
    def hopeful(self) -> bool:
        """Whether enough replicas are in sync for that to move, or may soon be."""
        ...


class Parked(NamedTuple):
    """An outcome that waits for the disk or the replicas."""

    end: int
    """Log offset before which everything must be safe first."""
    deadline: float
    outcome: Outcome
    failure: StoreError | None
    """Nothing of it was stored; it waits only because answers keep their order."""
    began: float
    """When the first of its turn was staged."""


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
        self._on_disk = settings.durability.on_disk
        self.waits = settings.durability is not Durability.MEMORY
        """Outcomes wait for the disk or the replicas; else they are known at the end of their turn."""
        self.copies: Copies | None = None
        """Whose ``held_end`` puts and readers wait for, at REPLICA."""
        self.grown: Callable[[], None] = _nobody
        """Called when the log has grown, or more of it is durable."""
        self.configure(settings)
        self._outcomes: list[Outcome] = []
        self._began = 0.0  # when the first of them was staged
        self.send_times = Histogram(SEND_BOUNDS)
        """Of each turn: from its first put to the answers, which are as safe as promised."""
        self.sync_times = Histogram(SYNC_BOUNDS)
        self.late: Counter[Response] = Counter()
        """Outcomes that were stored, but not as safe as promised within the time."""
        self.number = 0
        """Of the current turn."""
        self._parked: deque[Parked] = deque()
        self.waiting_bytes = 0
        self._synced_messages = 0
        self._complaint = ""
        self._sync_due = Event()
        self._last_sync_ms = 1
        self._stopping = False

    def configure(self, settings: Settings) -> None:
        """Take over limits and times; a longer time until the next sync counts when the running one has passed."""
        self._timeout = (
            max(
                settings.sync_timeout_ms if settings.durability.on_disk else 0,
                settings.replica_timeout_ms if settings.durability.on_replicas else 0,
            )
            / 1000
        )
        self._flush_messages = settings.flush_messages
        self._flush_interval = settings.flush_interval_ms / 1000
        self.max_waiting_bytes = settings.max_waiting_bytes

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
        return round(1000 * (self._clock.monotonic() - self._parked[0].deadline + self._timeout))

    def staged(self, outcome: Outcome) -> None:
        """Take an outcome of this turn: its puts hold when the append at the end of the turn succeeds."""
        if not self._outcomes:
            self._began = self._clock.monotonic()
            self._loop.run_callback(self.finish)
        self._outcomes.append(outcome)

    def finish(self) -> None:
        """The end of the turn: append, then answer or park."""
        outcomes, self._outcomes = self._outcomes, []
        began, answered = self._began, False
        self.number += 1
        store = self._store
        failure: StoreError | None = None
        try:
            readable = store.append()
        except StoreError as error:
            if str(error) != self._complaint:  # a master that is fenced refuses every turn
                logger.error("append failed reason=%s", error)
            self._complaint = str(error)
            failure, readable = error, []
            if isinstance(error, Fenced):  # the refusals would wait behind what waits for replicas, which may be in vain
                self._give_up_waiting()
        else:
            self._complaint = ""
        end = store.log.end
        deadline = self._clock.monotonic() + self._timeout
        for outcome in outcomes:
            if self.waits and (self._parked or end > self._safe_end()):
                self._parked.append(Parked(end, deadline, outcome, failure, began))
            else:
                self._settle(outcome, failure)
                answered = True
        if answered:
            self.send_times.observe(self._clock.monotonic() - began)
        if self._on_disk:
            if self._parked:
                self._sync_due.set()
        elif store.messages_put - self._synced_messages >= self._flush_messages:
            self._sync_due.set()
        if readable:
            self._wake(readable)
        self.grown()
        if self.copies is not None:
            self.release()

    def _settle(self, outcome: Outcome, failure: StoreError | None) -> None:
        """The promised level is reached, or nothing was stored."""
        self.waiting_bytes -= outcome.size
        if failure is not None:
            outcome.refused(failure, NOT_STORED)
        else:
            outcome.stored()

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _safe_end(self) -> int:
        """Log offset before which everything is as safe as promised."""
        return self._store.durable_end if self.copies is None else self.copies.held_end

    def is_copied(self, end: int) -> bool:
        """Whether enough replicas hold the log before a log offset; always where nothing waits for them."""
        return self.copies is None or self.copies.held_end >= end

    def release(self) -> None:
        """Answer what is as safe as promised; at REPLICA let readers see it, and answer what cannot become so."""
        safe_end = self._safe_end()
        began, now = -1.0, 0.0  # of the turn that is answered
        while self._parked and self._parked[0].end <= safe_end:
            parked = self._parked.popleft()
            self._settle(parked.outcome, parked.failure)
            if parked.began != began:
                began, now = parked.began, now or self._clock.monotonic()
                self.send_times.observe(now - began)
        if self._parked and self._on_disk and self._store.durable_end < self._parked[-1].end:
            self._sync_due.set()
        if self.copies is not None:
            readable = self._store.publish(safe_end)
            if readable:
                self._wake(readable)
            while self._parked and not self.copies.hopeful:
                self._late(self._parked.popleft(), TOO_FEW_REPLICAS)

    def _give_up_waiting(self) -> None:
        """Answer everything that waits as late. It is in the log, and if this stays the master it may still become safe."""
        while self._parked:
            self._late(self._parked.popleft(), NOT_ON_REPLICAS)

    def abandon(self, error: MetaqError) -> None:
        """Refuse everything that waits: nobody will ever know that it is safe."""
        while self._parked:
            outcome = self._parked.popleft().outcome
            self.waiting_bytes -= outcome.size
            outcome.refused(error, IN_DOUBT)

    # -- syncing ------------------------------------------------------------------------------------------------------

    def sync_forever(self) -> None:
        """The greenlet that syncs: one at a time, the next at once when more has come meanwhile."""
        store = self._store
        reported: StoreError | None = None
        while not self._stopping:
            self._sync_due.wait(None if self._on_disk else self._flush_interval)
            self._sync_due.clear()
            self._synced_messages, syncs = store.messages_put, store.syncs
            started = self._clock.monotonic()
            try:
                readable = store.sync(self._run)
            except StoreError as error:
                if error is not reported:  # the store raises it again for every turn that wants a sync
                    logger.critical("sync failed, the broker is read-only until it is restarted reason=%s", error)
                    reported = error
                self.abandon(error)
                continue
            took_s = self._clock.monotonic() - started
            self._last_sync_ms = max(1, round(took_s * 1000))
            if store.syncs > syncs:
                self.sync_times.observe(took_s)
            self.release()
            if readable:
                self._wake(readable)
            self.grown()

    def expire(self) -> None:
        """Answer the puts that have waited too long: they are stored, but not yet as durable as asked."""
        now = self._clock.monotonic()
        while self._parked and self._parked[0].deadline <= now:
            parked = self._parked.popleft()
            on_disk = self._store.durable_end >= parked.end or not self._on_disk
            self._late(parked, NOT_ON_REPLICAS if on_disk else NOT_ON_DISK)

    def _late(self, parked: Parked, short: Short) -> None:
        if parked.failure is not None:
            self._settle(parked.outcome, parked.failure)
        else:
            self.waiting_bytes -= parked.outcome.size
            self.late[short.code] += 1
            parked.outcome.late(short)

    def stop(self) -> None:
        """Let the syncing greenlet end after what it is doing."""
        self._stopping = True
        self._sync_due.set()

    def nothing_parked(self) -> bool:
        return not self._parked and not self._outcomes


def _nobody() -> None:
    """Without slaves nobody waits for the log to grow."""
