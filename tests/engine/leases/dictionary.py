"""The model of leases: a dictionary of messages for each group and partition."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition
from tests.engine.leases.leased import GROUPS, MOST_TIMES, PARTITIONS, TOPIC


@dataclass
class Given:
    """An open message."""

    pop_ms: int
    due_ms: int
    """On the monotonic clock."""
    times: int
    first_ms: int


class Message(NamedTuple):
    """A message of the log."""

    body: bytes
    tag: str


class Receipt(NamedTuple):
    """The words with which a consumer names a delivery."""

    place: GroupPartition
    ordinal: int
    pop_ms: int


@dataclass
class Place:
    """One group in one partition."""

    next: int = 0
    open: dict[int, Given] = field(default_factory=dict)
    dying: set[int] = field(default_factory=set)
    """Those of the open ones that are dead once this turn has ended."""
    done: set[int] = field(default_factory=set)
    """Messages that were acked, or passed by a filter."""
    dead: set[int] = field(default_factory=set)
    undone: set[int] = field(default_factory=set)
    """Messages that were finished before a reset which is not stored yet: they are finished again if it is lost."""

    def copy(self) -> "Place":
        given = {ordinal: replace(each) for ordinal, each in self.open.items()}
        return Place(self.next, given, set(self.dying), set(self.done), set(self.dead), set(self.undone))

    def waiting(self, now_ms: int) -> list[int]:
        return sorted(ordinal for ordinal, each in self.open.items() if each.due_ms <= now_ms and ordinal not in self.dying)

    def leased(self, now_ms: int) -> list[int]:
        return sorted(ordinal for ordinal, each in self.open.items() if each.due_ms > now_ms)

    @property
    def base(self) -> int:
        return min(self.open, default=self.next)

    def go_to(self, offset: int) -> None:
        """Reset: what comes from there on is new."""
        self.undone |= self.done | self.dead
        self.next = offset
        self.open.clear()
        self.dying.clear()
        self.done = {ordinal for ordinal in self.done if ordinal < offset}
        self.dead = {ordinal for ordinal in self.dead if ordinal < offset}

    def finish(self, ordinal: int) -> None:
        del self.open[ordinal]
        self.done.add(ordinal)

    def commit(self, offset: int) -> None:
        """Take a commit of the group's own: what is before has been consumed."""
        if offset >= self.next:
            self.next = offset
            self.open.clear()
            self.dying.clear()
        for ordinal in [each for each in self.open if each < offset]:
            self.finish(ordinal)

    def take_over(self, state: PartitionLeases | None, offset: int) -> None:
        """Take over what is known of a place whose events were not all stored. No message may be lost."""
        following = offset if state is None else state.next
        found = {} if state is None else {ordinal: given_in(state, ordinal) for ordinal in state.ordinals()}
        known = found.keys() | self.undone
        assert all(ordinal in known or ordinal >= following for ordinal in self.open), (self, found, following)
        passed = range(self.next, following)
        assert not [
            ordinal for ordinal in passed if ordinal not in found and ordinal not in self.done | self.dead | self.undone
        ], (
            self,
            found,
        )
        self.next, self.open = following, found
        self.dying.clear()
        self.done = {each for each in self.done | self.undone if each not in found and each < following}
        self.undone.clear()
        self.dead = {each for each in self.dead if each not in found and each < following}


def given_in(state: PartitionLeases, ordinal: int) -> Given:
    bunch = state.find(ordinal)
    assert bunch is not None
    return Given(bunch.pop_ms, bunch.due_ms, bunch.times, bunch.first_ms)


class Dictionary:
    """All that is known of a broker."""

    def __init__(self) -> None:
        self.messages: list[list[Message]] = [[] for _ in range(PARTITIONS)]
        self.places = {GroupPartition(group, TOPIC, partition): Place() for group in GROUPS for partition in range(PARTITIONS)}
        self.letters = dict.fromkeys(GROUPS, 0)
        """Dead letters that were read, by group."""

    def copy(self) -> "Dictionary":
        other = Dictionary()
        other.messages = [list(messages) for messages in self.messages]
        other.places = {where: place.copy() for where, place in self.places.items()}
        other.letters = dict(self.letters)
        return other

    def place_of(self, group: str, body: bytes) -> tuple[Place, int]:
        """Return where a message is, and its ordinal."""
        for partition, messages in enumerate(self.messages):
            for ordinal, message in enumerate(messages):
                if message.body == body:
                    return self.places[GroupPartition(group, TOPIC, partition)], ordinal
        raise AssertionError(body)

    def matching(self, partition: int, first: int, end: int, tag: str) -> list[int]:
        """Return the ordinals of the messages of a range that a consumer wants."""
        return [each for each in range(first, end) if not tag or self.messages[partition][each].tag == tag]

    def is_poison(self, given: Given) -> bool:
        return given.times >= MOST_TIMES
