"""The messages that a client sends and receives, and the result of a send."""

import enum
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple

from metaq.errors import BadRequest, DecodeError
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, MessageQueue, QueueOffset
from metaq.protocol.inflating import COMPRESSED_ZLIB, COMPRESSION, inflated
from metaq.protocol.properties import (
    CHECKSUM,
    DEDUPE_ID,
    DELAY,
    KEYS,
    PRIORITY,
    REAL_QUEUE,
    REAL_TOPIC,
    REPLY_TO,
    RETRY_TOPIC,
    SHARDING_KEY,
    TIMER_DELAY,
    TIMER_DELIVER,
    TIMER_OUT,
    TIMERS,
    TRANSACTION,
    UNIQUE_KEY,
    WAIT,
    parse,
)
from metaq.protocol.record import TAGS

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Body = TypeVar("Body", default=bytes)
else:
    from typing import TypeVar

    Body = TypeVar("Body")  # Python 3.13 is the first with a default

CORRELATION_ID: Final = "CORRELATION_ID"
TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"

_NONE: Final[Mapping[str, str]] = MappingProxyType({})

RESERVED: Final = frozenset(
    {
        KEYS,
        TAGS,
        DELAY,
        UNIQUE_KEY,
        DEDUPE_ID,
        SHARDING_KEY,
        PRIORITY,
        RETRY_TOPIC,
        WAIT,
        REAL_TOPIC,
        REAL_QUEUE,
        TRANSACTION,
        *TIMERS,
        TIMER_OUT,
    }
)
"""Properties with a meaning for brokers or clients: they are set by parameters of their own, or only by brokers and clients."""

COMPRESS_FROM_BYTES: Final = 4096
_ZLIB_LEVEL: Final = 5
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MOST_DIGITS: Final = 18
_MS: Final = timedelta(milliseconds=1)


class SendStatus(enum.Enum):
    """The durability of an accepted message. With any of these, the message is stored."""

    SEND_OK = 0
    """As durable as the broker is configured to make it."""
    FLUSH_DISK_TIMEOUT = 10
    """Not known to be synced to disk yet: lost if the broker's machine fails now."""
    SLAVE_NOT_AVAILABLE = 11
    """No replica is available to copy it."""
    FLUSH_SLAVE_TIMEOUT = 12
    """Not known to be on a replica yet."""


class SendResult(NamedTuple):
    """The place and the status of an accepted message."""

    id: str
    """The id that the client made; consumers see it as ``ReceivedMessage.id``."""
    offset_id: str
    """The id that the broker made: its address and the message's log offset, in hexadecimal digits."""
    queue: MessageQueue
    queue_offset: QueueOffset
    """Its offset in ``queue``; 0 while it is delayed."""
    status: SendStatus
    handle: str | None = None
    """The handle by which ``Client.cancel`` cancels the message, if it is delayed by ``delay`` or ``deliver_at``."""


class OutgoingMessage(NamedTuple, Generic[Body]):
    """A message to send, for ``Producer.send_batch``."""

    body: Body
    tag: str | None = None
    keys: str | Iterable[str] = ()
    properties: Mapping[str, str] = _NONE
    priority: int | None = None


class ReceivedMessage:
    """A message as a consumer gets it; its attributes are read-only."""

    __slots__ = ("_body", "_found", "_head", "_most", "_properties", "_queue")

    def __init__(self, head: tuple[Any, ...], body: bytes, properties: bytes, queue: MessageQueue, most: int = 0) -> None:
        """Make a message of a record: ``head`` has the fields of ``metaq.protocol.record.HEADER``.

        ``most`` is the limit that ``inflated`` takes; 0 for a body that is not compressed.
        """
        self._head = head
        self._body = body
        self._properties = properties
        self._queue = queue
        self._most = most
        self._found: tuple[bytes, DecodeError | None] | None = None

    @property
    def topic(self) -> str:
        """The topic that the message was sent to, even when it is delivered again or is a dead letter."""
        if self._queue.topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            return self.properties.get(RETRY_TOPIC, self._queue.topic)
        return self._queue.topic

    @property
    def queue(self) -> MessageQueue:
        """The queue that it was read from; for a message that is delivered again, a queue of the group's retry topic."""
        return self._queue

    @property
    def partition(self) -> int:
        """The number of its partition in the topic, on its broker."""
        return self._queue.partition

    @property
    def queue_offset(self) -> QueueOffset:
        """Its offset in ``queue``: 0, 1, 2, …"""
        return QueueOffset(self._head[5])

    @property
    def log_offset(self) -> int:
        """Its byte offset in the commit log of its broker."""
        return int(self._head[6])

    @property
    def body(self) -> bytes:
        """The body as it was sent, or, with an ``error``, as it is stored. A compressed body is inflated on first access."""
        return self._body if self._found is None and not self._most else self._unpacked()[0]

    @property
    def value(self) -> Any:
        """The body as the ``deserializer`` of the consumer has decoded it; ``BadRequest`` without one."""
        if self.error is not None:
            raise self.error
        raise BadRequest(f"{self!r} has no value, only a body: its consumer has no deserializer, such as metaq.JSON")

    @property
    def error(self) -> DecodeError | None:
        """The reason why ``body`` is not what was sent, or cannot be decoded to a ``value``; else ``None``."""
        return None if self._found is None and not self._most else self._unpacked()[1]

    @property
    def _is_packed(self) -> bool:
        """True while the body is compressed and nobody has asked for it."""
        return self._found is None and bool(self._most)

    def _unpacked(self) -> tuple[bytes, DecodeError | None]:
        """Return the inflated body or the error. Inflating all messages on arrival could need more memory than there is."""
        found = self._found
        if found is None:
            try:
                found = inflated(self._body, self._head[7], self._most), None
            except DecodeError as error:
                found = self._body, error.with_traceback(None)
            self._found = found
        return found

    @property
    def stored_size(self) -> int:
        """The size of its body in bytes as it is stored, perhaps compressed."""
        return int(self._head[14])

    @property
    def flag(self) -> int:
        """32 bits for the sender's own use."""
        return int(self._head[4])

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, including those of brokers and clients."""
        return _properties(self._properties)

    @property
    def tag(self) -> str | None:
        """The tag by which consumers can choose it; ``None`` for one without."""
        return self.properties.get(TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys by which it can be found (``Admin.query_by_key``)."""
        return tuple(self.properties.get(KEYS, "").split())

    @property
    def id(self) -> str:
        """The sender's id, which is the same in all deliveries; ``offset_id`` when the sender gave none."""
        return self.properties.get(UNIQUE_KEY) or self.offset_id

    @property
    def offset_id(self) -> str:
        """The broker's id: its address and ``log_offset``."""
        host: bytes = self._head[11]
        return f"{host.hex()}{self.log_offset:016x}".upper()

    @property
    def born_ms(self) -> int:
        """The time at which it was sent, by the sender's clock, in milliseconds since 1970."""
        return int(self._head[8])

    @property
    def store_ms(self) -> int:
        """The time at which it was stored, by the broker's clock, in milliseconds since 1970."""
        return int(self._head[10])

    @property
    def reconsume_times(self) -> int:
        """The number of earlier attempts to consume it, all of which failed."""
        return int(self._head[12])

    @property
    def delay_level(self) -> int:
        """The delay level of a delayed message, 1 to 18; else 0."""
        level = self.properties.get(DELAY, "")
        return int(level) if level.isdecimal() else 0

    @property
    def priority(self) -> int | None:
        """The priority with which it was sent; ``None`` for one without."""
        value = self.properties.get(PRIORITY, "")
        return int(value) if value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS else None

    @property
    def is_request(self) -> bool:
        """True when its sender waits for a reply (``Producer.reply``)."""
        return REPLY_TO in self.properties and CORRELATION_ID in self.properties

    def _after_failures(self, failures: int) -> "ReceivedMessage":
        """Return the same message with ``reconsume_times`` raised by ``failures``."""
        if not failures:
            return self
        head = (*self._head[:12], self.reconsume_times + failures, *self._head[13:])
        copy = ReceivedMessage(head, self._body, self._properties, self._queue, self._most)
        copy._found = self._found
        return copy

    def _become(self, other: "ReceivedMessage") -> None:
        """Have this object stand for the same message as ``other``."""
        self._head, self._body, self._properties = other._head, other._body, other._properties
        self._queue, self._most, self._found = other._queue, other._most, other._found

    def _damaged(self, reason: str) -> "ReceivedMessage":
        """Mark this message as damaged, with ``reason`` as its ``error``, and return it."""
        self._found = self._body, DecodeError(reason)
        return self

    def _packed(self) -> tuple[bytes, int]:
        """Return the body to forward, and its system flag; a body with an ``error`` is forwarded as it is stored."""
        if self.error is None:
            return compressed(self.body)
        return self._body, self._head[7] & COMPRESSION

    def __repr__(self) -> str:
        topic, broker_name, partition = self._queue
        where = f"{topic}@{broker_name}-{partition} offset {self.queue_offset}"
        return f"<ReceivedMessage {self.id} {where}, {self.stored_size} bytes>"


class DecodedMessage(ReceivedMessage):
    """A message whose body was decoded."""

    __slots__ = ("_value",)

    def __init__(self, message: ReceivedMessage, value: object) -> None:
        self._become(message)
        self._value = value

    @property
    def value(self) -> Any:
        """The body as the ``deserializer`` of the consumer has decoded it."""
        return self._value


@lru_cache(maxsize=1024)
def _properties(data: bytes) -> Mapping[str, str]:
    """Parse properties on access: most programs never read them, and those that do often read the same ones again."""
    pairs = parse(data.decode(errors="replace"))
    pairs.pop(CHECKSUM, None)  # describes the record, not the message
    return MappingProxyType(pairs)


# -- outgoing ---------------------------------------------------------------------------------------------------------


def message_properties(
    unique_id: str, tag: str | None, keys: str | Iterable[str], properties: Mapping[str, str], own: Mapping[str, str] = _NONE
) -> dict[str, str]:
    """Return the properties of a message to send; ``own`` are those of further parameters.

    ``BadRequest`` names a parameter or a property that cannot be sent.
    """
    if not properties and not keys and not tag and not own:
        return {UNIQUE_KEY: unique_id}
    if reserved := RESERVED & properties.keys():
        raise BadRequest(f"property {min(reserved)} is reserved; use the parameter for it")
    found = dict(properties)
    found[UNIQUE_KEY] = unique_id
    if joined := keys if isinstance(keys, str) else " ".join(keys):
        found[KEYS] = joined
    if tag:
        found[TAGS] = tag
    if own:
        found |= own
    for name, value in found.items():
        text = name + value
        if not name or "\x01" in text or "\x02" in text:
            raise BadRequest(f"property {name[:40]!r} is empty, or it or its value contains the byte 1 or 2")
    return found


def delay_properties(level: int, delay: timedelta | None, deliver_at: datetime | None) -> Mapping[str, str]:
    """Return the property by which a message is delayed; none without a delay."""
    if level:
        return {DELAY: str(level)}
    if delay is not None:
        return {TIMER_DELAY: str(milliseconds(delay))}
    return _NONE if deliver_at is None else {TIMER_DELIVER: str(unix_ms(deliver_at))}


def priority_properties(priority: int | None) -> Mapping[str, str]:
    """Return the property by which a message has a priority; none without one."""
    return _NONE if priority is None else {PRIORITY: str(priority)}


def milliseconds(delay: timedelta) -> int:
    """Return a delay in milliseconds, rounded up: nothing comes before its time."""
    return -(-delay // _MS)


def unix_ms(time: datetime) -> int:
    """Return a time in Unix milliseconds, rounded up; 0 for one before 1970. A time without a zone is local."""
    return max(0, milliseconds((time if time.tzinfo else time.astimezone()) - _EPOCH))


def properties_text(properties: Mapping[str, str]) -> str:
    """Encode properties as a request carries them. Those with an empty value are left out: empty means the same as absent."""
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items() if value])


def compressed(body: bytes) -> tuple[bytes, int]:
    """Return the body to send and its system flag; it is compressed from 4096 bytes on, if that makes it shorter."""
    if len(body) >= COMPRESS_FROM_BYTES:
        packed = zlib.compress(body, _ZLIB_LEVEL)
        if len(packed) < len(body):
            return packed, COMPRESSED_ZLIB
    return body, 0
