"""Topics with priorities: the partition that a message belongs to, and the order in which a pop looks at partitions.

In such a topic each partition is a level, and the greater its number the more urgent.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from metaq.engine.tables.topics import Topic, TopicTable
from metaq.engine.writing import Draft
from metaq.errors import MessageIllegal
from metaq.protocol.properties import PRIORITY, SHARDING_KEY

MOST_DIGITS: Final = 18
ALL: Final = 100
"""Pops of which ``priority_factor`` says how many go by priority."""


def level_of(topic: Topic, pairs: Mapping[str, str]) -> int:
    """Return the partition of a message with these properties in a topic with priorities.

    Raise ``MessageIllegal`` for a priority that is not a number from 0 up.
    """
    value = pairs.get(PRIORITY, "0")
    if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
        raise MessageIllegal(f"the property {PRIORITY} is {value[:20]!r}, not a number from 0 up")
    return max(0, min(int(value), topic.partitions - 1))


def prioritize(topics: TopicTable, draft: Draft) -> None:
    """Move a message to the partition of its priority, whatever its sender asked for, if its topic has priorities.

    One with a key stays where its sender puts that key, and loses its priority. Raise ``MessageIllegal`` as ``level_of`` does.
    """
    topic = topics.get(draft.topic)
    if topic is None or not topic.has_priorities:
        return
    if SHARDING_KEY in draft.properties:
        draft.properties.pop(PRIORITY, None)
    else:
        draft.partition = level_of(topic, draft.properties)


def partition_of_copy(topic: Topic, pairs: Mapping[str, str], asked: int) -> int:
    """Return the partition in which a message is put that was parked for partition ``asked``, of a topic that may have changed.

    A priority counts now; one that is none, since the topic had no priorities when it was sent, is the lowest.
    """
    if topic.has_priorities and SHARDING_KEY not in pairs:
        try:
            return level_of(topic, pairs)
        except MessageIllegal:
            return 0
    return asked % topic.all_partitions  # the topic may have shrunk


# -- the order of a pop -----------------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A partition with messages that a pop may take."""

    partition: int
    waiting_ms: int
    """How long the oldest of them has been ready."""


def pop_order(ready: Iterable[Ready], *, levels: int, factor: int, pops: int, max_wait_ms: int) -> list[int]:
    """Return the partitions in the order in which a pop takes from them: from the highest down, but for two brakes.

    Partitions whose oldest message has waited for more than ``max_wait_ms`` come first (0: none does), the longest wait first.
    Of 100 pops, ``factor`` then go by priority; each of the others begins at the next of the ``levels`` partitions in turn.
    ``pops`` is the number of this group's pops from the topic before this one: it decides, not chance.
    """
    known = list(ready)
    aged = [one for one in known if max_wait_ms and one.waiting_ms > max_wait_ms]
    aged.sort(key=lambda one: (-one.waiting_ms, -one.partition))
    first = [one.partition for one in aged]
    others = sorted({one.partition for one in known}.difference(first), reverse=True)
    by_priority = pops * factor // ALL
    if (pops + 1) * factor // ALL == by_priority:
        turn = (pops - by_priority) % levels
        others.sort(key=lambda partition: partition != turn)
    return first + others
