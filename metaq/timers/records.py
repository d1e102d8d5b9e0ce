"""The records of timers in the log: *parks*, which hold delayed messages, and *marks*, which say what became of them.

::

    METAQ_SYS_TIMERS 0   parks: the message, and at the end of its properties TIMER_OUT_MS, REAL_TOPIC, REAL_QID
    METAQ_SYS_TIMERS 1   marks, as JSON:

    {"do":"deliver","to":[1700000000000,81920],"messages":250,"dropped":0,"segments":{"0":250}}
    {"do":"cancel","timers":[[1700000000000,81920,81920]]}
    {"do":"secret","secret":"5f…"}
    {"do":"define",…}, {"do":"undefine",…}                  recurring messages: metaq.timers.definitions

A timer is known by its *key*: the time at which it is due, in Unix milliseconds, and its *id*, the log offset of its first
park. A park that stores a timer again has ``METAQ_TIMER``, *id:place:store time* of the park before it and of the first one.

The copies that a ``deliver`` mark delivers follow it as members of its group (``metaq.store.recordgroups``). Such a mark
means all parks before it whose keys are not greater than ``to``, except those that were cancelled. ``segments`` counts, by the
base of a segment, the parks in it that the mark ends. A ``cancel`` mark has the key and the newest place of each timer.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson
from librt.strings import read_i32_be

from metaq.errors import CorruptRecord
from metaq.message import TIMERS_TOPIC, TopicPartition
from metaq.protocol.properties import CRON, REAL_QUEUE, REAL_TOPIC, TIMER, TIMER_OUT
from metaq.protocol.record import CHECKSUM_SIZE, HEADER_SIZE, Record, decode_record
from metaq.protocol.text.messages import Stored

PARKS: Final = TopicPartition(TIMERS_TOPIC, 0)
MARKS: Final = TopicPartition(TIMERS_TOPIC, 1)

_KEY: Final = struct.Struct(">QQ")
_OUT: Final = f"{TIMER_OUT}\x01".encode()
_AGAIN: Final = f"{TIMER}\x01".encode()
_CRON: Final = f"{CRON}\x01".encode()
MOST_IN_RUN: Final = 256
"""Parks in one event."""
_OWN: Final = b"METAQ_"
"""The begin of the names of properties that only the broker sets."""
_END: Final = 2
LENGTH_AT: Final = 84
"""The place of the body's length in a record's header."""
PROPERTIES_AT: Final = 1 + len(PARKS.topic) + 2
"""Where the properties of a park begin after its body."""
_MOST_DIGITS: Final = 18
LATEST_MS: Final = (1 << 53) - 1
"""The latest time at which a message can be due: what JSON readers can represent, in the year 287396."""

Key = bytes
"""The key of a timer as bytes, which sort like the pair of its time and its id."""


def key_of(due_ms: int, ident: int) -> Key:
    """Return the key of a timer."""
    return _KEY.pack(due_ms, ident)


def parts_of(key: Key) -> tuple[int, int]:
    """Return the time and the id in a key."""
    due_ms, ident = _KEY.unpack(key)
    return due_ms, ident


class Again(NamedTuple):
    """The origin of a park that stores its timer once more."""

    ident: int
    place: int
    """The log offset of the park before this one."""
    since_ms: int
    """When the timer was first stored, in Unix milliseconds."""

    def __str__(self) -> str:
        return f"{self.ident}:{self.place}:{self.since_ms}"


class Park(NamedTuple):
    """A park: a timer enters the table, or moves to another place."""

    key: Key
    place: int
    before: int | None
    """The place of the park that this one replaces; ``None`` for a timer's first park."""
    end: int
    """The log offset after the record."""
    definition: int | None = None
    """The number of the recurring message of which this is the next run."""


class Parks:
    """First parks in the order of the log, none of a recurring message: nearly all that comes. Together they cost a third."""

    __slots__ = ("end", "keys", "places")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.places: list[int] = []
        self.end = 0
        """The log offset after the last record."""

    @property
    def is_full(self) -> bool:
        """True when no more may be added."""
        return len(self.keys) == MOST_IN_RUN

    def add(self, key: Key, place: int, end: int) -> None:
        """Take one more."""
        self.keys.append(key)
        self.places.append(place)
        self.end = end


class Delivered(NamedTuple):
    """A mark of delivery."""

    to: Key
    segments: dict[int, int]
    end: int


class Cancelled(NamedTuple):
    """A mark of cancels: the keys of timers, and the places of their newest parks."""

    timers: list[tuple[Key, int]]
    end: int


class Secret(NamedTuple):
    """The secret that authenticates handles."""

    secret: bytes
    place: int
    end: int


class Definition(NamedTuple):
    """A recurring message, without its body and what else only a park of it needs."""

    name: str
    number: int
    """The log offset of its first mark."""
    place: int
    """The log offset of its newest mark, which holds the whole."""
    cron: str
    zone: str
    topic: str
    partition: int
    missed: str
    """One of ``metaq.timers.definitions.Missed``."""


class Ended(NamedTuple):
    """The end of a definition: its number, and the run that is cancelled with it."""

    number: int
    key: Key
    place: int


class Defined(NamedTuple):
    """A mark that defines a recurring message, perhaps in place of another one with its name, or stores it once more."""

    definition: Definition
    replaced: Ended | None
    end: int


class Undefined(NamedTuple):
    """A mark that ends a recurring message."""

    name: str
    ended: Ended
    end: int


TimerEvent = Park | Parks | Delivered | Cancelled | Secret | Defined | Undefined


def record_count(event: TimerEvent) -> int:
    """Return how many records an event is of."""
    return len(event.keys) if isinstance(event, Parks) else 1


def properties_of_park(due_ms: int, topic: str, partition: int) -> dict[str, str]:
    """Return what the broker adds to the properties of a message that it parks, in the order in which they must stand."""
    return {TIMER_OUT: str(due_ms), REAL_TOPIC: topic, REAL_QUEUE: str(partition)}


def deliver_mark(to: Key, messages: int, dropped: int, segments: dict[int, int]) -> bytes:
    """Return the body of a mark of delivery."""
    counts = {str(base): count for base, count in segments.items()}
    return orjson.dumps({"do": "deliver", "to": parts_of(to), "messages": messages, "dropped": dropped, "segments": counts})


def cancel_mark(timers: list[tuple[Key, int]]) -> bytes:
    """Return the body of a mark of cancels."""
    return orjson.dumps({"do": "cancel", "timers": [[*parts_of(key), place] for key, place in timers]})


def secret_mark(secret: bytes) -> bytes:
    """Return the body of a mark that holds the secret."""
    return orjson.dumps({"do": "secret", "secret": secret.hex()})


def park_origin(record: Record) -> Again:
    """Return the origin of the timer in a park, which may be its first one."""
    found = _value(record.properties, _AGAIN)
    if found is None:
        return Again(record.log_offset, record.log_offset, record.store_ms)
    return Again(*map(int, found.split(b":")))


def due_of_first(data: bytes) -> int | None:
    """Return when an intact record is due that is the first park of a timer, as nearly all are, and of no recurring message.

    Returns ``None`` where only ``event_of_park`` can say what a record means. This costs a fifth of that.
    """
    length: int = read_i32_be(data, LENGTH_AT)
    text = data[HEADER_SIZE + length + PROPERTIES_AT : len(data) - CHECKSUM_SIZE]
    if text.find(_OWN) >= 0:  # by ``in`` it would take twice as long: that first tries a number
        return None
    at = text.rfind(_OUT)
    if at < 0 or (at > 0 and text[at - 1] != _END):
        return None
    at += len(_OUT)
    end = text.find(b"\x02", at)
    if end < at:  # before a slice is made: compiled, one that ends before it begins is an error
        return None
    value = text[at:end]
    return int(value) if value.isdigit() and len(value) <= _MOST_DIGITS else None


def event_of_park(stored: Stored) -> Park:
    """Return what a park means. Raise ``CorruptRecord`` when an intact record is not a park."""
    view, at, size, _ = stored
    properties = decode_record(bytes(view[at : at + size])).properties
    place, end = stored.log_offset, stored.log_offset + size
    try:
        due, again, cron = _value(properties, _OUT), _value(properties, _AGAIN), _value(properties, _CRON)
        number = None if cron is None else int(cron.rpartition(b":")[2])
        if due is None:
            raise CorruptRecord(f"the record at log offset {place} is not a park: it has no {TIMER_OUT}")
        if again is None:
            return Park(key_of(int(due), place), place, None, end, number)
        ident, before, _ = map(int, again.split(b":"))
        return Park(key_of(int(due), ident), place, before, end, number)
    except (ValueError, struct.error) as error:
        raise CorruptRecord(f"the park at log offset {place} cannot be read: {error}") from error


def event_of_mark(stored: Stored) -> TimerEvent:
    """Return what a mark means. Raise ``CorruptRecord`` when an intact record is not a mark."""
    record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
    place, end = stored.log_offset, stored.log_offset + stored.size
    try:
        mark: dict[str, Any] = orjson.loads(bytes(record.body))
        match mark["do"]:
            case "deliver":
                return Delivered(key_of(*mark["to"]), {int(base): count for base, count in mark["segments"].items()}, end)
            case "cancel":
                return Cancelled([(key_of(due, ident), at) for due, ident, at in mark["timers"]], end)
            case "secret":
                return Secret(bytes.fromhex(mark["secret"]), place, end)
            case "define":
                replaced = ended_of(mark["replaced"]) if mark.get("replaced") else None
                return Defined(definition_of(mark, place), replaced, end)
            case "undefine":
                return Undefined(mark["name"], ended_of(mark["ended"]), end)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CorruptRecord(f"the mark of timers at log offset {place} cannot be read: {error}") from error
    raise CorruptRecord(f"the mark of timers at log offset {place} is of an unknown kind")


def definition_of(mark: Mapping[str, Any], place: int) -> Definition:
    """Return the definition in a mark at a log offset."""
    number = mark.get("number", place)
    cron, zone, topic = (str(mark[name]) for name in ("cron", "zone", "topic"))
    return Definition(str(mark["name"]), number, place, cron, zone, topic, int(mark["partition"]), str(mark["missed"]))


def ended_of(numbers: Sequence[int]) -> Ended:
    """Return the end of a definition as marks have it: number, due, id and place of the run."""
    number, due_ms, ident, place = numbers
    return Ended(number, key_of(due_ms, ident), place)


def _value(properties: bytes, name: bytes) -> bytes | None:
    """Return the value of the last property of a name. What the broker adds stands after everything that a sender gave."""
    data, found = b"\x02" + properties, b"\x02" + name
    at = data.rfind(found)
    if at < 0:
        return None
    at += len(found)
    return data[at : data.index(b"\x02", at)]
