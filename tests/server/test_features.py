"""Features by their IDs (docs/features.md), each as a user sees it: a real broker process and its answers."""

import contextlib
import itertools
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.checksum import body_crc
from metaq.client import TextClient, parse_stats
from metaq.errors import Refused
from metaq.message import Message
from metaq.protocol.text.replies import MOVED, NOT_FOUND, OK, VALUE, Reply
from metaq.protocol.text.writing import write_get, write_put
from tests.support.broker import BrokerProcess, wait_until
from tests.support.talk import ReplyReader

DEADLINE_S: Final = 60.0
SMALL_FILES: Final = ("--segment-bytes", "65536", "--max-body-bytes", "4096", "--queue-file-bytes", "256")
ALL_FLAGS: Final = ("--ample-free-bytes", str(1 << 62))
"""With these the watermarks count, however much is free."""


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    return SMALL_FILES


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[TextClient]:
    with connect(broker) as client:
        yield client


@pytest.fixture
def topic() -> str:
    """One that no other test uses."""
    return f"topic-{next(_numbers)}"


_numbers = itertools.count()


def connect(broker: BrokerProcess) -> TextClient:
    return TextClient(broker.host, broker.port, timeout_s=DEADLINE_S)


def ask(connection: socket.socket, data: bytes, count: int) -> list[Reply]:
    """Send bytes and read so many replies."""
    connection.sendall(data)
    reader = ReplyReader()
    replies: list[Reply] = []
    while len(replies) < count:
        received = connection.recv(1 << 16)
        assert received, f"the broker closed the connection after {replies}"
        replies += reader.receive(received)
    return replies


def bodies(client: TextClient, topic: str, partition: int = 0, group: str = "g") -> list[bytes]:
    return [message.body for message in client.iterate(topic, partition=partition, group=group)]


def number(client: TextClient, name: str) -> int:
    """One value of the broker's statistics."""
    return int(parse_stats(client.stats())[name])


# -- publishing and reading -------------------------------------------------------------------------------------------


def test_every_group_reads_everything(client: TextClient, topic: str) -> None:
    """MQ-001, MQ-002, MQ-003, MQ-005, SG-003: readers pull, each at its own pace, and take nothing away from another."""
    sent = [b"%d" % count for count in range(10)]
    client.put_many(topic, sent)
    slow, fast = client.iterate(topic, group="slow"), client.iterate(topic, group="fast")
    assert next(slow).body == sent[0]
    assert [message.body for message in fast] == sent
    assert [message.body for message in slow] == sent[1:]


def test_the_broker_takes_the_partitions_in_turn(client: TextClient, topic: str) -> None:
    """MQ-007, MQ-017, MY-005: a put to partition −1."""
    client.create(topic, 3)
    results = client.put_many(topic, [b"%d" % count for count in range(9)])
    assert [result.partition for result in results] == [0, 1, 2] * 3
    assert [bodies(client, topic, partition) for partition in range(3)] == [
        [b"%d" % count for count in range(partition, 9, 3)] for partition in range(3)
    ]


def test_a_topic_grows_while_it_is_used(client: TextClient, topic: str) -> None:
    """MQ-019, MY-018: more partitions, and what was in the others stays; the answer is their number."""
    client.put(topic, b"before")
    with pytest.raises(Refused, match="wrong partition 1"):
        client.put(topic, b"too early", partition=1)
    assert client.create(topic, 2) == 2
    client.put(topic, b"after", partition=1)
    assert (bodies(client, topic, 0), bodies(client, topic, 1)) == ([b"before"], [b"after"])


def test_order_within_a_partition(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """SG-005: several connections put without waiting for answers; each one's messages stay in order."""
    count = 500
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(broker.connect()) for _ in range(4)]
        for part in range(5):
            for sender, connection in enumerate(connections):
                numbers = range(part * 100, part * 100 + 100)
                connection.sendall(b"".join(write_put(topic, 0, 0, b"%d %d" % (sender, at), at) for at in numbers))
        for connection in connections:
            assert [reply.opaque for reply in ask(connection, b"", count)] == list(range(count))
    found = [tuple(map(int, body.split())) for body in bodies(client, topic)]
    for sender in range(4):
        assert [at for who, at in found if who == sender] == list(range(count))


def test_a_get_says_what_it_wants(broker: BrokerProcess, topic: str) -> None:
    """MQ-030, MQ-031, MQ-032, MQ-058: topic, group, partition, position, size and opaque; whole messages up to the size."""
    with broker.connect() as connection:
        ask(connection, b"".join(write_put(topic, 0, 0, b"x" * 80, opaque) for opaque in range(10)), 10)
        for size, messages in ((1, 1), (100, 1), (199, 1), (200, 2), (950, 9), (5000, 10)):
            (reply,) = ask(connection, write_get(topic, "g", 0, 0, size, -7), 1)
            assert (reply.code, reply.opaque, len(reply.body)) == (VALUE, -7, 100 * messages)


def test_a_message_can_be_read_when_its_put_is_answered(broker: BrokerProcess, topic: str) -> None:
    """RD-007, SG-028, MQ-038: queue and log are written by the same call, so the next command finds the message."""
    with broker.connect() as connection:
        for position in range(0, 2500, 25):
            put, get = ask(connection, write_put(topic, 0, 0, b"hello", 1) + write_get(topic, "g", 0, position, 1, 2), 2)
            assert (put.code, put.body.split()[2]) == (OK, b"%d" % position)
            assert (get.code, get.body[20:]) == (VALUE, b"hello")


def test_what_fails_its_checks_is_not_stored(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """MQ-038, MQ-110: the broker validates, then writes, then answers."""
    wrong = body_crc(b"hello") ^ 1
    with broker.connect() as connection:
        (reply,) = ask(connection, f"put {topic} 0 5 0 {wrong} 1\r\nhello".encode(), 1)
        assert (reply.code, b"Checksum failure" in reply.body) == (500, True)
        (reply,) = ask(connection, f"put {topic} 0 5 1 1\r\nhello".encode(), 1)
        assert (reply.code, b"announces an attribute" in reply.body) == (400, True)
    assert bodies(client, topic) == []


def test_handlers_never_see_how_a_command_was_written(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """MQ-055, MQ-059: every spelling of a put, in any slices, becomes the same message."""
    checksum = body_crc(b"hello")
    spellings = [
        f"put {topic} 0 5 0\r\nhello",
        f"put {topic} 0 5 0 1\r\nhello",
        f"put {topic} 0 5 0 {checksum} 1\r\nhello",
        f"put {topic} +0 05 -0 -1 4294967295  \r\nhello",
        f"\r\n\r\nput {topic} 0 5 0 1\r\nhello\r\n",
    ]
    with broker.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for spelling in spellings:
            for byte in spelling.encode()[:-1]:
                connection.send(bytes((byte,)))
            (reply,) = ask(connection, spelling.encode()[-1:], 1)
            assert reply.code == OK
    found = list(client.iterate(topic))
    assert [(message.body, message.attribute, message.flag) for message in found] == [(b"hello", None, 0)] * len(spellings)


def test_a_held_get_stops_nobody_else(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """MQ-056, RD-006, SG-085: also at a position beyond the end; commands behind it wait, other connections do not."""
    with broker.connect() as waiting:
        waiting.sendall(write_get(topic, "g", 0, 0, 1000, 1, wait_ms=30_000) + b"version 2\r\n")
        for _ in range(50):
            client.put(f"{topic}-other", b"x")
        assert client.put(topic, b"hello").position == 0
        get, version = ask(waiting, b"", 2)
    assert (get.code, get.opaque, get.body[20:]) == (VALUE, 1, b"hello")
    assert (version.code, version.opaque) == (OK, 2)


# -- connections ------------------------------------------------------------------------------------------------------


def test_the_life_of_a_connection(tmp_path: Path) -> None:
    """MQ-054, SG-092: opened, used, idle, closed by either side; the broker counts them."""
    with BrokerProcess(tmp_path / "silent", *SMALL_FILES, "--idle-timeout-ms", "100") as broker, broker.connect() as silent:
        assert silent.recv(1) == b"", "closed because nothing was said"
    with BrokerProcess(tmp_path / "data", *SMALL_FILES) as broker:
        with broker.connect() as leaving:
            assert ask(leaving, b"version 1\r\n", 1)[0].code == OK
        with broker.connect() as quitting:
            quitting.sendall(b"version 1\r\nquit\r\nversion 2\r\n")
            data = b"".join(iter(lambda: quitting.recv(1000), b""))
            assert [reply.opaque for reply in ReplyReader().receive(data)] == [1]

        def alone() -> bool:
            with connect(broker) as client:
                return number(client, "curr_connections") == 1

        wait_until(alone, DEADLINE_S, "all other connections are gone")


def test_bursts_of_connections(broker: BrokerProcess) -> None:
    """SG-006: hundreds at once, each one served."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(broker.connect()) for _ in range(300)]
        for opaque, connection in enumerate(connections):
            connection.sendall(b"version %d\r\n" % opaque)
        for opaque, connection in enumerate(connections):
            assert ask(connection, b"", 1)[0].opaque == opaque


def test_pressure_is_answered(tmp_path: Path) -> None:
    """E-15: with a code, the limit that is reached, and how long to wait."""
    limits = ("--max-topics", "1", "--max-connections", "2")
    with BrokerProcess(tmp_path / "data", *SMALL_FILES, *limits) as broker, connect(broker) as client:
        client.put("t", b"x")
        for refused in (lambda: client.put("u", b"x"), lambda: client.create("u", 1)):
            with pytest.raises(Refused, match=r"already 1 topics \(max_topics\); retry after 60000 ms") as refusal:
                refused()
            assert refusal.value.code == 503
        # the broker itself may still hold a connection, over which it checks its advertised address
        wait_until(lambda: number(client, "curr_connections") == 1, DEADLINE_S, "nobody else is connected")
        with broker.connect() as second, broker.connect() as third:
            assert ask(second, b"version 1\r\n", 1)[0].code == OK
            (reply,) = ask(third, b"", 1)
            assert (reply.code, reply.opaque) == (503, 2147483647)
            assert reply.body == b"there are 2 connections already (max_connections); retry after 1000 ms"
            assert third.recv(1) == b""


# -- topics -----------------------------------------------------------------------------------------------------------


def test_topics_of_the_configuration(tmp_path: Path) -> None:
    """MQ-006, MQ-115, MQ-103: they exist from the start, and say whether they take puts and answer gets."""
    file = tmp_path / "broker.yaml"
    file.write_text(
        "topics:\n  open: {partitions: 2}\n  writes: {accept_subscribe: false}\n  reads: {accept_publish: false}\n"
        "auto_create_topics: false\n"
    )
    with BrokerProcess(tmp_path / "data", *SMALL_FILES, "--config", str(file)) as broker, connect(broker) as client:
        assert client.put("open", b"x", partition=1).position == 0
        client.put("writes", b"x")
        for refused, status, reason in (
            (lambda: client.put("reads", b"x"), 403, "accept_publish"),
            (lambda: client.get("writes"), 403, "accept_subscribe"),
            (lambda: client.put("unknown", b"x"), 500, "The server do not accept topic unknown"),
        ):
            with pytest.raises(Refused, match=reason) as refusal:
                refused()
            assert refusal.value.code == status
        assert client.get("reads").messages == []
        shown = parse_stats(client.stats("topics"))
        assert shown["writes"].endswith("accept_publish true accept_subscribe false")


# -- durability -------------------------------------------------------------------------------------------------------


def test_at_disk_an_answered_put_is_synced(tmp_path: Path) -> None:
    """MQ-040, SG-041, RD-011: one sync answers many puts."""
    with BrokerProcess(tmp_path / "data", *SMALL_FILES, durability="disk") as broker, connect(broker) as client:
        for _ in range(10):
            client.put("t", b"x")
            shown = parse_stats(client.stats())
            assert shown["log_durable_end"] == shown["log_end"] != "0"
        before = number(client, "syncs")
        client.put_many("t", [b"x"] * 1000)
        assert 1 <= number(client, "syncs") - before < 500


@pytest.mark.parametrize("flags", [("--flush-messages", "10"), ("--flush-interval-ms", "20")])
def test_at_memory_the_log_is_synced_behind(tmp_path: Path, flags: tuple[str, str]) -> None:
    """MQ-039, SG-042, RD-012: after so many messages, or so long."""
    never = ("--flush-messages", "1000000", "--flush-interval-ms", "100000000", "--checkpoint-interval-ms", "100000000")
    with BrokerProcess(tmp_path / "data", *SMALL_FILES, *never, *flags) as broker, connect(broker) as client:
        assert number(client, "log_durable_end") == 0
        client.put_many("t", [b"x"] * 10)

        def synced() -> bool:
            shown = parse_stats(client.stats())
            return shown["log_durable_end"] == shown["log_end"]

        wait_until(synced, DEADLINE_S, "everything is synced")
        assert number(client, "syncs") >= 1


def test_at_memory_no_put_waits_for_a_sync(tmp_path: Path) -> None:
    """SG-042, RD-012: and a killed broker keeps what was answered all the same."""
    never = ("--flush-messages", "1000000", "--flush-interval-ms", "100000000", "--checkpoint-interval-ms", "100000000")
    with BrokerProcess(tmp_path / "data", *SMALL_FILES, *never) as broker:
        with connect(broker) as client:
            client.put_many("t", [b"%d" % count for count in range(100)])
            assert (number(client, "syncs"), number(client, "log_durable_end")) == (0, 0)
        broker.restart()
        with connect(broker) as client:
            assert bodies(client, "t") == [b"%d" % count for count in range(100)]


# -- files ------------------------------------------------------------------------------------------------------------


def test_positions_go_through_all_files(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """MY-033, MQ-009, MQ-013, MQ-025, SG-011, SG-022, SG-029, RD-010: hot from the map, later from the files."""
    sent = [b"%d" % count * 300 for count in range(300)]
    results = client.put_many(topic, sent)
    assert [result.position for result in results] == list(
        itertools.accumulate((20 + len(body) for body in sent[:-1]), initial=0)
    )
    assert len(list((broker.data / "commitlog").iterdir())) > 4
    hot = list(client.iterate(topic))
    assert [message.body for message in hot] == sent
    broker.restart(same_port=True)
    cold: list[Message] = list(client.iterate(topic))
    assert cold == hot
    assert [client.get(topic, result.position, max_bytes=1).messages[0] for result in results[::37]] == hot[::37]


def test_all_topics_share_one_log(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """MQ-010, MQ-014, RD-004, SG-012, SG-023: ids, which name places in the log, grow from topic to topic."""
    ids = [client.put(f"{topic}-{count % 3}", b"x" * 100).id for count in range(30)]
    steps = [after - before for before, after in itertools.pairwise(ids)]
    record_size = 91 + 100 + len(topic) + 2 + 20
    assert min(steps) == record_size
    assert steps.count(record_size) >= len(steps) - 1, "records stand one behind the other, but where a segment ends"
    wait_until((broker.data / "consumequeue" / f"{topic}-0" / "0").is_dir, DEADLINE_S, "the queue is written")
    wait_until((broker.data / "config").is_dir, DEADLINE_S, "the topics are saved")
    assert sorted(path.name for path in broker.data.iterdir() if path.is_dir()) == ["commitlog", "config", "consumequeue"]


def test_a_record_names_both_hosts(tmp_path: Path) -> None:
    """SG-016, SG-020: the client's and the broker's address and port, as the log holds them."""
    with BrokerProcess(tmp_path / "data", *SMALL_FILES) as broker, broker.connect() as connection:
        mine = connection.getsockname()
        before_ms = time.time_ns() // 1_000_000
        ask(connection, write_put("t", 0, 0, b"hello", 1), 1)
        record = (broker.data / "commitlog" / "00000000000000000000").read_bytes()[:200]
        born_ms, born_host, store_ms, store_host = struct.unpack_from(">q8sq8s", record, 40)
    assert born_host == struct.pack(">4Bi", 127, 0, 0, 1, mine[1])
    assert store_host == struct.pack(">4Bi", 127, 0, 0, 1, broker.port)
    assert before_ms <= born_ms <= store_ms <= before_ms + DEADLINE_S * 1000


def test_sizes_of_queue_files_are_whole_units(tmp_path: Path) -> None:
    """SG-024, MQ-016: another size is refused rather than rounded."""
    command = [sys.executable, "-m", "metaq", "serve", "--data", str(tmp_path), "--queue-file-bytes", "1000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (run.returncode, "queue_file_bytes must be a multiple of 16" in run.stderr) == (2, True)


# -- retention --------------------------------------------------------------------------------------------------------

SOON: Final = ("--retention-interval-ms", "30", "--checkpoint-interval-ms", "30")


def fill(client: TextClient, count: int = 400) -> list[bytes]:
    """Some segments full of messages."""
    sent = [b"%05d" % at * 100 for at in range(count)]
    client.put_many("t", sent)
    return sent


def check_cut_off(broker: BrokerProcess, client: TextClient, sent: list[bytes]) -> None:
    """Wait until the oldest messages are gone with their files; what is left is the same at the same positions."""
    first_segment = broker.data / "commitlog" / "00000000000000000000"
    first_queue_file = broker.data / "consumequeue" / "t" / "0" / "00000000000000000000"
    wait_until(lambda: not (first_segment.exists() or first_queue_file.exists()), DEADLINE_S, "the oldest files are gone")
    oldest = client.offset("t", 0)
    assert oldest > 0 and oldest % 520 == 0
    with broker.connect() as connection:
        (reply,) = ask(connection, write_get("t", "g", 0, 0, 1000, 1), 1)
        assert reply.code == MOVED and int(reply.body) >= oldest
    left = list(client.iterate("t", position=client.offset("t", 0)))
    assert [message.body for message in left] == sent[left[0].position // 520 :]


def test_expired_segments_are_deleted(tmp_path: Path) -> None:
    """SG-044, SG-045, SG-046, SG-049: above the first watermark at any hour; queue files go with them."""
    marks = ("--clean-ratio", "0.000001", "--force-ratio", "1", "--refuse-ratio", "1", "--keep-hours", "0.00001")
    with (
        BrokerProcess(tmp_path / "data", *SMALL_FILES, *SOON, *ALL_FLAGS, *marks) as broker,
        connect(broker) as client,
    ):
        check_cut_off(broker, client, fill(client))


def test_at_the_second_watermark_the_oldest_go_first(tmp_path: Path) -> None:
    """SG-047: expired or not; the segment that is written to stays."""
    marks = ("--clean-ratio", "0.000001", "--force-ratio", "0.000001", "--refuse-ratio", "1")
    with (
        BrokerProcess(tmp_path / "data", *SMALL_FILES, *SOON, *ALL_FLAGS, *marks) as broker,
        connect(broker) as client,
    ):
        check_cut_off(broker, client, fill(client))


def test_at_the_last_watermark_puts_are_refused(tmp_path: Path) -> None:
    """SG-048, E-15: with a code and a reason, while gets go on."""
    flags = (*SMALL_FILES, *SOON, *ALL_FLAGS)
    marks = ("--clean-ratio", "0.000001", "--force-ratio", "0.000001", "--refuse-ratio", "0.000001")
    with BrokerProcess(tmp_path / "data", *flags) as broker, connect(broker) as client:
        client.put("t", b"kept")
    with BrokerProcess(tmp_path / "data", *flags, *marks) as broker, connect(broker) as client:
        with pytest.raises(Refused, match="refuse_ratio") as refusal:
            client.put("t", b"refused")
        assert refusal.value.code == 503
        assert parse_stats(client.stats())["writable"].startswith("no: the disk is ")
        assert bodies(client, "t") == [b"kept"]


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_count(broker: BrokerProcess, client: TextClient, topic: str) -> None:
    """MQ-064: commands, misses and refusals, of the broker and of a topic; a reset begins anew."""
    before = {name: number(client, name) for name in ("cmd_put", "cmd_get", "cmd_offset", "get_miss", "put_failed")}
    client.put_many(topic, [b"12345"] * 4)
    client.get(topic)
    client.get(topic, 100)
    client.offset(topic, 0)
    with pytest.raises(Refused):
        client.put(topic, b"x", partition=7)
    after = {name: number(client, name) for name in before}
    assert {name: after[name] - before[name] for name in before} == {
        "cmd_put": 5,
        "cmd_get": 2,
        "cmd_offset": 1,
        "get_miss": 1,
        "put_failed": 1,
    }
    shown = parse_stats(client.stats(topic))
    assert (shown["resultCode"], shown["partitions"], shown["message_count"], shown["bytes"]) == ("0", "1", "4", "100")
    assert shown["topic_realtime_put"].startswith("Count=4,")
    assert parse_stats(client.stats("realtime"))["realtime_message_size"].startswith("Count=")
    client.stats("reset")
    assert parse_stats(client.stats("realtime"))["realtime_put"] == "null"
    assert parse_stats(client.stats(topic))["topic_realtime_put"] == "null"
    assert parse_stats(client.stats("offsets"))[f"{topic} part 0"] == "min_offset 0 max_offset 100"


def test_a_question_for_nothing(broker: BrokerProcess, topic: str) -> None:
    """MQ-062, MQ-063: 404 and 301 say where there is nothing, and where to go on."""
    with broker.connect() as connection:
        (reply,) = ask(connection, b"offset %b g 0 0 1\r\n" % topic.encode(), 1)
        assert reply.code == NOT_FOUND
        ask(connection, write_put(topic, 0, 0, b"hello", 1), 1)
        answers = {position: ask(connection, write_get(topic, "g", 0, position, 99, 1), 1)[0] for position in (-1, 3, 25, 99)}
    assert {position: reply.code for position, reply in answers.items()} == {
        -1: MOVED,
        3: MOVED,
        25: NOT_FOUND,
        99: NOT_FOUND,
    }
    assert (answers[-1].body, answers[3].body) == (b"0", b"0")
