"""Stored messages: from a place of a partition on, by key, by id; and waiting for the next ones."""

import heapq
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated

from gevent.event import Event
from gevent.hub import get_hub
from msgspec import Meta

from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage
from metaq.engine.pool import run_in_pool
from metaq.engine.reading.filters import filter_of, parse_cached
from metaq.engine.tables.topics import Topic
from metaq.errors import BadRequest, Overloaded, RequestFailed
from metaq.message import TopicPartition
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, QueryMessage, ViewMessage
from metaq.protocol.subscription import EVERYTHING, ExpressionKind
from metaq.server.access.permissions import Action
from metaq.server.remoting.consuming.pull import Found, check_readable, read_of_replica
from metaq.server.services.call import Call
from metaq.server.services.rows import Input, Name, Number, OffsetId, Output, Partition, RowPage, UnixMs
from metaq.server.services.topics import topic_of
from metaq.store.queues.consumequeue import ConsumeQueue

MOST_BODY = 256 * 1024
"""Bytes of a body that are shown; a larger one is cut."""
MOST_SHOWN = 4 * 1024 * 1024
"""Bytes of bodies after which a page ends: compressed messages may be a thousand times as large as they are stored."""
EVER_MS = (1 << 62) - 1
"""A time after all others."""
MOST_FOUND = 64
"""Messages that one search by key looks at."""
WAIT_MS = 20_000
"""The longest wait for a message."""
MOST_TAILED = 64
"""Partitions that one tail follows."""
TAILED_AT_ONCE = 32
"""Messages of one partition, before the next partition has its turn."""
_BY_ID = {"_UNIQUE_KEY_QUERY": "true"}
QUIET_S = 5.0
"""The longest that a tail without messages says nothing; only a write shows that its reader has left."""


class StoredMessage(Output, frozen=True):
    """A stored message."""

    topic: str
    partition: int
    offset: int
    id: Annotated[str, Meta(description="The id that its sender made.")]
    offset_id: Annotated[str, Meta(description="The id that the broker made: its address and the place in its log.")]
    tag: str | None
    keys: list[str]
    properties: dict[str, str]
    body: Annotated[str | None, Meta(description="The body as text; null when it is no UTF-8.")]
    body_base64: Annotated[str | None, Meta(description="The body in base64 when it is no text.")]
    size: Annotated[int, Meta(description="Bytes of the body.")]
    cut: Annotated[bool, Meta(description=f"Whether only the first {MOST_BODY} bytes of the body are there.")]
    damaged: Annotated[str | None, Meta(description="Why the body is not what was sent; null when it is.")]
    born_ms: UnixMs
    stored_ms: UnixMs
    deliveries: Annotated[int, Meta(description="How often it was delivered again.")]


class ReadQuery(Input, frozen=True):
    """The place where reading begins: an offset or a time, by default the oldest message."""

    offset: Annotated[Number | None, Meta(description="An offset; one before the oldest message means that one.")] = None
    time_ms: Annotated[UnixMs | None, Meta(description="The first message that was stored then or later.")] = None
    limit: Annotated[int, Meta(ge=1, le=256, description="The most messages; fewer when they are large.")] = 32
    tags: Annotated[str, Meta(max_length=1024, description="A filter, as `paid || refunded`; `*` is all.")] = EVERYTHING
    wait_ms: Annotated[int, Meta(ge=0, le=WAIT_MS, description="How long to wait when there is none.")] = 0


class NewestQuery(Input, frozen=True):
    """The number of messages that are wanted."""

    limit: Annotated[int, Meta(ge=1, le=256, description="The most messages; fewer when they are large.")] = 50


class TailQuery(Input, frozen=True):
    """The messages that a tail has."""

    tags: Annotated[str, Meta(max_length=1024, description="A filter, as `paid || refunded`; `*` is all.")] = EVERYTHING


class MessagesRead(Output, frozen=True):
    """Messages of a partition."""

    messages: list[StoredMessage]
    next: Annotated[int, Meta(description="The offset to read from next.")]
    begin: int
    end: int


class SearchQuery(Input, frozen=True):
    """The messages that are looked for: exactly one of `key` and `id`."""

    key: Annotated[str, Meta(max_length=4096)] = ""
    id: Annotated[str, Meta(max_length=255, description="The id that the sender made.")] = ""
    from_ms: UnixMs = 0
    to_ms: UnixMs = EVER_MS
    limit: Annotated[int, Meta(ge=1, le=MOST_FOUND, description="The most messages; fewer when they are large.")] = 32


def read_messages(call: Call, topic: Name, partition: Partition, query: ReadQuery) -> MessagesRead:
    """Return messages of a partition from a place on; wait for the first one when there is none."""
    topic_of_reader(call, topic, partition)
    if query.offset is not None and query.time_ms is not None:
        raise BadRequest("reading begins at an offset or at a time_ms, not at both")
    reader = PartitionReader(call, topic, partition, query.tags)
    offset = reader.begin(query)
    found = reader.read(offset, query.limit)
    if not found.messages and query.wait_ms and found.end <= found.next:
        wait_for(call, {reader: found.next}, query.wait_ms / 1000)
        found = reader.read(found.next, query.limit)
    return found


def read_newest(call: Call, topic: Name, query: NewestQuery) -> RowPage[StoredMessage]:
    """Return the newest messages of all partitions of a topic, the newest first."""
    known = topic_of(call, topic, Action.SUBSCRIBE)
    topic_of_reader(call, topic, 0)
    rows: list[StoredMessage] = []
    shown = 0
    for number, (partition, ordinal) in enumerate(_newest(call, known, query.limit), 1):
        found = PartitionReader(call, topic, partition).read(ordinal, 1).messages
        rows += [one for one in found if one.offset == ordinal]  # another one where it was deleted meanwhile
        shown += sum(map(_shown, found))
        if shown >= MOST_SHOWN:
            break
        call.rest_after(number)
    return RowPage(rows=rows, next=None)


def _newest(call: Call, topic: Topic, most: int) -> list[tuple[int, int]]:
    """Return the partitions and the offsets in them of the newest messages of a topic, the newest first."""
    store, read = call.context.store, call.interior.read
    found: list[tuple[int, int]] = []
    heap: list[tuple[int, int, int, ConsumeQueue]] = []

    def push(queue: ConsumeQueue, ordinal: int) -> None:
        if ordinal >= store.first(queue, read)[0]:
            log_offset = queue.unit(ordinal, read)[0]  # all partitions share the log, whose order is exact
            heapq.heappush(heap, (-log_offset, queue.partition, ordinal, queue))

    for number in range(topic.all_partitions):
        queue = store.queues.get(TopicPartition(topic.name, number))
        if queue is not None:
            push(queue, queue.readable - 1)
        call.rest_after(number + 1)
    for number in range(most):
        if not heap:
            break
        _, partition, ordinal, queue = heapq.heappop(heap)
        found.append((partition, ordinal))
        push(queue, ordinal - 1)
        call.rest_after(number + 1)
    return found


def search(call: Call, topic: Name, query: SearchQuery) -> RowPage[StoredMessage]:
    """Return the newest messages of a topic with a key or an id, the oldest of them first."""
    if bool(query.key) == bool(query.id):
        raise BadRequest("a search needs a key or an id, and not both")
    if query.key:
        header = QueryMessage(topic, query.key, Int32(query.limit), query.from_ms, query.to_ms)
        found = [one for one in _query(call, header, {}) if query.key in one.keys]
    else:
        header = QueryMessage(topic, query.id, Int32(query.limit), query.from_ms, query.to_ms)
        found = [one for one in _query(call, header, _BY_ID) if one.id == query.id]
    newest = sorted(found, key=_age, reverse=True)[: query.limit]
    return RowPage(rows=_page_of(newest)[::-1], next=None)


def found_by_id(call: Call, topic: str, ident: str) -> list[ReceivedMessage]:
    """Return the newest messages of a topic with the id that their sender made."""
    header = QueryMessage(topic, ident, Int32(MOST_FOUND), 0, EVER_MS)
    return [one for one in _query(call, header, _BY_ID) if one.id == ident]


def _query(call: Call, header: QueryMessage, more: Mapping[str, str]) -> list[ReceivedMessage]:
    answer = call.ask(Request.QUERY_MESSAGE, header, more=more, also=(Response.QUERY_NOT_FOUND,))
    if answer.code == Response.QUERY_NOT_FOUND:
        return []
    return decode_messages(bytes(answer.body), call.broker, damaged_too=True)


def show_message(call: Call, offset_id: OffsetId) -> StoredMessage:
    """Return the message with an id that this broker made."""
    return row_of(by_offset_id(call, offset_id))


def by_offset_id(call: Call, offset_id: str) -> ReceivedMessage:
    """Return the message with an id that this broker made. Raise ``RequestFailed`` when there is none."""
    where = decode_offset_id(offset_id)
    try:
        answer = call.ask(Request.VIEW_MESSAGE_BY_ID, ViewMessage(where.log_offset))
    except RequestFailed as error:
        raise RequestFailed(Response.QUERY_NOT_FOUND, f"{error}; the id is {offset_id}") from error
    return decode_messages(bytes(answer.body), call.broker, damaged_too=True)[0]


def topic_of_reader(call: Call, topic: str, partition: int) -> None:
    """Raise why the user cannot read a partition."""
    check_readable(call.context, call.principal, topic, partition)


class PartitionReader:
    """Reads one partition; ``check_readable`` is the caller's duty."""

    def __init__(self, call: Call, topic: str, partition: int, tags: str = EVERYTHING) -> None:
        self._call = call
        self.key = TopicPartition(topic, partition)
        self._filter = filter_of(parse_cached(topic, tags, kind=ExpressionKind.TAG))

    def begin(self, query: ReadQuery) -> int:
        """Return the offset at which reading begins."""
        if query.offset is not None:
            return query.offset
        store, read = self._call.context.store, self._call.interior.read
        queue = store.queues.get(self.key)
        if queue is None:
            return 0
        return store.first(queue, read)[0] if query.time_ms is None else store.reader.at_time(queue, query.time_ms, read)

    @property
    def end(self) -> int:
        """The offset after the newest message."""
        queue = self._call.context.store.queues.get(self.key)
        return 0 if queue is None else queue.readable

    def read(self, offset: int, most: int, most_body: int = MOST_BODY) -> MessagesRead:
        """Return messages from an offset on, cut to ``most_body`` bytes; ``next`` leads past what the filter leaves out."""
        found = self._read(offset, most)
        if found.code == Response.PULL_OFFSET_MOVED:
            found = self._read(found.next, most)
        data = b"".join(found.body)
        decoded = decode_messages(data, self._call.broker, damaged_too=True) if data else []
        messages = _page_of(decoded, most_body)
        following = found.next if len(messages) == len(decoded) else messages[-1].offset + 1
        return MessagesRead(messages=messages, next=following, begin=found.least, end=found.most)

    def _read(self, offset: int, most: int) -> Found:
        return read_of_replica(self._call.context, self.key, offset, most, self._filter, self._call.interior.read)

    def has(self, offset: int) -> bool:
        """Return whether there is a message at an offset."""
        queue = self._call.context.store.queues.get(self.key)
        return queue is not None and queue.readable > offset


def wait_for(call: Call, readers: Mapping[PartitionReader, int], seconds: float) -> None:
    """Return when a reader's partition has a message at its offset, or the time is over.

    Raise ``Overloaded`` when too many wait already, ``Fenced`` when the broker stops.
    """
    if any(reader.has(offset) for reader, offset in readers.items()):
        return
    call.check_goes_on()
    holds, limit = call.interior.holds, call.context.settings.max_held_gets
    if not holds.has_room(limit - len(readers) + 1):
        raise Overloaded(f"{limit} gets wait for messages already (max_held_gets)", retry_after_ms=1000)
    woken, loop = Event(), get_hub().loop
    held = [holds.hold(reader.key, loop.timer(seconds), woken.set) for reader in readers]
    try:
        woken.wait()
    finally:
        for hold in held:
            hold.cancel()


def tail(call: Call, topic: Name, query: TailQuery) -> Iterator[StoredMessage | None]:
    """Stream the messages of a topic as they come, of each partition in its order."""
    # the iterator yields None when nothing has come for a while
    _readers(call, topic, query.tags, 0)
    return _tail(call, topic, query.tags, [PartitionReader(call, topic, number).end for number in range(MOST_TAILED)])


def _readers(call: Call, topic: str, tags: str, begin: int) -> list[PartitionReader]:
    """Return readers of a topic's partitions from a number on. Raise why the user cannot have them, or has too many."""
    known = topic_of(call, topic, Action.SUBSCRIBE)
    if known.read_partitions > MOST_TAILED:
        raise BadRequest(f"the topic {topic} has {known.read_partitions} partitions; a tail follows {MOST_TAILED} at most")
    topic_of_reader(call, topic, 0)
    return [PartitionReader(call, topic, number, tags) for number in range(begin, known.read_partitions)]


def _tail(call: Call, topic: str, tags: str, ends: Sequence[int]) -> Iterator[StoredMessage | None]:
    """Yield what is stored after ``ends``, by partition; some partitions may be added later."""
    steps, at = count(1), dict[PartitionReader, int]()
    while True:
        call.check_goes_on()
        # the user may have lost the right, the topic may be gone, or have more partitions
        at |= {reader: ends[reader.key.partition] for reader in _readers(call, topic, tags, len(at))}
        moved = False
        for reader, offset in at.items():
            if reader.has(offset):
                call.check_goes_on()  # whoever reads the stream may have taken long for the message before
                found = reader.read(offset, TAILED_AT_ONCE)
                at[reader], moved = found.next, True
                for message in found.messages:
                    yield message
                    call.rest_after(next(steps))  # a reader that keeps up is written to without waiting, and so without others
                call.rest_after(next(steps))  # the filter may have left out all
        if not moved:
            wait_for(call, at, QUIET_S)
            if not any(reader.has(offset) for reader, offset in at.items()):
                yield None


def inflate(message: ReceivedMessage) -> None:
    """Inflate a compressed body in a thread, so that nobody else waits for it: the largest take 40 ms."""
    if message._is_packed:
        run_in_pool(message._unpacked)


def _page_of(messages: Sequence[ReceivedMessage], most_body: int = MOST_BODY) -> list[StoredMessage]:
    """Return the first messages as users see them: all of them, or fewer when they are large."""
    rows: list[StoredMessage] = []
    shown = 0
    for message in messages:
        if shown >= MOST_SHOWN:
            break
        rows.append(row_of(message, most_body))
        shown += _shown(rows[-1])
    return rows


def _shown(row: StoredMessage) -> int:
    """Return the size of what is there of a body."""
    return len(row.body or row.body_base64 or "")


def row_of(message: ReceivedMessage, most_body: int = MOST_BODY) -> StoredMessage:
    """Return a message as users see it, with so many bytes of its body."""
    inflate(message)
    error, body = message.error, message.body
    part = body[:most_body]
    text = _text(part, is_cut=len(part) < len(body))
    return StoredMessage(
        topic=message.topic,
        partition=message.partition,
        offset=message.queue_offset,
        id=message.id,
        offset_id=message.offset_id,
        tag=message.tag,
        keys=list(message.keys),
        properties=dict(message.properties),
        body=text,
        body_base64=b64encode(part).decode() if text is None else None,
        size=len(body),
        cut=len(part) < len(body),
        damaged=None if error is None else str(error),
        born_ms=max(0, message.born_ms),
        stored_ms=max(0, message.store_ms),
        deliveries=message.reconsume_times,
    )


def _text(body: bytes, *, is_cut: bool) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        if is_cut and error.start > len(body) - 4:  # the cut is inside of a character
            return body[: error.start].decode()
        return None


def _age(message: ReceivedMessage) -> tuple[int, int]:
    return message.store_ms, message.log_offset
