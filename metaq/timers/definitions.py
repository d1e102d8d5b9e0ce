"""Recurring messages: their definitions, of each of which one run is pending at every moment.

::

    {"do":"define","name":"nightly","cron":"0 2 * * *","zone":"Europe/Berlin","topic":"jobs","partition":-1,"attribute":"…",
     "flag":0,"body":"base64","missed":"last","replaced":[81920,1700000000000,82944,82944],"number":90112}
    {"do":"undefine","name":"nightly","ended":[81920,1700000000000,82944,82944]}

A definition is known by its *number*, the log offset of its first mark. Its next run is a park with ``METAQ_CRON``,
*name:number*. The first one is a member of the group that the mark begins, each other one of the group that delivers the
run before it. ``replaced`` and ``ended`` are the number of a definition that ends, and due time, id and place of its pending
run, which is cancelled with it. ``number`` stands in a mark that stores a definition again before its segment is deleted.
"""

import enum
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import orjson

from metaq.errors import BadRequest
from metaq.store.ordered.engine import DeleteKey, Entry, Operation, SetKey
from metaq.timers.cron import Recurrence, parse_schedule
from metaq.timers.records import Defined, Definition, Ended, Key, Park, TimerEvent, Undefined, parts_of

RECURRING: Final = "recurring"
"""What a data folder is marked with once a message was defined, so that no older version opens it."""
MOST: Final = 10_000
"""Definitions of one broker."""
MOST_BODY_BYTES: Final = 64 * 1024
LONGEST_NAME: Final = 100
LONGEST_ATTRIBUTE: Final = 1000
DEFINITION, NEXT = b"C", b"N"
_NUMBER: Final = struct.Struct(">Q")
_NAME_SIGNS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


class Missed(enum.StrEnum):
    """The treatment of times that passed while nothing ran."""

    LAST = "last"
    """One message for all of them."""
    ALL = "all"
    """A message for each."""
    NONE = "none"
    """No message."""


class Recurring(NamedTuple):
    """A recurring message as it is defined."""

    name: str
    cron: str
    topic: str
    body: bytes
    zone: str = "UTC"
    partition: int = -1
    attribute: str | None = None
    flag: int = 0
    missed: str = Missed.LAST

    def check(self) -> Recurrence:
        """Return the schedule. Raise ``BadRequest`` for what cannot be defined."""
        if not (self.name and len(self.name) <= LONGEST_NAME and _NAME_SIGNS.issuperset(self.name)):
            raise BadRequest(f"the name {self.name[:40]!r} is not of 1 to {LONGEST_NAME} letters, digits, dots, - and _")
        if len(self.body) > MOST_BODY_BYTES:
            raise BadRequest(f"a body of {len(self.body)} bytes is longer than {MOST_BODY_BYTES} of a recurring message")
        if self.attribute is not None and (
            len(self.attribute) > LONGEST_ATTRIBUTE or not self.attribute.isprintable() or not self.attribute
        ):
            raise BadRequest(f"the attribute is not of 1 to {LONGEST_ATTRIBUTE} printable characters")
        if self.missed not in tuple(Missed):
            raise BadRequest(f"missed is {self.missed[:40]!r}, not one of {', '.join(Missed)}")
        if not -1 <= self.partition < 1 << 31 or not -1 << 31 <= self.flag < 1 << 31:
            raise BadRequest("partition is a number from -1 on, and flag one of 32 bits")
        return parse_schedule(self.cron, self.zone)


def ended_numbers(ended: Ended) -> list[int]:
    """Return the end of a definition as marks have it."""
    return [ended.number, *parts_of(ended.key), ended.place]


def define_mark(recurring: Recurring, replaced: Ended | None = None, number: int | None = None) -> bytes:
    """Return the body of a mark that defines a recurring message."""
    mark: dict[str, Any] = {"do": "define", **recurring._asdict(), "body": b64encode(recurring.body).decode()}
    if replaced is not None:
        mark["replaced"] = ended_numbers(replaced)
    if number is not None:
        mark["number"] = number
    return orjson.dumps(mark)


def undefine_mark(name: str, ended: Ended) -> bytes:
    """Return the body of a mark that ends a recurring message."""
    return orjson.dumps({"do": "undefine", "name": name, "ended": ended_numbers(ended)})


def recurring_of(body: bytes | memoryview) -> Recurring:
    """Return the recurring message in the body of an intact mark that defines one."""
    mark = orjson.loads(bytes(body))
    return Recurring(**{name: mark[name] for name in Recurring._fields if name != "body"}, body=b64decode(mark["body"]))


class Definitions:
    """The definitions of one store: a part of the table of timers, and of its index."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}
        self._by_number: dict[int, Definition] = {}
        self._runs: dict[int, Key] = {}  # by number; may come before the definition, when that was stored again
        self._numbers: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Definition]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Definition | None:
        return self._by_name.get(name)

    def run(self, definition: Definition) -> Key | None:
        """Return the next run of a definition; ``None`` when it was lost with a damaged log."""
        return self._runs.get(definition.number)

    def of_run(self, key: Key) -> Definition | None:
        """Return the definition of which a timer is the next run."""
        number = self._numbers.get(key)
        return None if number is None else self._by_number.get(number)

    def load(self, scan: Callable[[bytes, bytes], list[Entry]]) -> None:
        """Take what the index has; ``scan`` returns the first entries of a range."""
        for kind in (DEFINITION, NEXT):
            begin = kind
            while rows := scan(begin, kind + b"\xff" * 9):
                for row, value in rows:
                    if kind == DEFINITION:
                        self._set(Definition(*orjson.loads(value)))
                    else:
                        self._set_run(_NUMBER.unpack(row[1:])[0], value)
                begin = rows[-1][0] + b"\0"

    def follow(self, event: TimerEvent) -> None:
        """Take a safe event."""
        match event:
            case Park(key=key, definition=int(number)):
                self._set_run(number, key)
            case Defined(definition, replaced, _):
                if replaced is not None:
                    self._end(definition.name, replaced.number)
                self._set(definition)
            case Undefined(name, ended, _):
                self._end(name, ended.number)

    def rows(self, event: TimerEvent) -> list[Operation]:
        """Return what an event changes in the index."""
        match event:
            case Park(key=key, definition=int(number)):
                return [SetKey(NEXT + _NUMBER.pack(number), key)]
            case Defined(definition, replaced, _):
                changes: list[Operation] = [] if replaced is None else self._end_rows(replaced.number)
                return [*changes, SetKey(DEFINITION + _NUMBER.pack(definition.number), orjson.dumps(list(definition)))]
            case Undefined(_, ended, _):
                return self._end_rows(ended.number)
        return []

    @staticmethod
    def _end_rows(number: int) -> list[Operation]:
        return [DeleteKey(kind + _NUMBER.pack(number)) for kind in (DEFINITION, NEXT)]

    def _set(self, definition: Definition) -> None:
        self._by_name[definition.name] = self._by_number[definition.number] = definition

    def _end(self, name: str, number: int) -> None:
        self._drop_run(number)
        self._by_number.pop(number, None)
        self._by_name.pop(name, None)

    def _set_run(self, number: int, key: Key) -> None:
        self._drop_run(number)
        self._runs[number] = key
        self._numbers[key] = number

    def _drop_run(self, number: int) -> None:
        key = self._runs.pop(number, None)
        if key is not None:
            self._numbers.pop(key, None)
