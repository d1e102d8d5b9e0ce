"""Message frames: messages that a broker pushes between replies, or answers to ``pop`` (specs: text protocol, section 16).

::

    message LENGTH OPAQUE ID TOPIC PARTITION POSITION ATTEMPT FLAG [priority=N] [key=WORD] [crc=N] CR LF body

OPAQUE is that of the ``subscribe`` or ``pop``, ATTEMPT is 1 for the first delivery. FLAG and body are those of a text message:
with bit 0 of FLAG the body begins with the attribute, and ``crc`` is its checksum. Readers skip words behind FLAG that they do
not know.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from metaq.errors import BadRequest, StreamLost
from metaq.protocol.properties import PRIORITY, SHARDING_KEY
from metaq.protocol.record import HEADER_SIZE, TAGS
from metaq.protocol.text.ids import MOST_ORDINAL, MessageId, read_id
from metaq.protocol.text.messages import Stored, payload_fields, text_body
from metaq.protocol.text.tokens import INT32, integer, is_word

PUSHED: Final = b"message "
_HEAD: Final = re.compile(
    rb"message ([0-9]{1,10}) ([+-]?[0-9]{1,19}) ([!-~]+) ([!-~]+) ([0-9]{1,10}) ([0-9]{1,19}) ([0-9]{1,10}) (-?[0-9]{1,10})"
    rb"((?: .*)?)",
    re.DOTALL,
)
_MOST_INT32: Final = INT32[1]
MOST_COPIED: Final = 1024
"""Bytes of a body that are copied behind its line: that costs less than to send one buffer more."""

_ATTRIBUTE: Final = TAGS.encode() + b"\x01"
_PRIORITY: Final = PRIORITY.encode() + b"\x01"
_KEY: Final = SHARDING_KEY.encode() + b"\x01"
"""The names of the properties of which frames tell, as records have them: most messages have none of these."""


class PushedHead(NamedTuple):
    """The line of a message frame."""

    length: int
    opaque: int
    id: MessageId
    topic: str
    partition: int
    position: int
    attempt: int
    flag: int
    priority: int | None
    key: str | None
    crc: int | None


class Pushed(NamedTuple):
    """A message that came without being the reply to a command."""

    head: PushedHead
    body: bytes


class Push(NamedTuple):
    """A message on its way to a client: what its frame says beyond the record."""

    opaque: str
    id: MessageId
    topic: str
    position: int
    attempt: int
    with_crc: bool


def encode_pushed(push: Push, stored: Stored, out: list[bytes | memoryview]) -> int:
    """Append the frame of one intact record to ``out`` as buffers, a long body as a view of the record; return its size.

    A priority that is no number, and a key that cannot be a word, stay out of the line.
    """
    opaque, message_id, topic, position, attempt, with_crc = push
    view, at, size, _ = stored
    crc, flag, length = payload_fields(stored)
    start = at + HEADER_SIZE
    rest = bytes(view[start + length : at + size])
    told, prefix = "", b""
    body: bytes | memoryview = view[start : start + length]
    if _ATTRIBUTE in rest or _PRIORITY in rest or _KEY in rest:
        crc, flag, prefix, body, pairs = text_body(stored)
        length = len(prefix) + len(body)
        told = _told(pairs)
    if with_crc:
        told += f" crc={crc}"
    partition, ordinal, token = message_id
    line = f"message {length} {opaque} {partition}-{ordinal}-{token} {topic} {partition} {position} {attempt} {flag}{told}\r\n"
    head = line.encode() + prefix
    if length <= MOST_COPIED:
        out.append(head + body)
    else:
        out.append(head)
        out.append(body)
    return len(head) + len(body)


def _told(pairs: Mapping[str, str]) -> str:
    """Return the words of a line for a message's priority and key."""
    words, priority, key = "", _priority(pairs.get(PRIORITY)), pairs.get(SHARDING_KEY)
    if priority is not None:
        words += f" priority={priority}"
    if key is not None and is_word(key):
        words += f" key={key}"
    return words


def _priority(value: str | None) -> int | None:
    try:
        return None if value is None else integer(value, PRIORITY, (0, _MOST_INT32))
    except BadRequest:
        return None  # a sender's own property


def read_pushed_line(line: bytes) -> PushedHead:
    """Return what the line of a message frame says; ``StreamLost`` when it is none."""
    found = _HEAD.fullmatch(line)
    if found is None:
        raise StreamLost(f"{line[:80]!r} is not the line of a message")
    try:
        values = _options(found[9].decode())
        return PushedHead(
            length=int(found[1]),
            opaque=int(found[2]),
            id=read_id(found[3].decode("ascii")),
            topic=found[4].decode("ascii"),
            partition=int(found[5]),
            position=integer(found[6].decode("ascii"), "position", (0, MOST_ORDINAL)),
            attempt=integer(found[7].decode("ascii"), "attempt", (1, _MOST_INT32)),
            flag=integer(found[8].decode("ascii"), "flag", INT32),
            priority=_number(values, "priority"),
            key=values.get("key"),
            crc=_number(values, "crc"),
        )
    except (BadRequest, UnicodeDecodeError) as error:
        raise StreamLost(f"{line[:80]!r} is not the line of a message: {error}") from error


def _options(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split(" ")]
    return {name: value for name, equals, value in pairs if equals}


def _number(values: dict[str, str], name: str) -> int | None:
    return integer(values[name], name, (0, _MOST_INT32)) if name in values else None
