"""The level of a message in a topic with priorities, where each partition is a level: the greater the more urgent."""

from collections.abc import Mapping
from typing import Final

from metaq.errors import MessageIllegal
from metaq.protocol.properties import PRIORITY, SHARDING_KEY

MOST_DIGITS: Final = 18


def priority_level(pairs: Mapping[str, str], levels: int, asked: int) -> int:
    """Return the partition of a message with these properties, in a topic with so many levels.

    Without a priority it is 0; a message with a key stays in the partition that was ``asked`` for. Raise ``MessageIllegal`` for
    a priority that is not a number from 0 up.
    """
    if SHARDING_KEY in pairs:
        return asked
    value = pairs.get(PRIORITY, "0")
    if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
        raise MessageIllegal(f"the property {PRIORITY} is {value[:20]!r}, not a number from 0 up")
    return max(0, min(int(value), levels - 1))


def one_level(several: list[Mapping[str, str]], levels: int, asked: int) -> int:
    """Return the partition of a batch of messages with these properties; ``MessageIllegal`` when they differ in it."""
    found = {priority_level(pairs, levels, asked) for pairs in several}
    if len(found) > 1:
        raise MessageIllegal("the messages of a batch have several priorities; send one batch for each")
    return found.pop() if found else asked
