"""The pure parts of the client, by properties; and a consumer's answers to its broker."""

import struct
import threading
import time
import zlib
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client import Client, ReceivedMessage, SimpleConsumer, connect
from metaq.client.client import _registries
from metaq.client.connecting.core import Core
from metaq.client.connecting.scheduler import Scheduler
from metaq.client.connecting.transport import Done, RemotingRequest
from metaq.client.consuming.fetching import QUEUE_BYTES
from metaq.client.consuming.offsets import LocalOffsets
from metaq.client.consuming.progress import Progress
from metaq.client.consuming.records import decode_messages
from metaq.client.message import RESERVED, compressed, message_properties, properties_text, unix_ms
from metaq.errors import BadRequest, ChecksumMismatch, ClientError, NotConnected, StreamLost
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.inflating import inflated
from metaq.protocol.properties import parse
from metaq.protocol.record import BLANK_MAGIC, HEADER, encode_properties
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import decode_offsets, encode_offsets
from metaq.protocol.remoting.codes import JSON, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.testing import InMemoryBroker
from metaq.testing.log import Letter, Log
from tests.client.test_consumers import DEADLINE_S, FIRST, Heard, send, take
from tests.support.broker import wait_until

TEXTS = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=20)
NAMES = TEXTS.filter(lambda name: name not in {"__CRC32#", "DELAY"})

# -- records ----------------------------------------------------------------------------------------------------------


def records(bodies: list[bytes], topic: str, properties: dict[str, str]) -> bytes:
    log = Log()
    for body in bodies:
        log.put(Letter(topic, 3, body, properties, flag=7, born_ms=11, reconsume_times=2))
    return b"".join(log.topics[topic][3].records)


@given(st.lists(st.binary(max_size=300), max_size=5), st.dictionaries(NAMES, TEXTS, max_size=4), st.booleans())
def test_records_become_messages(bodies: list[bytes], properties: dict[str, str], known: bool) -> None:
    """RD-020, SG-098: what a pull brings, whether or not the topic is known before."""
    data = records(bodies, "orders", properties) if bodies else b""
    messages = decode_messages(data, "a", "orders" if known else "")
    assert [message.body for message in messages] == bodies
    assert [message.queue_offset for message in messages] == list(range(len(bodies)))
    for message in messages:
        assert message.properties == properties
        assert message.queue == MessageQueue("orders", "a", 3)
        assert (message.flag, message.born_ms, message.reconsume_times) == (7, 11, 2)


@given(st.integers(0), st.booleans())
def test_a_flipped_bit_in_a_body_is_noticed(bit: int, known: bool) -> None:
    """SG-098: its checksum says so."""
    data = bytearray(records([b"first", b"x" * 100], "orders", {}))
    at = data.index(b"x" * 100)
    bit %= 800
    data[at + bit // 8] ^= 1 << bit % 8
    known_topic = "orders" if known else ""
    with pytest.raises(ChecksumMismatch, match="message 1 of partition 3 on a"):
        decode_messages(bytes(data), "a", known_topic)
    first, second = decode_messages(bytes(data), "a", known_topic, damaged_too=True)
    assert (first.error, first.body) == (None, b"first")
    assert str(second.error).startswith("message 1 of partition 3 on a")


@given(st.integers(1, 100))
def test_cut_records_are_noticed(missing: int) -> None:
    """SG-093: whatever is missing."""
    data = records([b"x" * 10], "orders", {"name": "value"})
    with pytest.raises((StreamLost, ChecksumMismatch)):
        decode_messages(data[:-missing], "a", "orders")


def test_other_kinds_of_records() -> None:
    """SG-016: IPv6 hosts, long topics, compressed bodies, in one answer with plain ones."""
    packed = zlib.compress(b"inflate me" * 10)
    topic = "t" * 130
    properties = encode_properties([("TAGS", "a")])
    tail = struct.pack(">h", len(topic)) + topic.encode() + struct.pack(">h", len(properties)) + properties
    head = struct.Struct(">iiiiiqqiq20sq20siqi")
    size = head.size + len(packed) + len(tail)
    magic = struct.unpack(">i", b"\xda\xa3\x20\xab")[0]
    host = bytes(15) + b"\x01" + struct.pack(">i", 10911)
    crc = zlib.crc32(packed) & 0x7FFFFFFF
    odd = head.pack(size, magic, crc, 1, 0, 5, 77, 0x331, 1, host, 2, host, 0, 0, len(packed)) + packed + tail
    plain = records([b"plain"], "orders", {})
    first, second, third = decode_messages(plain + odd + plain, "a", "orders")
    assert (first.body, second.body, third.body) == (b"plain", b"inflate me" * 10, b"plain")
    assert (second.topic, second.tag, second.queue_offset) == (topic, "a", 5)
    assert second.offset_id == host.hex().upper() + f"{77:016X}"
    with pytest.raises(StreamLost, match="the mark cbd43194"):
        decode_messages(HEADER.pack(100, BLANK_MAGIC, *[0] * 7, b"", 0, b"", 0, 0, 0), "a")


@given(st.binary(max_size=200), st.integers(0, 60))
def test_compression_loses_nothing(body: bytes, repeats: int) -> None:
    """SG-098: and is only used where it makes a body shorter."""
    body *= repeats
    packed, sys_flag = compressed(body)
    assert inflated(packed, sys_flag) == body
    assert len(packed) <= len(body)
    assert (sys_flag == 0) == (packed == body)


@given(st.dictionaries(NAMES.filter(lambda name: name not in RESERVED), TEXTS), TEXTS, st.lists(st.just("k"), max_size=3))
def test_properties_go_there_and_back(given_properties: dict[str, str], tag: str, keys: list[str]) -> None:
    """SG-131, SG-132: as the record keeps them."""
    pairs = message_properties("id", tag, keys, given_properties, {"DELAY": "3"})
    expected = {**given_properties, "UNIQ_KEY": "id", "TAGS": tag, "DELAY": "3"} | ({"KEYS": " ".join(keys)} if keys else {})
    assert parse(properties_text(pairs)) == expected


@given(st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1)), st.integers(-720, 720))
def test_a_time_in_milliseconds_is_never_before_it(when: datetime, minutes: int) -> None:
    """A reader that begins at a time sees nothing older, and no timer fires early. Without a zone it is local time."""
    aware = when.replace(tzinfo=timezone(timedelta(minutes=minutes)))
    begin = datetime(1970, 1, 1, tzinfo=UTC)
    assert timedelta() <= begin + timedelta(milliseconds=unix_ms(aware)) - aware < timedelta(milliseconds=1)
    assert unix_ms(when) == unix_ms(when.astimezone())
    assert unix_ms(datetime(1969, 12, 31, tzinfo=UTC)) == 0


# -- progress ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=30), st.randoms())
def test_progress_is_the_oldest_unfinished_message(gaps: list[int], random: Random) -> None:
    """SG-118: in whatever order messages are finished, what is not finished is never behind the position."""
    progress = Progress(QueueOffset(0))
    offsets: list[QueueOffset] = []
    at = 0
    for gap in gaps:
        at += gap
        offsets.append(QueueOffset(at))
        at += 1
    progress.add(offsets, QueueOffset(at))
    left = list(offsets)
    random.shuffle(left)
    while left:
        assert (progress.position, progress.unfinished) == (min(left), len(left))
        progress.finish(left.pop())
    assert (progress.position, progress.unfinished) == (at, 0)


# -- offsets in files -------------------------------------------------------------------------------------------------


def test_local_offsets_survive(tmp_path: Path) -> None:
    """SG-118, SG-130: replaced as a whole; a damaged file is not taken for none."""
    file = tmp_path / "deep" / "news.json"
    queue = MessageQueue("orders", "a", 3)
    offsets = LocalOffsets(file)
    offsets.open()
    assert offsets.read(queue, 0.0) is None
    offsets.update(queue, QueueOffset(17))
    offsets.save()
    again = LocalOffsets(file)
    with pytest.raises(ClientError, match=r"another broadcast consumer uses the offsets in .*news.json; give each client"):
        again.open()
    offsets.close()
    offsets.update(queue, QueueOffset(18))
    offsets.save()
    again.open()
    assert again.read(queue, 0.0) == 17, "what is closed saves nothing any more"
    again.close()
    assert sorted(path.name for path in file.parent.iterdir()) == ["news.json", "news.json.lock"]
    file.write_bytes(b"{")
    with pytest.raises(ClientError, match=r"news.json is not a file of offsets"):
        again.open()
    file.unlink()
    again.open()
    again.close()


def test_local_offsets_that_cannot_be_read_are_not_locked(tmp_path: Path) -> None:
    """SG-118: who mends the file can try again in the same process."""
    offsets, file = LocalOffsets(tmp_path / "news.json"), tmp_path / "news.json"
    file.mkdir()
    with pytest.raises(ClientError, match=r"cannot read offsets in .*news.json: Is a directory"):
        offsets.open()
    file.rmdir()
    again = LocalOffsets(file)
    again.open()
    again.close()


@given(st.integers(0, 1 << 32))
def test_progress_never_passes_an_unfinished_message(seed: int) -> None:
    """SG-077: whatever the order, also when messages are added once more after a step that failed."""
    rng = Random(seed)
    begin = QueueOffset(rng.randrange(10))
    progress, unfinished, given_out = Progress(begin), set[QueueOffset](), list[QueueOffset]()
    end = begin
    for _ in range(30):
        if rng.random() < 0.4:
            first, end = end, QueueOffset(end + rng.randrange(4))
            offsets = [QueueOffset(number) for number in range(first, end)]
            unfinished |= set(offsets)
            for _ in range(rng.choice([1, 1, 2])):  # once more, whether or not some of them are finished
                progress.add(iter(offsets), end)
                given_out += offsets
        elif given_out:
            done = given_out.pop(rng.randrange(len(given_out)))
            unfinished.discard(done)
            progress.finish(done)
        assert progress.position == min(unfinished, default=end)
        assert progress.unfinished == len(unfinished)


# -- addresses --------------------------------------------------------------------------------------------------------


def test_addresses_of_registries() -> None:
    """SG-116: one or several, with or without a port."""
    assert _registries("a:1; b ,c:3") == ["a:1", "b:9876", "c:3"]
    with connect("metaq://a:1;b/?timeout_s=3&instance=one") as client:
        assert client.id.endswith("@one")
    for wrong, reason in [
        ("", "is not the address of a registry"),
        ("redis://a", "begins with redis://"),
        ("metaq://a/?zk=b", "has the unknown parameter zk"),
        ("metaq://a/?timeout_s=x", "timeout_s is 'x'"),
    ]:
        with pytest.raises(BadRequest, match=reason):
            connect(wrong)


@pytest.mark.parametrize("password", ["pa/ss", "pa?ss", "pa?ss=1", "pa#ss", "p@a/ss", "p@a?ss", "pa/s?s#"])
@pytest.mark.parametrize("scheme", ["metaq", "zk", "http"])
def test_a_password_in_an_address_must_be_quoted_and_is_not_shown(scheme: str, password: str) -> None:
    """SG-133: what follows it would be read as the path or the parameters."""
    with pytest.raises(BadRequest, match="write %2F for /, %3F for") as caught:
        connect(f"{scheme}://bob:{password}@host/?timeout_s=3")
    assert not [part for part in ("bob", "pa", "ss") if part in str(caught.value).replace("password", "")]


def test_a_quoted_password_and_a_name_with_an_at_are_read() -> None:
    """SG-116: only user and password must be quoted."""
    with connect("metaq://bob:p%2F%3F%23%40@host/?instance=one@two") as client:
        assert (client._core.access.user, client._core.access.password) == ("bob", "p/?#@")
        assert client.id.endswith("@one@two")


# -- heartbeats -------------------------------------------------------------------------------------------------------


def test_a_host_that_has_vanished_takes_no_time_from_the_heartbeats_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-089: connecting to it takes all the time of its own heartbeat."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    left_s: dict[str, float] = {}

    def submit(address: str, request: RemotingRequest, deadline: float, done: Done) -> None:
        left_s[address] = deadline - clock[0]
        clock[0] += 3.0
        raise NotConnected("vanished")

    transport: Any = SimpleNamespace(submit=submit)
    core = Core(["registry:1"], timeout_s=DEADLINE_S, make_transport=lambda asked, greeting: transport)
    core._producers["desk"] = 1
    monkeypatch.setattr(core, "routes", SimpleNamespace(broker_addresses=lambda *, masters_only: ["a:1", "b:1", "c:1"]))
    core.heartbeat(wait_s=3.0)
    assert left_s == {"a:1": 3.0, "b:1": 3.0, "c:1": 3.0}


# -- scheduler --------------------------------------------------------------------------------------------------------


def test_the_scheduler_keeps_time_and_survives_failures() -> None:
    """SG-089: heartbeats go on whatever another task does."""
    scheduler = Scheduler("test")
    ran: list[str] = []
    enough = threading.Event()

    def fail() -> None:
        raise ValueError("as planned")

    def repeat() -> None:
        ran.append("again")
        if ran.count("again") == 3:
            enough.set()

    scheduler.after(1.0, lambda: ran.append("second"))  # this thread may be late between the two
    scheduler.after(0.01, lambda: ran.append("first"))
    scheduler.run(fail)
    scheduler.every(0.03, repeat, enough.is_set)
    assert enough.wait(DEADLINE_S)
    wait_until(lambda: "second" in ran, DEADLINE_S, "the second one has run")
    scheduler.close()
    scheduler.after(0.0, lambda: ran.append("never"))
    scheduler.run(lambda: ran.append("never"))
    assert [name for name in ran if name != "again"] == ["first", "second"]
    assert ran.count("again") == 3


def test_closing_the_scheduler_loses_nothing() -> None:
    """SG-089: who waits for a later task is told that it is dropped, and what waits for a thread still runs."""
    scheduler = Scheduler("test")
    ran: list[str] = []
    go = threading.Event()
    for _ in range(8):
        scheduler.run(lambda: go.wait(DEADLINE_S))
    scheduler.run(lambda: ran.append("queued"))
    scheduler.after(DEADLINE_S, lambda: ran.append("never"), lambda: ran.append("dropped"))
    scheduler.close()
    scheduler.after(0.0, lambda: ran.append("never"), lambda: ran.append("refused"))
    assert ran == ["dropped", "refused"]
    go.set()
    wait_until(lambda: ran[2:] == ["queued"], DEADLINE_S, "the queued task has run")


@pytest.mark.parametrize("thread", ["worker", "timer"])
def test_the_scheduler_goes_on_when_no_thread_could_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, thread: str
) -> None:
    """SG-089: what was to be done is done by the thread that starts next."""
    usual, failures, ran = threading.Thread.start, [RuntimeError("can't start new thread")], list[str]()

    def start(self: threading.Thread) -> None:
        if thread in self.name and failures:
            raise failures.pop()
        usual(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    scheduler = Scheduler("test")
    for name in ("first", "second"):
        task = partial(ran.append, name)
        if thread == "worker":
            assert scheduler.run(task)
        else:
            scheduler.after(0.0, task)
    wait_until(lambda: sorted(ran) == ["first", "second"], DEADLINE_S, "both have run")
    assert "no thread for a task client=test reason=can't start new thread" in caplog.text
    scheduler.close()


# -- flow control -----------------------------------------------------------------------------------------------------


def test_a_consumer_that_is_not_ready_is_not_flooded(memory: InMemoryBroker) -> None:
    """P31: of a long partition only some is fetched ahead; the rest comes as it is consumed."""
    count, body = 4_000, bytes(9_000)
    with connect(memory.address) as client:
        memory.create_topic("orders", 1)
        producer = client.producer()
        for _ in range(0, count, 100):
            producer.send_batch("orders", [body] * 100)
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            wait_until(lambda: buffered(consumer) > 0, DEADLINE_S, "something is fetched")
            # the limit, and what was on its way when it was reached: up to 1,024 messages each
            assert settled(consumer) <= QUEUE_BYTES // len(body) + 3 * 1024
            received = [consumer.receive(DEADLINE_S) for _ in range(count)]
    assert None not in received


def buffered(consumer: SimpleConsumer) -> int:
    return sum(fetcher.buffered for fetcher in consumer._fetchers.values())


def settled(consumer: SimpleConsumer) -> int:
    """Return how many messages are buffered, once that number has not changed for 0.3 s."""
    before, since = buffered(consumer), time.monotonic()
    while time.monotonic() - since < 0.3:
        time.sleep(0.01)
        if (now := buffered(consumer)) != before:
            before, since = now, time.monotonic()
    return before


# -- what brokers ask -------------------------------------------------------------------------------------------------


def request(code: Request, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
    return RemotingCommand(code, 1, 0, fields, body, None, "JAVA", 409, JSON)


@pytest.fixture
def client(memory: InMemoryBroker) -> Client:
    return connect(memory.address)


def test_a_listener_consumes_a_message_by_command(memory: InMemoryBroker, client: Client) -> None:
    """SG-132: 309, with what came of it."""
    heard = Heard()

    def listener(message: ReceivedMessage) -> None:
        heard(message)
        if message.body == b"1":
            raise ValueError("no")

    with client, client.listen("orders", "billing", listener) as consumer:
        for number, result in (("0", "CR_SUCCESS"), ("1", "CR_THROW_EXCEPTION")):
            record = records([number.encode()], "orders", {})
            answer = consumer._asked(request(Request.CONSUME_MESSAGE_DIRECTLY, {"brokerName": "a"}, record))
            assert fastjson.decode(answer.body)["consumeResult"] == result
        none = consumer._asked(request(Request.CONSUME_MESSAGE_DIRECTLY, {}))
    assert heard.bodies == [b"0", b"1"]
    assert none.code == Response.SYSTEM_ERROR


@pytest.mark.parametrize("moment", ["_first_offset", "_gained"])
def test_a_reset_is_obeyed_by_who_is_about_to_take_the_queue(
    memory: InMemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """SG-118: also when it comes while the member asks where to begin, and before the queue is quite its own."""
    queue, fields = MessageQueue("orders", "memory", 0), {"topic": "orders", "group": "billing"}
    memory.create_topic("orders", 1)
    usual = getattr(SimpleConsumer, moment)
    told: list[MessageQueue] = []

    def told_meanwhile(consumer: SimpleConsumer, subject: Any, *more: Any) -> Any:
        if queue not in told and queue in (subject, getattr(subject, "queue", None)):
            told.append(queue)
            consumer._asked(request(Request.RESET_CONSUMER_CLIENT_OFFSET, fields, encode_offsets({queue: 2})))
        return usual(consumer, subject, *more)

    monkeypatch.setattr(SimpleConsumer, moment, told_meanwhile)
    with client:
        send(client, 3)
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            bodies = [message.body for message in take(consumer, 1)]
    assert told
    assert bodies == [b"2"]
    assert memory.committed("billing", "orders") == {0: 2}  # the message was handed out, not committed


def test_a_reset_is_obeyed_by_who_is_about_to_give_the_queue_up(memory: InMemoryBroker, client: Client) -> None:
    """SG-118: an ordered queue is given up when its message is consumed, whose position is from before the reset."""
    queue, fields = MessageQueue("orders", "memory", 0), {"topic": "orders", "group": "billing"}
    memory.create_topic("orders", 1)
    called, go_on = threading.Event(), threading.Event()
    bodies: list[bytes] = []

    def listener(message: ReceivedMessage) -> None:
        bodies.append(message.body)
        called.set()
        assert go_on.wait(DEADLINE_S)

    with client:
        send(client, 3)
        with client.listen("orders", "billing", listener, ordered=True, consume_from=FIRST) as consumer:
            assert called.wait(DEADLINE_S)
            consumer._drop([queue])
            consumer._asked(request(Request.RESET_CONSUMER_CLIENT_OFFSET, fields, encode_offsets({queue: 2})))
            go_on.set()
            wait_until(lambda: not consumer._leaving, DEADLINE_S, "it is given up")
            consumer._rebalance()
            wait_until(lambda: len(bodies) > 1, DEADLINE_S, "it is taken again")
    assert bodies == [b"0", b"2"]


def test_a_consumer_tells_its_offsets_and_its_state(memory: InMemoryBroker, client: Client) -> None:
    """SG-088: 221 and 307, as administration tools show them; 220 moves it."""
    queue = MessageQueue("orders", "memory", 0)
    memory.create_topic("orders", 1)
    with client, client.consumer("orders", "billing", tags="a || b", consume_from=FIRST) as consumer:
        send(client, 3)
        wait_until(lambda: queue in consumer.assignment(), DEADLINE_S, "the queue is the consumer's")
        fields = {"topic": "orders", "group": "billing"}
        consumer._asked(request(Request.RESET_CONSUMER_CLIENT_OFFSET, fields, encode_offsets({queue: 2})))
        status = consumer._asked(request(Request.GET_CONSUMER_STATUS_FROM_CLIENT, fields))
        assert decode_offsets(status.body) == {queue: 2}
        info = fastjson.decode(consumer._asked(request(Request.GET_CONSUMER_RUNNING_INFO, fields)).body)
        assert info["mqTable"][queue]["commitOffset"] == 2
        assert [row["subString"] for row in info["subscriptionSet"] if row["topic"] == "orders"] == ["a || b"]
        unknown = consumer._asked(request(Request.CONSUME_MESSAGE_DIRECTLY, fields))
    assert unknown.code == Response.REQUEST_CODE_NOT_SUPPORTED
    assert memory.committed("billing", "orders") == {0: 2}
