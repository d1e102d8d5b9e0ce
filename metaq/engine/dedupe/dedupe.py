"""The ids of the messages of one broker: whoever stores a message of a topic with a window asks here first.

A duplicate is answered with the place of the first message, as part of the turn in which it came. Everything before the end of
that turn is safe when the turn is, so it is answered when the first one is safe; a first one of the same turn fails with it.

A question that memory cannot answer waits for the index (``ColdIds``), in a queue (``metaq.engine.dedupe.asking``), so that the
messages of one sender keep their order.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from metaq.dedupe.records import (
    RELEASED,
    First,
    StoredAs,
    generation_of,
    id_of,
    name_of,
    over_ms,
    properties_of_release,
    value_of,
)
from metaq.dedupe.seen import SeenIds
from metaq.engine.context import Context
from metaq.engine.dedupe.asking import RETRY_MS, Asking, ColdIds
from metaq.engine.dedupe.index import MOST_WAITING, IdIndex
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, Placed
from metaq.errors import Overloaded
from metaq.message import HALF_TOPIC, SCHEDULE_TOPIC, TopicPartition
from metaq.protocol.properties import NONE, REAL_TOPIC
from metaq.store.files.filecache import Run
from metaq.timers.handles import Handle

_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""


class Looked(NamedTuple):
    """The answer to a question about an id."""

    key: bytes
    """The key under which a message of now has to be staged."""
    first: First | None
    """The message that was stored first; ``None`` when there is none in the window."""


class Dedupe(IdIndex):
    """The ids of one broker, and who asks for them."""

    def __init__(self, context: Context, turns: Turns, handle_of: Callable[[int, int], Handle], run: Run) -> None:
        """Open the index as ``IdIndex`` does.

        ``handle_of`` returns the handle of a delayed message, by its time and log offset (``Timers.parked_handle``).
        """
        super().__init__(context, turns, run)
        self._handle_of = handle_of
        self.asking = Asking(self.find, self._read)
        self._noted = -1
        self.duplicates = 0
        """Messages that were not stored again, since the start: who answers one counts it."""

    def stop(self) -> None:
        """End the reading, and answer no more questions."""
        super().stop()
        self.asking.stop()

    def new_key(self, topic: str, ident: str, now_ms: int) -> bytes | None:
        """Return the key of an id of a topic with a window if it is certainly new; ``None`` when ``look`` has to say it."""
        seen = self._seen
        if seen is None or self.asking.is_busy or self._fold is not None or self._failure is not None:
            return None
        return seen.new_key(topic, name_of(topic, ident), now_ms) if seen.waiting <= MOST_WAITING else None

    def come_after(self, topic: str) -> None:
        """Have a message without an id come after those that wait for the index, if its topic has a window.

        Raises ``ColdIds`` when there are any, but not when so many wait that it might have to be refused: it is always stored.
        """
        if self.asking.is_busy and not self.asking.is_again and topic in self.windows and self.asking.has_room:
            raise ColdIds([])

    def look(self, topic: str, ident: str, now_ms: int) -> Looked:
        """Return what is known about an id of a topic with a window.

        Raises ``Overloaded`` while that cannot be known, and ``ColdIds`` when the index has to be asked.
        """
        seen = self._ready()
        name = name_of(topic, ident)
        key = seen.key(topic, name, now_ms)
        if self.asking.is_busy and not self.asking.is_again:
            raise ColdIds(_to_ask(seen, topic, name, now_ms))  # behind those that wait already
        if seen.meet(topic, name, now_ms):
            return _new(Looked, (key, None))
        keys = seen.keys(topic, name, now_ms)
        first = seen.look(keys)
        if first is None:
            first = self.asking.first_of(keys)
        if first is None and not self.asking.lacks(keys) and seen.may_have(keys):
            raise ColdIds(keys)
        if first is not None:
            if first.kind == StoredAs.RELEASED:
                first = None
            elif first.kind == StoredAs.PLAIN and first.ordinal < self._deleted_before(topic, first.partition):
                first = None  # it was in an earlier topic of the same name
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

    def keys(self, topic: str, ident: str, now_ms: int) -> list[bytes]:
        """Return the keys under which the index may know an id of a topic with a window."""
        return self._ready().keys(topic, name_of(topic, ident), now_ms)

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
            self.come_after(topic)
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
        seen = None if self._seen is None and self._failure is None else self._ready()
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
        if self._fold is not None or self._failure is not None:
            raise Overloaded("the ids of messages of before the start are still being read", retry_after_ms=RETRY_MS)
        if self._seen is None:
            self.begin()
        seen = self._seen
        assert seen is not None
        if seen.waiting > MOST_WAITING:
            reason = f"{seen.waiting} ids of messages wait for the index, the limit is {MOST_WAITING}"
            raise Overloaded(reason, retry_after_ms=RETRY_MS)
        return seen

    def numbers(self) -> Mapping[str, object]:
        """Return figures for stats: values by name."""
        return {"duplicates": self.duplicates, **super().numbers()}


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
