"""Leases as operators see them: 30052, 30054 and 30055 (docs/remoting.md).

Bodies are JSON; lists come in pages (``metaq.protocol.remoting.timers``)::

    30052  {"group":"billing","topic":"orders","after":"orders 7"}  →  {"rows":[{"topic":"orders","partition":8,…}],"next":null}
    30054  {"group":"billing","topic":"orders","partition":8,"after":41}  →  {"rows":[{"ordinal":42,…}],"next":null}
    30055  {"group":"billing","after":"orders"}  →  {"rows":[{"topic":"payments",…}],"next":null}

30052 has a row for each partition in which the group leases messages, of one topic or of all; 30054 one for each message that
is open there; 30055 one for each topic.
"""

from typing import NamedTuple


class PlaceRow(NamedTuple):
    """The leases of a group in one partition. Offsets are queue offsets, all else counts messages."""

    topic: str
    partition: int
    base: int
    """The lowest message that is not finished: the group's offset."""
    next: int
    """The first message that was never given."""
    end: int
    lag: int
    """Messages that are not finished: those that are ready, in flight, delayed or lined."""
    ready: int
    """Messages that can be given now: those never given, and those that wait."""
    in_flight: int
    """Messages that consumers have."""
    waiting: int
    """Messages to be given next: their leases or delays have ended, or those before them with their keys are done."""
    delayed: int
    """Messages that were given back with a delay which goes on."""
    lined: int
    """Messages that were never given because others with their keys are before them."""
    oldest_ms: int | None
    """When the message at ``base`` was given for the first time; ``None`` when it was not, or nothing is open."""


class OpenRow(NamedTuple):
    """A message that is open: it was given and is not finished, or is passed over because of its key."""

    ordinal: int
    times: int
    """Its deliveries so far."""
    state: str
    """``leased``, ``delayed``, ``lined`` or ``waiting``; ``dying`` while it is on its way to the dead letters."""
    first_ms: int
    """When it was given for the first time; 0: never."""
    due_ms: int
    """When its lease or its delay ends, or ended; 0 for a message that was never given."""


class TopicRow(NamedTuple):
    """The leases of a group in one topic."""

    topic: str
    mode: str
    """How the group's members get messages: ``PULL`` or ``POP`` (401)."""
    waiting_consumers: int
    """Pops and subscriptions that wait for messages."""
    given: int
    """Messages given for the first time since the broker started,"""
    again: int
    """given again,"""
    dead: int
    """and given up."""
    max_in_flight: int
    """How many messages of one partition may be in flight or delayed,"""
    max_open: int
    """and how many open."""
    unkept: int
    """Partitions of the whole broker whose leases are in memory only."""
