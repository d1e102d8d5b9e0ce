"""The progress of the text protocol's readers, observed from their gets: the protocol has no commits.

A group is only a word in a get there. The table lives in memory, since the start of the broker, and is not reliable: a person
at a telnet is a group, too. So it is bounded, and a reader that is silent for long is forgotten.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from metaq.address import Address
from metaq.message import TextPosition
from metaq.protocol.text.commands import Get
from metaq.store.files.filecache import Rest

MOST_PLACES: Final = 10_000
"""The most pairs of group and partition, some 4 MB. Beyond it the first that came is dropped; its next get brings it back."""
LONGEST_GROUP: Final = 255
"""The longest name of a group that is observed, RocketMQ's limit for names; a command line has room for 4,000 characters."""
OWNS_S: Final = 60.0
"""How long a reader counts as the owner of a partition after a get: twice the longest hold of a get (``max_hold_ms``)."""
FORGOTTEN_S: Final = 24 * 3600.0


class LastGet(NamedTuple):
    """The last get of a group in one partition."""

    position: TextPosition
    """The position that it asked for: everything before it has been read."""
    at_s: float
    """When it was, in monotonic seconds."""
    address: tuple[Any, ...]
    """The reader's address: host and port."""


class Observed:
    """The last get of each group in each partition."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._asked: dict[tuple[str, str, int], LastGet] = {}

    def asked(self, get: Get, address: tuple[Any, ...]) -> None:
        """Note a get from a partition that exists; groups with too long a name are ignored."""
        if len(get.group) > LONGEST_GROUP:
            return
        asked = tuple.__new__(LastGet, (get.position, self._monotonic(), address))  # a third of the cost of LastGet(...)
        self._asked[get.group, get.topic, get.partition] = asked
        if len(self._asked) > MOST_PLACES:
            del self._asked[next(iter(self._asked))]

    def table(self, rest: Rest) -> dict[tuple[str, str], dict[int, LastGet]]:
        """Return the last gets by group and topic, then by partition; forget those older than ``FORGOTTEN_S``.

        ``rest`` is called after each of them; gets that come meanwhile may be missing.
        """
        oldest_s = self._monotonic() - FORGOTTEN_S
        table: dict[tuple[str, str], dict[int, LastGet]] = {}
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

    def owner(self, asked: LastGet) -> str | None:
        """Return HOST:PORT of the reader if its get was within ``OWNS_S``, otherwise ``None``."""
        return str(Address(*asked.address[:2])) if asked.at_s + OWNS_S > self._monotonic() else None
