"""The end of leasing in a group that pulls from now on: its open messages become retries.

Each open message gets a copy in the group's retry topic, which appears there when its lease ends, or at once if it was never
given, or if its properties have no room to say when. The group's offset is then that of the first message that is neither open
nor done, where its consumers go on: nothing is lost, and nothing that was done comes again.
"""

from typing import Any, Final

from gevent.event import AsyncResult

from metaq.engine.context import Context
from metaq.engine.leases.leases import Leases
from metaq.engine.leases.moving import Moves
from metaq.engine.schedule import LEVEL_SECONDS
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.engine.writing import again, delayed, new_record
from metaq.errors import MessageIllegal, StoreError
from metaq.leases.events import Dead
from metaq.leases.redelivered import MOST_TIMES
from metaq.message import GroupPartition
from metaq.protocol import properties
from metaq.protocol.ids import offset_id_of
from metaq.protocol.record import decode_record
from metaq.store.files.filecache import Run, read_through
from metaq.store.newrecord import NewRecord

PORTION: Final = 64
"""Messages in one group of records."""
PORTION_BYTES: Final = 1 << 20


class Drain:
    """Turns leases into retries."""

    def __init__(self, context: Context, leases: Leases, moves: Moves, run: Run) -> None:
        self._context = context
        self._store = context.store
        self._leases = leases
        self._moves = moves
        self._read = read_through(run)

    def drain(self, group: Group, topic: str) -> None:
        """Turn all leases of a group in a topic into retries, and wait until they are in the log.

        Raise ``MetaqError`` when they cannot be stored: the rest stays open, and another call goes on.
        """
        for partition in list(self._leases.of(group.name, topic)):
            place = GroupPartition(group.name, topic, partition)
            state = self._leases.settled(place)
            ordinals = [] if state is None else sorted(state.ordinals())
            for start in range(0, len(ordinals), PORTION):
                self._drain_some(group, place, ordinals[start : start + PORTION])

    def _drain_some(self, group: Group, place: GroupPartition, ordinals: list[int]) -> None:
        """Store the retries of some messages, as many at a time as fit into a group of records."""
        records = [(ordinal, self._leases.message(place, ordinal, self._read)) for ordinal in ordinals]
        while records:
            self._store.check_writable()
            moved: list[int] = []
            copies: list[NewRecord] = []
            size = 0
            while records and (not copies or size < min(PORTION_BYTES, self._store.settings.segment_bytes // 4)):
                ordinal, record = records.pop(0)
                copy = self._retry(group, place, ordinal, record)
                if copy is not None:
                    moved.append(ordinal)
                    copies.append(copy)
                    size += copy.size
            if copies:
                self._move(place, moved, copies)

    def _move(self, place: GroupPartition, moved: list[int], copies: list[NewRecord]) -> None:
        appended: Any = AsyncResult()
        self._moves.stage(place, moved, copies, appended.set)
        failure: StoreError | None = appended.get()
        if failure is not None:
            raise failure

    def _retry(self, group: Group, place: GroupPartition, ordinal: int, record: bytes | None) -> NewRecord | None:
        """Return the retry of a message; ``None`` when it is not open any more, or lost."""
        state = self._leases.get(place)
        bunch = None if state is None else state.find(ordinal)
        if state is None or bunch is None or state.is_claimed(ordinal):
            return None
        if record is None:
            self._leases.record(place, Dead(ordinal))
            return None
        message = decode_record(record)
        own = properties.parse(message.properties.decode(errors="replace"))
        origin = {properties.ORIGIN_ID: offset_id_of(message.store_host, message.log_offset)}
        pairs = {properties.RETRY_TOPIC: message.topic, **origin, **own}
        level = _level_of(bunch.due_ms / 1000 - self._store.clock.monotonic()) if bunch.times else 0  # nobody has had it
        if level:
            pairs[properties.DELAY] = str(level)
        topic = self._retry_topic(group)
        draft = again(message, topic.name, ordinal % topic.partitions, pairs)
        draft.reconsume_times = min(MOST_TIMES, message.reconsume_times + bunch.times)
        try:
            return new_record(self._context, delayed(draft))
        except MessageIllegal:
            draft.properties = own
            return new_record(self._context, draft)

    def _retry_topic(self, group: Group) -> Topic:
        count = max(1, group.retry_queue_nums)
        return self._context.topics.get(group.retry_topic) or self._context.topics.put(Topic(group.retry_topic, count, count))


def _level_of(seconds: float) -> int:
    """Return the first delay level that is at least so long, or the longest; 0: no delay."""
    if seconds <= 0:
        return 0
    return next((number for number, length in enumerate(LEVEL_SECONDS, 1) if length >= seconds), len(LEVEL_SECONDS))
