"""Delivery of delayed messages (specs: remoting protocol, section 5.2).

Each delay level is one partition of the schedule topic, first in, first out: a message is due when its level's delay has passed
since its store time. For each level one greenlet sleeps until the oldest message is due, or until there is a message. Messages
that are due are stored again under their real topic and partition.

A delivered copy carries the property ``METAQ_SCHEDULED``, *level:ordinal* of its source, which no sender can set. So the log
itself shows what has been delivered: at a start the broker looks for copies. ``config/delayOffset.json`` only shortens that::

    {"log": [1, 0, 0, 81920], "offsetTable": {"3": 17}, "logOffset": 40960}

All messages of level 3 before ordinal 17 are delivered; the copies of the later ones lie at or after log offset 40960. The file
is written once the log is durable up to its end at the time of the snapshot, which ``log`` records
(``metaq.store.copies.snapshots``).

A copy whose topic has been deleted is dropped, as the topic's messages were; so is a copy that cannot be stored.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import gevent
from gevent.event import AsyncResult, Event

from metaq.engine.context import Context
from metaq.engine.priorities.levels import partition_of_copy
from metaq.engine.reading.hold import Holds
from metaq.engine.tables.topics import FOLDER, LEVELS
from metaq.engine.turn import Turns
from metaq.engine.writing import again, note, stage
from metaq.errors import BadRequest, MessageIllegal, MetaqError
from metaq.message import SCHEDULE_TOPIC, TopicPartition
from metaq.protocol import properties
from metaq.protocol.record import Record, decode_record
from metaq.protocol.text.messages import Stored
from metaq.store.copies.snapshots import moment, read_snapshot
from metaq.store.files.documents import write_document
from metaq.store.files.filecache import Run, read_here, read_through
from metaq.store.log.walk import Gap
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

MINUTE: Final = 60
_LEVEL_MINUTES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)
LEVEL_SECONDS: Final = (1, 5, 10, 30, *(minutes * MINUTE for minutes in _LEVEL_MINUTES))
assert len(LEVEL_SECONDS) == LEVELS

POSITIONS: Final = "delayOffset.json"
SAVE_S: Final = 10.0
"""Pause between two snapshots of the positions."""
PORTION: Final = 128
"""Messages delivered in one turn of the loop, about 5 ms of work."""
PORTION_BYTES: Final = 1024 * 1024
LONGEST_SLEEP_S: Final = 60.0
"""The longest sleep, so that a wall clock that was set is noticed."""
RETRY_S: Final = 1.0
"""Pause after a failed delivery: a full disk may have room again."""


class Snapshot(NamedTuple):
    """The progress of all levels at one moment."""

    positions: dict[int, int]
    """By level: all messages before this ordinal are delivered."""
    log_offset: int
    """Copies of the messages from the positions on lie at or after this log offset."""
    log_end: int
    """Copies of the messages before the positions lie before this log offset."""


class Schedule:
    """All delay levels, and how far each is delivered."""

    def __init__(self, context: Context, turns: Turns, holds: Holds, loop: Any, run: Run) -> None:
        """Find out what is delivered already; nothing is delivered before ``start`` is called."""
        self._store = context.store
        self._epochs = context.epochs
        self._run = run
        self._path: Path = context.settings.data / FOLDER / POSITIONS
        numbers = range(1, LEVELS + 1)
        self._levels = {number: _Level(number, context, turns, holds, loop, run) for number in numbers}
        self._greenlets: list[Any] = []
        self._waiting: Snapshot | None = None  # for the log to be durable up to its end
        self._saved: dict[int, int] = {}
        self._recover()

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._greenlets = [gevent.spawn(level.deliver_forever) for level in self._levels.values()]

    def stop(self) -> None:
        """Stop delivering."""
        gevent.killall(self._greenlets)

    def save_last(self) -> None:
        """Sync the log and save the positions at an orderly stop, when nothing else writes any more."""
        if self._store.failure is None:
            self._store.sync(self._run)
            self._write(self._snapshot(), self._run)

    # -- positions ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the positions noted by the last call if they are durable by now, and note the current ones.

        Called every ``SAVE_S``.
        """
        waiting = self._waiting
        if self._store.failure is not None or (waiting is not None and waiting.log_end > self._store.durable_end):
            return
        self._waiting = self._snapshot()
        if waiting is not None:
            self._write(waiting, self._run)

    def positions(self) -> dict[int, int]:
        """Return, for each level that ever held a message, the ordinal before which all messages are delivered."""
        return {number: level.next for number, level in self._levels.items() if level.next or level.pending}

    def _snapshot(self) -> Snapshot:
        end = self._store.log.end
        in_flight = [level.in_flight_from for level in self._levels.values() if level.in_flight_from is not None]
        return Snapshot(self.positions(), min([end, *in_flight]), end)

    def _write(self, snapshot: Snapshot, run: Run) -> None:
        if snapshot.positions == self._saved and not any(level.pending for level in self._levels.values()):
            return
        table = {str(number): position for number, position in snapshot.positions.items()}
        content = {**moment(self._epochs, snapshot.log_end), "offsetTable": table, "logOffset": snapshot.log_offset}
        run(lambda: self._store.disk.make_directories(self._path.parent))
        run(lambda: write_document(self._store.disk, self._path, content))
        self._saved = snapshot.positions

    def _recover(self) -> None:
        """Take the positions of the last snapshot, and move them on past the copies that the log holds."""
        content, problems = read_snapshot(self._store.disk, self._path, self._epochs)
        for problem in problems:
            logger.error("positions of delay levels damaged, found again in the log problem=%s", problem)
        log_offset = 0
        if content is not None:
            self._saved = {int(number): position for number, position in content["offsetTable"].items()}
            log_offset = content["logOffset"]
        oldest = []
        for number, level in self._levels.items():
            level.next = min(self._saved.get(number, 0), 0 if level.queue is None else level.queue.next)
            if level.queue is not None and level.pending:
                oldest.append(level.queue.unit(max(level.next, level.queue.base), read_here)[0])
        if oldest:  # a copy lies after its source
            self._read_copies(max(log_offset, min(oldest)))

    def _read_copies(self, log_offset: int) -> None:
        """Move the positions past the copies in the log from a log offset on.

        Copies come in the order of their sources, but after a power cut one may be missing although later ones are there.
        """
        log = self._store.log
        missing: dict[int, int] = {}  # by level: the first ordinal without a copy that has a later copy
        damaged = False
        for found in log.walk(max(log_offset, log.begin)):
            if isinstance(found, Gap):
                damaged = True
                continue
            source = source_of(found)
            if source is not None and source.level in self._levels:
                level = self._levels[source.level]
                if source.ordinal == missing.get(source.level):  # it was delivered again since
                    missing[source.level] += 1
                elif source.ordinal > level.next and source.ordinal > level.first:
                    missing.setdefault(source.level, max(level.next, level.first))
                level.next = max(level.next, source.ordinal + 1)
        for number, ordinal in missing.items():
            if damaged and ordinal < self._levels[number].next:  # without damage the missing ones were dropped on purpose
                logger.warning("delayed messages are delivered again, copies were lost delay_level=%d from=%d", number, ordinal)
                self._levels[number].next = ordinal
        self._store.files.clear()  # the walk has switched off readahead for the files


class Source(NamedTuple):
    """The place of a delivered copy's original: delay level and ordinal."""

    level: int
    ordinal: int


def source_of(stored: Stored) -> Source | None:
    """Return the source that a record names, or ``None`` when it is not a delivered copy."""
    data = bytes(stored.buffer[stored.at : stored.at + stored.size])
    if properties.SCHEDULED.encode() not in data:
        return None
    named = properties.parse(decode_record(data).properties.decode(errors="replace")).get(properties.SCHEDULED)
    if named is None:
        return None
    level, _, ordinal = named.partition(":")
    return Source(int(level), int(ordinal))


class _Parked(NamedTuple):
    """A message of a level; ``record`` is ``None`` when it is damaged or lost."""

    ordinal: int
    record: Record | None


class _Level:
    """One delay level."""

    def __init__(self, number: int, context: Context, turns: Turns, holds: Holds, loop: Any, run: Run) -> None:
        self.number = number
        self.next = 0
        """All messages before this ordinal are delivered."""
        self.in_flight_from: int | None = None
        """The log offset of the first copy that is staged and not yet known to be stored."""
        self._delay_ms = LEVEL_SECONDS[number - 1] * 1000
        self._key = TopicPartition(SCHEDULE_TOPIC, number - 1)
        self._context = context
        self._store = context.store
        self._turns = turns
        self._holds = holds
        self._timer: Callable[[float], Any] = loop.timer
        self._read = read_through(run)
        self._failing = False

    @property
    def queue(self) -> ConsumeQueue | None:
        return self._store.queues.get(self._key)

    @property
    def first(self) -> int:
        """The oldest ordinal that the log still has."""
        return 0 if self.queue is None else self._store.first(self.queue, read_here)[0]

    @property
    def pending(self) -> bool:
        """True when there are messages to deliver, now or later."""
        return self.queue is not None and self.next < self.queue.next

    # -- waiting ------------------------------------------------------------------------------------------------------

    def deliver_forever(self) -> None:
        while True:
            try:
                due, wait_s = self._due()
                if due:
                    self._deliver(due)
                self._failing = False
            except MetaqError as error:
                self._report(error)
                wait_s = RETRY_S
            if wait_s is None:
                self._wait_for_message()
            else:
                gevent.sleep(min(wait_s, LONGEST_SLEEP_S))

    def _wait_for_message(self) -> None:
        woken = Event()
        hold = self._holds.hold(self._key, self._timer(LONGEST_SLEEP_S), woken.set)
        try:
            woken.wait()
        finally:
            hold.cancel()

    def _report(self, error: MetaqError) -> None:
        """Log a failure once, not at every try."""
        if not self._failing:
            logger.error("delayed messages wait, tried again delay_level=%d reason=%s", self.number, error)
        self._failing = True

    # -- delivering ---------------------------------------------------------------------------------------------------

    def _due(self) -> tuple[list[_Parked], float | None]:
        """Return the messages that are due, at most a portion, and the seconds until more may be; ``None``: none is parked."""
        queue = self.queue
        if queue is None or self.next >= queue.readable:
            return [], None
        first = self._store.first(queue, self._read)[0]
        if first > self.next:
            lost = first - self.next
            logger.error("delayed messages aged out or damaged before they were due delay_level=%d count=%d", self.number, lost)
            self.next = first
        due: list[_Parked] = []
        size = 0
        for ordinal, stored in enumerate(self._store.records(queue, self.next, PORTION_BYTES, self._read), self.next):
            record = None
            if stored is not None:
                record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
                wait_ms = record.store_ms + self._delay_ms - self._store.clock.now_ms()
                if 0 < wait_ms <= self._delay_ms:  # longer: the clock has been set back since
                    return due, wait_ms / 1000
                size += stored.size
            due.append(_Parked(ordinal, record))
            if len(due) == PORTION or size >= PORTION_BYTES:
                break
        return due, 0.0

    def _deliver(self, due: list[_Parked]) -> None:
        """Store copies of the messages that are due, and wait until they are stored.

        Raises ``MetaqError`` when that fails; then ``next`` is the first message that is not delivered.
        """
        self._store.check_writable()
        end = self.next
        obstacle: MetaqError | None = None
        for ordinal, record in due:
            if record is not None:
                try:
                    self._stage(record, ordinal)
                except (MessageIllegal, BadRequest) as error:
                    self._dropped(record, str(error))
                except MetaqError as error:  # no room: the messages before it may still be stored
                    obstacle = error
                    break
            end = ordinal + 1
        if self.in_flight_from is not None:
            outcome: Any = AsyncResult()
            note(self._turns, outcome.set)
            failure: MetaqError | None = outcome.get()
            self.in_flight_from = None
            if failure is not None:
                raise failure
        self.next = end
        if obstacle is not None:
            raise obstacle

    def _stage(self, record: Record, ordinal: int) -> None:
        """Stage the copy that consumers get, or drop the message when its topic was deleted."""
        pairs = properties.parse(record.properties.decode(errors="replace"))
        name, number = pairs.get(properties.REAL_TOPIC, ""), int(pairs.get(properties.REAL_QUEUE, "0"))
        topic = self._context.topics.of_parked(name, number)
        if topic is None:
            self._dropped(record, f"the topic {name} was deleted")
            return
        copy = again(record, name, partition_of_copy(topic, pairs, number), pairs)
        placed = stage(self._context, copy, {properties.SCHEDULED: f"{self.number}:{ordinal}"})
        if self.in_flight_from is None:
            self.in_flight_from = placed.log_offset

    def _dropped(self, record: Record, reason: str) -> None:
        logger.error("delayed message dropped delay_level=%d ordinal=%d reason=%s", self.number, record.queue_offset, reason)
