"""Attributes of topics and groups: settings by name, in RocketMQ 5's form.

A request changes them: ``+name=value`` sets one, or adds to one that is a set; ``-name`` gives it its default again. The header
of 17 has the changes as one text, joined by commas; the body of 200 has them as a mapping, ``{"+name": "value", "-name": ""}``.
What is stored and shown has the bare names.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.message import DEFAULT_TOPIC, LONGEST_WINDOW_MS
from metaq.protocol.remoting.headers import CreateTopic, Int32
from metaq.protocol.spans import MOST_CHARACTERS as MOST_SPAN_CHARACTERS
from metaq.protocol.spans import Spans

MOST_CHARACTERS: Final = 4096
"""Characters of the changes in one header."""
LATEST_MS: Final = 86_400_000 * 366
"""A year: more than any length of time that an attribute sets."""

MESSAGE_TYPE: Final = "message.type"
NORMAL_TYPE, PRIORITY_TYPE = "NORMAL", "PRIORITY"
PRIORITY_MAX_WAIT_MS: Final = "priority.max.wait.ms"
DEDUPE_WINDOW_MS: Final = "dedupe.window.ms"
DISCARDED: Final = "discarded"
"""The ordinals of the letters of a dead-letter topic that an operator has discarded one by one."""
PRIORITY_FACTOR: Final = "priority.factor"
MAX_IN_FLIGHT: Final = "max_in_flight"
MAX_OPEN: Final = "max_open"
MAX_INVISIBLE_MS: Final = "max_invisible_ms"
ORDER: Final = "order"
LEASE_ACKS: Final = "lease_acks"
LEASE_AGED_OUT: Final = "lease_aged_out"


class Number(NamedTuple):
    """The values of an attribute that is a number."""

    least: int
    most: int
    default: int

    def check(self, name: str, value: str) -> None:
        """Raise ``BadRequest`` for what is no such number."""
        is_number = value.isascii() and value.isdecimal() and len(value) <= 18
        if not is_number or not self.least <= int(value) <= self.most:
            raise BadRequest(f"the attribute {name} is {value[:20]!r}, not a number from {self.least} to {self.most}")


class Choice(NamedTuple):
    """The values of an attribute that is one of some words."""

    words: tuple[str, ...]
    default: str

    def check(self, name: str, value: str) -> None:
        """Raise ``BadRequest`` for another word."""
        if value not in self.words:
            raise BadRequest(f"the attribute {name} is {value[:20]!r}, not one of {', '.join(self.words)}")


class OrdinalSet(NamedTuple):
    """The values of an attribute that is a set of ordinals (``metaq.protocol.spans``): a change adds to it."""

    default: str = ""

    def check(self, name: str, value: str) -> None:
        """Raise ``BadRequest`` for what is no such set."""
        Spans.read(value)


Known = Mapping[str, Number | Choice | OrdinalSet]

TOPIC_ATTRIBUTES: Final[Known] = {
    # only PRIORITY means something to this broker; the others are what RocketMQ's tools set
    MESSAGE_TYPE: Choice(("UNSPECIFIED", NORMAL_TYPE, "FIFO", "DELAY", "TRANSACTION", "MIXED", PRIORITY_TYPE), NORMAL_TYPE),
    PRIORITY_MAX_WAIT_MS: Number(0, LATEST_MS, 60_000),
    DEDUPE_WINDOW_MS: Number(0, LONGEST_WINDOW_MS, 0),
    DISCARDED: OrdinalSet(),
}
GROUP_ATTRIBUTES: Final[Known] = {
    PRIORITY_FACTOR: Number(0, 100, 100),
    MAX_IN_FLIGHT: Number(1, 1_000_000, 20_000),
    MAX_OPEN: Number(1, 100_000_000, 1_000_000),
    MAX_INVISIBLE_MS: Number(1, LATEST_MS, 43_200_000),
    ORDER: Choice(("none", "partition", "key"), "none"),
    LEASE_ACKS: Choice(("appended", "safe"), "appended"),
    LEASE_AGED_OUT: Choice(("dead", "drop"), "dead"),
}


def number(known: Known, attributes: Mapping[str, str], name: str) -> int:
    """Return the value of an attribute that is a number, or its default."""
    return int(attributes.get(name, known[name].default))


def word_attribute(known: Known, attributes: Mapping[str, str], name: str) -> str:
    """Return the value of an attribute that is a word, or its default."""
    return attributes.get(name, str(known[name].default))


def check_attributes(known: Known, attributes: Mapping[str, str]) -> None:
    """Raise ``BadRequest`` for a name that is not known, or a value that it cannot have."""
    for name, value in attributes.items():
        kind = known.get(name)
        if kind is None:
            raise BadRequest(f"there is no attribute {name[:40]!r}; there are {', '.join(known)}")
        kind.check(name, value)


def changed(known: Known, current: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes after changes, sorted by name.

    As RocketMQ does, refuse with ``BadRequest`` a name without sign, one that is not known or named twice, and the removal of
    one that is not set.
    """
    result, named = dict(current), set[str]()
    for signed, value in changes.items():
        sign, name = signed[:1], signed[1:]
        if sign not in {"+", "-"}:
            raise BadRequest(f"the attribute {signed[:40]!r} is to be written +NAME=VALUE to set it, or -NAME to remove it")
        if name in named:
            raise BadRequest(f"the attribute {name[:40]} is changed twice in one request")
        named.add(name)
        if sign == "+":
            check_attributes(known, {name: value})
            result[name] = _joined(current.get(name, ""), value) if isinstance(known[name], OrdinalSet) else value
        elif name in current:
            del result[name]
        else:
            raise BadRequest(f"the attribute {name[:40]!r} cannot be removed: it is not set")
    return dict(sorted(result.items()))


def _joined(before: str, added: str) -> str:
    """Return the ordinals of two sets as one. Raise ``BadRequest`` when they are too many spans."""
    return _set_text(Spans.read(before) | Spans.read(added))


def _set_text(letters: Spans) -> str:
    text = str(letters)
    if len(text) > MOST_SPAN_CHARACTERS:
        raise BadRequest(
            f"too many dead letters would be discarded one by one: the list of them has {len(text)} characters, and the limit "
            f"is {MOST_SPAN_CHARACTERS}. Letters that follow each other count as one there; to discard all takes no room at all"
        )
    return text


def discarding(topic: str, partitions: tuple[int, int], permission: int, letters: Spans) -> CreateTopic:
    """Return the header of 17 by which letters of a dead-letter topic are discarded, beside those that were before.

    ``partitions``, to read and to write, and the permission are those that the topic has. ``BadRequest`` when the letters are
    too many spans.
    """
    read, write = partitions
    changes = write_changes({f"+{DISCARDED}": _set_text(letters)})
    return CreateTopic(topic, DEFAULT_TOPIC, Int32(read), Int32(write), Int32(permission), attributes=changes)


def read_changes(text: str) -> dict[str, str]:
    """Return the changes in the header of 17: values by signed name. Raise ``BadRequest`` when it is none."""
    if len(text) > MOST_CHARACTERS:
        raise BadRequest(f"attributes of {len(text)} characters are longer than {MOST_CHARACTERS}")
    changes: dict[str, str] = {}
    for piece in filter(None, text.split(",")):
        signed, equals, value = piece.partition("=")
        if bool(equals) != signed.startswith("+"):
            raise BadRequest(f"{piece[:40]!r} is no change of an attribute: +NAME=VALUE sets one, -NAME removes it")
        if signed in changes:
            raise BadRequest(f"the attribute {signed[1:40]} is changed twice in one request")
        changes[signed] = value
    return changes


def write_changes(changes: Mapping[str, str]) -> str:
    """Return the text that ``read_changes`` reads."""
    return ",".join(f"{signed}={value}" if signed.startswith("+") else signed for signed, value in changes.items())
