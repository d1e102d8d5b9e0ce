"""A broker in which messages are leased, without handlers, on a disk in memory that fills up and outlives the process."""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from metaq.engine.duties import Duties
from metaq.engine.leases.keeping import LeaseKeeper
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import Plan, PopRequest
from metaq.engine.leases.popping import PopResult
from metaq.engine.offsets.offsetlog import APPEND_S, OffsetLog
from metaq.engine.reading.filters import EVERY_MESSAGE, filter_of, parse_cached
from metaq.engine.writing import internal_mark, note, stage
from metaq.errors import DiskFull, MetaqError
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition, TopicPartition
from metaq.protocol.properties import DEAD, DEAD_ID, DEAD_TOPIC, SHARDING_KEY, parse
from metaq.protocol.record import TAGS, Record, decode_record, is_intact
from metaq.store.files.filecache import read_here, run_here
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.inprocess import Parts

TOPIC: Final = "orders"
FILLER: Final = "filler"
PARTITIONS: Final = 2
GROUPS: Final = ("billing", "audit")
MOST_TIMES: Final = 2
KEEP_S: Final = 3600
SEGMENT_BYTES: Final = 64 * 1024
FILLER_BYTES: Final = 12 * 1024
TABLE: Final = {TOPIC: {"partitions": PARTITIONS}, FILLER: {"partitions": 1}}


class DeadLetter(NamedTuple):
    """A message among the dead letters of a group."""

    body: bytes
    reason: str
    times: int


class LeasedBroker:
    """The engine, and what a broker does with it."""

    def __init__(self, disk: FaultyDisk | None = None, now_ms: int | None = None) -> None:
        """Open the folder of a disk, an empty one by default, at a time."""
        self.disk = disk or FaultyDisk(random.Random(0))
        sizes: dict[str, Any] = {"segment_bytes": SEGMENT_BYTES, "max_body_bytes": 16 * 1024, "hot_bytes": 8 * 1024}
        keep = {"keep_hours": KEEP_S / 3600, "queue_file_bytes": 1024, "index_slots": 16, "index_entries": 20_000}
        self.parts = Parts(DATA, self.disk, topics=TABLE, **sizes, **keep)
        if now_ms is not None:
            self.parts.clock.jump(now_ms - self.parts.clock.now_ms())
        self.context, self.store, self.clock = self.parts.context, self.parts.store, self.parts.clock
        for name in GROUPS:
            group = self.context.groups.ensure(name)
            self.context.groups.put(replace(group, retry_max_times=MOST_TIMES))
        self.offsets = OffsetLog(self.context, self.parts.turns, run_here)
        self.leasing = Leasing.open(self.context, self.parts.turns, self.parts.loop.timer)
        self.leases = self.leasing.leases
        self.keeper = LeaseKeeper(self.leases, self.leasing.poison, self.parts.end_turn, run_here)
        self._duties = Duties(self.context, self.parts.turns, run_here)
        self._duties._keepers = (self.keeper,)
        self._offsets_at = 0.0

    # -- its end ------------------------------------------------------------------------------------------------------

    def closed(self) -> "LeasedBroker":
        """End in order, and start again."""
        self.end_turn()
        self._duties.save_topics()
        self.offsets.save_last()
        self.store.close()
        return LeasedBroker(self.disk, self.clock.now_ms())

    def killed(self) -> "LeasedBroker":
        """End by SIGKILL, and start again, with room: what was appended is there, and nothing else."""
        self.disk.killed()
        self.disk.full_from = None
        return LeasedBroker(self.disk, self.clock.now_ms())

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The monotonic time."""
        return int(self.clock.monotonic() * 1000)

    def end_turn(self) -> None:
        self.parts.end_turn()

    def advance(self, seconds: float) -> None:
        """Move the clock, and do what is due every second."""
        self.parts.advance(seconds)
        if self.clock.monotonic() - self._offsets_at > APPEND_S:
            self._offsets_at = self.clock.monotonic()
            self.log_offsets()

    def log_offsets(self) -> None:
        self.offsets.append()
        self.end_turn()
        self.store.sync()  # after a power cut, a snapshot of offsets that is ahead of the log stands
        with suppress(DiskFull):
            self.offsets.save()

    def tend(self) -> None:
        self.keeper.tend()
        self.end_turn()

    # -- the disk -----------------------------------------------------------------------------------------------------

    def free_disk(self) -> None:
        self.disk.full_from = None
        self.store.sweep()

    def retire(self) -> None:
        """Have retention delete all segments but the last, which takes two rounds when they are still needed."""
        for _ in range(SEGMENT_BYTES // FILLER_BYTES + 1):
            self.put(FILLER, 0, bytes(FILLER_BYTES))
            self.end_turn()
        self.advance(2 * KEEP_S)
        for _ in range(3):
            self.store.checkpoint()
            self.put(FILLER, 0, b"")
            self.end_turn()
            self._duties.delete_expired()
            self.end_turn()

    # -- messages -----------------------------------------------------------------------------------------------------

    def order_by_key(self) -> None:
        """Give the messages of each key in order, to all groups; it has to be said again after a start."""
        for name in GROUPS:
            self.context.groups.put(replace(self.context.groups.ensure(name), attributes={"order": "key"}))

    def put(self, topic: str, partition: int, body: bytes, tag: str = "", key: str = "") -> bool:
        """Put a message at the end of this turn; return whether there is room."""
        draft = internal_mark(self.context, TopicPartition(topic, partition), body)
        if tag:
            draft.properties[TAGS] = tag
        if key:
            draft.properties[SHARDING_KEY] = key
        try:
            self.store.check_writable()
            stage(self.context, draft)
        except MetaqError:
            return False
        note(self.parts.turns, lambda _: None)
        return True

    def request(
        self, group: str, partition: int | None, most: int, invisible_ms: int, tag: str = "", *, in_order: bool = False
    ) -> PopRequest:
        wanted = filter_of(parse_cached(TOPIC, tag, kind="TAG")) if tag else EVERY_MESSAGE
        topic, known = self.context.topics.get(TOPIC), self.context.groups.get(group)
        assert topic is not None and known is not None
        partitions = None if partition is None else (partition,)
        return PopRequest(known, topic, partitions, most, invisible_ms, wanted, from_first=True, in_order=in_order)

    def plan(self, request: PopRequest) -> Plan:
        return self.leasing.pops.plan(request, read_here)

    def take(self, request: PopRequest, plan: Plan) -> PopResult | None:
        return self.leasing.pops.take(request, plan)

    def state(self, place: GroupPartition) -> PartitionLeases | None:
        return self.leases.settled(place)

    def end_of(self, partition: int) -> int:
        """Return the ordinal after the last message that can be read."""
        queue = self.store.queues.get(TopicPartition(TOPIC, partition))
        return 0 if queue is None else queue.readable

    def first_of(self, partition: int) -> int:
        queue = self.store.queues.get(TopicPartition(TOPIC, partition))
        return 0 if queue is None else self.store.first(queue, read_here)[0]

    def dead_letters(self, group: str, first: int = 0) -> list[DeadLetter]:
        """Return the dead letters of a group from an ordinal on."""
        queue, found = self.store.queues.get(TopicPartition(f"%DLQ%{group}", 0)), []
        if queue is not None:
            for stored in self.store.records(queue, first, 1 << 20, read_here):
                if stored is None:
                    continue  # a power cut took it
                record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
                pairs = parse(record.properties.decode())
                assert pairs[DEAD_TOPIC] == TOPIC and pairs[DEAD_ID]
                found.append(DeadLetter(bytes(record.body), pairs[DEAD], record.reconsume_times))
        return found

    def delete_topic(self) -> None:
        """Delete the topic, and make it again."""
        known = self.context.topics.get(TOPIC)
        assert known is not None
        ends = {key: queue.next for key, queue in self.store.queues.items() if key.topic == TOPIC}
        self.context.topics.delete(TOPIC, ends)
        for key, end in ends.items():
            self.store.queue(*key).hide_before(end)
        self.context.offsets.remove_topic(TOPIC)
        self.leasing.pops.forget(topic=TOPIC)
        self.context.topics.put(known)
        self.end_turn()
        self._duties.save_topics()
        self.log_offsets()


def records_of(body: Sequence[bytes | memoryview]) -> Iterator[Record]:
    """Iterate over the records of an answer, which are intact."""
    for each in body:
        view = memoryview(each)
        while view:
            size = int.from_bytes(view[:4])
            assert is_intact(view[:size], int.from_bytes(view[28:36]))
            yield decode_record(view[:size])
            view = view[size:]
