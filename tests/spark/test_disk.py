"""A store folder read without its broker, compared with what a consumer of the broker receives."""

import os
import random
import shutil
import zlib
from bisect import bisect_left
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from metaq.checksum import body_crc
from metaq.errors import StoreError, UnknownTopic, UnknownVersion
from metaq.message import TopicPartition
from metaq.protocol.properties import KEYS, UNIQUE_KEY
from metaq.protocol.record import (
    HEADER_SIZE,
    TAGS,
    Record,
    constant_middle,
    decode_properties,
    encode_properties,
    host_bytes,
    java_hash,
    record_tail,
)
from metaq.protocol.remoting.codes import Request
from metaq.protocol.sysflag import COMPRESSED
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.spark.reading.columns import MOST_BYTES, NOT_USERS, UNIT, Piece, Shape, missing, record_batches
from metaq.spark.reading.disk import Ends, Folder
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import write_document
from metaq.store.log.segments import segment_name
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import FILLER_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.support.admin import ask
from tests.support.broker import BrokerProcess, wait_until
from tests.support.halves import COMMIT, ROLLBACK, Producer
from tests.support.manualclock import ManualClock
from tests.support.messages import records, send, send_header, sent
from tests.support.remoting import RemotingClient
from tests.support.talk import Talk
from tests.support.wire import stored_record

SEGMENT: Final = 64 * 1024
FLAGS: Final = (
    "--segment-bytes",
    str(SEGMENT),
    "--max-body-bytes",
    "30000",
    "--check-after-ms",
    "3600000",
    "--default-partitions",
    "4",
)
SMALL: Final = StoreSettings(segment_bytes=SEGMENT // 4, queue_file_bytes=256)
TOPICS: Final = {"text": 4, "remoting": 4, "orders": 4}
AGAIN: Final = TopicPartition("again", 0)
FIRST: Final = TopicPartition("a", 0)
KEYS_OF_MADE: Final = (FIRST, TopicPartition("a", 1), TopicPartition("b", 0))
DEADLINE_S: Final = 60.0
HOST: Final = host_bytes("127.0.0.1", 8123)

Row = dict[str, Any]


def rows(folder: Folder, key: TopicPartition, *, verify: bool = True) -> tuple[list[Row], list[int]]:
    """All rows of a partition, and the ordinals that have none."""
    found: list[Row] = []
    lost: list[int] = []
    least, most = folder.ends(*key)
    following = least
    for piece in folder.pieces(*key, least, most, verify=verify):
        assert piece.first == following
        following += len(piece.sizes)
        lost += [ordinal for run in missing(piece, most) for ordinal in run]
        for batch in record_batches(piece, *key, Shape(headers=True), until=most):
            found += batch.to_pylist()
    assert following == most
    return found, lost


def row_of(record: Record, key: TopicPartition) -> Row:
    """Return the row that Spark must make of a record that a consumer receives."""
    pairs, body = decode_properties(record.properties), bytes(record.body)
    keys = pairs.get(KEYS, "").split()
    users = [{"key": name, "value": value.encode()} for name, value in pairs.items() if name not in NOT_USERS]
    return {
        "key": keys[0].encode() if keys else None,
        "value": zlib.decompress(body) if record.sys_flag & COMPRESSED else body,
        "topic": key.topic,
        "partition": key.partition,
        "offset": record.queue_offset,
        "timestamp": datetime.fromtimestamp(record.store_ms / 1000, UTC),
        "timestampType": 1,
        "tag": pairs.get(TAGS),
        "headers": users or None,
    }


def state(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every name below a folder, when it was changed, and what is in it."""
    paths = [directory, *directory.rglob("*")]
    return {str(path): (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes()) for path in paths}


def write_everything(broker: BrokerProcess) -> None:
    """Both protocols, transactions of both, batches of sizes, a topic that is deleted and one that is made again."""
    chance = random.Random(7)
    with Talk(broker) as talk, Producer(broker) as producer:
        for number in range(150):
            talk.placed(
                "text", chance.randbytes(chance.randrange(3000)), None, number % 3, chance.choice([None, "", "größe", "T"])
            )
        for key, end in (("TX:a:1", "COMMIT_ONE_PHASE"), ("TX:a:2", "ROLLBACK")):
            talk.done(key, "BEGIN")
            for number in range(3):
                talk.placed("text", b"in %s, %d" % (key.encode(), number), key, 1)
            talk.done(key, end)
        for number in range(150):
            pairs = f"{UNIQUE_KEY}\x01U{number}\x02{KEYS}\x01k{number} other\x02{TAGS}\x01T{number % 3}\x02user\x01{number}\x02"
            pairs = pairs if number % 5 else ""
            body, flag = chance.randbytes(chance.randrange(2000)), 0
            if number % 7 == 0:
                body, flag = zlib.compress(bytes(5000)), COMPRESSED
            sent(producer, send(producer, send_header("remoting", pairs, partition=number % 4, sys_flag=flag), body))
        for number in range(6):
            begun = producer.half(b"half %d" % number, pairs="user\x01u\x02")
            if number < 4:
                producer.end(begun.end(COMMIT if number % 2 else ROLLBACK))
        for topic in ("gone", "again"):
            talk.placed(topic, b"old")
            ask(producer, Request.DELETE_TOPIC_IN_BROKER, topic=topic)
        talk.placed("again", b"new")


def everything(broker: BrokerProcess) -> dict[TopicPartition, list[Row]]:
    """Return the rows of everything that a consumer receives, by partition."""
    with RemotingClient(broker.host, broker.port) as client:
        keys = [TopicPartition(topic, partition) for topic, count in TOPICS.items() for partition in range(count)]
        return {key: [row_of(record, key) for record in records(client, *key)] for key in keys}


def test_rows_are_what_a_consumer_is_given(tmp_path: Path) -> None:
    """P47, MQ-011, F-KILL: beside the broker, after its SIGKILL and after its stop; and nothing in the folder changes."""
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker:
        write_everything(broker)
        wanted = everything(broker)
        counts = {key: Ends(0, len(found)) for key, found in wanted.items()}
        assert [sum(counts[key].most for key in counts if key.topic == topic) for topic in TOPICS] == [153, 150, 2]
        folder = Folder(broker.data)
        ends = counts | {AGAIN: Ends(1, 2)}
        wait_until(lambda: {key: folder.ends(*key) for key in ends} == ends, DEADLINE_S, "the sweep has written all units")
        assert {key: rows(folder, key) for key in counts} == {key: (found, []) for key, found in wanted.items()}
        broker.kill()
        check_copy(broker.data, tmp_path / "killed", wanted)
        broker.restart()
        assert broker.terminate() == 0
        check_copy(broker.data, tmp_path / "stopped", wanted)
        before = state(broker.data)
        assert rows(Folder(broker.data), TopicPartition("text", 0))[0]
        assert state(broker.data) == before


def check_copy(data: Path, copied: Path, wanted: dict[TopicPartition, list[Row]]) -> None:
    shutil.copytree(data, copied)
    before = state(copied)
    folder = Folder(copied)
    assert set(folder.topics()) & {*TOPICS, "again", "gone"} == {*TOPICS, "again"}
    assert {topic: folder.partitions(topic) for topic in TOPICS} == TOPICS
    assert {key: rows(folder, key) for key in wanted} == {key: (found, []) for key, found in wanted.items()}
    with pytest.raises(UnknownTopic, match="has no topic gone"):
        folder.partitions("gone")
    assert folder.ends(*AGAIN) == Ends(1, 2), "what was deleted with the topic is not shown"
    assert [row["value"] for row in rows(folder, AGAIN)[0]] == [b"new"]
    assert "METAQ_SYS_TRANSACTIONS" not in folder.topics()
    assert rows(folder, TopicPartition("METAQ_SYS_TRANSACTIONS", 0))[0], "the broker's own topics can be read by their names"
    assert state(copied) == before


# -- folders made by a store ------------------------------------------------------------------------------------------


def put(store: MessageStore, key: TopicPartition, body: bytes, tag: str | None = None) -> None:
    now_ms = store.clock.now_ms()
    middle = constant_middle(0, now_ms, HOST, now_ms, HOST)
    crc, size = body_crc(body), HEADER_SIZE_TEXT + len(body)
    if tag is None:
        store.put(store.queue(*key), 0, body, crc, middle, size)
    else:
        tail, size = record_tail(key.topic, encode_properties([(TAGS, tag)])), size + 4 + len(tag.encode())
        store.put(store.queue(*key), 0, body, crc, middle, size, tail, java_hash(tag))
    store.append()


class Made(NamedTuple):
    """A folder that no process uses."""

    path: Path
    bodies: dict[TopicPartition, list[bytes]]
    times: dict[TopicPartition, list[int]]

    def read(self, key: TopicPartition = FIRST, *, verify: bool = True) -> tuple[list[bytes], list[int]]:
        """Bodies, and the ordinals without one."""
        found, lost = rows(Folder(self.path), key, verify=verify)
        return [row["value"] for row in found], lost

    def without(self, *ordinals: int, key: TopicPartition = FIRST) -> tuple[list[bytes], list[int]]:
        """Return the bodies that are read when these messages are lost, and the numbers of the lost ones."""
        return [body for ordinal, body in enumerate(self.bodies[key]) if ordinal not in ordinals], list(ordinals)

    def unit(self, ordinal: int) -> tuple[int, int]:
        """Log offset and size of a message of ``FIRST``, all units of which are in one file."""
        data = (self.path / "consumequeue" / "a" / "0" / segment_name(0)).read_bytes()
        log_offset, size, _ = np.frombuffer(data, UNIT)[ordinal].item()
        return log_offset, size

    def flip(self, name: str, at: int, bit: int = 0) -> None:
        with (self.path / name).open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes((byte ^ 1 << bit,)))


def make(path: Path, count: int, largest: int, *, settings: StoreSettings = SMALL, stop: bool = True) -> Made:
    """Messages of three partitions, in turn; a millisecond goes by with every second one."""
    chance = random.Random(count)
    clock = ManualClock(1_700_000_000_000)
    store, _ = open_store(path, settings, clock)
    made = Made(path, {key: [] for key in KEYS_OF_MADE}, {key: [] for key in KEYS_OF_MADE})
    for number in range(count):
        key = KEYS_OF_MADE[number % 3]
        body = chance.randbytes(chance.randrange(largest))
        put(store, key, body, chance.choice([None, "", "tag"]))
        made.bodies[key].append(body)
        made.times[key].append(clock.now_ms())
        clock.jump(number % 2)
    if stop:
        store.close()
    else:
        store.sweep()
    return made


@pytest.fixture(scope="module")
def given_back(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A folder that tests leave as it was."""
    return make(tmp_path_factory.mktemp("made") / "data", 30, 100)


def test_many_segments_and_queue_files(tmp_path: Path) -> None:
    """P47, MQ-011: blank records and the ends of files are passed over."""
    made = make(tmp_path / "data", 900, 300)
    names = sorted(path.name for path in (made.path / "commitlog").iterdir())
    assert len(names) > 10
    assert len(list((made.path / "consumequeue" / "a" / "0").iterdir())) > 10
    for key, bodies in made.bodies.items():
        assert made.read(key) == (bodies, [])
        folder = Folder(made.path)
        assert [body for piece in folder.pieces(*key, 7, 211) for body in bodies_of(piece)] == bodies[7:211]
        assert list(folder.pieces(*key, 5, 5)) == []


def bodies_of(piece: Piece) -> list[bytes]:
    return [row["value"] for batch in record_batches(piece, "t", 0, Shape(), until=1 << 60) for row in batch.to_pylist()]


def test_times(tmp_path: Path) -> None:
    """P47: the first message at or after a time, as the broker finds it."""
    made = make(tmp_path / "data", 300, 100)
    folder = Folder(made.path)
    for key, times in made.times.items():
        for time_ms in (0, times[0], *range(times[0], times[-1] + 3, 11), times[-1], times[-1] + 1):
            assert folder.at_time(*key, time_ms) == bisect_left(times, time_ms), time_ms


@pytest.mark.parametrize("ordinal", [0, 5, 9])
def test_a_flipped_bit_is_one_missing_message(tmp_path: Path, ordinal: int) -> None:
    """F-BIT: in any byte of a record, the first and the last one of the partition, too; the others are read."""
    made = make(tmp_path / "data", 30, 100)
    log_offset, size = made.unit(ordinal)
    segment = segment_name(log_offset // SMALL.segment_bytes * SMALL.segment_bytes)
    assert made.read() == made.without()
    for at in range(size):
        place = f"commitlog/{segment}", log_offset % SMALL.segment_bytes + at, at % 8
        made.flip(*place)
        assert made.read() == made.without(ordinal), f"byte {at} of {size}"
        made.flip(*place)
    assert made.read() == made.without()


def test_digits_of_a_checksum_that_only_add_up_to_it(tmp_path: Path) -> None:
    """F-BIT: bytes that are no digits are never taken for the checksum, whatever number they would make."""
    made = make(tmp_path / "data", 30, 100)
    log_offset, size = made.unit(5)
    path = made.path / "commitlog" / segment_name(0)
    data = bytearray(path.read_bytes())
    digits = log_offset + size - 11
    place = next(at for at in range(digits, digits + 9) if data[at + 1] > ord("0"))
    data[place] += 10
    data[place + 1] -= 1
    path.write_bytes(data)
    assert made.read() == made.without(5)


def test_a_record_in_the_body_of_another_one(tmp_path: Path) -> None:
    """F-BIT, F-PROTO: a sender can make one that is right in all its parts, but no unit leads into another record's middle."""
    store, _ = open_store(tmp_path / "data", SMALL)
    inner_at = HEADER_SIZE + 5
    inner = stored_record("a", b"inner", body_crc(b"inner"), ordinal=1, log_offset=inner_at)
    put(store, FIRST, b"12345" + inner)
    put(store, FIRST, b"outer")
    store.close()
    made = Made(tmp_path / "data", {FIRST: [b"12345" + inner, b"outer"]}, {})
    assert made.read() == made.without()
    path = made.path / "consumequeue" / "a" / "0" / segment_name(0)
    path.write_bytes(path.read_bytes()[:16] + np.array([(inner_at, len(inner), 0)], UNIT).tobytes())
    assert made.read() == made.without(1)


def test_without_verification_only_what_leads_to_the_message_is_compared(tmp_path: Path) -> None:
    """F-BIT: a flipped bit of a body is read, one of the ordinal, place, size or topic is a missing message."""
    made = make(tmp_path / "data", 30, 100)
    log_offset, size = made.unit(5)
    body = made.bodies[FIRST][5]
    assert len(body) > 2
    made.flip(f"commitlog/{segment_name(0)}", log_offset + HEADER_SIZE + 1)
    changed, lost = made.read(verify=False)
    assert (changed[5], lost) == (bytes((body[0], body[1] ^ 1, *body[2:])), [])
    for at in (0, 3, 4, 15, 27, 35, 84, 87, HEADER_SIZE + len(body), HEADER_SIZE + len(body) + 1):
        made.flip(f"commitlog/{segment_name(0)}", log_offset + at)
        assert made.read(verify=False)[1] == [5], f"byte {at} of {size}"
        made.flip(f"commitlog/{segment_name(0)}", log_offset + at)


def test_a_flipped_bit_of_a_unit_is_one_missing_message(tmp_path: Path) -> None:
    """F-BIT: wherever the unit leads then; the tag hash leads nowhere."""
    made = make(tmp_path / "data", 30, 100)
    for ordinal in (0, 5, 9):
        for bit in range(0, 128, 3 if ordinal else 1):
            place = f"consumequeue/a/0/{segment_name(0)}", ordinal * 16 + bit // 8, bit % 8
            made.flip(*place)
            assert made.read() == (made.without() if bit >= 96 else made.without(ordinal)), f"bit {bit} of unit {ordinal}"
            made.flip(*place)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_stands_in_a_unit_costs_its_message_alone(given_back: Made, seed: int) -> None:
    """F-BIT, F-ZERO: garbage, zeros, and numbers at the ends of what they can be."""
    made, chance = given_back, random.Random(seed)
    path = made.path / "consumequeue" / "a" / "0" / segment_name(0)
    units = path.read_bytes()
    hit = sorted(chance.sample(range(10), chance.randint(1, 4)))
    data = bytearray(units)
    for ordinal in hit:
        log_offset = chance.choice([0, -1, -(1 << 63), (1 << 63) - 1, 16_000, SMALL.segment_bytes, chance.getrandbits(40)])
        size = chance.choice([0, -1, -(1 << 31), FILLER_SIZE, FILLER_SIZE - 1, 110, 111, 112, chance.getrandbits(12)])
        data[ordinal * 16 : ordinal * 16 + 12] = log_offset.to_bytes(8, signed=True) + size.to_bytes(4, signed=True)
    path.write_bytes(data)
    try:
        assert made.read(verify=chance.random() < 0.5) == made.without(*hit)
    finally:
        path.write_bytes(units)


@pytest.mark.parametrize("topic", ["b", "x" * 127])
def test_units_of_another_topic_lead_to_none_of_this_one(tmp_path: Path, topic: str) -> None:
    """F-ZERO: swapped files; the same places, partitions, ordinals and sizes, but other messages."""
    made = make(tmp_path / "data", 30, 100)
    queue = made.path / "consumequeue" / topic / "0"
    shutil.rmtree(queue, ignore_errors=True)
    shutil.copytree(made.path / "consumequeue" / "a" / "0", queue)
    key = TopicPartition(topic, 0)
    found = [piece for verify in (False, True) for piece in Folder(made.path).pieces(*key, 0, 10, verify=verify)]
    assert [missing(piece, 10) for piece in found] == [[range(10)]] * 2
    assert made.read() == made.without()


def test_fillers_are_missing_messages(tmp_path: Path) -> None:
    """F-BIT: a store that was opened after damage has put fillers; quarantined records are not read."""
    made = make(tmp_path / "data", 30, 100)
    for ordinal in (3, 4):
        made.flip(f"commitlog/{segment_name(0)}", made.unit(ordinal)[0] + 60)
    store, recovery = open_store(made.path, SMALL, rebuild=True)
    store.close()
    assert recovery.gaps
    assert made.unit(3) == made.unit(4) == (0, FILLER_SIZE)
    assert made.read() == made.without(3, 4)


def test_the_end_is_behind_the_last_intact_message(tmp_path: Path) -> None:
    """F-TORN: a log that was copied earlier than the units has no record for the last ones, which are not there yet."""
    made = make(tmp_path / "data", 30, 100, stop=False)
    assert made.read() == made.without()
    os.truncate(made.path / "commitlog" / segment_name(0), made.unit(7)[0] + 50)
    assert Folder(made.path).ends(*FIRST) == Ends(0, 7)
    assert made.read() == (made.bodies[FIRST][:7], [])


def test_what_was_durable_is_missing_when_it_is_not_there(tmp_path: Path) -> None:
    """F-ZERO: the checkpoint knows how many messages were acknowledged, so a log that was cut short is not taken for whole."""
    made = make(tmp_path / "data", 30, 100)
    os.truncate(made.path / "commitlog" / segment_name(0), made.unit(7)[0] + 50)
    assert Folder(made.path).ends(*FIRST) == Ends(0, 10)
    assert made.read() == made.without(7, 8, 9)
    os.truncate(made.path / "consumequeue" / "a" / "0" / segment_name(0), 8 * 16 + 3)
    assert made.read() == made.without(7, 8, 9)
    shutil.rmtree(made.path / "consumequeue")
    with pytest.raises(StoreError, match="has lost its consumequeue; metaq verify --repair rebuilds it from the log"):
        Folder(made.path)


def test_folders_without_documents(tmp_path: Path) -> None:
    """F-ZERO: all of them can be made anew from the log, so a lost one costs nothing here, either."""
    made = make(tmp_path / "data", 30, 100)
    for path in [*made.path.glob("*.json*"), *made.path.glob("checkpoint*")]:
        path.unlink()
    folder = Folder(made.path)
    assert (folder.topics(), folder.partitions("a"), folder.partitions("b")) == (["a", "b"], 2, 1)
    assert made.read() == made.without()


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    """P47: one sentence says why."""
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(StoreError, match=f"{path} is not a store folder: it has no commitlog"):
            Folder(path)
    made = make(tmp_path / "data", 3, 10)
    with pytest.raises(UnknownTopic, match="has no topic never"):
        Folder(made.path).partitions("never")
    write_document(RealDisk(), made.path / "store.json", {"format": 2})
    with pytest.raises(UnknownVersion, match="has format version 2, this metaq reads 1"):
        Folder(made.path)


def test_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-BIG: by the bytes of their records, and by the part of a segment that is mapped for one."""
    made = make(tmp_path / "data", 60, 2_000_000, settings=StoreSettings(segment_bytes=32 * 1024 * 1024))
    folder = Folder(made.path)
    pieces = list(folder.pieces(*FIRST, 0, 20))
    assert 1 < len(pieces) < 20
    assert all(piece.sizes.sum() <= MOST_BYTES for piece in pieces)
    monkeypatch.setattr("metaq.spark.reading.disk.SPAN", 3_000_000)
    narrow = list(folder.pieces(*FIRST, 0, 20))
    assert len(narrow) > len(pieces)
    assert all(len(piece.data) <= 3_000_000 + 2_000_000 for piece in narrow)
    assert [body for piece in narrow for body in bodies_of(piece)] == made.bodies[FIRST]
