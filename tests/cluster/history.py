"""The requests of clients to a group of replicas, the answers, and what every replica must therefore hold.

A message carries its number, from which its content can be made again. It is *stored* once a put at REPLICA was acknowledged or
a reader has seen it: from then on it is at that place, under that id, whoever is the master. It is *refused* when the answer
said so: then nobody ever sees it. All others may be there or not.

An id is ``epoch << 47 | log offset``, so it shows under which master a message was accepted.
"""

import random
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from metaq.client import TextClient
from metaq.message import Message, TopicPartition
from tests.crash.command import expect

TOPICS: Final = {"orders": 3, "others": 2, "half": 1}
PARTITIONS: Final = [TopicPartition(topic, number) for topic, count in TOPICS.items() for number in range(count)]
OFFSET_BITS: Final = 47
NUMBER_SIZE: Final = 8
LARGEST_BODY: Final = 600
SHOWN: Final = 3
"""Examples of each kind of violation."""


@dataclass(slots=True)
class Sent:
    """One message, and what is known of it. Times are of the monotonic clock."""

    partition: TopicPartition
    stream: int
    """Of the connection on which it was sent; 0: its order is nobody's promise."""
    at: float
    stored: bool = False
    refused: bool = False
    answered_at: float = 0.0
    id: int | None = None
    ordinal: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message is."""

    partition: TopicPartition
    position: int
    id: int


class History:
    """One group's, from its begin to its end. Threads share it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()  # guards everything here
        self._sent: list[Sent] = []
        self._places: dict[int, Place] = {}
        self._streams = 0
        self._stored_at: list[float] = []
        self.counts: Counter[str] = Counter()
        self.epoch = 0
        """The newest of an acknowledged message."""
        self.newest = 0.0
        """When the put was sent that was acknowledged and sent last."""

    # -- what clients do ----------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        """A number for a connection."""
        with self._lock:
            self._streams += 1
            return self._streams

    def send(self, partition: TopicPartition, stream: int = 0) -> tuple[int, bytes]:
        """Number and body of a message that is sent now."""
        with self._lock:
            number = len(self._sent)
            self._sent.append(Sent(partition, stream, time.monotonic()))
        return number, self.body(number)

    def body(self, number: int) -> bytes:
        rng = random.Random(self._seed << 40 | number)
        return number.to_bytes(NUMBER_SIZE) + rng.randbytes(rng.choice((0, 10, 100, 100, LARGEST_BODY)))

    def stored(self, number: int, message_id: int | None = None, ordinal: int | None = None) -> None:
        """It was acknowledged: it is as safe as it can be."""
        now = time.monotonic()
        with self._lock:
            sent = self._sent[number]
            sent.stored, sent.answered_at, sent.ordinal = True, now, ordinal
            if message_id is not None:
                sent.id = message_id
                self.epoch = max(self.epoch, message_id >> OFFSET_BITS)
            self.counts["acknowledged"] += 1
            if sent.stream:
                self._stored_at.append(now)
                self.newest = max(self.newest, sent.at)

    def refused(self, number: int) -> None:
        """It was not taken, and never will be."""
        with self._lock:
            self._sent[number].refused = True
            self.counts["refused"] += 1

    def unknown(self, number: int, *, answered: bool) -> None:
        """It may be there or not, as the answer said or because there was none; nothing changes by this but a count."""
        assert not self._sent[number].stored
        with self._lock:
            self.counts["in doubt" if answered else "unanswered"] += 1

    def may_be_lost(self) -> None:
        """All that held what was stored until now have lost it, or not; what is left of it is where it was."""
        with self._lock:
            for sent in self._sent:
                sent.stored = False
            self._places.clear()

    @property
    def outcomes_unknown(self) -> int:
        """Puts whose clients do not know whether they are stored."""
        return self.counts["in doubt"] + self.counts["unanswered"]

    def longest_pause(self, start: float, end: float) -> float:
        """The longest time between two acknowledgements from ``start`` to ``end``, in seconds."""
        with self._lock:
            moments = [start, *self._stored_at[bisect_left(self._stored_at, start) : bisect_left(self._stored_at, end)], end]
        return max(after - before for before, after in pairwise(moments))

    # -- what readers see ---------------------------------------------------------------------------------------------

    def delivered(self, partition: TopicPartition, message: Message) -> int:
        """A message that a reader got, from whichever replica; its number. :class:`Violation`."""
        number = int.from_bytes(message.body[:NUMBER_SIZE])
        place = Place(partition, message.position, message.id)
        with self._lock:
            expect(number < len(self._sent), "phantom: nobody sent it", place, message.body)
            expect(message.body == self.body(number), "corrupt: it is not as it was sent", number, place, message.body)
            sent = self._sent[number]
            expect(sent.partition == partition, "phantom: it was sent elsewhere", number, sent, place)
            expect(not sent.refused, "phantom: it was refused", number, sent, place)
            known = self._places.setdefault(number, place)
        expect(known == place, "duplicate or moved: a reader has seen it elsewhere", number, sent, known, place)
        return number

    def seen(self, number: int) -> bool:
        """Return whether a reader got the message of this number."""
        return number in self._places

    # -- what must be there -------------------------------------------------------------------------------------------

    def check(self, host: str, port: int) -> None:
        """Read everything from one replica, and compare it with all that is known. :class:`Violation`."""
        found: dict[int, tuple[int, int]] = {}  # number → ordinal and id
        ids: dict[int, int] = {}
        with TextClient(host, port, timeout_s=30.0) as client:
            for partition in PARTITIONS:
                last: dict[int, int] = {}
                for ordinal, message in enumerate(client.iterate(partition.topic, partition=partition.partition)):
                    number = self.delivered(partition, message)
                    expect(number not in found, "duplicate: it is there twice", partition, number)
                    owner = ids.setdefault(message.id, number)
                    expect(owner == number, "duplicate: two messages have one id", message.id, number, owner)
                    found[number] = ordinal, message.id
                    stream = self._sent[number].stream
                    if stream:
                        expect(last.get(stream, -1) < number, "reordered", partition, stream, last.get(stream), number)
                        last[stream] = number
        self._check_known(found)
        self._check_epochs(found)

    def _check_known(self, found: dict[int, tuple[int, int]]) -> None:
        lost, other = [], []
        for number, sent in enumerate(self._sent):
            if number not in found:
                if sent.stored or number in self._places:
                    lost.append((number, sent, self._places.get(number)))
                continue
            ordinal, message_id = found[number]
            if sent.id not in {None, message_id} or sent.ordinal not in {None, ordinal}:
                other.append((number, sent, ordinal, message_id))
        expect(not lost, f"lost: {len(lost)} that were acknowledged or read", lost[:SHOWN])
        expect(not other, f"duplicate: {len(other)} have another id or ordinal than was acknowledged", other[:SHOWN])

    def _check_epochs(self, found: dict[int, tuple[int, int]]) -> None:
        """Nothing was taken under an old epoch once a newer one was seen: sent after that, acknowledged, with an old id."""
        begun: dict[int, float] = {}
        puts = [
            (sent, found[number][1] >> OFFSET_BITS) for number, sent in enumerate(self._sent) if sent.stored and sent.stream
        ]
        for sent, epoch in puts:
            begun[epoch] = min(begun.get(epoch, sent.answered_at), sent.answered_at)
        old = [
            (sent, epoch, newer)
            for sent, epoch in puts
            for newer, moment in begun.items()
            if newer > epoch and sent.at > moment
        ]
        expect(not old, f"{len(old)} were taken under an old epoch", old[:SHOWN])
        self.counts["acknowledged late under an old epoch"] += sum(
            any(newer > epoch and sent.answered_at > moment for newer, moment in begun.items()) for sent, epoch in puts
        )


class Commit(NamedTuple):
    """An offset that a master has taken."""

    asked: float
    answered: float
    offset: int


class Progress:
    """The commits of one consumer, and the offsets from which its group goes on after a failover."""

    BACK_S: Final = 1.0
    """So much of what was committed may be lost, whatever the machine does: who takes commits sees to it."""
    KEPT_S: Final = 3.0
    """After this time a single commit is with the replicas, too: six periods of the duty that brings it there."""

    def __init__(self, late_s: Callable[[float, float], float]) -> None:
        """``late_s`` tells for how long of some time this machine was late."""
        self._late_s = late_s
        self._commits: list[Commit] = []
        self.fault_at = float("inf")
        """Since when there is a fault."""
        self.most_back_s = 0.0
        """What a failover took back at most: from the first commit of it to the last."""
        self.excused = 0
        """How often a commit was lost that had been there for longer when the fault came, on a machine that was late."""

    def committed(self, offset: int, asked: float) -> None:
        self._commits.append(Commit(asked, time.monotonic(), offset))

    def found(self, offset: int) -> None:
        """Where a master says that the group goes on. :class:`Violation`."""
        lost = [commit for commit in self._commits if commit.offset > offset]
        self._commits = [commit for commit in self._commits if commit.offset <= offset]
        if not lost:
            return
        first, last = lost[0], lost[-1]
        back_s = last.asked - first.answered
        self.most_back_s = max(self.most_back_s, back_s)
        expect(back_s <= self.BACK_S, f"an offset went back by {back_s:.2f} s of commits", first, last, offset)
        old_s = self.fault_at - first.answered
        if old_s > self.KEPT_S:
            late_s = self._late_s(first.answered, self.fault_at)
            expect(old_s <= self.KEPT_S + late_s, f"a commit was lost after {old_s:.2f} s", first, offset, late_s)
            self.excused += 1
