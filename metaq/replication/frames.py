"""The replication protocol of a master and its slaves, over one connection that the slave opens.

All integers are big-endian and signed::

    slave   hello     8 magic FF 6D 65 74 61 71 00 01 │ 4 length │ JSON: who it is, and its log (``Hello``)
            report    8 log offset: it holds everything before; as often as it likes, never less than the one before
    master  frame     8 log offset │ 4 size │ so many bytes of the log from there on
            control   8 log offset where the master's log ends │ 4 −1 │ 4 length │ JSON object (``Control``)

The magic is negative as a number, which no report of a RocketMQ slave is: the two protocols differ, and such a slave is
refused. Most frames hold whole records; a record that is longer than a frame continues in the next one. A frame that does not
begin where the last one ended begins the next segment. The first frame of a master is a control frame with ``follow``, ``copy``
or ``refused``; a master with users first asks the slave to prove who it is (``metaq.replication.peers``).
"""

import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, Self

import orjson

from metaq.errors import ProtocolError, StreamLost
from metaq.replication.sameness import Ranges, are_ranges

MAGIC: Final = b"\xffmetaq\x00\x01"
LENGTH: Final = struct.Struct(">i")
REPORT: Final = struct.Struct(">q")
FRAME: Final = struct.Struct(">qi")
CONTROL: Final = -1
HELLO_HEAD: Final = len(MAGIC) + LENGTH.size
MOST_REPLICA: Final = 1023
MOST_HELLO: Final = 256 * 1024
MOST_DATA: Final = 64 * 1024 * 1024
"""The most bytes of the log in one frame."""
MOST_CONTROL: Final = 64 * 1024 * 1024
"""The most bytes of one control frame: tables of 16,000 topics have some megabytes."""


class Hello(NamedTuple):
    """A slave's first message: its identity, and the state of its log."""

    cluster: str
    broker_name: str
    broker_number: int
    replica: int
    """Its ``replica_number``."""
    segment_bytes: int
    begin: int
    """The log offset where its log begins; equal to ``end`` when the log is empty."""
    end: int
    epochs: list[list[int]]
    """The epochs of its log: number, start and replica of each (``metaq.store.copies.epochs``)."""
    last: list[Any] | None
    """Log offset, size and checksum property (text) of its last record."""
    text: str
    """HOST:PORT where clients of the text protocol reach it, for operators."""
    proved: int = -1
    """The log offset before which its log is known to be right; −1: an older version, which proves nothing."""
    ranges: Ranges = []  # noqa: RUF012 - a hello is never changed
    """Checksums of the log from ``proved`` on (``metaq.replication.sameness``)."""

    def encode(self) -> bytes:
        body = orjson.dumps(self._asdict())
        return MAGIC + LENGTH.pack(len(body)) + body

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Decode the JSON of a hello; raise ``ProtocolError`` when it is none."""
        content = _object(body, "hello")
        try:
            hello = cls(**content)
            is_right = hello._is_right()
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"the fields of a hello must be {', '.join(cls._fields)}") from error
        if not is_right:
            raise ProtocolError("a value of the hello has the wrong type")
        return hello

    def _is_right(self) -> bool:
        """Return whether all values may be those of a slave. Raise ``TypeError`` or ``ValueError`` for some that may not."""
        numbers = self.broker_number, self.replica, self.segment_bytes, self.begin, self.end, self.proved
        return (
            all(type(number) is int for number in (*numbers, *chain.from_iterable(self.epochs)))
            and all(isinstance(name, str) for name in (self.cluster, self.broker_name, self.text))
            and len(self.epochs) > 0
            and all(len(epoch) == 3 for epoch in self.epochs)
            and 0 <= self.begin <= self.end
            and 1 <= self.replica <= MOST_REPLICA
            and (self.proved == -1 or are_ranges(self.ranges, self.proved, self.end))
            and (self.last is None or [type(part) for part in self.last] == [int, int, str])
        )


def hello_length(head: bytes) -> int:
    """Return the size of the JSON after the first ``HELLO_HEAD`` bytes of a connection.

    Raises ``ProtocolError`` when these bytes do not begin a hello.
    """
    if head[: len(MAGIC)] != MAGIC:
        if head[0] == 0:
            raise ProtocolError("this may be a RocketMQ slave, which has another replication protocol")
        raise ProtocolError(f"the first bytes {head[: len(MAGIC)].hex()} are not the hello of a slave")
    length: int = LENGTH.unpack_from(head, len(MAGIC))[0]
    if not 2 <= length <= MOST_HELLO:
        raise ProtocolError(f"a hello of {length} bytes is over the limit of {MOST_HELLO}")
    return length


class Data(NamedTuple):
    """A frame of bytes of the log."""

    log_offset: int
    data: bytes


class Control(NamedTuple):
    """A control frame of a master: an object with some of these members.

    ``epoch``, ``readable_end`` (readers may see the log before it), ``begin`` (the master keeps nothing before it), ``in_sync``
    (numbers of the replicas): the present state. ``documents``: name → text of each table that has changed. ``follow``: the log
    offset up to which the two logs are the same; with ``differs`` they should be the same further on, and are not.
    ``comparing``: the master is still comparing the logs, and has come to this log offset. ``copy``: where the master's log
    begins, and for each partition its topic, number, ordinal and text position there, for a slave that has to begin anew.
    ``refused``: why the slave may not follow, or not any further. ``no_master``: why there is no master to follow here yet.
    ``challenge`` and ``proof``: see ``metaq.replication.peers``.
    """

    log_end: int
    content: dict[str, Any]


def _is_offset(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_copy(value: object) -> bool:
    if not isinstance(value, dict) or not _is_offset(value.get("begin")) or not isinstance(value.get("partitions"), list):
        return False
    rows = value["partitions"]
    return all(
        isinstance(row, list) and len(row) == 4 and isinstance(row[0], str) and all(map(_is_offset, row[1:])) for row in rows
    )


_MEMBERS: Final[dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("epoch", "readable_end", "begin", "follow", "comparing"), _is_offset),
    "differs": lambda value: value is True,
    "in_sync": lambda value: isinstance(value, list) and all(map(_is_offset, value)),
    "documents": lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    "copy": _is_copy,
    **dict.fromkeys(("refused", "no_master", "challenge", "proof"), lambda value: isinstance(value, str)),
}


def encode_data(log_offset: int, size: int) -> bytes:
    """Return the head of a data frame, which its bytes follow."""
    return FRAME.pack(log_offset, size)


def encode_control(log_end: int, content: dict[str, Any]) -> bytes:
    body = orjson.dumps(content)
    return FRAME.pack(log_end, CONTROL) + LENGTH.pack(len(body)) + body


class ReplicationFrameReader:
    """The parser of the bytes that a slave receives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes) -> Sequence[Data | Control]:
        """Take bytes and return the frames that are complete by now; raise ``StreamLost`` for anything but frames."""
        self._buffer += data
        found: list[Data | Control] = []
        at = 0
        while (end := self._read(at, found)) > at:
            at = end
        del self._buffer[:at]
        return found

    def _read(self, at: int, found: list[Data | Control]) -> int:
        """Parse the frame that begins at ``at``; return its end, or ``at`` when it has not come completely."""
        buffer = self._buffer
        start = at + FRAME.size
        if start > len(buffer):
            return at
        log_offset, size = FRAME.unpack_from(buffer, at)
        if log_offset < 0 or not CONTROL <= size <= MOST_DATA:
            raise StreamLost(f"not a frame of a master: log offset {log_offset}, size {size}")
        if size != CONTROL:
            if start + size > len(buffer):
                return at
            found.append(Data(log_offset, bytes(buffer[start : start + size])))
            return start + int(size)
        if start + LENGTH.size > len(buffer):
            return at
        length: int = LENGTH.unpack_from(buffer, start)[0]
        start += LENGTH.size
        if not 2 <= length <= MOST_CONTROL:
            raise StreamLost(f"a control frame of {length} bytes")
        if start + length > len(buffer):
            return at
        content = _object(bytes(buffer[start : start + length]), "control frame")
        if not all(right(content[name]) for name, right in _MEMBERS.items() if name in content):
            raise StreamLost("a value of the control frame has the wrong type")
        found.append(Control(log_offset, content))
        return start + length


def _object(body: bytes, what: str) -> dict[str, Any]:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise StreamLost(f"a {what} that is not JSON") from error
    if not isinstance(content, dict):
        raise StreamLost(f"a {what} that is not an object")
    return content
