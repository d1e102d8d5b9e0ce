"""Copies of a log, cuts of what diverged, fresh starts (``metaq.store.copies.applying``, ``discarding``, ``epochs``)."""

import random
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.role import Role
from metaq.errors import CorruptRecord
from metaq.message import Durability, TopicPartition
from metaq.protocol.record import encode_properties, identity, java_hash, record_tail
from metaq.protocol.text.messages import Stored, encode_stored, text_size_and_tag
from metaq.store.copies.applying import Copier, hide_from, piece
from metaq.store.copies.discarding import begin_at_next_opening, cut_at_next_opening
from metaq.store.copies.epochs import END_OF_NEWEST, FIRST, Epoch, Epochs, common_end, last_record
from metaq.store.files.filecache import read_here, run_here
from metaq.store.log.retention import RetentionRules
from metaq.store.messagestore import LOG, QUEUES, MessageStore
from metaq.store.newrecord import NewRecord
from metaq.store.queues.consumequeue import FILLER_SIZE, ConsumeQueue
from metaq.store.recordgroups import put_record_group
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.store.test_record_groups import FIRST as T0
from tests.store.test_record_groups import MARKS, bodies, put, ready
from tests.store.test_record_groups import SECOND as T1

SEGMENT: Final = 4096
FREE: Final = RetentionRules(ample_free_bytes=0)
"""However full the disk is."""
MASTER: Final = StoreSettings(
    retention=FREE, segment_bytes=SEGMENT, queue_file_bytes=256, index_slots=5, index_entries=40, durability=Durability.MEMORY
)
SLAVE: Final = StoreSettings(
    retention=FREE, segment_bytes=SEGMENT, queue_file_bytes=256, index_slots=5, index_entries=40, durability=Durability.REPLICA
)

SIZE_BYTES: Final = 4


def plain(store: MessageStore, key: TopicPartition, body: bytes) -> NewRecord:
    """A message without properties."""
    return ready(store, key, body)._replace(tail=None, keys=())


def fill(store: MessageStore, rng: random.Random, turns: int) -> None:
    """Single messages, turns of several, and groups; in ``T1`` most have no properties, in ``T0`` all have keys."""
    for number in range(turns):
        if rng.random() < 0.3:
            members = [message(store, rng, 200) for _ in range(rng.randrange(4))]
            put_record_group(store, ready(store, MARKS, b"mark %d" % number), members)
        for _ in range(rng.randrange(1, 4)):
            store.put(*message(store, rng, 400))
        store.append()


def message(store: MessageStore, rng: random.Random, most: int) -> NewRecord:
    key = rng.choice((T0, T1, T1))
    make = plain if key == T1 and rng.random() < 0.8 else ready
    return make(store, key, rng.randbytes(rng.randrange(most)))


def send(master: MessageStore, slave: MessageStore, rng: random.Random, *, most: int = 300) -> None:
    """Copy all that the slave lacks, in pieces of any size."""
    copier = Copier(slave)
    at = slave.log.end
    while at < master.log.end:
        start, data = piece(master.log, at, rng.randrange(1, most), read_here)
        while data:
            size = rng.randrange(1, len(data) + 1)
            copier.take(start, bytes(data[:size]))
            slave.append()
            start, data = start + size, data[size:]
        at = start
    assert slave.log.end == master.log.end
    slave.publish(slave.log.end)


def files(store: MessageStore, folder: str) -> dict[str, bytes]:
    root = store.directory / folder
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def same(master: MessageStore, slave: MessageStore) -> None:
    for store in (master, slave):
        store.sweep()
    ours, theirs = files(master, LOG), files(slave, LOG)
    assert {name: ours[name] for name in theirs if name in ours} == theirs  # a spare segment may be there or not
    units = [{name: data for name, data in files(store, QUEUES).items() if data} for store in (master, slave)]
    assert units[0] == units[1]  # a queue of which all was cut keeps an empty file
    for key in (T0, T1):
        assert bodies(master, key) == bodies(slave, key)
        assert master.queue(*key).readable_text_end == slave.queue(*key).readable_text_end


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_is_the_same_byte_for_byte(tmp_path: Path, seed: int) -> None:
    """F-PART, MQ-065: log and queues, over segments and groups, sent in pieces of any size, with restarts of both."""
    rng = random.Random(seed)
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    for _ in range(4):
        fill(master, rng, rng.randrange(1, 25))
        send(master, slave, rng)
        same(master, slave)
        if rng.random() < 0.5:
            master.close()
            master, _ = open_store(tmp_path / "master", MASTER)
        if rng.random() < 0.5:
            slave.close()
            slave, _ = open_store(tmp_path / "slave", SLAVE)
    slave.index_keys()
    for store in (master, slave):
        (last,) = [body for body in bodies(store, T0)[-1:] if body]
        assert store.query("t", last[:8].hex(), 0, 1 << 60, 9, read_here)
    master.close()
    slave.close()


def test_keys_of_copies_are_entered_as_they_come(tmp_path: Path) -> None:
    """MQ-065: a slave need not read its log again for them; what has none costs the index nothing."""
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    put_record_group(master, ready(master, MARKS, b"mark"), [ready(master, T0, b"in a group")])
    for body in (b"alone", b"last"):
        master.put(*ready(master, T0, body))
        master.put(*plain(master, T1, body))
    master.append()
    send(master, slave, random.Random(1), most=100_000)
    assert slave.indexing.behind == 0
    slave.index_keys()
    assert slave.indexing.log_offset == slave.log.end
    for body in (b"in a group", b"alone", b"last"):
        assert len(slave.query("t", body[:8].hex(), 0, 1 << 60, 9, read_here)) == 1
    master.close()
    slave.close()


def test_a_group_becomes_part_of_the_log_whole(tmp_path: Path) -> None:
    """F-TX: a slave that is killed in the middle of a group has nothing of it."""
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    put(master, T0, b"before")
    before = master.log.end
    put_record_group(master, ready(master, MARKS, b"mark"), [ready(master, T0, b"1"), ready(master, T1, b"2")])
    master.append()
    _, data = piece(master.log, 0, SEGMENT, read_here)
    copier = Copier(slave)
    copier.take(0, bytes(data[:-1]))
    slave.append()
    assert slave.log.end == before
    copier.take(len(data) - 1, bytes(data[-1:]))
    slave.append()
    assert slave.log.end == master.log.end


def test_lost_messages_are_lost_on_a_new_slave(tmp_path: Path) -> None:
    """SG-018: also where all of its log is so new that it is trusted."""
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    put(master, T0, b"first")
    master.queue(*T0).fill(3)  # as a start does when the log's end is gone, and the checkpoint knows of them
    put(master, T0, b"last")
    send(master, slave, random.Random(1))
    queue = slave.queue(*T0)
    assert [stored is None for stored in slave.records(queue, 0, SEGMENT, read_here)] == [False, True, True, False]
    for lost in (1, 2):
        assert slave.reader.hot_slices(queue, lost, 4, SEGMENT, read_here) == ([], lost)
        assert slave.reader.hot_run(queue, lost, 4, 0, read_here) is None


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """F-HA-GARBAGE: other places, other bytes; nothing is stored."""
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    put(master, T0, b"one")
    second = put(master, T0, b"two")
    _, data = piece(master.log, 0, SEGMENT, read_here)
    for offset, sent in (
        (1, bytes(data)),
        (0, bytes(data[1:])),
        (second, bytes(data[second:])),
        (0, bytes(data[:50]) + b"x" + bytes(data[51:])),
        (0, b"\xff" * 300),
    ):
        with pytest.raises(CorruptRecord):
            Copier(slave).take(offset, sent)
        assert (slave.append(), slave.log.end) == ([], 0)


def test_no_altered_record_is_taken_behind_good_ones(tmp_path: Path) -> None:
    """F-HA-GARBAGE: whichever byte differs, and in queues that are known already, the log goes no further than before it."""
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    put(master, T1, b"of another queue")
    ends = [master.log.end]
    for key, body in ((T0, b"first"), (T0, b"second"), (T1, b"third")):
        master.put(*plain(master, key, body))
        master.append()
        ends.append(master.log.end)
    _, data = piece(master.log, 0, SEGMENT, read_here)
    good = bytes(data)
    copier = Copier(slave)
    copier.take(0, good[: ends[1]])
    slave.append()
    for at in range(ends[1] + SIZE_BYTES, ends[2]):  # of another size more would have to come first
        altered = good[ends[1] : at] + bytes((good[at] ^ 1,)) + good[at + 1 :]
        with pytest.raises(CorruptRecord):
            copier.take(ends[1], altered)
        assert (slave.append(), slave.log.end) == ([], ends[1])
    with pytest.raises(CorruptRecord):
        copier.take(ends[1], good[ends[2] :])  # whole, but not what stands there
    assert (slave.append(), slave.log.end) == ([], ends[1])
    copier.take(ends[1], good[ends[1] :])
    slave.append()
    slave.publish(slave.log.end)
    same(master, slave)
    master.close()
    slave.close()


def test_lost_messages_are_lost_in_the_copy_too(tmp_path: Path) -> None:
    """P36: what stands behind them keeps its ordinal and its position."""
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    for _ in range(3):
        for _ in range(3):
            master.put(*plain(master, T0, b"stored"))
        master.queue(*T0).fill(master.queue(*T0).next + 2)
        master.queue(*T0).text_end += 100
        master.put(*plain(master, T0, b"behind"))
        master.append()
    send(master, slave, random.Random(0), most=SEGMENT)
    same(master, slave)
    master.close()
    slave.close()


@pytest.mark.parametrize("tag", [None, "", "paid", "päid" * 50])
def test_a_copy_takes_as_much_room_for_text_readers_as_they_get(tmp_path: Path, tag: str | None) -> None:
    """MQ-065: size and tag that a slave derives from a record are those of what readers are given."""
    store, _ = open_store(tmp_path / "data", MASTER)
    pairs = [("KEYS", "k"), *([] if tag is None else [("TAGS", tag)])]
    for tail in (None, record_tail(T0.topic, encode_properties(pairs))):
        offset = store.put(*plain(store, T0, b"body")._replace(tail=tail))
        store.append()
        stored = store.log.record_at(offset)
        assert stored is not None
        overhead, out = store.queue(*T0).overhead, list[bytes | memoryview]()
        size, found = text_size_and_tag(stored, overhead)
        assert size == encode_stored(stored, overhead, 0, out) == sum(map(len, out))
        assert found == (0 if tail is None else java_hash(tag or ""))
    store.close()


@pytest.mark.parametrize("seed", range(20))
def test_what_diverged_is_cut(tmp_path: Path, seed: int) -> None:
    """P08, F-FAIL: the old master's log is cut where the new one's began; then it follows."""
    rng = random.Random(seed)
    old, _ = open_store(tmp_path / "old", MASTER)
    new, _ = open_store(tmp_path / "new", SLAVE)
    Epochs(old).begin(2, 1)
    fill(old, rng, rng.randrange(20))
    send(old, new, rng)
    common = new.log.end
    fill(old, rng, rng.randrange(20))
    new.close()
    new, _ = open_store(tmp_path / "new", MASTER)
    epochs = Epochs(new)
    epochs.begin(3, 2)
    fill(new, rng, rng.randrange(20))
    end = common_end(epochs.table, new.log.end, Epochs(old).table, old.log.end)
    assert end == common
    cut_at_next_opening(old, end, None)
    old.close()
    old, _ = open_store(tmp_path / "old", SLAVE)
    assert old.log.end == common
    send(new, old, rng)
    same(new, old)
    assert Epochs(old).table == epochs.table
    old.close()
    old, recovery = open_store(tmp_path / "old", SLAVE)
    assert not recovery.problems
    same(new, old)


def test_a_log_begins_anew_behind_what_has_aged_out(tmp_path: Path) -> None:
    """P06: ordinals and positions go on as the master's, also of a partition that has no message left."""
    rng = random.Random(0)
    master, _ = open_store(tmp_path / "master", MASTER)
    other = TopicPartition("gone", 3)
    put(master, other, b"aged out")
    for _ in range(8):
        fill(master, rng, 5)
    master.close()
    master, _ = open_store(tmp_path / "master", MASTER)
    begin = master.log.segments[2].base
    for segment in master.log.segments[:2]:
        master.log.remove(segment)
    for queue in master.queues.values():
        queue.drop_before(master.reader.oldest(queue, queue.base, read_here), lambda call: call())
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    put(slave, T0, b"of another time")
    begin_at_next_opening(slave, begin, [(*key, *master.first(queue, read_here)) for key, queue in master.queues.items()])
    slave.close()
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    assert (slave.log.begin, slave.log.end) == (begin, begin)
    send(master, slave, rng)
    for key, queue in master.queues.items():
        copied = slave.queue(*key)
        assert (copied.next, copied.text_end) == (queue.next, queue.text_end)
        assert slave.first(copied, read_here) == master.first(queue, read_here)
    slave.close()
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    assert slave.queue(*other).next == 1
    assert not (slave.directory / QUEUES / "gone" / "3" / f"{0:020}").exists()


@pytest.mark.parametrize("seed", range(10))
def test_readers_see_no_more_than_is_published(tmp_path: Path, seed: int) -> None:
    """DESIGN 5: after a restart, too, what a failover could take back stays hidden."""
    rng = random.Random(seed)
    store, _ = open_store(tmp_path / "data", SLAVE)
    fill(store, rng, 10)
    end = store.log.end
    seen = {key: (store.queue(*key).next, store.queue(*key).text_end) for key in (T0, T1)}
    fill(store, rng, rng.randrange(10))
    store.close()
    store, _ = open_store(tmp_path / "data", SLAVE)
    hide_from(store, end)
    for key, (following, position) in seen.items():
        queue = store.queue(*key)
        assert (queue.readable, queue.readable_text_end) == (following, position)
    store.publish(store.log.end - 1)
    assert [store.queue(*key).readable for key in (T0, T1)] == [
        following for following, _ in seen.values()
    ] or store.log.end == end
    store.publish(store.log.end)
    for key in (T0, T1):
        assert store.queue(*key).readable == store.queue(*key).next
    store.close()


def hidden_by_walking(queue: ConsumeQueue, log_offset: int) -> int:
    """Return the ordinal before which messages are shown, found from the end of the queue."""
    count = queue.next
    while count > queue.base:
        offset, size, _ = queue.unit(count - 1, read_here)
        if offset < log_offset and size != FILLER_SIZE:
            break
        count -= 1
    return count


def intact(store: MessageStore, queue: ConsumeQueue, ordinal: int) -> Stored | None:
    offset, size, _ = queue.unit(ordinal, read_here)
    return None if size == FILLER_SIZE else store.log.record_at(offset)


@pytest.mark.parametrize("seed", range(10))
def test_the_first_hidden_message_is_found_among_lost_ones(tmp_path: Path, seed: int) -> None:
    """Fillers, which stand for lost messages, have no place in the log."""
    rng = random.Random(seed)
    store, _ = open_store(tmp_path / "data", SLAVE)
    for _ in range(30):
        fill(store, rng, 1)
        for key in (T0, T1):
            queue = store.queue(*key)
            queue.fill(queue.next + rng.choice((0, 0, 1, 3)))
    for log_offset in (0, store.log.end, *(rng.randrange(store.log.end) for _ in range(50))):
        expected = {key: hidden_by_walking(queue, log_offset) for key, queue in store.queues.items()}
        hide_from(store, log_offset)
        assert {key: queue.readable for key, queue in store.queues.items()} == expected
        for queue in store.queues.values():
            first = next(
                (stored for stored in map(partial(intact, store, queue), range(queue.readable, queue.next)) if stored), None
            )
            assert queue.readable_text_end == (queue.text_end if first is None else identity(first.buffer).text_position)
        store.publish(store.log.end)
        for queue in store.queues.values():
            queue.publish(queue.next, queue.text_end)
    store.close()


def test_what_no_replica_wrote_is_shown_from_the_start(tmp_path: Path) -> None:
    """ES-009: what was acknowledged at a level without replicas stays visible at one with them; after an epoch nothing does."""
    store, _ = open_store(tmp_path / "data", MASTER)
    put(store, T0, b"acknowledged without replicas")
    end = store.log.end
    first, _ = Role(epoch=1).taken(store, 1, run_here)
    assert first.readable_end == end
    put(store, T0, b"not yet held by others")
    again, _ = Role(epoch=2, readable_end=end).taken(store, 1, run_here)
    assert again.readable_end == end
    store.close()


def test_epochs_are_part_of_the_log(tmp_path: Path) -> None:
    """F-FAIL: they are found again after a restart, and written again before retention takes them."""
    store, _ = open_store(tmp_path / "data", MASTER)
    epochs = Epochs(store)
    assert epochs.table == [FIRST]
    put(store, T0, b"old")
    start = store.log.end
    epochs.begin(4, 7)
    store.append()
    later = put(store, T0, b"new")
    assert [epochs.at(offset) for offset in (0, start - 1, start, later)] == [
        (1, start),
        (1, start),
        (4, END_OF_NEWEST),
        (4, END_OF_NEWEST),
    ]
    place = epochs.oldest
    assert place == start
    store.no_room = "a test says so"  # puts are refused, this is not
    epochs.keep(later)
    store.append()
    assert epochs.oldest == place  # until the new one is durable
    store.sync()
    assert epochs.oldest is not None
    assert epochs.oldest > later
    store.close()
    store, _ = open_store(tmp_path / "data", MASTER)
    again = Epochs(store)
    assert (again.table, again.oldest, store.epoch) == ([FIRST, Epoch(4, start, 7)], epochs.oldest, 4)
    last = last_record(store)
    assert last is not None
    assert sum(last) == store.log.end
    assert identity(memoryview(store.log.record_at(last[0]).buffer)).topic == "METAQ_SYS_EPOCHS"  # type: ignore[union-attr]
    store.close()


@pytest.mark.parametrize(
    ("ours", "our_end", "theirs", "their_end", "common"),
    [
        ([FIRST], 500, [FIRST], 300, 300),
        ([FIRST, Epoch(2, 300, 1)], 500, [FIRST], 400, 300),
        ([FIRST, Epoch(2, 300, 1)], 500, [FIRST, Epoch(2, 300, 1)], 700, 500),
        ([FIRST, Epoch(3, 300, 2)], 500, [FIRST, Epoch(2, 200, 1)], 700, 200),
        ([FIRST, Epoch(2, 300, 1)], 500, [FIRST, Epoch(2, 300, 2)], 500, 300),
        ([Epoch(7, 300, 1)], 500, [Epoch(2, 300, 2)], 500, None),
        ([Epoch(2, 0, 1), Epoch(5, 80, 1)], 90, [Epoch(2, 0, 1), Epoch(3, 60, 2), Epoch(4, 70, 2)], 90, 60),
    ],
)
def test_where_two_logs_part(ours: list[Epoch], our_end: int, theirs: list[Epoch], their_end: int, common: int | None) -> None:
    """P08: found from the two tables alone, the same from both sides."""
    assert common_end(ours, our_end, theirs, their_end) == common
    assert common_end(theirs, their_end, ours, our_end) == common
