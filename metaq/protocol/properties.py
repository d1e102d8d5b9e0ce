"""Message properties as senders write them and as records keep them (specs: store format, section 1.2).

``name 01 value 02``, repeated; the last 02 may be missing.
"""

import re
from collections.abc import Mapping
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

UNKEPT: Final = frozenset((WAIT, CHECKSUM, SCHEDULED))
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


_TAKEN_APART: Final = (DELAY, TRANSACTION, REPLY_TO, CHECKSUM, SCHEDULED, *TIMERS)
_CHANGED: Final = re.compile(f"\x02(?:(?:{'|'.join(map(re.escape, _TAKEN_APART))})\x01|{WAIT}\x01(?!true\x02))")
_WAITING: Final = f"\x02{WAIT}\x01true\x02"
_TAG, _UNIQUE, _KEYS = [f"\x02{name}\x01" for name in (TAGS, UNIQUE_KEY, KEYS)]
_UNIQUE_NAME, _KEYS_NAME = _UNIQUE[1:], _KEYS[1:]
_UNIQUE_SIZE, _KEYS_SIZE = len(_UNIQUE_NAME), len(_KEYS_NAME)


AsSent = tuple[bytes, str | None, tuple[str, ...]]
"""What a record keeps, the tag, and the keys by which the message is found."""


class _Shape(NamedTuple):
    """Properties without the values of UNIQ_KEY and KEYS, in which the messages of one sender differ."""

    before: bytes
    between: bytes
    behind: bytes
    """What a record keeps around the two values."""
    unique_first: bool
    tag: str | None


def as_sent(text: str) -> AsSent | None:
    """Properties that the broker leaves as they are; ``None`` for others.

    The short way for nearly every message: a shape is looked into once, then only the two values are cut out and put in.
    """
    at = text.find(_UNIQUE_NAME) + _UNIQUE_SIZE
    if at < _UNIQUE_SIZE:
        return _look_into(text)
    end = text.find("\x02", at)
    unique = text[at:end] if end >= 0 else text[at:]
    rest = text[:at] + text[at + len(unique) :]
    words = ""
    at = rest.find(_KEYS_NAME) + _KEYS_SIZE
    if at >= _KEYS_SIZE:
        end = rest.find("\x02", at)
        words = rest[at:end] if end >= 0 else rest[at:]
        rest = rest[:at] + rest[at + len(words) :]
        if not words:
            return _look_into(text)
    shape = _shapes.get(rest) or _remember(rest, with_words=bool(words))
    if shape is _STRANGE or not unique or "\x01" in unique or "\x01" in words:
        return _look_into(text)
    before, between, behind, unique_first, tag = shape
    keys: tuple[str, ...]
    if not words:
        data, keys = b"%b%b%b" % (before, unique.encode(), behind), (unique,)
    else:
        first, second = (unique, words) if unique_first else (words, unique)
        data = b"%b%b%b%b%b" % (before, first.encode(), between, second.encode(), behind)
        keys = (unique, *filter(None, words.split(" ")))
    return (data, tag, keys) if len(data) <= MOST_BYTES else _look_into(text)


def _remember(rest: str, *, with_words: bool) -> _Shape:
    """Find out about a shape by looking into properties that have it, with values that occur nowhere else."""
    at = rest.find(_UNIQUE_NAME) + _UNIQUE_SIZE
    words_at = rest.find(_KEYS_NAME) + _KEYS_SIZE if with_words else len(rest)
    unique_first = at <= words_at
    first, second = _PROBES if unique_first else _PROBES[::-1]
    low, high = sorted((at, words_at))
    found = _look_into(f"{rest[:low]}{first}{rest[low:high]}{second if with_words else ''}{rest[high:]}")
    shape = _STRANGE
    if found is not None and found[2] == (_PROBES if with_words else _PROBES[:1]):
        before, _, behind = found[0].partition(first.encode())
        between, _, behind = behind.partition(second.encode()) if with_words else (b"", b"", behind)
        shape = _Shape(before, between, behind, unique_first, found[1])
    if len(rest) <= _SHAPE_MOST:
        if len(_shapes) >= _SHAPES_MOST:
            _shapes.clear()
        _shapes[rest] = shape
    return shape


_STRANGE: Final = _Shape(b"", b"", b"", True, None)
"""Stands for shapes that have to be looked into each time."""
_PROBES: Final = ("the\x03unique\x03key", "the\x03other\x03keys")
_SHAPE_MOST: Final = 512
_SHAPES_MOST: Final = 256
_shapes: Final[dict[str, _Shape]] = {}


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
    if words is None:
        return data, tag, (unique,) if unique else ()
    return data, tag, tuple(filter(None, (unique, *words.split(" "))))


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
