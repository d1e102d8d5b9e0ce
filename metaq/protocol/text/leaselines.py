"""The syntax of the commands about leases (specs: text protocol, section 16).

::

    COMMAND WORDS OPTIONS [OPAQUE]

The options stand together, in any order. Where there are none, the number of words decides whether the last is the opaque.
"""

import re
from typing import Final

from metaq.errors import BadRequest
from metaq.protocol.text.commands import NO_OPAQUE, Ack, Extend, Nack, Pop, Ready, Subscribe, Unsubscribe
from metaq.protocol.text.ids import MOST_PARTITION, MessageId, read_ids
from metaq.protocol.text.tokens import INT32, choice, integer, is_option, opaque, option_values, word

READY: Final = (0, 10_000)
COUNT: Final = (1, 1024)
INVISIBLE: Final = (1000, 43_200_000)
"""Milliseconds: one second to twelve hours."""
DELAY: Final = (0, 43_200_000)
PARTITION: Final = (0, MOST_PARTITION)
DEAD: Final = "dead"

_IDS_BEGIN: Final = re.compile("[0-9]+-[0-9]+-")


def _split(tokens: list[str], options_from: int, counts: tuple[int, ...], usage: str) -> tuple[list[str], list[str], str]:
    """Return the words, the options and the opaque of a line.

    The first option, if any, stands at ``options_from`` or later. ``counts`` are the possible numbers of words.
    """
    end = len(tokens)
    first = options_from
    while first < end and not _is_option(tokens, first):
        first += 1
    last = first
    while last < end and _is_option(tokens, last):
        last += 1
    words, options, after = tokens[1:first], tokens[first:last], tokens[last:]
    if not options and len(words) not in counts and words:
        after = [words.pop()]
    if len(words) not in counts or len(after) > 1:
        raise BadRequest(f"{tokens[0]} needs {usage}")
    return words, options, opaque(after[0]) if after else NO_OPAQUE


def _is_option(tokens: list[str], at: int) -> bool:
    return is_option(tokens[at]) or (tokens[at] == DEAD and tokens[0] == "nack")


def _from_first(values: dict[str, str]) -> bool | None:
    return choice(values["from="], "from", "first", "last") if "from=" in values else None


def _milliseconds(values: dict[str, str], name: str, bounds: tuple[int, int]) -> int | None:
    return integer(values[name], name[:-1], bounds) if name in values else None


def _word(values: dict[str, str], name: str) -> str | None:
    return word(values[name], name[:-1]) if name in values else None


SUBSCRIBE_USAGE: Final = "TOPIC GROUP [OPTION=VALUE …] [OPAQUE]"
SUBSCRIBE_OPTIONS: Final = ("ready=", "invisible=", "from=", "partition=", "attribute=", "assign=", "name=", "crc=")


def read_subscribe(tokens: list[str]) -> Subscribe:
    """Parse ``subscribe``; ``BadRequest`` says what is wrong, here and below."""
    words, options, number = _split(tokens, 3, (2,), SUBSCRIBE_USAGE)
    values = option_values("subscribe", options, SUBSCRIBE_OPTIONS)
    return Subscribe(
        topic=word(words[0], "topic"),
        group=word(words[1], "group"),
        ready=integer(values.get("ready=", "1"), "ready", READY),
        invisible_ms=_milliseconds(values, "invisible=", INVISIBLE),
        from_first=_from_first(values),
        partition=integer(values["partition="], "partition", PARTITION) if "partition=" in values else None,
        attribute=_word(values, "attribute="),
        owns="assign=" in values and choice(values["assign="], "assign", "own", "shared"),
        name=_word(values, "name="),
        with_crc="crc=" in values and choice(values["crc="], "crc", "yes", "no"),
        opaque=number,
    )


def read_unsubscribe(tokens: list[str]) -> Unsubscribe:
    """Parse ``unsubscribe``."""
    words, options, number = _split(tokens, 3, (2,), "TOPIC GROUP [OPAQUE]")
    option_values("unsubscribe", options, ())
    return Unsubscribe(word(words[0], "topic"), word(words[1], "group"), number)


def read_ready(tokens: list[str]) -> Ready:
    """Parse ``ready``."""
    words, options, number = _split(tokens, 2, (1, 3), "N [TOPIC GROUP] [OPAQUE]")
    option_values("ready", options, ())
    ready = integer(words[0], "ready", READY)
    if len(words) == 1:
        return Ready(ready, None, None, number)
    return Ready(ready, word(words[1], "topic"), word(words[2], "group"), number)


POP_USAGE: Final = "TOPIC GROUP [COUNT] [OPTION=VALUE …] [OPAQUE]"
POP_OPTIONS: Final = ("invisible=", "wait=", "from=", "attribute=")


def read_pop(tokens: list[str]) -> Pop:
    """Parse ``pop``. A number directly behind the group is the count."""
    words, options, number = _split(tokens, 3, (2, 3), POP_USAGE)
    values = option_values("pop", options, POP_OPTIONS)
    return Pop(
        topic=word(words[0], "topic"),
        group=word(words[1], "group"),
        most=integer(words[2], "count", COUNT) if len(words) == 3 else 1,
        invisible_ms=_milliseconds(values, "invisible=", INVISIBLE),
        wait_ms=integer(values.get("wait=", "0"), "wait", (0, INT32[1])),
        from_first=_from_first(values),
        attribute=_word(values, "attribute="),
        opaque=number,
    )


def read_ack(tokens: list[str]) -> Ack:
    """Parse ``ack``."""
    words, options, number = _split(tokens, _behind_ids(tokens), (1, 3), "[TOPIC GROUP] ID[,ID…] [OPAQUE]")
    option_values("ack", options, ())
    topic, group, ids = _whose(words)
    return Ack(ids, topic, group, number)


def read_nack(tokens: list[str]) -> Nack:
    """Parse ``nack``."""
    usage = "[TOPIC GROUP] ID[,ID…] [delay=MS | dead] [OPAQUE]"
    words, options, number = _split(tokens, _behind_ids(tokens), (1, 3), usage)
    values = option_values("nack", options, ("delay=", DEAD))
    if len(values) > 1:
        raise BadRequest("nack takes one of delay=MS and dead, not both")
    topic, group, ids = _whose(words)
    return Nack(ids, _milliseconds(values, "delay=", DELAY), DEAD in values, topic, group, number)


def read_extend(tokens: list[str]) -> Extend:
    """Parse ``extend``."""
    words, options, number = _split(tokens, _behind_ids(tokens), (2, 4), "[TOPIC GROUP] ID[,ID…] MS [OPAQUE]")
    option_values("extend", options, ())
    topic, group, ids = _whose(words[:-1])
    return Extend(ids, integer(words[-1], "time", INVISIBLE), topic, group, number)


def _behind_ids(tokens: list[str]) -> int:
    """Return where the token behind the IDs stands: these are the first, or follow topic and group."""
    return 4 if len(tokens) > 3 and _IDS_BEGIN.match(tokens[3]) else 2


def _whose(words: list[str]) -> tuple[str | None, str | None, tuple[MessageId, ...]]:
    """Return topic, group and IDs from ``[TOPIC GROUP] IDS``."""
    ids = read_ids(words[-1])
    if len(words) == 1:
        return None, None, ids
    return word(words[0], "topic"), word(words[1], "group"), ids
