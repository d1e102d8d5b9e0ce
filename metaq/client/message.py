"""What goes out of the client and what comes in: messages, where they are, and what a send returned."""

import enum
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from metaq.errors import BadRequest, DecodeError
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.inflating import COMPRESSED_ZLIB, COMPRESSION, inflated
from metaq.protocol.properties import (
    CHECKSUM,
    DELAY,
    KEYS,
    REAL_QUEUE,
    REAL_TOPIC,
    REPLY_TO,
    RETRY_TOPIC,
    TRANSACTION,
    UNIQUE_KEY,
    WAIT,
    parse,
)
from metaq.protocol.record import TAGS

SHARDING_KEY: Final = "__SHARDINGKEY"
CORRELATION_ID: Final = "CORRELATION_ID"
TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"

RESERVED: Final = frozenset(
    {KEYS, TAGS, DELAY, UNIQUE_KEY, SHARDING_KEY, RETRY_TOPIC, WAIT, REAL_TOPIC, REAL_QUEUE, TRANSACTION}
)
"""Properties that mean something to brokers or clients; they are set by parameters of their own, or by them alone."""

COMPRESS_FROM_BYTES: Final = 4096
_ZLIB_LEVEL: Final = 5
_SEPARATORS: Final = frozenset("\x01\x02")


class SendStatus(enum.Enum):
    """How safe an accepted message is. Whatever it says, the message is stored."""

    SEND_OK = 0
    """As safe as the broker is set up to make it."""
    FLUSH_DISK_TIMEOUT = 10
    """Not known to be on the disk yet: lost if the broker's machine fails now."""
    SLAVE_NOT_AVAILABLE = 11
    """No replica is there to copy it."""
    FLUSH_SLAVE_TIMEOUT = 12
    """Not known to be on a replica yet."""


class SendResult(NamedTuple):
    """Where an accepted message is."""

    id: str
    """Made by the client, and what consumers see as ``ReceivedMessage.id``."""
    offset_id: str
    """Made by the broker: its address and the message's place in its log, in hexadecimal digits."""
    queue: MessageQueue
    queue_offset: QueueOffset
    status: SendStatus


class OutgoingMessage(NamedTuple):
    """A message to send, for ``Producer.send_batch``."""

    body: bytes
    tag: str | None = None
    keys: str | Iterable[str] = ()
    properties: Mapping[str, str] = MappingProxyType({})


class ReceivedMessage:
    """A message as a consumer gets it; nothing of it can be changed."""

    __slots__ = ("_body", "_found", "_head", "_most", "_properties", "_queue")

    def __init__(self, head: tuple[Any, ...], body: bytes, properties: bytes, queue: MessageQueue, most: int = 0) -> None:
        """``head`` has the fields of ``metaq.protocol.record.HEADER``; ``most`` is that of ``inflated``, 0 for a plain body."""
        self._head = head
        self._body = body
        self._properties = properties
        self._queue = queue
        self._most = most
        self._found: tuple[bytes, DecodeError | None] | None = None

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also of one that is delivered again or is a dead letter."""
        if self._queue.topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX)):
            return self.properties.get(RETRY_TOPIC, self._queue.topic)
        return self._queue.topic

    @property
    def queue(self) -> MessageQueue:
        """Where it was read: for one that is delivered again, a queue of the group's retry topic."""
        return self._queue

    @property
    def partition(self) -> int:
        return self._queue.partition

    @property
    def queue_offset(self) -> QueueOffset:
        """Its number in ``queue``: 0, 1, 2, …"""
        return QueueOffset(self._head[5])

    @property
    def log_offset(self) -> int:
        """Its place in the log of its broker."""
        return int(self._head[6])

    @property
    def body(self) -> bytes:
        """As it was sent; a compressed one is inflated when it is asked for. With an ``error``, as it is stored."""
        return self._body if self._found is None and not self._most else self._unpacked()[0]

    @property
    def error(self) -> DecodeError | None:
        """Why ``body`` is not what was sent: it cannot be inflated, or does not have its checksum."""
        return None if self._found is None and not self._most else self._unpacked()[1]

    def _unpacked(self) -> tuple[bytes, DecodeError | None]:
        """Inflate here and not when messages arrive: many bodies that are small may be more than memory together."""
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
        """Bytes of its body as it is stored, perhaps compressed."""
        return int(self._head[14])

    @property
    def flag(self) -> int:
        """32 bits of the sender's own."""
        return int(self._head[4])

    @property
    def properties(self) -> Mapping[str, str]:
        """All properties, those of brokers and clients among them."""
        return _properties(self._properties)

    @property
    def tag(self) -> str | None:
        return self.properties.get(TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """What it can be found by (``Admin.query_by_key``)."""
        return tuple(self.properties.get(KEYS, "").split())

    @property
    def id(self) -> str:
        """The sender's id, the same through all deliveries; ``offset_id`` where the sender gave none."""
        return self.properties.get(UNIQUE_KEY) or self.offset_id

    @property
    def offset_id(self) -> str:
        """The broker's id: its address and ``log_offset``."""
        host: bytes = self._head[11]
        return f"{host.hex()}{self.log_offset:016x}".upper()

    @property
    def born_ms(self) -> int:
        """When it was sent, by the sender's clock."""
        return int(self._head[8])

    @property
    def store_ms(self) -> int:
        """When it was stored, by the broker's clock."""
        return int(self._head[10])

    @property
    def reconsume_times(self) -> int:
        """How often consuming it has failed before."""
        return int(self._head[12])

    @property
    def delay_level(self) -> int:
        """1 to 18 of a delayed message, else 0."""
        level = self.properties.get(DELAY, "")
        return int(level) if level.isdecimal() else 0

    @property
    def is_request(self) -> bool:
        """Whether its sender waits for a reply (``Producer.reply``)."""
        return REPLY_TO in self.properties and CORRELATION_ID in self.properties

    def after_failures(self, failures: int) -> "ReceivedMessage":
        """The same message, consuming which has failed so many times more."""
        if not failures:
            return self
        head = (*self._head[:12], self.reconsume_times + failures, *self._head[13:])
        copy = ReceivedMessage(head, self._body, self._properties, self._queue, self._most)
        copy._found = self._found
        return copy

    def damaged(self, reason: str) -> "ReceivedMessage":
        """The same message, known not to have the body that was sent."""
        self._found = self._body, DecodeError(reason)
        return self

    def packed(self) -> tuple[bytes, int]:
        """The body to send on, and its system flag; one with an ``error`` is sent on as it is stored."""
        if self.error is None:
            return compressed(self.body)
        return self._body, self._head[7] & COMPRESSION

    def __repr__(self) -> str:
        topic, broker_name, partition = self._queue
        where = f"{topic}@{broker_name}-{partition} offset {self.queue_offset}"
        return f"<ReceivedMessage {self.id} {where}, {self.stored_size} bytes>"


@lru_cache(maxsize=1024)
def _properties(data: bytes) -> Mapping[str, str]:
    """Most readers never ask for them, and who asks, asks often for the same."""
    pairs = parse(data.decode(errors="replace"))
    pairs.pop(CHECKSUM, None)  # says something about the record, nothing about the message
    return MappingProxyType(pairs)


# -- outgoing ---------------------------------------------------------------------------------------------------------


def message_properties(
    unique_id: str, tag: str | None, keys: str | Iterable[str], properties: Mapping[str, str], delay_level: int = 0
) -> dict[str, str]:
    """The properties that carry what a send was told. ``BadRequest`` names what cannot be carried."""
    if reserved := RESERVED & properties.keys():
        raise BadRequest(f"property {min(reserved)} has a meaning of its own; use the parameter for it")
    if not 0 <= delay_level <= 18:
        raise BadRequest(f"delay_level is {delay_level}; 1 to 18 are delays from 1 s to 2 h, 0 is none")
    found = dict(properties)
    found[UNIQUE_KEY] = unique_id
    if joined := keys if isinstance(keys, str) else " ".join(keys):
        found[KEYS] = joined
    if tag:
        found[TAGS] = tag
    if delay_level:
        found[DELAY] = str(delay_level)
    for name, value in found.items():
        if not name or not _SEPARATORS.isdisjoint(name + value):
            raise BadRequest(f"property {name[:40]!r} is empty, or it or its value holds the byte 1 or 2")
    return found


def properties_text(properties: Mapping[str, str]) -> str:
    """Properties as a request carries them; empty values cannot be carried, and mean the same as none."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if value)


def compressed(body: bytes) -> tuple[bytes, int]:
    """The body to send and its system flag: compressed when it is long enough and that makes it shorter."""
    if len(body) >= COMPRESS_FROM_BYTES:
        packed = zlib.compress(body, _ZLIB_LEVEL)
        if len(packed) < len(body):
            return packed, COMPRESSED_ZLIB
    return body, 0
