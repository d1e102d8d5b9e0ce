"""Bulk fetches from real brokers: the messages that pulls bring, byte by byte, whatever has happened to the log."""

import os
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.client.consuming.bulk import BulkConnection
from metaq.errors import ConnectionFailed, OffsetOutOfRange, Refused
from metaq.message import TopicPartition
from metaq.protocol.record import TAGS, decode_properties, decode_record, java_hash
from metaq.protocol.remoting.bulk import MISSING, UNIT_SIZE, Bulk, BulkFetch, decode_bulk
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, encode_header
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from metaq.protocol.sysflag import COMPRESSED
from metaq.spark.reading.checking import intact_piece
from metaq.store.queues.consumequeue import FILLER, UNIT
from tests.support.admin import ask, connect, create_topic, fields_of, pull, send
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cluster import PATIENT, Cluster, wait_caught_up
from tests.support.remoting import RemotingClient

TIMEOUT_S: Final = 60.0
TOPIC: Final = "orders"
PARTITIONS: Final = 4
ALL_MESSAGES: Final = 1 << 20
ALL_BYTES: Final = 1 << 30
MOST_BYTES: Final = 8 << 20
"""Of records in an answer."""
FLAGS: Final = ("--segment-bytes", "1048576", "--queue-file-bytes", "1024", "--max-body-bytes", "65536")
DERIVED: Final = ("checkpoint", "checkpoint.bak", "checkpoint.live", "store.json")
"""Beside the queues."""

Message = tuple[bytes, bytes]
"""A unit and a record; the latter is empty where there is none."""


def put_all_kinds(broker: BrokerProcess, rng: random.Random, rounds: int) -> None:
    """Messages of all kinds in all partitions, with others between them."""
    with connect(broker) as client, TextClient(broker.host, broker.port) as text:
        create_topic(client, TOPIC, write=PARTITIONS, read=PARTITIONS)
        for number in range(rounds):
            partition = rng.randrange(PARTITIONS)
            body = rng.randbytes(rng.choice((1, 30, 100, 3000, 60_000)))
            kind = rng.choice(("plain", "properties", "compressed", "batch", "text", "tagged text", "other"))
            if kind == "plain":
                send(client, TOPIC, body, partition=partition)
            elif kind == "properties":
                send(client, TOPIC, body, partition=partition, pairs=f"TAGS\x01tag{number % 3}\x02KEYS\x01k{number}\x02")
            elif kind == "compressed":
                send_flagged(client, zlib.compress(body), partition, COMPRESSED)
            elif kind == "batch":
                items = [BatchItem(number, body[:200], f"KEYS\x01b{at}\x02") for at in range(rng.randrange(1, 40))]
                send_flagged(client, encode_batch(items), partition, 0, Request.SEND_BATCH_MESSAGE)
            elif kind == "other":
                send(client, "other", body)
            else:
                text.put(TOPIC, body, partition=partition, attribute="paid" if kind == "tagged text" else None)


def send_flagged(
    client: RemotingClient, body: bytes, partition: int, sys_flag: int, code: Request = Request.SEND_MESSAGE_V2
) -> None:
    place = fields_of(a="pg", b=TOPIC, c="TBW102", d=4, e=partition, f=sys_flag, g=1700000000000, h=0, j=0, k=False)
    ask(client, code, body, **place, m=code == Request.SEND_BATCH_MESSAGE)


def pulled(broker: BrokerProcess, partition: int, offset: int = 0) -> list[Message]:
    """Return the messages that pulls bring from an offset on, each with its unit."""
    found = []
    with connect(broker) as client:
        while (answer := pull(client, TOPIC, offset, partition=partition)).code == Response.SUCCESS:
            at = 0
            while at < len(answer.body):
                record = decode_record(answer.body[at:])
                tag = decode_properties(record.properties).get(TAGS)
                unit = UNIT.pack(record.log_offset, record.size, 0 if tag is None else java_hash(tag))
                found.append((unit, answer.body[at : at + record.size]))
                at += record.size
            offset = int(answer.fields["nextBeginOffset"])
    assert answer.code == Response.PULL_NOT_FOUND, answer
    return found


def messages(bulk: Bulk) -> list[Message]:
    """Those of one answer."""
    found, at = [], 0
    for index in range(0, len(bulk.units), UNIT_SIZE):
        unit = bytes(bulk.units[index : index + UNIT_SIZE])
        size = UNIT.unpack(unit)[1]
        found.append((unit, bytes(bulk.records[at : at + size])))
        at += size
    assert (len(found), at) == (bulk.next - bulk.first, len(bulk.records))
    return found


def fetched(
    broker: BrokerProcess,
    partition: int,
    offset: int = 0,
    *,
    most_messages: int = ALL_MESSAGES,
    most_bytes: int = ALL_BYTES,
    verified: bool = True,
    ahead: bool = False,
) -> list[Message]:
    """Return the messages that bulk fetches bring from an offset on, prefetched or not; check that none exceeds its limits."""
    wanted = BulkFetch(TOPIC, Int32(partition), offset, Int32(most_messages), Int32(most_bytes), verified)
    found: list[Message] = []
    with BulkConnection(broker.address, TIMEOUT_S) as connection:
        while True:
            bulk = connection.fetch(wanted)
            wanted = wanted._replace(queue_offset=bulk.next)
            if ahead:
                connection.prefetch(wanted)
            some = messages(bulk)
            assert bulk.first == offset and len(some) <= most_messages
            assert bulk.verified or not verified
            assert not bulk.verified or intact_piece(bulk, TopicPartition(TOPIC, partition)) is not None
            assert len(some) == 1 or len(bulk.records) <= min(most_bytes, MOST_BYTES)
            if not some:
                assert bulk.most == offset
                return found
            found += some
            offset = bulk.next


def check_all(broker: BrokerProcess) -> None:
    """Fetches and pulls bring the same, whatever is asked for at once."""
    for partition in range(PARTITIONS):
        wanted = pulled(broker, partition)
        assert len(wanted) > 20
        for limits in ({}, {"most_messages": 7}, {"most_bytes": 1}, {"most_bytes": 50_000}):
            for verified in (True, False):
                found = fetched(broker, partition, **limits, verified=verified, ahead=not verified)
                assert found == wanted, (partition, limits, verified)
        assert fetched(broker, partition, len(wanted) // 2) == wanted[len(wanted) // 2 :]


@pytest.mark.slow
def test_fetches_bring_what_pulls_bring(tmp_path: Path) -> None:
    """P47: from memory; from the disk after a stop and a kill; and from both in one answer. Segments end between them."""
    rng = random.Random(4)
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker:
        put_all_kinds(broker, rng, 300)
        check_all(broker)
        assert broker.terminate() == 0
        broker.restart()
        check_all(broker)
        put_all_kinds(broker, rng, 100)
        check_all(broker)
        broker.restart()
        check_all(broker)
    with BrokerProcess(tmp_path / "data", *FLAGS, "--hot-bytes", "100000") as broker:
        put_all_kinds(broker, rng, 60)
        check_all(broker)


def test_answers_have_limits_of_their_own(tmp_path: Path) -> None:
    """P47: 8 MiB of records at most, but for a message that is larger; nonsense for a limit is one message."""
    body = 3 << 20
    flags = ("--segment-bytes", str(64 << 20), "--max-message-bytes", str(12 << 20), "--max-body-bytes", str(12 << 20))
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        with connect(broker) as client:
            create_topic(client, TOPIC)
            send(client, TOPIC, *(bytes([number]) * body for number in range(4)), bytes(11 << 20), b"last")

        def counts() -> list[int]:
            offset, found = 0, []
            with BulkConnection(broker.address, TIMEOUT_S) as connection:
                while len(some := fetch(connection, 0, offset).units) > 0:
                    found.append(len(some) // UNIT_SIZE)
                    offset += found[-1]
                for most_messages, most_bytes in ((0, ALL_BYTES), (-1, ALL_BYTES), (9, 0), (9, -1)):
                    bulk = connection.fetch(BulkFetch(TOPIC, Int32(0), 0, Int32(most_messages), Int32(most_bytes)))
                    assert len(bulk.units) == UNIT_SIZE
            return found

        assert counts() == [2, 2, 1, 1]
        broker.restart()
        assert counts() == [2, 2, 1, 1]


def fetch(connection: BulkConnection, partition: int, offset: int) -> Bulk:
    return connection.fetch(BulkFetch(TOPIC, Int32(partition), offset, Int32(ALL_MESSAGES), Int32(ALL_BYTES)))


def flip(broker: BrokerProcess, log_offset: int) -> None:
    """Change a byte of the log of a broker that does not run; its segments are of 1 MiB."""
    base = log_offset >> 20 << 20
    with (broker.data / "commitlog" / f"{base:020d}").open("r+b") as segment:
        segment.seek(log_offset - base)
        (byte,) = segment.read(1)
        segment.seek(log_offset - base)
        segment.write(bytes([byte ^ 4]))


def test_damaged_messages_are_units_of_zeros(tmp_path: Path) -> None:
    """F-BIT: found when they are read, and named in the log; after a recovery that has found them, too."""
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker:
        put_all_kinds(broker, random.Random(1), 200)
        wanted = [fetched(broker, partition) for partition in range(PARTITIONS)]
        assert broker.terminate() == 0
        for messages_of_one in wanted:
            for ordinal in (1, 5, 6, len(messages_of_one) - 1):
                log_offset, size, _ = UNIT.unpack(messages_of_one[ordinal][0])
                flip(broker, log_offset + random.randrange(size))
                messages_of_one[ordinal] = (MISSING, b"")
        broker.start()
        assert [fetched(broker, partition) for partition in range(PARTITIONS)] == wanted
        assert f"message damaged topic={TOPIC} partition=2 ordinal=5" in broker.stderr()
        for partition, messages_of_one in enumerate(wanted):
            with BulkConnection(broker.address, TIMEOUT_S) as connection:
                wanted_all = BulkFetch(TOPIC, Int32(partition), 0, Int32(ALL_MESSAGES), Int32(ALL_BYTES), verified=False)
                assert not connection.fetch(wanted_all).verified
            raw = fetched(broker, partition, verified=False)
            damaged = [ordinal for ordinal, (_, record) in enumerate(messages_of_one) if not record]
            differing = [ordinal for ordinal, message in enumerate(raw) if message != messages_of_one[ordinal]]
            assert differing in (damaged, damaged[:-1])  # a damaged record at the end of the log is what recovery finds
        assert broker.terminate() == 0
        shutil.rmtree(broker.data / "consumequeue")
        for name in DERIVED:
            (broker.data / name).unlink(missing_ok=True)
        broker.start()
        rebuilt = [fetched(broker, partition) for partition in range(PARTITIONS)]
        # a last message that is lost leaves no trace
        assert [some[:-1] for some in wanted] == [some[: len(all_) - 1] for some, all_ in zip(rebuilt, wanted, strict=True)]
        assert FILLER in (broker.data / "consumequeue" / TOPIC / "0" / f"{0:020d}").read_bytes()


def test_a_segment_that_was_cut_costs_what_it_had(tmp_path: Path) -> None:
    """F-BIT: verified or not, the messages behind it are there, and the connection stays."""
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker:
        put_all_kinds(broker, random.Random(6), 200)
        whole = [fetched(broker, partition) for partition in range(PARTITIONS)]
        broker.restart()
        first, second = sorted((broker.data / "commitlog").iterdir())[:2]
        cut = 1 << 19
        os.truncate(first, cut)
        for partition, wanted in enumerate(whole):
            places = [UNIT.unpack(unit) for unit, _ in wanted]
            kept = [offset + size <= cut or offset >= int(second.name) for offset, size, _ in places]
            assert {True, False} == set(kept)
            found = [message if there else (MISSING, b"") for message, there in zip(wanted, kept, strict=True)]
            for verified in (True, False):
                assert fetched(broker, partition, verified=verified) == found, (partition, verified)


def test_damaged_units_cost_their_message(tmp_path: Path) -> None:
    """F-BIT: a unit that leads elsewhere, with whatever size, brings no message of another place."""
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker:
        put_all_kinds(broker, random.Random(2), 200)
        wanted = fetched(broker, 1)
        assert broker.terminate() == 0
        path = broker.data / "consumequeue" / TOPIC / "1" / f"{0:020d}"
        units = bytearray(path.read_bytes())
        wrong = [bytes(16), b"\xff" * 16, wanted[7][0], UNIT.pack(1 << 40, 200, 0), UNIT.pack(0, 1 << 30, 0)]
        wrong.append(struct.pack(">qii", UNIT.unpack(wanted[13][0])[0], UNIT.unpack(wanted[13][0])[1] + 1, 0))
        for ordinal, unit in zip((3, 5, 8, 10, 12, 13), wrong, strict=True):
            units[ordinal * UNIT_SIZE : (ordinal + 1) * UNIT_SIZE] = unit
            wanted[ordinal] = (MISSING, b"")
        path.write_bytes(units)
        broker.start()
        assert fetched(broker, 1) == wanted
        with BulkConnection(broker.address, TIMEOUT_S) as connection:
            for ordinal, message in enumerate(wanted):
                bulk = connection.fetch(BulkFetch(TOPIC, Int32(1), ordinal, Int32(1), Int32(1), verified=False))
                sound = intact_piece(bulk, TopicPartition(TOPIC, 1)) is not None
                assert sound == (messages(bulk) == [message]), ordinal


def test_what_is_asked_for_ahead(tmp_path: Path) -> None:
    """P47: it is what the next fetch brings, or is dropped when that wants something else; what fails is told by the fetch."""
    with BrokerProcess(tmp_path / "data") as broker, BulkConnection(broker.address, TIMEOUT_S) as connection:
        with connect(broker) as client:
            create_topic(client, TOPIC)
            send(client, TOPIC, *(b"%d" % number for number in range(9)))
        wanted = [BulkFetch(TOPIC, Int32(0), ordinal, Int32(1), Int32(1)) for ordinal in range(9)]
        for ahead, now in ((1, 1), (2, 3), (4, 0)):
            connection.prefetch(wanted[ahead])
            connection.prefetch(wanted[ahead])
            assert messages(connection.fetch(wanted[now])) == fetched(broker, 0)[now : now + 1]
        connection.prefetch(wanted[0]._replace(topic="unknown"))
        assert connection.fetch(wanted[5]).first == 5
        connection.prefetch(wanted[0]._replace(topic="unknown"))
        with pytest.raises(Refused, match="unknown does not exist"):
            connection.fetch(wanted[0]._replace(topic="unknown"))
        connection.prefetch(wanted[6])
        broker.kill()
        connection.prefetch(wanted[7])
        with pytest.raises(ConnectionFailed):
            connection.fetch(wanted[7])


def test_offsets_out_of_range(tmp_path: Path) -> None:
    """P48: what has aged out or never was is said, with the ordinals that there are."""
    soon = ("--retention-interval-ms", "30", "--checkpoint-interval-ms", "30", "--ample-free-bytes", str(1 << 62))
    marks = ("--clean-ratio", "0.000001", "--force-ratio", "1", "--refuse-ratio", "1", "--keep-hours", "0.00001")
    with (
        BrokerProcess(tmp_path / "data", "--segment-bytes", "65536", "--max-body-bytes", "4096", *soon, *marks) as broker,
        BulkConnection(broker.address, TIMEOUT_S) as connection,
        connect(broker) as client,
    ):
        create_topic(client, TOPIC)
        assert messages(fetch(connection, 0, 0)) == []
        with pytest.raises(OffsetOutOfRange, match="5 lies behind the end of the partition, 0") as refused:
            fetch(connection, 0, 5)
        assert (refused.value.least, refused.value.most) == (0, 0)
        count = 300
        send(client, TOPIC, *(b"%04d" % number * 200 for number in range(count)))

        def oldest() -> int:
            return int(ask(client, Request.GET_MIN_OFFSET, topic=TOPIC, queueId=0).fields["offset"])

        wait_until(lambda: oldest() > count // 2, TIMEOUT_S, "messages have aged out")
        with pytest.raises(OffsetOutOfRange, match="0 lies before the oldest message, ") as refused:
            fetch(connection, 0, 0)
        least = refused.value.least
        assert count // 2 < least < count == refused.value.most

        def rest_is_read() -> bool:
            begin = oldest()
            try:
                bulk = fetch(connection, 0, begin)
            except OffsetOutOfRange:  # it has aged out since
                return False
            return least <= begin < count and (bulk.next, bulk.least, bulk.most) == (count, oldest(), count)

        wait_until(rest_is_read, TIMEOUT_S, "the segment that is written to stays")
        end = fetch(connection, 0, count)
        assert (messages(end), end.next, end.most) == ([], count, count)
        for offset in (-1, count + 1):
            with pytest.raises(OffsetOutOfRange) as refused:
                fetch(connection, 0, offset)
            assert (refused.value.code, refused.value.most) == (Response.PULL_OFFSET_MOVED, count)


def test_what_ages_out_while_it_is_read(tmp_path: Path) -> None:
    """P48: an answer has all messages from its first one on, or says that this one has aged out; nothing is left out."""
    soon = ("--retention-interval-ms", "10", "--checkpoint-interval-ms", "10", "--ample-free-bytes", str(1 << 62))
    marks = ("--clean-ratio", "0.000001", "--force-ratio", "1", "--refuse-ratio", "1", "--keep-hours", "0.00001")
    small = ("--segment-bytes", "65536", "--max-body-bytes", "4096", "--queue-file-bytes", "256", "--hot-bytes", "0")
    with (
        BrokerProcess(tmp_path / "data", *small, *soon, *marks) as broker,
        BulkConnection(broker.address, TIMEOUT_S) as connection,
        connect(broker) as client,
    ):
        create_topic(client, TOPIC)
        body = encode_batch([BatchItem(0, b"x" * 1000, "")] * 10)
        least = offset = moved = found = 0

        def goes_on() -> bool:
            nonlocal least, offset, moved, found
            place = fields_of(a="pg", b=TOPIC, c="TBW102", d=4, e=0, f=0, g=1700000000000, h=0, j=0, k=False, m=True)
            sends = [client.send(Request.SEND_BATCH_MESSAGE, place, body) for _ in range(20)]
            for _ in range(2):  # the second one begins with what there was a moment ago
                try:
                    bulk = fetch(connection, 0, offset)
                    assert MISSING not in [unit for unit, _ in messages(bulk)]
                    assert [decode_record(record).queue_offset for _, record in messages(bulk)] == [*range(offset, bulk.next)]
                    found += bulk.next - offset
                    least = bulk.least
                except OffsetOutOfRange as gone:
                    moved += 1
                    least = gone.least
                offset = least
            assert {client.response(opaque).code for opaque in sends} == {Response.SUCCESS}
            return moved >= 10 and found >= 2000

        wait_until(goes_on, TIMEOUT_S, "ten fetches begin with what has aged out, others bring messages")


def test_what_is_refused(tmp_path: Path) -> None:
    """MQ-016, SG-058: as of pulls: topics and partitions that are not there, and what may not be read. The connection stays."""
    with (
        BrokerProcess(tmp_path / "data") as broker,
        BulkConnection(broker.address, TIMEOUT_S) as connection,
        connect(broker) as client,
    ):
        create_topic(client, TOPIC, write=2, read=2)
        create_topic(client, "secret", perm=2)
        for topic, partition, code, words in (
            ("unknown", 0, Response.TOPIC_NOT_EXIST, "the topic unknown does not exist on this broker"),
            (TOPIC, 2, Response.SYSTEM_ERROR, "has 2 partitions to read, and 2 is not one of them"),
            (TOPIC, -1, Response.SYSTEM_ERROR, "has 2 partitions to read, and -1 is not one of them"),
            ("secret", 0, Response.NO_PERMISSION, "does not give messages"),
        ):
            with pytest.raises(Refused, match=words) as refused:
                connection.fetch(BulkFetch(topic, Int32(partition), 0, Int32(1), Int32(1)))
            assert refused.value.code == code
        answer = client.call(Request.BULK_FETCH, fields_of(topic=TOPIC, queueId=0, queueOffset="x", maxMsgNums=1, maxBytes=1))
        assert (answer.code, "queueOffset" in (answer.remark or "")) == (Response.SYSTEM_ERROR, True)
        assert fetch(connection, 1, 0).next == 0


def test_a_slave_answers(tmp_path: Path) -> None:
    """SG-083: the same bytes as its master; who is ahead of it is not sent back, and gets nothing until it has caught up."""
    with (
        RegistryProcess(tmp_path / "registry") as registry,
        Cluster(tmp_path, *PATIENT, *FLAGS, "--registries", registry.address) as cluster,
    ):
        master, slave = cluster.pair()
        put_all_kinds(master, random.Random(3), 150)
        wait_caught_up(master, slave)
        with connect(slave) as client:
            last = encode_header(BulkFetch(TOPIC, Int32(PARTITIONS - 1), 0, Int32(1), Int32(1)))
            known = "the slave has the table of topics"
            wait_until(lambda: client.call(Request.BULK_FETCH, last).code == Response.SUCCESS, TIMEOUT_S, known)
        for partition in range(PARTITIONS):
            wanted = fetched(master, partition)
            assert fetched(slave, partition) == wanted == pulled(master, partition)
            with BulkConnection(slave.address, TIMEOUT_S) as connection:
                ahead = fetch(connection, partition, len(wanted) + 9)
            assert (len(ahead.units), ahead.next, ahead.most) == (0, len(wanted) + 9, len(wanted))


def test_a_client_that_does_not_read_has_one_answer_waiting(tmp_path: Path) -> None:
    """F-LORIS, E-15: what is sent without waiting is refused or waits; the broker holds no answer for each."""
    with BrokerProcess(tmp_path / "data", "--max-unsent-bytes", "100000") as broker:
        with connect(broker) as client:
            for topic in ("other", TOPIC):
                create_topic(client, topic)
            send(client, "other", b"x")  # the first record of a log is always read from the disk
            send(client, TOPIC, *(bytes(50_000) for _ in range(100)))
        wanted = fetched(broker, 0)
        header = encode_header(BulkFetch(TOPIC, Int32(0), 0, Int32(100), Int32(MOST_BYTES)))
        count = 300
        with connect(broker) as client:
            opaques = [client.send(Request.BULK_FETCH, header) for _ in range(count)]
            with connect(broker) as other:  # answered after all of those have come
                ask(other, Request.GET_MAX_OFFSET, topic=TOPIC, queueId=0)
            assert resident_bytes(broker) < 300 << 20
            for opaque in opaques:
                assert is_start(wanted, client.response(opaque))
        broker.restart()
        with connect(broker) as client:
            opaques = [client.send(Request.BULK_FETCH, header) for _ in range(count)]
            answers = [client.response(opaque) for opaque in opaques]
            assert {answer.code for answer in answers} <= {Response.SUCCESS, Response.SYSTEM_BUSY}
            assert is_start(wanted, answers[0])
            assert all(
                "one bulk fetch at a time" in (answer.remark or "") for answer in answers if answer.code == Response.SYSTEM_BUSY
            )
            assert resident_bytes(broker) < 300 << 20


def is_start(wanted: list[Message], answer: RemotingCommand) -> bool:
    """Whether an answer has the first of these messages: as many as it took some milliseconds to read."""
    found = messages(decode_bulk(0, answer.fields, answer.body))
    return bool(found) and found == wanted[: len(found)]


def resident_bytes(broker: BrokerProcess) -> int:
    status = Path(f"/proc/{broker.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024
