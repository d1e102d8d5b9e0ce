"""The messages sent to a broker, its answers and deliveries, and what it must therefore keep through any number of kills.

Every message carries a number, from which its content can be made again. A message is *placed* once the broker has
acknowledged or delivered it: from then on it is at that position of that partition under that id, whatever happens. One that
was sent and never placed may turn up, whole and in its order, or not.
"""

import random
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.client import TextClient
from metaq.client.text.textclient import Batch
from metaq.message import Message, TopicPartition
from metaq.protocol.text.commands import BROKER_CHOOSES, END_OF_LOG
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, join_attribute
from metaq.protocol.text.replies import OK, Reply
from metaq.protocol.text.writing import write_put
from tests.crash.command import expect

CREATED: Final = {"orders": 4, "t": 2}
"""Topics that are made in advance, with their partitions. The topic ``auto`` begins with the first put to it."""
PARTITIONS: Final = [
    *(TopicPartition(topic, number) for topic, count in CREATED.items() for number in range(count)),
    TopicPartition("auto", 0),
]
LARGEST_BODY: Final = 4096
LARGEST_TEXT_BODY: Final = LARGEST_BODY + 64
"""With number and attribute."""
_NUMBER_SIZE: Final = 8
_OLD_MESSAGES_EACH: Final = 4


class Sent(NamedTuple):
    """One put: which partition it asked for, ``BROKER_CHOOSES`` included, and on which connection."""

    topic: str
    partition: int
    stream: int


class Place(NamedTuple):
    """Where a message is, for good."""

    partition: TopicPartition
    position: int
    id: int


@dataclass(slots=True)
class Track:
    """One partition, compared whole up to the position ``end``."""

    end: int = 0
    least_end: int = 0
    """The end of the last placed message."""
    waiting: set[int] = field(default_factory=set)
    """Numbers of the messages behind ``end`` that are placed."""


class History:
    """One data folder's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.sent: list[Sent] = []
        self.places: dict[int, Place] = {}
        self.acknowledged = 0
        self._last_stream = 0
        self._by_id: dict[int, int] = {}
        self._tracks = {partition: Track() for partition in PARTITIONS}
        self._streams: dict[int, list[int]] = {}  # numbers in the order in which a connection sent them, since the last check

    def new_stream(self) -> int:
        """A number for a connection."""
        self._last_stream += 1
        return self._last_stream

    def some_position(self, partition: TopicPartition, rng: random.Random) -> int:
        """Where a reader may begin: at a message, mostly one of the last, or at the end."""
        track = self._tracks[partition]
        new = [self.places[number].position for number in track.waiting]
        return rng.choice((0, track.end, track.end, rng.choice(new or [track.end])))

    # -- what happens -------------------------------------------------------------------------------------------------

    def content(self, number: int) -> tuple[str | None, bytes]:
        """Attribute and body of a message, one of which holds its number."""
        rng = random.Random(self._seed << 32 | number)
        body = rng.randbytes(rng.choice((0, 1, 30, 100, 100, 1000, rng.randrange(LARGEST_BODY + 1))))
        if rng.random() < 0.3:
            return str(number), body
        return None, number.to_bytes(_NUMBER_SIZE) + body

    def put(self, stream: int, topic: str, partition: int) -> bytes:
        """A new message's put; its opaque is its number."""
        number = len(self.sent)
        self.sent.append(Sent(topic, partition, stream))
        self._streams.setdefault(stream, []).append(number)
        return write_put(topic, partition, *join_attribute(*self.content(number)), number)

    def answered(self, reply: Reply) -> None:
        """The reply to a put. There is room, nobody misbehaves and the disk is quick: every put is taken."""
        expect(reply.code == OK, "no put is refused", reply)
        message_id, partition, position = map(int, reply.body.split())
        sent = self.sent[reply.opaque]
        expect(sent.partition in (partition, BROKER_CHOOSES), "a put goes where it asked", sent, reply)
        self.acknowledged += 1
        self._place(reply.opaque, Place(TopicPartition(sent.topic, partition), position, message_id))

    def delivered(self, partition: TopicPartition, message: Message) -> int:
        """A message that a reader got; returns its number."""
        number = int.from_bytes(message.body[:_NUMBER_SIZE]) if message.attribute is None else int(message.attribute)
        expect(number < len(self.sent), "nothing is delivered that was not sent", partition, message)
        sent = self.sent[number]
        there = sent.topic == partition.topic and sent.partition in (partition.partition, BROKER_CHOOSES)
        expect(there, "a message is delivered where it was sent", partition, sent, message)
        expect((message.attribute, message.body) == self.content(number), "a message is as it was sent", partition, message)
        self._place(number, Place(partition, message.position, message.id))
        return number

    def _place(self, number: int, place: Place) -> None:
        known = self.places.setdefault(number, place)
        expect(known == place, "a message stays where it was acknowledged or delivered", number, known, place)
        owner = self._by_id.setdefault(place.id, number)
        expect(owner == number, "no two messages have one id", number, owner, place)
        track = self._tracks[place.partition]
        if place.position >= track.end:
            track.waiting.add(number)
            _, text_body = join_attribute(*self.content(number))
            track.least_end = max(track.least_end, place.position + HEADER_SIZE_TEXT + len(text_body))
        else:
            expect(known is not place, "positions never go back", number, place, track.end)

    # -- what must be there -------------------------------------------------------------------------------------------

    def check(self, client: TextClient, rng: random.Random, *, whole: bool) -> None:
        """Compare the broker with what happened: all that is new since the last check and some of the old, or everything."""
        for topic, partitions in CREATED.items():
            expect(client.create(topic, 1) == partitions, "a topic keeps its partitions", topic)
        for partition, track in self._tracks.items():
            self._check_partition(client, partition, track, 0 if whole else track.end)
        self._check_streams()
        for number in rng.choices(list(self.places), k=_OLD_MESSAGES_EACH if self.places else 0):
            place = self.places[number]
            messages = _get(client, place.partition, place.position, max_bytes=1).messages
            expect(len(messages) == 1, "an old message is there alone", place, messages)
            expect(self.delivered(place.partition, messages[0]) == number, "an old message is there", number, place)

    def _check_partition(self, client: TextClient, partition: TopicPartition, track: Track, start: int) -> None:
        missing = set(track.waiting)
        if not start:
            missing |= {number for number, place in self.places.items() if place.partition == partition}
        position, message_id = start, -1
        last_of: dict[int, int] = {}
        while (batch := _get(client, partition, position)).messages:
            for message in batch.messages:
                expect(message.id > message_id, "ids rise with positions", partition, message)
                number = self.delivered(partition, message)
                stream = self.sent[number].stream
                expect(number > last_of.get(stream, -1), "one connection's order is kept", partition, number, stream)
                last_of[stream] = number
                missing.discard(number)
                position, message_id = message.next_position, message.id
        expect(batch.next_position == position, "there are no holes", partition, position, batch)
        lost = [(number, self.places[number]) for number in sorted(missing)[:3]]
        expect(not missing, "nothing acknowledged or delivered is lost", len(missing), lost)
        expect(position >= track.least_end, "positions never go back", partition, position, track.least_end)
        end = client.offset(partition.topic, END_OF_LOG, partition=partition.partition) if position else 0
        expect(end == position, "the end is behind the last message", partition, end, position)
        track.end = position
        track.waiting.clear()

    def _check_streams(self) -> None:
        """The log is cut at one place: of each connection there is all up to a message, and nothing behind it."""
        for stream, numbers in self._streams.items():
            kept = [number in self.places for number in numbers]
            expect(kept == sorted(kept, reverse=True), "no hole in what a connection sent", stream, kept)
        self._streams.clear()

    def counts(self) -> dict[TopicPartition, int]:
        """How many messages each partition has."""
        counts = dict.fromkeys(PARTITIONS, 0)
        for place in self.places.values():
            counts[place.partition] += 1
        return counts


def _get(client: TextClient, partition: TopicPartition, position: int, max_bytes: int = 1 << 20) -> Batch:
    return client.get(partition.topic, position, partition=partition.partition, max_bytes=max_bytes)
