"""A model of a store: the messages given to it, and which of them an end of the process must leave.

The model keeps, per partition, every message by ordinal with the text position and log offset that the store gave it.
``appended`` of them survive a killed process, ``synced`` of them a power cut. ``check`` compares an opened store with that and
takes over what else it found: messages in flight at the end may be there, whole and in their place, or not; of a group all
are there or none.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.checksum import body_crc
from metaq.errors import Overloaded
from metaq.message import Durability, TextPosition, TopicPartition
from metaq.protocol.keys import KEYS as KEYS_PROPERTY
from metaq.protocol.keys import UNIQ_KEY, keys_of
from metaq.protocol.record import (
    TAGS,
    constant_middle,
    decode_properties,
    decode_record,
    encode_properties,
    host_bytes,
    java_hash,
    record_tail,
)
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, Stored, decode_text_messages, encode_stored
from metaq.store.files.filecache import read_here
from metaq.store.messagestore import MessageStore
from metaq.store.newrecord import NewRecord
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.recordgroups import put_record_group
from tests.crash.command import expect

MARKS: Final = TopicPartition("METAQ_SYS_TRANSACTIONS", 0)
"""Where marks of groups are put, and messages of their own."""
KEYS: Final = [*(TopicPartition(topic, partition) for topic in ("orders", "t") for partition in (0, 1)), MARKS]
_HOST: Final = host_bytes("127.0.0.1", 8123)


Put = tuple[TopicPartition, bytes, int, str | None]
"""What is to be put: partition, body, flag and attribute."""


class Sent(NamedTuple):
    """One message as it was given to the store, and where that put it."""

    body: bytes
    flag: int
    attribute: str | None
    keys: tuple[str, ...]
    position: int
    log_offset: int

    @property
    def text_size(self) -> int:
        extra = 0 if self.attribute is None else 4 + len(self.attribute.encode())
        return HEADER_SIZE_TEXT + extra + len(self.body)


@dataclass(slots=True)
class Track:
    """One partition. ``None`` in ``sent``: was in flight at a power cut and is lost, with one behind it kept."""

    sent: list[Sent | None] = field(default_factory=list)
    appended: int = 0
    synced: int = 0


def message_keys(key: TopicPartition, ordinal: int) -> tuple[str, ...]:
    """Two of three messages have keys: one of their own, and perhaps one that they share. Marks have none."""
    return () if key == MARKS else (f"u{ordinal}", "shared")[: ordinal % 3]


def random_message(rng: random.Random, largest: int) -> tuple[bytes, int, str | None]:
    """Body, flag and attribute."""
    length = rng.choice((0, 1, 30, 30, 100, 100, 500, rng.randrange(largest + 1)))
    attribute = rng.choice((None, None, None, "", "tag", "größer"))
    return rng.randbytes(length), rng.choice((0, 0, 0, 2, -2, 0x7FFFFFFE)), attribute


def _asked(store: MessageStore, topic: str, word: str) -> list[Stored]:
    """Return what a query finds; while it is refused as ``Overloaded``, index the keys and ask again."""
    while True:
        try:
            return store.query(topic, word, 0, 1 << 62, 64, read_here)
        except Overloaded:
            store.index_keys()


class Model:
    """See the module."""

    def __init__(self) -> None:
        self.tracks: dict[TopicPartition, Track] = {}
        self.groups: list[list[tuple[TopicPartition, int]]] = []
        """Partition and ordinal of the records that must all be there, or none of them."""
        self.begin_allowed = 0
        """The log may have lost what is before this offset: retention was told so."""

    def copy(self) -> "Model":
        """For another future of the same past."""
        twin = Model()
        twin.tracks = {key: Track(list(track.sent), track.appended, track.synced) for key, track in self.tracks.items()}
        twin.groups = list(self.groups)
        twin.begin_allowed = self.begin_allowed
        return twin

    # -- following what the store does --------------------------------------------------------------------------------

    def put(self, store: MessageStore, put: Put) -> None:
        """Stage one message; it is remembered only when the store took it."""
        new, sent = _new_record(store, put, [])
        self._put(put[0], sent, store.put(*new))

    def put_group(self, store: MessageStore, puts: Sequence[Put]) -> None:
        """Stage a mark and its members."""
        made: list[tuple[Put, Sent]] = []
        group = []
        for put in puts:
            new, sent = _new_record(store, put, [before for each, before in made if each[0] == put[0]])
            made.append((put, sent))
            group.append(new)
        offsets = put_record_group(store, group[0], group[1:])
        places = [self._put(put[0], sent, offset) for (put, sent), offset in zip(made, offsets, strict=True)]
        self.groups.append(places)

    def _put(self, key: TopicPartition, sent: Sent, log_offset: int) -> tuple[TopicPartition, int]:
        track = self.tracks.setdefault(key, Track())
        track.sent.append(sent._replace(log_offset=log_offset))
        return key, len(track.sent) - 1

    def appended(self) -> None:
        """``append`` returned."""
        for track in self.tracks.values():
            track.appended = len(track.sent)

    def refused(self) -> None:
        """``append`` failed: nothing of the turn was stored."""
        for track in self.tracks.values():
            del track.sent[track.appended :]
        self.groups = [group for group in self.groups if group[0][1] < self.tracks[group[0][0]].appended]

    def before_sync(self) -> dict[TopicPartition, int]:
        """Return how many messages of each partition a sync that begins now will cover."""
        return {key: track.appended for key, track in self.tracks.items()}

    def synced(self, covered: dict[TopicPartition, int]) -> None:
        """The sync is finished."""
        for key, count in covered.items():
            self.tracks[key].synced = max(self.tracks[key].synced, count)

    def ended(self, *, power: bool) -> None:
        """The process is gone: what must be there is now what it leaves."""
        if power:
            for track in self.tracks.values():
                track.appended = track.synced

    # -- comparing ----------------------------------------------------------------------------------------------------

    def check(self, store: MessageStore, rng: random.Random) -> None:
        """Compare a store just opened, and go on from what it has."""
        expect(store.failure is None, "an opened store takes messages", store.failure)
        begin = store.log.begin
        expect(begin <= self.begin_allowed, "only retention deletes segments", begin, self.begin_allowed)
        expect(set(store.queues) <= set(KEYS), "no partition appears from nowhere", *store.queues)
        for key, track in self.tracks.items():
            queue = store.queue(*key)
            expect(queue.next >= track.appended, "ordinals never go back", key, queue.next, track.appended)
            expect(queue.next <= len(track.sent), "nothing appears that was not put", key, queue.next, len(track.sent))
            expect(queue.readable == queue.next, "all that was found is readable", key, queue.readable, queue.next)
            del track.sent[queue.next :]
            self._check_messages(store, queue, track, begin)
            self._check_positions(store, queue, track, begin, rng)
            self.check_found(store, key, rng)
            track.appended = queue.next
            if store.settings.durability is Durability.DISK:
                track.synced = queue.next
        self._check_groups()

    def _check_groups(self) -> None:
        whole = []
        for group in self.groups:
            sent = [self.tracks[key].sent[ordinal : ordinal + 1] for key, ordinal in group]
            there = [found not in ([], [None]) for found in sent]
            expect(len(set(there)) == 1, "all of a group or nothing", group, there)
            if there[0]:
                whole.append(group)
        self.groups = whole

    def check_found(self, store: MessageStore, key: TopicPartition, rng: random.Random) -> None:
        """Some readable messages are found by their keys, whatever the index has seen, unless it has no room."""
        queue = store.queue(*key)
        first, _ = store.first(queue, read_here)
        for ordinal in rng.sample(range(first, queue.readable), min(3, queue.readable - first)):
            sent = self.tracks[key].sent[ordinal]
            for word in () if sent is None else sent.keys:
                found = _asked(store, key.topic, word)
                offsets = [stored.log_offset for stored in found]
                expect(offsets == sorted(set(offsets), reverse=True), "newest first, each once", key, word, offsets)
                there = sent is not None and sent.log_offset in offsets
                expect(there or len(found) == 64 or store.indexing.paused is not None, "found by key", key, word, sent)

    def _check_messages(self, store: MessageStore, queue: ConsumeQueue, track: Track, begin: int) -> None:
        found = list(store.records(queue, queue.base, 1000, read_here)) if queue.base < queue.readable else []
        expect(len(found) == queue.readable - queue.base, "one answer a message", queue, len(found))
        for ordinal, sent in enumerate(track.sent):
            stored = found[ordinal - queue.base] if ordinal >= queue.base else None
            if stored is not None:
                expect(sent is not None, "a lost message stays lost", queue, ordinal)
                assert sent is not None
                compare(queue, ordinal, sent, stored, store.epoch << 47)
            elif ordinal < track.appended:
                gone = sent is None or sent.log_offset < begin
                expect(gone, "nothing acknowledged is lost", queue, ordinal, sent, begin)
            else:
                track.sent[ordinal] = None

    def _check_positions(self, store: MessageStore, queue: ConsumeQueue, track: Track, begin: int, rng: random.Random) -> None:
        last = track.sent[-1] if track.sent else None
        if last is not None:
            expected = last.position + last.text_size
            expect(queue.text_end == expected, "positions go on where they were", queue, queue.text_end, expected)
        there = [(ordinal, sent) for ordinal, sent in enumerate(track.sent) if sent is not None and sent.log_offset >= begin]
        first = (there[0][0], there[0][1].position) if there else (queue.readable, queue.text_end)
        expect(store.first(queue, read_here) == first, "first", queue, store.first(queue, read_here), first)
        for index in rng.sample(range(len(there)), min(2, len(there))):
            ordinal, sent = there[index]
            inside = sent.position + rng.randrange(sent.text_size)
            answer = store.locate(queue, inside, read_here)
            expect(answer == (ordinal, sent.position), "locate", queue, inside, answer, (ordinal, sent.position))
        end = (queue.readable, TextPosition(queue.text_end))
        expect(store.locate(queue, queue.text_end, read_here) == end, "locate the end", queue)


def _new_record(store: MessageStore, put: Put, before: Sequence[Sent]) -> tuple[NewRecord, Sent]:
    """A message that follows those ``before`` it, which are not staged yet, in its partition."""
    key, body, flag, attribute = put
    queue = store.queue(*key)
    keys = message_keys(key, queue.next + len(before))
    pairs = [] if attribute is None else [(TAGS, attribute)]
    pairs += zip((UNIQ_KEY, KEYS_PROPERTY), keys, strict=False)
    tail = record_tail(key.topic, encode_properties(pairs)) if pairs else None
    middle = constant_middle(0, store.clock.now_ms(), _HOST, store.clock.now_ms(), _HOST)
    sent = Sent(body, flag, attribute, keys, queue.text_end + sum(each.text_size for each in before), 0)
    new = NewRecord(
        queue=queue,
        flag=flag,
        body=body,
        crc=body_crc(body),
        middle=middle,
        text_size=sent.text_size,
        tail=tail,
        tag=0 if attribute is None else java_hash(attribute),
        keys=keys,
    )
    return new, sent


def compare(queue: ConsumeQueue, ordinal: int, sent: Sent, stored: Stored, id_base: int) -> None:
    """A delivered record against what was put, as binary and as text readers get it."""
    record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
    attribute = decode_properties(record.properties).get(TAGS)
    keys = keys_of(record.topic, record.sys_flag, record.properties)
    got = Sent(bytes(record.body), record.flag, attribute, keys, record.text_position, record.log_offset)
    expect(got == sent, "a message is as it was put", queue, ordinal, got, sent)
    expect(record.queue_offset == ordinal, "a message is in its place", queue, ordinal, record.queue_offset)
    out: list[bytes | memoryview] = []
    size = encode_stored(stored, queue.overhead, id_base, out)
    (message,) = decode_text_messages(b"".join(out), sent.position)
    whole = (message.body, message.attribute, message.next_position, message.id)
    expected = (sent.body, sent.attribute, sent.position + sent.text_size, id_base | sent.log_offset)
    expect(whole == expected and size == sent.text_size, "the text form is as it was put", queue, ordinal, whole, expected)


def delivered(store: MessageStore, queue: ConsumeQueue) -> Iterator[tuple[int, Stored | None]]:
    """Every readable ordinal of a partition with what a reader gets for it."""
    if queue.base < queue.readable:
        yield from enumerate(store.records(queue, queue.base, 1000, read_here), queue.base)
