"""Message properties as senders write them and as records keep them (specs: store format, section 1.2).

``name 01 value 02``, repeated; the last 02 may be missing.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from metaq.errors import MessageIllegal
from metaq.protocol.record import CHECKSUM_SIZE, MAX_PROPERTIES_LENGTH, TAGS

KEYS: Final = "KEYS"
UNIQUE_KEY: Final = "UNIQ_KEY"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE: Final = "REAL_QID"
TRANSACTION: Final = "TRAN_MSG"
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_ID: Final = "ORIGIN_MESSAGE_ID"
REPLY_TO: Final = "REPLY_TO_CLIENT"
CLUSTER: Final = "CLUSTER"
CHECKSUM: Final = "__CRC32#"
TIMERS: Final = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME")

SCHEDULED: Final = "METAQ_SCHEDULED"
"""Which delayed message a record is the delivered copy of: *level:ordinal*. Only the broker sets it."""

MESSAGE_ID: Final = "METAQ_ID"
"""The text id of a message that was put in a transaction, which had no place when it was answered. Only the broker sets it."""

HALF: Final = "METAQ_HALF"
"""Which half message a record is a copy of: *ordinal:log offset:store time* of the first one. Only the broker sets it."""

GROUP_END: Final = "METAQ_GROUP_END"
"""Where the group of records ends that this one begins (``metaq.store.recordgroups``). Only the broker sets it."""

PREPARED_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
PRODUCER_GROUP: Final = "PGROUP"

OWN: Final = (SCHEDULED, MESSAGE_ID, HALF, GROUP_END)
UNKEPT: Final = frozenset((WAIT, CHECKSUM, *OWN))
"""What a sender says to the broker only, or may not say at all."""

NONE: Final[Mapping[str, str]] = {}

MOST_BYTES: Final = MAX_PROPERTIES_LENGTH - CHECKSUM_SIZE


def parse(text: str) -> dict[str, str]:
    """Pairs by name. Pieces without 01, without name or without value are skipped; of equal names the last wins."""
    pairs = {}
    for piece in text.split("\x02"):
        name, _, value = piece.partition("\x01")
        if name and value:
            pairs[name] = value
    return pairs


_TAKEN_APART: Final = (DELAY, TRANSACTION, REPLY_TO, CHECKSUM, *OWN, *TIMERS)
_CHANGED: Final = re.compile(f"\x02(?:(?:{'|'.join(map(re.escape, _TAKEN_APART))})\x01|{WAIT}\x01(?!true\x02))")
_WAITING: Final = f"\x02{WAIT}\x01true\x02"
_TAG, _UNIQUE, _KEYS = [f"\x02{name}\x01" for name in (TAGS, UNIQUE_KEY, KEYS)]
_UNIQUE_NAME, _KEYS_NAME = _UNIQUE[1:], _KEYS[1:]


AsSent = tuple[bytes, str | None, tuple[str, ...]]
"""What a record keeps, the tag, and the keys by which the message is found, each once."""


class _Shape(NamedTuple):
    """Properties without the values of UNIQ_KEY and KEYS, in which the messages of one sender differ."""

    match: Callable[[str], re.Match[str] | None]
    """Finds the values, in the order in which they are sent."""
    before: bytes
    between: bytes
    behind: bytes
    """What a record keeps around the values; without KEYS, nothing is between them."""
    unique_first: bool
    tag: str | None


def as_sent(text: str) -> AsSent | None:
    """Properties that the broker leaves as they are; ``None`` for others.

    The short way for nearly every message: a shape is looked into once, then only the two values are cut out and put in.
    """
    found = _fill(_latest[0], text)
    if found is None:
        rest, at, words_at = _without_values(text)
        if at < 0:
            return _look_into(text)
        shape = _shapes.get((rest, at < words_at)) or _remember(rest, at, words_at)
        if shape is _STRANGE:
            return _look_into(text)
        _latest[0] = shape
        found = _fill(shape, text)
    return found if found is not None and len(found[0]) <= MOST_BYTES else _look_into(text)


def _fill(shape: _Shape, text: str) -> AsSent | None:
    """What a record keeps of ``text``; ``None`` when it does not have this shape, or has strange values in it."""
    match, before, between, behind, unique_first, tag = shape
    found = match(text)
    if found is None:
        return None
    values = found.groups()
    if len(values) == 1:
        return before + values[0].encode() + behind, tag, values
    first, second = values
    unique, words = values if unique_first else (second, first)
    keys = _distinct(unique, *words.split(" ")) if " " in words or unique == words else (unique, words)
    return before + first.encode() + between + second.encode() + behind, tag, keys


def _distinct(*keys: str | None) -> tuple[str, ...]:
    """Those that are there, each once."""
    return tuple(dict.fromkeys(filter(None, keys)))


def _without_values(text: str) -> tuple[str, int, int]:
    """Properties without the values of UNIQ_KEY and KEYS, and where these belong; −1 for one that is not there."""
    at, words_at = -1, -1
    found = text.find(_UNIQUE_NAME)
    if found >= 0:
        at = found + len(_UNIQUE_NAME)
        text = text[:at] + text[_end(text, at) :]
    found = text.find(_KEYS_NAME)
    if found >= 0:
        words_at = found + len(_KEYS_NAME)
        size = _end(text, words_at) - words_at
        text = text[:words_at] + text[words_at + size :]
        at -= size if at > words_at else 0
    return text, at, words_at


def _end(text: str, at: int) -> int:
    """Where the value that begins at ``at`` ends."""
    found = text.find("\x02", at)
    return len(text) if found < 0 else found


def _remember(rest: str, at: int, words_at: int) -> _Shape:
    """Find out about a shape by looking into properties that have it, with values that occur nowhere else."""
    shape = _STRANGE
    with_words = words_at >= 0
    unique_first = at < words_at or not with_words
    low, high = sorted((at, words_at)) if with_words else (at, at)
    head, middle, end = rest[:low], rest[low:high], rest[high:]
    first, second = _PROBES if unique_first else _PROBES[::-1]
    found = _look_into(f"{head}{first}{middle}{second if with_words else ''}{end}")
    if found is not None and found[2] == (_PROBES if with_words else _PROBES[:1]):
        before, _, behind = found[0].partition(first.encode())
        between, _, behind = behind.partition(second.encode()) if with_words else (b"", b"", behind)
        pattern = _VALUE.join(map(re.escape, (head, middle, end) if with_words else (head, end)))
        shape = _Shape(re.compile(pattern).fullmatch, before, between, behind, unique_first, found[1])
    if len(rest) <= _SHAPE_MOST:
        if len(_shapes) >= _SHAPES_MOST:
            _shapes.clear()
        _shapes[rest, at < words_at] = shape
    return shape


_VALUE: Final = "([^\x01\x02]+)"
_STRANGE: Final = _Shape(re.compile("(?!)").fullmatch, b"", b"", b"", True, None)
"""Stands for shapes that have to be looked into each time; nothing has it."""
_PROBES: Final = ("the\x03unique\x03key", "the\x03other\x03keys")
_SHAPE_MOST: Final = 512
_SHAPES_MOST: Final = 256
_shapes: Final[dict[tuple[str, bool], _Shape]] = {}
_latest: Final = [_STRANGE]
"""The shape of the message before, which the next one most often has too."""


def _look_into(text: str) -> AsSent | None:
    """As ``as_sent``, without a shape: still a third of the cost of taking the pairs apart and writing them again."""
    marked = f"\x02{text}" if text[-1:] == "\x02" else f"\x02{text}\x02"
    if _CHANGED.search(marked):
        return None
    marked = marked.replace(_WAITING, "\x02", 1)
    tag, unique, words = _last(marked, _TAG), _last(marked, _UNIQUE), _last(marked, _KEYS)
    data = marked[1:].encode()
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    return data, tag, _distinct(unique, *(words or "").split(" "))


def _last(marked: str, name: str) -> str | None:
    """The last value under ``name``, both with their separators; ``None`` also for an empty one."""
    at = marked.rfind(name)
    if at < 0:
        return None
    at += len(name)
    return marked[at : marked.index("\x02", at)] or None


def encode(pairs: Mapping[str, str], own: Mapping[str, str] = NONE) -> bytes:
    """Pairs in the record's form, and behind them the broker's ``own``; ``MessageIllegal``: more than a record can keep."""
    pieces = [f"{name}\x01{value}\x02" for name, value in pairs.items() if name not in UNKEPT]
    if own:
        pieces += [f"{name}\x01{value}\x02" for name, value in own.items()]
    data = "".join(pieces).encode()
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    return data
