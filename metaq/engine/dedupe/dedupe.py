"""The ids of the messages of one broker: whoever stores a message of a topic with a window asks here first.

A duplicate is answered with the place of the first message, as part of the turn in which it came. Everything before the end of
that turn is safe when the turn is, so it is answered when the first one is safe; a first one of the same turn fails with it.

A question that memory cannot answer waits for the index (``ColdIds``), in a queue, so that the messages of one sender keep
their order: the handler gives its request to ``ask``, and handles it again when the index has answered. What comes meanwhile
waits behind it, but the index is not asked for what memory can answer: so the queue ends, however fast messages come.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import gevent
from gevent.lock import BoundedSemaphore

from metaq.dedupe.opening import IdReader, open_seen
from metaq.dedupe.records import (
    RELEASED,
    First,
    StoredAs,
    generation_of,
    id_of,
    latest_of,
    name_of,
    over_ms,
    properties_of_release,
    value_of,
)
from metaq.dedupe.seen import SeenIds
from metaq.engine.context import Context
from metaq.engine.reading.catchup import read_in_the_end
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, Placed
from metaq.errors import DiskFull, IndexFailed, Overloaded, StoreError
from metaq.message import DEAD_PREFIX, HALF_TOPIC, RETRY_PREFIX, SCHEDULE_TOPIC, TopicPartition
from metaq.protocol.properties import NONE, REAL_TOPIC
from metaq.store.copies.discarding import DEDUPE_INDEX
from metaq.store.files.filecache import Read, Run, read_through
from metaq.store.ordered.ordered import remove_ordered
from metaq.timers.handles import Handle

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 200_000
"""Ids that may wait to enter the index; beyond it messages with ids are refused."""
MOST_ASKED: Final = 10_000
"""Requests that may wait for the index at once."""
ASKED_AT_ONCE: Final = 256
APPLY_S: Final = 0.003
"""How long the index is written to before others go on."""
RETRY_MS: Final = 100
_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""
WAIT_S: Final = 0.05
"""Pause of a slave that has read all of its log."""

Again = Callable[[], Callable[[], None]]
"""Handles a request again, and returns what sends the answer; neither raises. With an answer the client may send more, so none
is sent before all that waited have been handled."""


class ColdIds(Exception):
    """Memory does not know whether an id was stored, and the asker may not wait for the disk."""

    def __init__(self, keys: list[bytes], touch: Callable[[Read], object] | None = None) -> None:
        """Name the keys to look up, none when others are only to be waited for, and what has to be read from the disk."""
        super().__init__()
        self.keys = keys
        self.touch = touch


class Looked(NamedTuple):
    """The answer to a question about an id."""

    key: bytes
    """The key under which a message of now has to be staged."""
    first: First | None
    """The message that was stored first; ``None`` when there is none in the window."""


class Dedupe:
    """The ids of one broker, as a master that stores messages or as a slave that follows."""

    def __init__(self, context: Context, turns: Turns, handle_of: Callable[[int, int], Handle], run: Run) -> None:
        """Open the index if a topic has a window; ``ConfigError`` without the package that it needs.

        ``handle_of`` returns the handle of a delayed message, by its time and log offset (``Timers.parked_handle``).
        """
        self._context = context
        self._turns = turns
        self._handle_of = handle_of
        self._store = context.store
        self._run = run
        self._read = read_through(run)
        self._folder: Path = context.settings.data / DEDUPE_INDEX
        self.windows: dict[str, int] = {}
        """The windows of the topics that have one, in milliseconds. It is always the same dictionary."""
        self._seen: SeenIds | None = None
        self._fold: IdReader | None = None
        self._fold_end = 0
        self._failure: type[StoreError] | None = None  # why the index is opened again; an error itself would hold its files
        self._noted = -1
        self._flushed = self._mark = 0
        self._asked: deque[tuple[ColdIds, Again]] = deque()
        self._asking: Any = None
        self._again = False  # a request is handled again
        self._found: dict[bytes, First] = {}  # what the index has of what it asks for
        self._absent: frozenset[bytes] = frozenset()  # and what it lacks
        self._greenlets: list[Any] = []
        self._lock = BoundedSemaphore(1)  # held by whoever changes the index
        self.duplicates = 0
        """Messages that were not stored again, since the start."""
        for topic in context.topics:
            self._take_window(topic.name)
        if self.windows:
            self._open()

    def _take_window(self, name: str) -> None:
        topics = self._context.topics
        topic = topics.get(name)
        is_ours = topics.is_system(name) or name.startswith((RETRY_PREFIX, DEAD_PREFIX))
        if topic is not None and topic.dedupe_window_ms and not is_ours:
            self.windows[name] = topic.dedupe_window_ms
        else:
            self.windows.pop(name, None)

    def _open(self) -> None:
        engine = self._context.settings.timer_engine
        self._seen, self._fold = open_seen(self._store, self._folder, engine, self.windows, self._run)
        self._fold_end = self._store.log.end
        self._flushed, self._mark = self._seen.covered, 0

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def _is_master(self) -> bool:
        return self._context.replicas.is_master

    def start(self) -> None:
        """Begin to read what the log has and the index has not."""
        if self._fold is not None and self._seen is not None:
            self._greenlets.append(gevent.spawn(self._fold_forever, self._fold, self._seen))

    def stop(self) -> None:
        """End the reading, and answer no more questions."""
        gevent.killall([*self._greenlets, *([] if self._asking is None else [self._asking])])

    def topic_changed(self, name: str) -> None:
        """Learn that a topic was made, changed or removed. Another window counts for what is stored from now on."""
        self._take_window(name)
        if self._seen is not None and self._fold is None:
            self._seen.windows = dict(self.windows)

    def failed(self, error: StoreError) -> None:
        """Take note that the index is damaged, or could not be written: it is opened again, anew when it is damaged."""
        if self._failure is None:
            logger.error("index of ids failed reason=%s", error)
            self._failure = type(error)

    def _fold_forever(self, fold: IdReader, seen: SeenIds) -> None:
        """Read what the log has and the index has not; a slave goes on with it as its log grows."""
        while self._fold is fold:
            end = self._fold_end if self._is_master else min(self._store.published_end, self._store.log.end)
            if fold.at >= end:
                if self._is_master:
                    self._fold = None
                    seen.windows = dict(self.windows)
                    return
                gevent.sleep(WAIT_S)
                continue
            before, found = fold.at, read_in_the_end("ids", fold.next, end, self._read)
            if self._fold is not fold:  # the index was opened again meanwhile
                return
            now_ms = self._store.clock.now_ms()
            for each in found:
                seen.follow(each, now_ms)
            gevent.sleep(WAIT_S if fold.at == before else 0.001)
            while seen.waiting > MOST_WAITING and self._fold is fold:
                gevent.sleep(WAIT_S)

    def apply(self) -> None:
        """Enter what cannot be taken back into the index; called every sweep interval."""
        seen, clock = self._seen, self._store.clock
        if seen is None:
            if self.windows and not self._is_master:
                self._open()
                self.start()
            return
        if not self.windows:
            self._drop()
            return
        if not self._is_master and seen.windows != self.windows and self._failure is None:
            self._failure = IndexFailed  # what it has passed may have ids that it did not take
        if self._failure is not None and not self._open_again():
            return
        began = clock.monotonic()
        with self._lock:
            seen = self._seen
            try:
                while seen is not None and seen.apply(self._safe_end()):
                    if clock.monotonic() - began >= APPLY_S:
                        gevent.sleep(0.001)
                        began = clock.monotonic()
            except (IndexFailed, DiskFull) as error:
                self.failed(error)

    def _open_again(self) -> bool:
        """Open the index again, once nobody works with it and nothing is staged; return whether that is done."""
        with self._lock:
            seen = self._seen
            if seen is None or seen.asked or seen.is_staging or self._store.shortage is not None:
                return False
            with suppress(StoreError):
                seen.index.close()
            if self._failure is IndexFailed:
                remove_ordered(self._folder)
            self._open()
            self._failure = None
            self.start()
        return True

    def _drop(self) -> None:
        """Remove the index: no topic has a window any more."""
        with self._lock:
            seen = self._seen
            if seen is None or seen.asked or seen.is_staging:
                return
            self._seen = self._fold = None
            with suppress(StoreError):
                seen.index.close()
            remove_ordered(self._folder)
            self._failure = None

    def _safe_end(self) -> int:
        """Return the log offset before which nothing can be taken back."""
        copies, durable = self._turns.copies, self._store.durable_end
        if not self._is_master:
            return min(durable, self._store.published_end)
        return durable if copies is None else min(durable, copies.held_end)

    def flush(self) -> None:
        """Write the index to the disk, so that a start reads less of the log again."""
        seen = self._seen
        if seen is None or self._failure is not None:
            return
        try:
            with self._lock:
                if self._mark <= self._safe_end():
                    seen.cover(self._mark)
                seen.forget(self._store.clock.now_ms())
            self._mark = self._store.log.end if self._fold is None else self._fold.at
            covered = seen.covered
            if covered != self._flushed:
                seen.flush(self._run)
                self._flushed = covered
        except (IndexFailed, DiskFull) as error:
            self.failed(error)

    def close(self) -> None:
        """Enter everything durable into the index and close it; nothing writes to the store any more."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        try:
            while self._failure is None and seen.apply(self._safe_end()):
                pass
            seen.index.close()
        except (IndexFailed, DiskFull) as error:  # the log has everything
            logger.error("index of ids not closed reason=%s", error)
            with suppress(StoreError):
                seen.index.close()

    # -- storing ------------------------------------------------------------------------------------------------------

    def new_key(self, topic: str, ident: str, now_ms: int) -> bytes | None:
        """Return the key of an id of a topic with a window if it is certainly new; ``None`` when ``look`` has to say it."""
        seen = self._seen
        if seen is None or self._asking is not None or self._fold is not None or self._failure is not None:
            return None
        return seen.new_key(topic, name_of(topic, ident), now_ms) if seen.waiting <= MOST_WAITING else None

    def look(self, topic: str, ident: str, now_ms: int) -> Looked:
        """Return what is known about an id of a topic with a window.

        Raises ``Overloaded`` while that cannot be known, and ``ColdIds`` when the index has to be asked.
        """
        seen = self._ready()
        name = name_of(topic, ident)
        key = seen.key(topic, name, now_ms)
        if self._asking is not None and not self._again:
            raise ColdIds(_to_ask(seen, topic, name, now_ms))  # behind those that wait already
        if seen.meet(topic, name, now_ms):
            return _new(Looked, (key, None))
        keys = seen.keys(topic, name, now_ms)
        first = seen.look(keys)
        if first is None and self._found:
            first = latest_of([self._found[key] for key in keys if key in self._found])
        is_absent = first is None and bool(self._absent) and self._absent.issuperset(keys)
        if first is None and not is_absent and seen.may_have(keys):
            raise ColdIds(keys)
        if first is not None:
            if first.kind == StoredAs.RELEASED:
                first = None
            elif first.kind == StoredAs.PLAIN and first.ordinal < self._deleted_before(topic, first.partition):
                first = None  # it was in an earlier topic of the same name
            else:
                self.duplicates += 1
        return _new(Looked, (key, first))

    def _deleted_before(self, topic: str, partition: int) -> int:
        deleted = self._context.topics.deleted
        return deleted.get(TopicPartition(topic, partition), 0) if deleted else 0

    def key(self, topic: str, ident: str, now_ms: int) -> bytes:
        """Return the key of another id of a batch whose first one was looked at."""
        seen, name = self._seen, name_of(topic, ident)
        assert seen is not None
        seen.meet(topic, name, now_ms)
        return seen.key(topic, name, now_ms)

    def stage(self, key: bytes, value: bytes, now_ms: int) -> None:
        """Take the id of a message that was just staged, which is known as ``value`` (``value_of``) from now on.

        The caller stages an outcome in the same turn.
        """
        seen = self._seen
        assert seen is not None
        if self._noted != self._turns.number:
            self._noted = self._turns.number
            self._turns.after_append(lambda failure: seen.appended(is_stored=failure is None))
        seen.stage(key, value, self._store.log.staged_end, now_ms)

    def once(self, draft: Draft, stage: Callable[[], Placed]) -> tuple[Placed, First | None]:
        """Stage a message unless it was stored before; return its place, and that message if there is one.

        Raises what ``stage`` and ``look`` raise.
        """
        topic, partition = draft.topic, draft.partition
        ident = id_of(draft.properties) if topic in self.windows else None
        if ident is None:
            return stage(), None
        now_ms = self._store.clock.now_ms()
        key, first = self.look(topic, ident, now_ms)
        if first is not None:
            return self._placed(topic, first), first
        position = self._store.queue(topic, partition).text_end
        placed = stage()
        self.stage(key, value_of(_first_of(placed, partition, position)), now_ms)
        return placed, None

    def release(
        self, pairs: Mapping[str, str], place: int, stored_ms: int, stage: Callable[[Mapping[str, str]], object]
    ) -> None:
        """Stage the cancel or rollback of a message: from then on the next one with its id is stored.

        The message has the properties ``pairs``, and was first stored at a log offset and a time. ``stage`` gets those of the
        record to stage, from which the log is understood later. The caller stages an outcome in the same turn. Raises what
        ``stage`` raises, and ``Overloaded`` while ids cannot be taken.
        """
        topic = pairs.get(REAL_TOPIC, "")
        ident = id_of(pairs) if topic in self.windows else None
        if ident is None:
            stage(NONE)
            return
        key = generation_of(over_ms(stored_ms, self.windows[topic])) + name_of(topic, ident)
        seen = None if self._seen is None else self._ready()
        known = None if seen is None else seen.look([key])
        if known is not None and known.log_offset != place:
            stage(NONE)  # the window was changed, and another message with the id came since
            return
        stage(properties_of_release(topic, ident, stored_ms))
        if seen is not None:
            self.stage(key, value_of(RELEASED), self._store.clock.now_ms())

    def _placed(self, topic: str, first: First) -> Placed:
        """Return the place of a message that was stored before."""
        handle = self._handle_of(first.detail, first.log_offset) if first.kind == StoredAs.TIMER else None
        queue = self._store.queue(HALF_TOPIC, 0) if first.kind == StoredAs.HALF else self._store.queue(topic, first.partition)
        return Placed(queue, first.ordinal, first.log_offset, handle)

    def _ready(self) -> SeenIds:
        if self._seen is None:
            self._begin()
        seen = self._seen
        assert seen is not None
        if self._fold is not None or self._failure is not None:
            raise Overloaded("the ids of messages of before the start are still being read", retry_after_ms=RETRY_MS)
        if seen.waiting > MOST_WAITING:
            reason = f"{seen.waiting} ids of messages wait for the index, the limit is {MOST_WAITING}"
            raise Overloaded(reason, retry_after_ms=RETRY_MS)
        return seen

    def _begin(self) -> None:
        """Make an index for the first window; ``ConfigError`` without the package that it needs."""
        remove_ordered(self._folder)  # of an earlier window
        self._open()
        self._fold = None  # ids count from now on

    # -- asking -------------------------------------------------------------------------------------------------------

    def ask(self, cold: ColdIds, again: Again) -> None:
        """Have the index asked, and call ``again``: what it asks then is known.

        Raises ``Overloaded`` when too many wait already.
        """
        if len(self._asked) >= MOST_ASKED:
            raise Overloaded(f"{MOST_ASKED} messages wait for the index of ids", retry_after_ms=RETRY_MS)
        self._again = False  # if this is asked once more, those after it have to wait for it
        self._asked.append((cold, again))
        if self._asking is None:
            self._asking = gevent.spawn(self._ask_all)

    def _ask_all(self) -> None:
        try:
            while self._asked:
                portion = [self._asked.popleft() for _ in range(min(len(self._asked), ASKED_AT_ONCE))]
                seen = self._seen
                found: dict[bytes, First] = {}
                keys = list(dict.fromkeys(key for cold, _ in portion for key in cold.keys))
                absent: frozenset[bytes] = frozenset()
                try:
                    if seen is not None and keys:
                        found = seen.find(keys, self._run)
                        absent = frozenset([key for key in keys if key not in found])
                except IndexFailed as error:
                    self.failed(error)
                for cold, _ in portion:
                    if cold.touch is not None:
                        with suppress(StoreError):  # who asks again meets it
                            cold.touch(self._read)
                if self._seen is seen:
                    self._found, self._absent = found, absent
                self._handle(portion)
        finally:
            self._asking = None

    def _handle(self, portion: list[tuple[ColdIds, Again]]) -> None:
        """Handle requests again, before anything else is done; then have them answered.

        One may have to ask once more: the index, which has written a file meanwhile, may not exclude its id any more. It goes
        before those that came since, and with it the rest of the portion.
        """
        later, self._asked = self._asked, deque()
        self._again = True
        try:
            answers = [again() for _, again in portion]
        finally:
            self._asked += later
            self._again, self._found, self._absent = False, {}, frozenset()
        for answer in answers:
            answer()

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of ids that wait to enter the index."""
        return 0 if self._seen is None else self._seen.waiting

    @property
    def behind_bytes(self) -> int:
        """The bytes of the log that the index does not cover; 0 without an index."""
        return 0 if self._seen is None else self._store.log.end - self._seen.covered

    @property
    def index_bytes(self) -> int:
        """The size of the index's files; 0 without an index."""
        return 0 if self._seen is None else self._seen.index.size_bytes

    def numbers(self) -> Mapping[str, object]:
        """Return figures for stats: values by name."""
        return {
            "duplicates": self.duplicates,
            "dedupe_index": "unused" if self._seen is None else "yes" if self._fold is None else "reading the log",
            "dedupe_index_waiting": self.waiting,
        }


def _to_ask(seen: SeenIds, topic: str, name: bytes, now_ms: int) -> list[bytes]:
    """Return the keys that the index has to be asked for because of an id."""
    keys = seen.keys(topic, name, now_ms)
    is_known = seen.is_new(topic, name, now_ms) or seen.look(keys) is not None or not seen.may_have(keys)
    return [] if is_known else keys


def _first_of(placed: Placed, partition: int, position: int) -> First:
    """Return how a message that was staged is known from now on."""
    name = placed.queue.topic
    if placed.handle is not None:
        return First(StoredAs.TIMER, partition, placed.ordinal, placed.log_offset, placed.handle.due_ms)
    if name == HALF_TOPIC:
        return First(StoredAs.HALF, partition, placed.ordinal, placed.log_offset, 0)
    if name == SCHEDULE_TOPIC:
        return First(StoredAs.LEVEL, partition, placed.ordinal, placed.log_offset, 0)
    return First(StoredAs.PLAIN, partition, placed.ordinal, placed.log_offset, position)
