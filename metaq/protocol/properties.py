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
DEDUPE_ID: Final = "DEDUPE_ID"
"""The id by which a topic with a window (``dedupe_window_ms``) knows a message; without it, UNIQ_KEY."""
WRITE: Final = "METAQ_WRITE"
"""The place of the row from which a Spark write made the message (``metaq.spark.writing.packing``)."""
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
SHARDING_KEY: Final = "__SHARDINGKEY"
PRIORITY: Final = "_SYS_MSG_PRIORITY_"
"""The priority of a message in a topic with priorities, 0 and more; elsewhere it means nothing."""
FIRST_POP_TIME: Final = "1ST_POP_TIME"
DEAD_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DEAD_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
TIMER_DELAY: Final = "TIMER_DELAY_MS"
TIMER_DELIVER: Final = "TIMER_DELIVER_MS"
TIMER_SECONDS: Final = "TIMER_DELAY_SEC"
TIMERS: Final = (TIMER_SECONDS, TIMER_DELAY, TIMER_DELIVER, "__STARTDELIVERTIME")
"""Properties by which a sender delays a message to any time (``metaq.protocol.delays``). The first one that is present wins.

The last is that of old clients of a cloud service."""
TIMER_OUT: Final = "TIMER_OUT_MS"
"""When a delayed message is due. The delivered copy has it, too: whoever sends that again does not delay it again."""
TIMER_ENQUEUE, TIMER_DEQUEUE = "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"
"""On the delivered copy: when the message was stored, and when it was delivered."""

TRACE_PARENT: Final = "traceparent"
"""The context of the trace that a message belongs to (W3C trace context)."""

SCHEDULED: Final = "METAQ_SCHEDULED"
"""On the delivered copy of a delayed message, the original: its *level:ordinal*. Only the broker sets it."""

MESSAGE_ID: Final = "METAQ_ID"
"""The text id of a message put in a transaction, which had no log offset yet when it was answered. Only the broker sets it."""

HALF: Final = "METAQ_HALF"
"""On a copy of a half message, the first record of it: *ordinal:log offset:store time*. Only the broker sets it."""

GROUP_END: Final = "METAQ_GROUP_END"
"""The log offset where the group that this record begins ends (``metaq.store.recordgroups``). Only the broker sets it."""

TIMER: Final = "METAQ_TIMER"
"""On a park that stores a delayed message again: *id:place:store time* (``metaq.timers.records``). Only the broker sets it."""

CRON: Final = "METAQ_CRON"
"""On a run of a recurring message: *name:number* of its definition (``metaq.timers.definitions``). Only the broker sets it."""

DEAD: Final = "METAQ_DEAD"
"""On a dead letter of a leased message: why it was given up (``metaq.engine.leases.poison``). Only the broker sets it."""

PREPARED_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
PRODUCER_GROUP: Final = "PGROUP"

OWN: Final = (SCHEDULED, MESSAGE_ID, HALF, GROUP_END, TIMER, CRON, DEAD)
UNKEPT: Final = frozenset((WAIT, CHECKSUM, *OWN))
"""Names that records do not keep from a sender: they are meant for the broker only, or the sender may not set them."""

NONE: Final[Mapping[str, str]] = {}

MOST_BYTES: Final = MAX_PROPERTIES_LENGTH - CHECKSUM_SIZE


def parse(text: str) -> dict[str, str]:
    """Return the values by name. Pieces without 01, without name or without value are skipped; of equal names the last wins."""
    pairs = {}
    for piece in text.split("\x02"):
        name, _, value = piece.partition("\x01")
        if name and value:
            pairs[name] = value
    return pairs


TAKEN_APART: Final = (DELAY, TRANSACTION, REPLY_TO, CHECKSUM, *OWN, *TIMERS)
"""Properties that the broker acts on, or does not keep: a message that has one is parsed."""
UNUSUAL_WAIT: Final = f"{WAIT}\x01(?!true\x02)"
"""The pattern of a WAIT that is not ``true``; one that is, is left out."""
_CHANGED: Final = re.compile(f"\x02(?:(?:{'|'.join(map(re.escape, TAKEN_APART))})\x01|{UNUSUAL_WAIT})")
_WAITING: Final = f"\x02{WAIT}\x01true\x02"
_TAG, _UNIQUE, _KEYS = [f"\x02{name}\x01" for name in (TAGS, UNIQUE_KEY, KEYS)]
_UNIQUE_NAME, _KEYS_NAME = _UNIQUE[1:], _KEYS[1:]
_DIFFERING: Final = frozenset((DEDUPE_ID, TRACE_PARENT, WRITE))
"""Properties that differ in each message, and stand at the end in those of metaq's client: they are kept out of the shape."""


COPIED: Final = (TIMER_DEQUEUE, PREPARED_OFFSET)
"""Properties of copies that clients get, and may send again: the id of such a message does not count."""
AsSent = tuple[bytes, str | None, tuple[str, ...], str | None]
"""The properties that a record keeps, the tag, the keys by which the message is looked up, each once, and its id.

The id is ``None`` when it has to be looked for (``metaq.dedupe.records.id_in``); there may be none.
"""
NO_PROPERTIES: Final[AsSent] = (b"", None, (), None)
_OTHER_IDS: Final = (DEDUPE_ID, *COPIED)
"""Properties because of which the id is not the value of UNIQ_KEY."""


class _Shape(NamedTuple):
    """Properties without the values of UNIQ_KEY and KEYS, in which the messages of one sender differ."""

    head: str
    middle: str
    end: str
    """The text around the values; ``middle`` begins with 02, or is empty when there is only one of the two."""
    before: str
    between: str
    behind: str
    """What a record keeps around the values."""
    unique_first: bool
    """True when UNIQ_KEY is the first value, or the only one."""
    is_id: bool
    """True when the value of UNIQ_KEY is the id of the message."""
    tag: str | None


def as_sent(text: str, most: int = len(_DIFFERING)) -> AsSent | None:
    """Return properties that the broker stores as they are, but for a WAIT of ``true``; ``None`` when they must be parsed.

    This is the fast path of nearly every message: a shape that comes again is analyzed once, then only the values
    are cut out and put in. ``MessageIllegal`` when the properties are longer than a record can keep.

    ``most`` is how many properties at the end may differ in each message.
    """
    found = _fill(_latest[0], text)
    if found is not None and len(found[0]) <= MOST_BYTES:
        return found
    at = text.rfind("\x02", 0, -1) + 1
    name_end = text.find("\x01", at)
    if most and name_end > at and text[at:name_end] in _DIFFERING:
        return _with_differing(text, at, name_end, most)
    return _shaped(text)


def _with_differing(text: str, at: int, name_end: int, most: int) -> AsSent | None:
    """Do the work of ``as_sent`` for properties of which the last one, at ``at``, is another one in each message."""
    value = text[name_end + 1 :].removesuffix("\x02")
    found: AsSent | None = NO_PROPERTIES
    if at:
        found = as_sent(text[:at], most - 1)
    if found is None or not is_value(value):
        return _look_into(text)
    name = text[at:name_end]
    data = f"{name}\x01{value}\x02".encode()
    if at:
        data = found[0] + data
    ident = found[3]
    if name == DEDUPE_ID and (ident is not None or not at):  # else there may be a property because of which none counts
        ident = value
    return (data, found[1], found[2], ident) if len(data) <= MOST_BYTES else _look_into(text)


def _shaped(text: str) -> AsSent | None:
    """Do the work of ``as_sent`` by the shape of the properties."""
    found = _fill(_latest[0], text)
    if found is None:
        rest, at, words_at = _without_values(text)
        if at < 0 and words_at < 0:
            return _look_into(text)
        shape = _shapes.get((rest, at < words_at))
        if shape is None and _is_met(rest):
            shape = _remember(rest, at, words_at)
        if shape is None or shape is _STRANGE:
            return _look_into(text)
        _latest[0] = shape
        found = _fill(shape, text)
    return found if found is not None and len(found[0]) <= MOST_BYTES else _look_into(text)


def _fill(shape: _Shape, text: str) -> AsSent | None:
    """Return what a record keeps of ``text``; ``None`` when ``text`` does not have this shape. An empty value never matches."""
    head, middle, end, before, between, behind, unique_first, is_id, tag = shape
    if not (text.startswith(head) and text.endswith(end)):
        return None
    at, stop = len(head), len(text) - len(end)
    if not middle:
        value = text[at:stop]
        if not is_value(value):
            return None
        keys = (value,) if unique_first or " " not in value else _distinct(*value.split(" "))
        return f"{before}{value}{behind}".encode(), tag, keys, value if is_id else None
    first_end = text.find("\x02", at)
    second_at = first_end + len(middle)
    if text[first_end:second_at] != middle:
        return None
    first, second = text[at:first_end], text[second_at:stop]
    if not (is_value(first) and is_value(second)):
        return None
    unique, words = (first, second) if unique_first else (second, first)
    keys = _distinct(unique, *words.split(" ")) if " " in words or unique == words else (unique, words)
    return f"{before}{first}{between}{second}{behind}".encode(), tag, keys, unique if is_id else None


def is_value(text: str) -> bool:
    """Return whether a property can have this value: it is not empty, and has none of the characters that divide properties."""
    return bool(text) and "\x01" not in text and "\x02" not in text


def _distinct(*keys: str | None) -> tuple[str, ...]:
    """Return the keys that are not empty or ``None``, each once."""
    return tuple(dict.fromkeys(filter(None, keys)))


def _without_values(text: str) -> tuple[str, int, int]:
    """Return properties without the values of UNIQ_KEY and KEYS, and the positions of these; −1 for one that is not there."""
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
    """Return where the value that begins at ``at`` ends."""
    found = text.find("\x02", at)
    return len(text) if found < 0 else found


def _is_met(rest: str) -> bool:
    """Return whether properties without their values were met before.

    Only then a shape is learned. A sender whose messages differ in another property has a new one each time, and to learn it
    costs three times what it would save.
    """
    if rest in _met:
        return True
    if len(rest) <= _SHAPE_MOST:
        if len(_met) >= _SHAPES_MOST:
            _met.clear()
        _met.add(rest)
    return False


def _remember(rest: str, at: int, words_at: int) -> _Shape:
    """Learn a shape from sample properties that have it, whose values occur nowhere else; return it."""
    shape = _STRANGE
    both = at >= 0 and words_at >= 0
    unique_first = 0 <= at < words_at or words_at < 0
    low, high = sorted((at, words_at)) if both else (max(at, words_at), max(at, words_at))
    head, middle, end = rest[:low], rest[low:high], rest[high:]
    first, second = _PROBES if unique_first or not both else _PROBES[::-1]
    found = _look_into(f"{head}{first}{middle}{second if both else ''}{end}")
    if found is not None and found[2] == (_PROBES if both else _PROBES[:1]):
        before, _, behind = found[0].decode().partition(first)
        between, _, behind = behind.partition(second) if both else ("", "", behind)
        is_id = at >= 0 and not any(f"{name}\x01" in rest for name in _OTHER_IDS)
        shape = _Shape(head, middle, end, before, between, behind, unique_first, is_id, found[1])
    if len(_shapes) >= _SHAPES_MOST:
        _shapes.clear()
    _shapes[rest, at < words_at] = shape
    return shape


_STRANGE: Final = _Shape("", "\x01", "", "", "", "", True, False, None)
"""Stands for shapes whose properties must be analyzed each time; it matches nothing, as its middle does not begin with 02."""
_PROBES: Final = ("the\x03unique\x03key", "the\x03other\x03keys")
_SHAPE_MOST: Final = 512
_SHAPES_MOST: Final = 256
_shapes: Final[dict[tuple[str, bool], _Shape]] = {}
_met: Final[set[str]] = set()
_latest: Final = [_STRANGE]
"""The shape of the previous message, which the next one usually has too."""


def _look_into(text: str) -> AsSent | None:
    """Do the work of ``as_sent`` without a shape: still a third of the cost of parsing the pairs and encoding them again."""
    marked = f"\x02{text}" if text[-1:] == "\x02" else f"\x02{text}\x02"
    if _CHANGED.search(marked):
        return None
    data, tag, unique, words = looked_up(marked)
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    return data, tag, _distinct(unique, *(words or "").split(" ")), None


def looked_up(marked: str) -> tuple[bytes, str | None, str | None, str | None]:
    """Return what a record keeps of properties with 02 before and after them, and the values of TAGS, UNIQ_KEY and KEYS.

    There is no WAIT in them but one that is ``true``.
    """
    marked = marked.replace(_WAITING, "\x02", 1)
    return marked[1:].encode(), _last(marked, _TAG), _last(marked, _UNIQUE), _last(marked, _KEYS)


def _last(marked: str, name: str) -> str | None:
    """Return the last value of ``name``, both given with their separators; ``None`` when it is absent or empty."""
    at = marked.rfind(name)
    if at < 0:
        return None
    at += len(name)
    return marked[at : marked.index("\x02", at)] or None


def encode(pairs: Mapping[str, str], own: Mapping[str, str] = NONE) -> bytes:
    """Return pairs in the record's form, and after them the broker's ``own``; names in ``UNKEPT`` are left out of ``pairs``.

    ``MessageIllegal`` when that is longer than a record can keep.
    """
    pieces = [f"{name}\x01{value}\x02" for name, value in pairs.items() if name not in UNKEPT]
    if own:
        pieces += [f"{name}\x01{value}\x02" for name, value in own.items()]
    data = "".join(pieces).encode()
    if len(data) > MOST_BYTES:
        raise MessageIllegal(f"properties of {len(data)} bytes are longer than {MOST_BYTES}")
    return data
