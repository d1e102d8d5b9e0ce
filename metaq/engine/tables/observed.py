"""Where readers of the text protocol are, by what they ask for: the protocol has no commits, a group is a word in a get.

The table lives in memory, since the start of the broker, and what is in it is little to rely on: a person at a telnet is a
group too. So it is bounded, and who is silent for long is forgotten.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from metaq.message import TextPosition
from metaq.protocol.text.commands import Get
from metaq.store.files.filecache import Rest

MOST_PLACES: Final = 10_000
"""Partitions of groups, some 4 MB; beyond it the oldest is dropped, and comes back with its next get."""
LONGEST_GROUP: Final = 255
"""Characters of a group that is observed: RocketMQ's limit for names. A command line has room for 4,000."""
OWNS_S: Final = 60.0
"""How long a reader has a partition after a get, twice the longest that one can be held (``max_hold_ms``)."""
FORGOTTEN_S: Final = 24 * 3600.0


class Asked(NamedTuple):
    """The last get of a group in one partition."""

    position: TextPosition
    """What it asked for: all before it has been read."""
    at_s: float
    """The monotonic time."""
    address: tuple[Any, ...]
    """Of the reader: host and port."""


class Observed:
    """The last gets of all groups."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._asked: dict[tuple[str, str, int], Asked] = {}

    def asked(self, get: Get, address: tuple[Any, ...]) -> None:
        """Take note of a get from a partition that exists."""
        if len(get.group) > LONGEST_GROUP:
            return
        asked = tuple.__new__(Asked, (get.position, self._monotonic(), address))  # a third of the cost of Asked(...)
        self._asked[get.group, get.topic, get.partition] = asked
        if len(self._asked) > MOST_PLACES:
            del self._asked[next(iter(self._asked))]

    def table(self, rest: Rest) -> dict[tuple[str, str], dict[int, Asked]]:
        """By group and topic, and then by partition, without those that were silent for ``FORGOTTEN_S``.

        ``rest`` is called after each; what is asked meanwhile may be missing.
        """
        oldest_s = self._monotonic() - FORGOTTEN_S
        table: dict[tuple[str, str], dict[int, Asked]] = {}
        for place in list(self._asked):
            asked = self._asked.get(place)
            if asked is None:  # dropped meanwhile
                continue
            if asked.at_s < oldest_s:
                del self._asked[place]
            else:
                group, topic, partition = place
                table.setdefault((group, topic), {})[partition] = asked
            rest()
        return table

    def owner(self, asked: Asked) -> str | None:
        """HOST:PORT of the reader, if it may still be there."""
        return f"{asked.address[0]}:{asked.address[1]}" if asked.at_s + OWNS_S > self._monotonic() else None
