"""The events of leases in the log: one record of ``METAQ_SYS_LEASES`` 0 for all events of a turn, as JSON.

::

    {"since":4096,"secret":"00ff…",
     "of":[["billing","orders",0],["billing","orders",3]],
     "do":[["p",0,POP,DUE,FIRST,COUNT],        popped: COUNT fresh messages from FIRST on
           ["p",1,POP,DUE,FIRST,COUNT,"5f"],   popped: of COUNT messages those of the bits; a filter passed the others
           ["s",0,NEXT],                       passed: nothing before NEXT is fresh any more
           ["r",0,POP,DUE,[17,23]],            given again: times + 1
           ["r",0,POP,DUE,[17,23],1],          given once more to the attempt that has them: times as before
           ["l",0,[31,40]],                     lined: open, but given only when what has their keys is done
           ["a",0,[[POP,FIRST,"ff"]]],         acked: the bits from FIRST on, of the delivery POP
           ["c",0,POP,ORDINAL,DUE],            changed: leased until DUE
           ["c",0,POP,ORDINAL,DUE,1],          changed: given back, and delayed until DUE
           ["x",0,ORDINAL],                    dead: given up; its copy follows in the record's group, if there is one
           ["o",0,OFFSET],                     reset: everything before OFFSET is done, nothing is open
           ["-",0],                            forgotten: the group has no leases here any more
           ["=",0,BASE,NEXT,[[FIRST,"bits",POP,DUE,TIMES,FIRST_MS]]],   the whole state
           ["+",0,[[FIRST,"bits",POP,DUE,TIMES,FIRST_MS]]]]}            more of a whole state, right after it

The second member of an event is the number of its place in ``of``. FIRST and ORDINAL are queue offsets, bits are hexadecimal
with the lowest one for FIRST, POP, DUE and FIRST_MS are Unix milliseconds. POP names a delivery of a message: an event of
another delivery than the message's last one means nothing. A row of a state has one member more, ``true``, when its message was
given back and is delayed. ``since`` is the ordinal of a record in the same partition from
which on a reader learns the whole state of every place (``metaq.engine.leases.leases``).

The state is what follows from the events in their order (``metaq.leases.state``).
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from metaq.errors import CorruptRecord
from metaq.message import LEASES_TOPIC, GroupPartition, TopicPartition

EVENTS: Final = TopicPartition(LEASES_TOPIC, 0)
"""The partition that holds them."""


class Popped(NamedTuple):
    """Fresh messages were given to a consumer for the first time."""

    pop_ms: int
    due_ms: int
    first: int
    length: int
    bits: int
    """Those that were given; the others of the ``length`` messages were passed."""


class Passed(NamedTuple):
    """Messages before ``next`` that were never given are not wanted, or not there any more."""

    next: int


class Repeated(NamedTuple):
    """Messages were given once more."""

    pop_ms: int
    due_ms: int
    ordinals: Sequence[int]
    same_attempt: bool = False
    """Their consumer asked again, since it had no answer: this delivery does not count."""


class Lined(NamedTuple):
    """Messages that were never given are open, and wait until those before them with the same key are done."""

    ordinals: Sequence[int]


class Acked(NamedTuple):
    """Messages of one delivery are done."""

    pop_ms: int
    first: int
    bits: int


class Changed(NamedTuple):
    """A message of a delivery becomes visible at another time."""

    pop_ms: int
    ordinal: int
    due_ms: int
    given_back: bool = False
    """Nobody has it until then: its consumer gave it back with a delay."""


class Dead(NamedTuple):
    """A message was given up."""

    ordinal: int


class Reset(NamedTuple):
    """The group goes on at another offset."""

    offset: int


class Forgotten(NamedTuple):
    """The group has no leases here any more."""


class Row(NamedTuple):
    """Open messages of one delivery, in a whole state."""

    first: int
    bits: int
    pop_ms: int
    due_ms: int
    times: int
    first_ms: int
    given_back: bool = False
    """As in ``Changed``."""


class Whole(NamedTuple):
    """The state, from which everything before it follows."""

    base: int
    next: int
    rows: Sequence[Row]


class More(NamedTuple):
    """More rows of the whole state before it."""

    rows: Sequence[Row]


LeaseEvent = Popped | Passed | Repeated | Lined | Acked | Changed | Dead | Reset | Forgotten | Whole | More
PlacedEvent = tuple[GroupPartition, LeaseEvent]


class LeaseRecord(NamedTuple):
    """The content of one record."""

    since: int
    events: Sequence[PlacedEvent]
    secret: bytes | None = None


def encode_events(record: LeaseRecord) -> bytes:
    """Return the body of a record. Acks that follow each other in one place become one row."""
    places: dict[GroupPartition, int] = {}
    rows: list[list[Any]] = []
    for place, event in record.events:
        index = places.setdefault(place, len(places))
        if isinstance(event, Acked):
            acked = [event.pop_ms, event.first, f"{event.bits:x}"]
            if rows and rows[-1][:2] == ["a", index]:
                rows[-1][2].append(acked)
            else:
                rows.append(["a", index, [acked]])
        else:
            rows.append(_row(index, event))
    secret = {} if record.secret is None else {"secret": record.secret.hex()}
    return orjson.dumps({"since": record.since, **secret, "of": [list(place) for place in places], "do": rows})


def _row(index: int, event: LeaseEvent) -> list[Any]:
    match event:
        case Popped(pop_ms, due_ms, first, count, bits):
            row = ["p", index, pop_ms, due_ms, first, count]
            return row if bits == (1 << count) - 1 else [*row, f"{bits:x}"]
        case Passed(following):
            return ["s", index, following]
        case Repeated(pop_ms, due_ms, ordinals, same_attempt):
            return ["r", index, pop_ms, due_ms, list(ordinals), *([1] if same_attempt else [])]
        case Lined(ordinals):
            return ["l", index, list(ordinals)]
        case Changed(pop_ms, ordinal, due_ms, given_back):
            return ["c", index, pop_ms, ordinal, due_ms, *([1] if given_back else [])]
        case Dead(ordinal):
            return ["x", index, ordinal]
        case Reset(offset):
            return ["o", index, offset]
        case Forgotten():
            return ["-", index]
        case Whole(base, following, state):
            return ["=", index, base, following, _rows(state)]
        case More(state):
            return ["+", index, _rows(state)]
        case _:
            raise TypeError(event)


def _rows(state: Sequence[Row]) -> list[list[Any]]:
    return [[row.first, f"{row.bits:x}", *row[2:6], *([True] if row.given_back else [])] for row in state]


def decode_events(body: bytes | memoryview) -> LeaseRecord:
    """Return what a record's body says. Raise ``CorruptRecord`` for a body that has another form."""
    try:
        content: dict[str, Any] = orjson.loads(body)
        places = [GroupPartition(*place) for place in content["of"]]
        events = [(places[row[1]], event) for row in content["do"] for event in _events(row)]
        secret = bytes.fromhex(content["secret"]) if "secret" in content else None
        return LeaseRecord(int(content["since"]), events, secret)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorruptRecord(f"a record of leases cannot be read: {error}") from error


def _events(row: list[Any]) -> list[LeaseEvent]:
    match row:
        case ["p", _, int(pop_ms), int(due_ms), int(first), int(count), *bits]:
            return [Popped(pop_ms, due_ms, first, count, int(bits[0], 16) if bits else (1 << count) - 1)]
        case ["s", _, int(following)]:
            return [Passed(following)]
        case ["r", _, int(pop_ms), int(due_ms), list(ordinals), *same_attempt]:
            return [Repeated(pop_ms, due_ms, ordinals, bool(same_attempt))]
        case ["l", _, list(ordinals)]:
            return [Lined(ordinals)]
        case ["a", _, list(acked)]:
            return [Acked(pop_ms, first, int(bits, 16)) for pop_ms, first, bits in acked]
        case ["c", _, int(pop_ms), int(ordinal), int(due_ms), *given_back]:
            return [Changed(pop_ms, ordinal, due_ms, bool(given_back))]
        case ["x", _, int(ordinal)]:
            return [Dead(ordinal)]
        case ["o", _, int(offset)]:
            return [Reset(offset)]
        case ["-", _]:
            return [Forgotten()]
        case ["=", _, int(base), int(following), list(rows)]:
            return [Whole(base, following, _state(rows))]
        case ["+", _, list(rows)]:
            return [More(_state(rows))]
        case _:
            raise ValueError(f"an event of an unknown kind: {str(row)[:80]}")


def _state(rows: list[Any]) -> list[Row]:
    return [Row(first, int(bits, 16), *rest) for first, bits, *rest in rows]
