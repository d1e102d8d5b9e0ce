"""Staging of messages with properties, shared by sends, send-backs, deliveries and replies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.checksum import crc32
from metaq.engine.context import Context
from metaq.engine.tables.topics import LEVELS
from metaq.engine.turn import Short, Turns
from metaq.errors import MessageIllegal, MetaqError
from metaq.message import SCHEDULE_TOPIC, TopicPartition
from metaq.protocol import properties
from metaq.protocol.keys import keys_of
from metaq.protocol.record import TAGS, Record, constant_middle, java_hash, record_tail
from metaq.protocol.sysflag import BORN_HOST_IPV6, STORE_HOST_IPV6, TRANSACTION_TYPE
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.newrecord import NewRecord
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.timers.handles import Handle

CLEARED: Final = ~(TRANSACTION_TYPE | BORN_HOST_IPV6 | STORE_HOST_IPV6)
"""The mask that clears the bits of a sender's sysFlag that only the broker may set."""

LONGEST_SOURCE: Final = f"{LEVELS}:{(1 << 63) - 1}"


@dataclass(slots=True)
class Draft:
    """A message on its way into the log."""

    topic: str
    partition: int
    body: bytes | memoryview
    properties: dict[str, str]
    flag: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    reconsume_times: int = 0

    def moved(self, topic: str, partition: int, pairs: dict[str, str]) -> "Draft":
        """Return the same message for another partition, with other properties."""
        return Draft(
            topic=topic,
            partition=partition,
            body=self.body,
            properties=pairs,
            flag=self.flag,
            sys_flag=self.sys_flag,
            born_ms=self.born_ms,
            born_host=self.born_host,
            reconsume_times=self.reconsume_times,
        )


def again(record: Record, topic: str, partition: int, pairs: dict[str, str]) -> Draft:
    """Return a stored message as a draft for another partition, with other properties."""
    return Draft(
        topic=topic,
        partition=partition,
        body=record.body,
        properties=pairs,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_ms=record.born_ms,
        born_host=record.born_host,
        reconsume_times=record.reconsume_times,
    )


def internal(context: Context, topic: str, body: bytes, pairs: Mapping[str, str] = properties.NONE, sys_flag: int = 0) -> Draft:
    """Return a message of the broker itself, for partition 0 of an internal topic."""
    return Draft(
        topic=topic,
        partition=0,
        body=body,
        properties=dict(pairs),
        flag=0,
        sys_flag=sys_flag,
        born_ms=context.store.clock.now_ms(),
        born_host=context.store_host,
    )


def internal_mark(context: Context, key: TopicPartition, body: bytes, pairs: Mapping[str, str] = properties.NONE) -> Draft:
    """Return a message of the broker itself for a partition of an internal topic."""
    draft = internal(context, key.topic, body, pairs)
    draft.partition = key.partition
    return draft


class Placed(NamedTuple):
    """The place that a staged message will have."""

    queue: ConsumeQueue
    ordinal: int
    log_offset: int
    handle: Handle | None = None
    """Of a message that is delayed to a time: what cancels it until then."""


def delayed(draft: Draft) -> Draft:
    """Return the same message, parked in the schedule topic if it asks for a delay level.

    A level above the last one means the last one. Raises ``MessageIllegal`` for what is no level, and when the properties leave
    no room for what the delivered copy adds.
    """
    pairs = draft.properties
    level = pairs.get(properties.DELAY, "0")
    if not level.isdecimal():
        raise MessageIllegal(f"the property {properties.DELAY} is {level[:20]!r}, not a delay level from 1 to {LEVELS}")
    if int(level) == 0:
        return draft
    kept = {**pairs, properties.REAL_TOPIC: draft.topic, properties.REAL_QUEUE: str(draft.partition)}
    properties.encode(kept, {properties.SCHEDULED: LONGEST_SOURCE})
    return draft.moved(SCHEDULE_TOPIC, min(int(level), LEVELS) - 1, kept)


def new_record(context: Context, draft: Draft, own: Mapping[str, str] = properties.NONE) -> NewRecord:
    """Return a message as the store takes it, unchanged; raise ``MessageIllegal`` for properties that are too long.

    ``own`` are properties that only the broker may set.
    """
    store, pairs, body = context.store, draft.properties, bytes(draft.body)
    kept = properties.encode(pairs, own)
    tag = pairs.get(TAGS)
    middle = constant_middle(
        sys_flag=draft.sys_flag,
        born_ms=draft.born_ms,
        born_host=draft.born_host,
        store_ms=store.clock.now_ms(),
        store_host=context.store_host,
        reconsume_times=draft.reconsume_times,
    )
    return NewRecord(
        queue=store.queue(draft.topic, draft.partition),
        flag=draft.flag,
        body=body,
        crc=crc32(body) & 0x7FFFFFFF,
        middle=middle,
        text_size=HEADER_SIZE_TEXT + len(body) + (0 if tag is None else 4 + len(tag.encode())),
        tail=record_tail(draft.topic, kept) if kept else None,
        tag=0 if tag is None else java_hash(tag),
        keys=keys_of(draft.topic, draft.sys_flag, kept),
    )


def stage(context: Context, draft: Draft, own: Mapping[str, str] = properties.NONE) -> Placed:
    """Stage a message unchanged and return its place.

    The caller has checked that the topic may be written, and stages an outcome (``Turns.staged``). Raises what
    ``new_record`` raises, and ``DiskFull`` when the log cannot grow.
    """
    new = new_record(context, draft, own)
    ordinal = new.queue.next
    return Placed(new.queue, ordinal, context.store.put(*new))


class Noted:
    """The outcome of the broker's own puts of one turn: ``done`` is called with ``None``, or with the error."""

    __slots__ = ("_done", "size")

    def __init__(self, done: Callable[[MetaqError | None], None]) -> None:
        self._done = done
        self.size = 0

    def stored(self) -> None:
        self._done(None)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._done(error)

    def late(self, short: Short) -> None:
        self._done(None)


def note(turns: Turns, done: Callable[[MetaqError | None], None]) -> None:
    """Have ``done`` called when the puts of this turn are as durable as promised, or late (``None``), or failed (the error)."""
    turns.staged(Noted(done))
