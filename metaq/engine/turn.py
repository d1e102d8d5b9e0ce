"""One turn of the event loop: puts are appended together, then parked until the disk or the replicas have them.

All puts that arrive in one turn, on any connection, are staged and then appended with one write at the end of the turn. At
MEMORY they are answered then. At DISK they are parked until a sync covers them: one sync releases every put before it (group
commit), and a turn that begins while one runs ends with it. At REPLICA they are parked until the replicas in sync hold them.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import gevent
from gevent.event import Event
from gevent.hub import Hub

from metaq.config import Settings
from metaq.engine.figures.metrics import Histogram
from metaq.engine.role import NO_PARTS, RoleParts
from metaq.errors import Fenced, MetaqError, Overloaded, StoreError, TooManyFiles
from metaq.message import Durability
from metaq.protocol.remoting.codes import Response
from metaq.protocol.text.replies import IN_DOUBT
from metaq.store.files.filecache import Run
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

LONGEST_HOLD_S: Final = 0.002
"""The longest that a turn is held for a running sync: what it appends earlier could not be synced earlier, but a slow disk must
not keep it from the log, and its time limit from running."""
RETRY_S: Final = 1.0
"""Pause after a sync for which no file could be opened."""
NOT_STORED: Final = "was not stored"
# typed as a tuple of any length: the compiled module mistakes a fixed-length tuple of floats for one that was never set
SYNC_BOUNDS: Final[tuple[float, ...]] = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SEND_BOUNDS: Final[tuple[float, ...]] = (0.0001, *SYNC_BOUNDS)


class Short(NamedTuple):
    """The shortfall of a put that is stored, but not as durable as promised."""

    code: Response
    level: str
    """The text that completes "stored at …, not yet"."""
    lacks: str
    """The text that completes "stored, but not"."""


NOT_ON_DISK: Final = Short(Response.FLUSH_DISK_TIMEOUT, Durability.DISK, "yet on the disk")
NOT_ON_REPLICAS: Final = Short(Response.FLUSH_SLAVE_TIMEOUT, Durability.REPLICA, "yet on all replicas in sync")
TOO_FEW_REPLICAS: Final = Short(
    Response.SLAVE_NOT_AVAILABLE,
    f"{Durability.REPLICA}: too few replicas are in sync (min_in_sync)",
    "on enough replicas: too few are in sync (min_in_sync)",
)


class PutOutcome(Protocol):
    """A receiver of the result of one sender's puts of one turn; exactly one of its three methods is called, once."""

    size: int
    """The bytes that wait; final when the turn ends."""

    def stored(self) -> None:
        """Report that the puts are as durable as promised."""
        ...

    def refused(self, error: MetaqError, outcome: str) -> None:
        """Report that the puts failed; ``outcome``, NOT_STORED or IN_DOUBT, completes "the message"."""
        ...

    def late(self, short: Short) -> None:
        """Report that the puts are stored, but not as durable as promised within the time limit."""
        ...


class Parked(NamedTuple):
    """An outcome that waits for the disk or the replicas."""

    end: int
    """The log offset before which everything must be safe first."""
    deadline: float
    outcome: PutOutcome
    failure: StoreError | None
    """Why nothing of it was stored, if so; it waits only because answers keep their order."""
    began: float
    """When the first put of its turn was staged, in monotonic seconds."""


class Turns:
    """The puts of the broker: collected in each turn, appended, and answered when the durability level is reached."""

    def __init__(
        self,
        store: MessageStore,
        settings: Settings,
        hub: Hub,
        run_sync: Run,
        wake: Callable[[list[ConsumeQueue]], None],
        parts: RoleParts = NO_PARTS,
    ) -> None:
        """Create it; ``run_sync`` makes syncs of the log, ``wake`` receives the queues in which readers can see more."""
        self._store = store
        self._clock = store.clock
        self._loop = hub.loop
        self.run_sync = run_sync
        """The way of all syncs of the log: one after the other, off the hub."""
        self._wake = wake
        self._on_disk = settings.durability.on_disk
        self.waits = parts.replicas.is_master and settings.durability is not Durability.MEMORY
        """True when outcomes wait for the disk or the replicas; otherwise they are known at the end of their turn. On a slave
        nothing waits, since it refuses all puts."""
        self.copies = parts.copies
        self._grown = parts.grown
        self.configure(settings)
        self._outcomes: list[PutOutcome] = []
        self._before_append: list[Callable[[], None]] = []
        self._after_append: list[Callable[[StoreError | None], None]] = []
        self._with_answers: list[Callable[[StoreError | None], None]] = []
        self._ends = False  # the end of this turn is coming
        self._began = 0.0  # when the turn began
        self.send_times = Histogram(SEND_BOUNDS)
        """The time of each turn from its first put to the answers, when the puts are as safe as promised."""
        self.sync_times = Histogram(SYNC_BOUNDS)
        self.late: Counter[Response] = Counter()
        """The number of outcomes that were stored, but not as safe as promised within the time limit."""
        self.number = 0
        """The number of the current turn."""
        self._parked: deque[Parked] = deque()
        self.waiting_bytes = 0
        self._synced_messages = 0
        self._complaint = ""
        self._sync_due = Event()
        self._syncing = False  # a sync runs for which puts wait
        self._held = False  # this turn ends with that sync
        self._latest_end = self._loop.timer(LONGEST_HOLD_S)
        self._last_sync_ms = 1
        self._stopping = False

    def configure(self, settings: Settings) -> None:
        """Take over limits and times; a new flush interval counts once the running one has passed."""
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
        """True when too many bytes wait for the disk or the replicas already."""
        return self.waiting_bytes > self.max_waiting_bytes

    def check_load(self) -> None:
        """Raise ``Overloaded`` while too many bytes wait for the disk or the replicas."""
        if self.waiting_bytes > self.max_waiting_bytes:
            reason = f"{self.waiting_bytes} bytes of puts wait for the disk, the limit is {self.max_waiting_bytes}"
            measured = f"the oldest since {self.longest_wait_ms} ms, the last sync took {self._last_sync_ms} ms"
            raise Overloaded(f"{reason} (max_waiting_bytes); {measured}", retry_after_ms=self._last_sync_ms)

    @property
    def waiting(self) -> int:
        """The number of outcomes that wait for the disk or the replicas."""
        return len(self._parked)

    @property
    def longest_wait_ms(self) -> int:
        """How long the oldest waiting outcome has been waiting, in milliseconds."""
        if not self._parked:
            return 0
        return round(1000 * (self._clock.monotonic() - self._parked[0].deadline + self._timeout))

    def staged(self, outcome: PutOutcome) -> None:
        """Take an outcome of this turn; its puts are in the log once the append at the end of the turn succeeds."""
        if not self._ends:
            self._begin()
        self._outcomes.append(outcome)

    def before_append(self, call: Callable[[], None]) -> None:
        """Have ``call`` called at the end of this turn, to stage what the turn has brought about. It must not raise."""
        if not self._ends:
            self._begin()
        self._before_append.append(call)

    def after_append(self, call: Callable[[StoreError | None], None]) -> None:
        """Have ``call`` called with the result of this turn's append, before any answer, whatever answers have to wait for.

        It must not answer: what a session stages after an answer belongs to the next turn, whose append may fail.
        """
        if not self._ends:
            self._begin()
        self._after_append.append(call)

    def with_answers(self, call: Callable[[StoreError | None], None]) -> None:
        """Have ``call`` called with the result of this turn's append to answer, or to let others go on, before the outcomes.

        All calls of ``after_append`` are made before.
        """
        if not self._ends:
            self._begin()
        self._with_answers.append(call)

    def _begin(self) -> None:
        """Begin a turn: its end is due once the loop has served what is ready now, and a running sync has ended."""
        self._ends = True
        self._began = self._clock.monotonic()
        self._held = self._syncing
        if self._held:
            self._latest_end.start(self.finish)
        else:
            self._loop.run_callback(self.finish)

    def finish(self) -> None:
        """End the turn: append what was staged, then answer or park the outcomes."""
        while self._before_append:
            stages, self._before_append = self._before_append, []
            for stage in stages:
                stage()
        outcomes, self._outcomes = self._outcomes, []
        began, answered = self._began, False
        self.number += 1
        self._ends = False
        if self._held:
            self._held = False
            self._latest_end.stop()
        store = self._store
        failure: StoreError | None = None
        try:
            readable = store.append(awaited=bool(self._parked))
        except StoreError as error:
            if str(error) != self._complaint:  # log once: a master that is fenced refuses every turn
                logger.error("append failed reason=%s", error)
            self._complaint = str(error)
            failure, readable = error, []
        else:
            self._complaint = ""
        if self._after_append:
            calls, self._after_append = self._after_append, []
            for call in calls:
                call(failure)
        if isinstance(failure, Fenced):  # else the refusals would wait after puts that may wait for replicas in vain
            self._give_up_waiting()
        if self._with_answers:
            calls, self._with_answers = self._with_answers, []
            for call in calls:
                call(failure)
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
        self._grown()
        if self.copies is not None:
            self.release()

    def _settle(self, outcome: PutOutcome, failure: StoreError | None) -> None:
        """Answer an outcome whose promised level is reached, or of which nothing was stored."""
        self.waiting_bytes -= outcome.size
        if failure is not None:
            outcome.refused(failure, NOT_STORED)
        else:
            outcome.stored()

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _safe_end(self) -> int:
        """Return the log offset before which everything is as safe as promised."""
        return self._store.durable_end if self.copies is None else self.copies.held_end

    def is_safe(self, end: int) -> bool:
        """Return whether everything before a log offset is as safe as promised; always true where outcomes do not wait."""
        return not self.waits or self._safe_end() >= end

    def lasting_end(self) -> int:
        """Return the log offset before which nothing can be taken back; of a master."""
        durable = self._store.durable_end
        return durable if self.copies is None else min(durable, self.copies.held_end)

    def is_copied(self, end: int) -> bool:
        """Return whether enough replicas hold the log before a log offset; always true where nothing waits for replicas."""
        return self.copies is None or self.copies.held_end >= end

    def release(self) -> None:
        """Answer the puts that are as safe as promised; at REPLICA let readers see them.

        At REPLICA the other puts are answered, too, when too few replicas are in sync for them to become safe.
        """
        safe_end = self._safe_end()
        # before the answers: whoever gets one may ask at once for what it is about
        readable = [] if self.copies is None else self._store.publish(safe_end)
        began, now = -1.0, 0.0  # when the turn that is being answered began, and the time now
        while self._parked and self._parked[0].end <= safe_end:
            parked = self._parked.popleft()
            self._settle(parked.outcome, parked.failure)
            if parked.began != began:
                began, now = parked.began, now or self._clock.monotonic()
                self.send_times.observe(now - began)
        if self._parked and self._on_disk and self._store.durable_end < self._parked[-1].end:
            self._sync_due.set()
        if readable:
            self._wake(readable)
        if self.copies is not None:
            while self._parked and not self.copies.hopeful:
                self._late(self._parked.popleft(), TOO_FEW_REPLICAS)

    def _give_up_waiting(self) -> None:
        """Answer all waiting puts as late. They are in the log, and may still become safe if this replica stays the master."""
        while self._parked:
            self._late(self._parked.popleft(), NOT_ON_REPLICAS)

    def abandon(self, error: MetaqError) -> None:
        """Refuse all waiting puts as in doubt: it can no longer be found out whether they are safe."""
        while self._parked:
            outcome = self._parked.popleft().outcome
            self.waiting_bytes -= outcome.size
            outcome.refused(error, IN_DOUBT)

    # -- syncing ------------------------------------------------------------------------------------------------------

    def sync_forever(self) -> None:
        """Sync the log for ever, in a greenlet of its own: one sync at a time, the next at once when more puts have come."""
        store = self._store
        reported = ""
        while not self._stopping:
            self._sync_due.wait(None if self._on_disk else self._flush_interval)
            self._sync_due.clear()
            self._synced_messages, syncs = store.messages_put, store.syncs
            started = self._clock.monotonic()
            try:
                readable = self._sync()
            except TooManyFiles as error:
                logger.error("sync not begun, tried again reason=%s", error)
                gevent.sleep(RETRY_S)
                self._sync_due.set()
                continue
            except StoreError as error:
                if str(error) != reported:  # the store raises it again for every turn that wants a sync
                    logger.critical("sync failed, the broker is read-only until it is restarted reason=%s", error)
                    reported = str(error)
                self.abandon(error)
                continue
            took_s = self._clock.monotonic() - started
            self._last_sync_ms = max(1, round(took_s * 1000))
            if store.syncs > syncs:
                self.sync_times.observe(took_s)
            self._loop.run_callback(self._synced, readable)

    def _sync(self) -> list[ConsumeQueue]:
        """Sync the log; return the queues in which readers see more. Then end the turn that was held for it."""
        self._syncing = self._on_disk
        try:
            return self._store.sync(self.run_sync)
        finally:
            self._syncing = False
            if self._held:
                self.finish()

    def _synced(self, readable: list[ConsumeQueue]) -> None:
        """Answer what a sync made safe, while the next one runs already."""
        self.release()
        if readable:
            self._wake(readable)
        self._grown()

    def expire(self) -> None:
        """Answer as late the puts that have waited too long: they are stored, but not yet as durable as promised."""
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
        """Let the syncing greenlet end after its present sync."""
        self._stopping = True
        self._sync_due.set()

    def nothing_parked(self) -> bool:
        return not self._parked and not self._outcomes
