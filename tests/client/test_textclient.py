"""The Python text client against a fake broker, which can do what a real one never does on purpose."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import metaq
from metaq.checksum import body_crc
from metaq.client import Batch, PutManyFailed, TextClient, parse_stats
from metaq.client.connecting.access import BlockingStream
from metaq.client.text.textclient import _CHUNK_MESSAGES, _CHUNKS_AHEAD
from metaq.errors import BadRequest, ClientError, ConnectionFailed, CorruptRecord, Refused, RequestTimeout
from metaq.message import PutResult, TextPosition
from metaq.protocol.text.commands import END_OF_LOG, NO_OPAQUE, Command, Create, Get, Offset, Put, Stats, Version
from metaq.protocol.text.replies import write_result
from tests.support.broker import wait_until
from tests.support.fakebroker import Answer, FakeBroker, answering, each, opaque, record, store, value

LONG_S = 60.0
"""A timeout that only a hanging test reaches."""
SHORT_S = 0.1


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def start(stack: contextlib.ExitStack, answer: Answer, timeout_s: float = LONG_S) -> tuple[FakeBroker, TextClient]:
    broker = stack.enter_context(FakeBroker(answer))
    client = stack.enter_context(TextClient("127.0.0.1", broker.port, timeout_s=LONG_S))
    client.timeout_s = timeout_s
    return broker, client


def test_put_sends_checksum_and_partition_of_the_brokers_choice(stack: contextlib.ExitStack) -> None:
    """MQ-010, MQ-037, MQ-059, MQ-110: the result says where the message is."""
    broker, client = start(stack, answering(200, "-7 3 1024"))
    assert client.put("orders", b"hello") == PutResult(-7, 3, TextPosition(1024))
    assert broker.received == [Put("orders", -1, 0, body_crc(b"hello"), None, "0", b"hello")]


def test_put_with_attribute(stack: contextlib.ExitStack) -> None:
    """MQ-012: an attribute travels in front of the body; an empty one is not none."""
    broker, client = start(stack, answering(200, "1 0 0"))
    client.put("orders", b"x", partition=2, attribute="A")
    client.put("orders", b"x", attribute="")
    puts = [command for command in broker.received if isinstance(command, Put)]
    assert [(put.partition, put.flag, put.body) for put in puts] == [
        (2, 1, b"\0\0\0\1Ax"),
        (-1, 1, b"\0\0\0\0x"),
    ]


@pytest.mark.parametrize("word", [b"value", b"data"])
def test_get_takes_both_words_for_records(stack: contextlib.ExitStack, word: bytes) -> None:
    """MQ-060, MQ-061: `data` as in the manual and `value` as in the code; a cut message at the end is left out."""
    records = record(b"a", 5) + record(b"\0\0\0\1Tbc", 6, 1) + record(b"cut")[:-1]
    broker, client = start(stack, each(lambda command: value(command, records, word)))
    batch = client.get("orders", 100, partition=1, group="g", max_bytes=512, wait_ms=5)
    assert broker.received == [Get("orders", "g", 1, 100, 512, "0", 5)]
    assert [(message.id, message.attribute, message.body) for message in batch.messages] == [(5, None, b"a"), (6, "T", b"bc")]
    assert [(message.position, message.next_position) for message in batch.messages] == [(100, 121), (121, 148)]
    assert batch.next_position == 148


def test_get_where_nothing_is(stack: contextlib.ExitStack) -> None:
    """MQ-062: 404 is an empty batch at the same place, 301 one that leads elsewhere, other statuses are refusals."""
    replies = iter([(404, "nothing"), (404, "no topic"), (301, "4096"), (403, "closed")])
    _, client = start(stack, each(lambda command: write_result(*next(replies), opaque(command))))
    assert client.get("orders", 77) == ([], 77)
    assert client.get("orders", END_OF_LOG) == ([], 0)
    assert client.get("orders", 5) == ([], 4096)
    with pytest.raises(Refused, match="the broker refused: closed") as refusal:
        client.get("orders", 5)
    assert refusal.value.code == 403


def test_get_of_less_than_a_message_says_so(stack: contextlib.ExitStack) -> None:
    """MQ-032: a broker that cuts even the first message would otherwise be asked for ever."""
    _, client = start(stack, each(lambda command: value(command, record(b"large")[:10])))
    with pytest.raises(ClientError, match="no whole message of orders-0 at 0 fits into 10 bytes; raise max_bytes"):
        client.get("orders", max_bytes=10)


def test_a_damaged_message_is_never_delivered(stack: contextlib.ExitStack) -> None:
    """MQ-011: a body that does not have its checksum raises."""
    damaged = record(b"good") + record(b"bad").replace(b"bad", b"bat")
    _, client = start(stack, each(lambda command: value(command, damaged)))
    with pytest.raises(CorruptRecord, match="the message at position 24 does not have its checksum"):
        client.get("orders")


def test_iterate_follows_where_the_broker_sends_it(stack: contextlib.ExitStack) -> None:
    """MQ-005, MQ-030: from before the oldest message through every batch to the end."""
    log = {1000: record(b"a") + record(b"b"), 1042: record(b"c")}

    def answer(command: Command) -> bytes:
        assert isinstance(command, Get)
        if command.position < 1000:
            return write_result(301, "1000", opaque(command))
        records = log.get(command.position)
        return value(command, records) if records else write_result(404, "end", opaque(command))

    broker, client = start(stack, each(answer))
    assert [message.body for message in client.iterate("orders")] == [b"a", b"b", b"c"]
    assert [command.position for command in broker.received if isinstance(command, Get)] == [0, 1000, 1042, 1063]


def test_follow_waits_for_messages_that_are_not_there_yet(stack: contextlib.ExitStack) -> None:
    """SG-084: a follower asks the broker to hold its gets, and goes on when that answers with nothing."""
    replies = iter([404, 404, 0])

    def answer(command: Command) -> bytes:
        code = next(replies)
        return write_result(code, "nothing yet", opaque(command)) if code else value(command, record(b"late"))

    broker, client = start(stack, each(answer))
    assert next(client.iterate("orders", position=21, follow=True)).body == b"late"
    gets = [command for command in broker.received if isinstance(command, Get)]
    assert [get.position for get in gets] == [21, 21, 21]
    assert all(get.wait_ms > 0 for get in gets)


def test_offset_create_version_and_stats(stack: contextlib.ExitStack) -> None:
    """MQ-063, MQ-064, MQ-109: the commands without a body."""
    replies = {Offset: "512", Create: "4", Version: "1.2.3", Stats: "STATS\r\npid 7\r\nEND\r\n"}
    broker, client = start(stack, each(lambda command: write_result(200, replies[type(command)], opaque(command))))
    assert client.offset("orders", 600, partition=1, group="g") == 512
    assert client.create("orders", 4) == 4
    assert client.version() == "1.2.3"
    assert parse_stats(client.stats()) == {"pid": "7"}
    assert client.stats("topics") == "STATS\r\npid 7\r\nEND\r\n"
    assert broker.received == [
        Offset("orders", "g", 1, 600, "0"),
        Create("orders", 4, False, "1"),
        Version("2"),
        Stats("", "3", item_only=False),
        Stats("topics", "4", item_only=False),
    ]


def test_parse_stats_names_partitions() -> None:
    """MQ-064: the lines of `stats offsets` differ in their first three words only."""
    text = "STATS\r\nt part 0 min_offset 0 max_offset 9\r\nt part 1 min_offset 5 max_offset 7\r\nu *Empty*\r\nalone\r\nEND\r\n"
    assert parse_stats(text) == {
        "t part 0": "min_offset 0 max_offset 9",
        "t part 1": "min_offset 5 max_offset 7",
        "u": "*Empty*",
        "alone": "",
    }


@pytest.mark.parametrize("name", ["", "two words", "line\r\nquit", "naïve", "tab\t"])
def test_names_that_would_break_a_line_are_never_sent(stack: contextlib.ExitStack, name: str) -> None:
    """MQ-057: a name is one token of a line."""
    broker, client = start(stack, answering(200, "0"))
    for call in (
        lambda: client.put(name, b""),
        lambda: client.put_many(name, [b""]),
        lambda: client.get(name),
        lambda: client.get("t", group=name),
        lambda: client.offset(name, 0),
        lambda: client.offset("t", 0, group=name),
        lambda: client.create(name, 1),
    ):
        with pytest.raises(BadRequest, match="is not made of printable ASCII"):
            call()
    assert broker.received == []


def test_put_many_returns_results_in_the_order_of_the_bodies(stack: contextlib.ExitStack) -> None:
    """MQ-037, MQ-058: from any iterable, over many chunks."""
    _, client = start(stack, each(store))
    results = client.put_many("orders", (b"%d" % number for number in range(5000)), partition=1)
    assert results == [PutResult(number, 1, TextPosition(10 * number)) for number in range(5000)]
    assert client.put_many("orders", []) == []


@settings(max_examples=20)
@given(st.integers(1, 1500), st.integers())
def test_replies_in_any_order_find_their_requests(count: int, seed: int) -> None:
    """MQ-058: brokers may answer pipelined requests in another order; the opaque decides."""
    order = random.Random(seed)

    def answer(commands: list[Command]) -> bytes:
        replies = [store(command) for command in commands]
        order.shuffle(replies)
        return b"".join(replies)

    with FakeBroker(answer) as broker, TextClient("127.0.0.1", broker.port, timeout_s=LONG_S) as client:
        results = client.put_many("orders", [b"%d" % number for number in range(count)])
    assert [result.id for result in results] == list(range(count))


def test_put_many_keeps_a_bounded_number_in_flight(stack: contextlib.ExitStack) -> None:
    """MQ-058: a broker that answers nothing does not get a whole endless stream."""
    broker, client = start(stack, lambda commands: b"", SHORT_S)
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"0"

    with pytest.raises(PutManyFailed, match=r"0 of .* messages are stored; message 0: no answer") as failure:
        client.put_many("orders", endless())
    assert isinstance(failure.value.reason, RequestTimeout)
    assert len(broker.received) <= taken == len(failure.value.results) <= (_CHUNKS_AHEAD + 1) * _CHUNK_MESSAGES


def test_put_many_says_what_became_of_each_body(stack: contextlib.ExitStack) -> None:
    """MQ-037: what was refused, what is stored behind it, and nothing more is sent."""

    def refuse_300(command: Command) -> bytes:
        assert isinstance(command, Put)
        return write_result(503, "disk full", opaque(command)) if command.body == b"300" else store(command)

    broker, client = start(stack, each(refuse_300))
    with pytest.raises(PutManyFailed, match="message 300: the broker refused: disk full") as failure:
        client.put_many("orders", [b"%d" % number for number in range(100_000)])
    results = failure.value.results
    assert failure.value.first_failed == 300
    assert isinstance(results[300], Refused)
    assert len(results) == len(broker.received) < 100_000
    assert [index for index, result in enumerate(results) if not isinstance(result, PutResult)] == [300]
    assert client.put_many("orders", [b"1"]) == [PutResult(1, 0, TextPosition(10))]
    assert len(broker.connections) == 1


def wrong_body() -> Iterator[Any]:
    yield "text"


def broken() -> Iterator[bytes]:
    yield from ()
    raise ConnectionFailed("the source of the bodies is gone")


@pytest.mark.parametrize(("source", "reason"), [(wrong_body, BadRequest), (broken, ConnectionFailed)])
def test_put_many_says_what_is_stored_before_a_body_that_cannot_be_sent(
    stack: contextlib.ExitStack, source: Callable[[], Iterator[bytes]], reason: type[Exception]
) -> None:
    """MQ-037: also at the end of the chunk that it is in; where nothing was sent, there is only the reason."""
    broker, client = start(stack, each(store))
    good = [b"%d" % number for number in range(_CHUNK_MESSAGES + 34)]
    with pytest.raises(PutManyFailed, match="290 of 291 messages are stored; message 290: it was not sent: ") as failure:
        client.put_many("orders", chain(good, source()))
    results = failure.value.results
    assert results[:-1] == [PutResult(number, 0, TextPosition(10 * number)) for number in range(len(good))]
    assert isinstance(failure.value.__cause__, reason)
    with pytest.raises(reason):
        client.put_many("orders", chain([b"0"], source()))
    assert len(broker.received) == len(good)
    assert client.put_many("orders", [b"1"]) == [PutResult(1, 0, TextPosition(10))]


@pytest.mark.parametrize("orderly", [True, False])
def test_put_many_over_a_connection_that_breaks(stack: contextlib.ExitStack, orderly: bool) -> None:
    """MQ-037: what was acknowledged before is told apart from what is unknown."""
    answered = 0

    def break_later(commands: list[Command]) -> bytes | None:
        nonlocal answered
        if answered > 1000:
            return None
        answered += len(commands)
        return b"".join(map(store, commands))

    broker, client = start(stack, break_later)
    broker.closes_orderly = orderly
    with pytest.raises(PutManyFailed) as failure:
        client.put_many("orders", [b"%d" % number for number in range(100_000)])
    results, stored = failure.value.results, failure.value.first_failed
    assert stored == answered or (stored < answered and not orderly)  # a reset may overtake what was sent before it
    assert [result.id for result in results[:stored] if isinstance(result, PutResult)] == list(range(stored))
    assert all(isinstance(result, ConnectionFailed) for result in results[stored:])


def test_refusal_leaves_the_connection_open(stack: contextlib.ExitStack) -> None:
    """MQ-062: an error status is an answer."""
    broker, client = start(stack, answering(500, "wrong partition 9"))
    for _ in range(2):
        with pytest.raises(Refused, match="refused: wrong partition 9"):
            client.put("orders", b"x", partition=9)
    assert len(broker.connections) == 1


def test_timeout_closes_and_the_next_call_reconnects(stack: contextlib.ExitStack) -> None:
    """MQ-037: without an answer the outcome is unknown; nothing is sent again by itself."""
    broker, client = start(stack, lambda commands: b"", SHORT_S)
    with pytest.raises(RequestTimeout, match=f"no answer from 127.0.0.1:{broker.port} in time .* may or may not"):
        client.put("orders", b"1")
    wait_until(lambda: len(broker.received) == 1, LONG_S, "it has come nevertheless")
    broker.answer = each(store)
    client.timeout_s = LONG_S
    assert client.put("orders", b"2").id == 2
    assert [command.body for command in broker.received if isinstance(command, Put)] == [b"1", b"2"]
    assert len(broker.connections) == 2


def test_a_held_get_may_take_longer_than_the_timeout(stack: contextlib.ExitStack) -> None:
    """SG-084: the time a broker was asked to wait is added to the time it has to answer."""
    answered = threading.Event()

    def answer(commands: list[Command]) -> bytes:
        assert not answered.wait(4 * SHORT_S)
        return write_result(404, "nothing", opaque(commands[0]))

    _, client = start(stack, answer, SHORT_S)
    assert client.get("orders", wait_ms=60_000) == ([], 0)


def test_a_connection_that_the_broker_closed_meanwhile_is_replaced(stack: contextlib.ExitStack) -> None:
    """MQ-054: after idle time the first call works, since nothing was in flight."""
    broker, client = start(stack, each(store))
    assert client.put("orders", b"1").id == 1
    broker.hang_up()
    assert client.put("orders", b"2").id == 2
    assert len(broker.connections) == 2


def test_what_the_broker_says_before_it_closes_is_in_the_error(stack: contextlib.ExitStack) -> None:
    """E-15: a broker with too many connections answers no request in particular."""
    broker, client = start(stack, lambda commands: write_result(503, "50 connections already", NO_OPAQUE))
    broker.closes_after_answer = True
    with pytest.raises(ConnectionFailed, match="the broker closed the connection, saying 503: 50 connections already"):
        client.version()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "it answered"),
        (b"result 200 5\r\n", "it answered"),
        (b"value 99999999999 0\r\n", "the limit is"),
        (b"x" * 5000, "this is not a metaq broker"),
    ],
)
def test_what_is_no_reply_ends_the_connection(stack: contextlib.ExitStack, reply: bytes, problem: str) -> None:
    """MQ-062: another server on that port, or a broken stream."""
    _, client = start(stack, lambda commands: reply)
    with pytest.raises(ConnectionFailed, match=problem):
        client.version()


def test_answers_of_another_kind_are_named(stack: contextlib.ExitStack) -> None:
    """MQ-062: a status of success with a body that cannot be meant."""
    _, client = start(stack, answering(200, "fine"))
    for call in (lambda: client.put("t", b""), lambda: client.offset("t", 0), lambda: client.create("t", 1)):
        with pytest.raises(ClientError, match="the broker answered b'fine'"):
            call()


def test_threads_share_a_client(stack: contextlib.ExitStack) -> None:
    """MQ-037, MQ-058: on one connection, and each gets the answers to its own requests."""
    broker, client = start(stack, each(store))
    found: dict[int, list[int]] = {}

    def work(start_at: int) -> None:
        numbers = range(start_at, start_at + 300)
        singles = [client.put("orders", b"%d" % number).id for number in numbers]
        many = [result.id for result in client.put_many("orders", [b"%d" % number for number in numbers])]
        assert singles == many
        found[start_at] = singles

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {start_at: list(range(start_at, start_at + 300)) for start_at in range(0, 8000, 1000)}
    assert len(broker.connections) == 1


def test_requests_of_other_threads_are_answered_while_one_waits(stack: contextlib.ExitStack) -> None:
    """MQ-058: a reply that comes before an older one reaches its thread at once."""
    held: list[Command] = []

    def answer(commands: list[Command]) -> bytes:
        held.extend(command for command in commands if isinstance(command, Get))
        others = [write_result(200, "1.0", opaque(command)) for command in commands if isinstance(command, Version)]
        stats = [b"".join(value(get, record(b"x")) for get in held) for command in commands if isinstance(command, Stats)]
        ends = [write_result(200, "", opaque(command)) for command in commands if isinstance(command, Stats)]
        return b"".join(others + stats + ends)

    _, client = start(stack, answer)
    batches: list[Batch] = []
    waiting = threading.Thread(target=lambda: batches.append(client.get("orders", wait_ms=1000)))
    waiting.start()
    wait_until(lambda: bool(held), LONG_S, "the get has arrived")
    assert [client.version() for _ in range(100)] == ["1.0"] * 100
    assert waiting.is_alive()
    client.stats()
    waiting.join()
    assert [message.body for message in batches[0].messages] == [b"x"]


def test_a_timeout_of_one_thread_fails_the_others_at_once(stack: contextlib.ExitStack) -> None:
    """MQ-037: they share the connection that is given up, so their outcome is unknown as well."""
    _, client = start(stack, lambda commands: b"", SHORT_S)
    errors: list[ClientError] = []

    def wait_long() -> None:
        with pytest.raises(ConnectionFailed) as failure:
            client.get("orders", wait_ms=60_000)
        errors.append(failure.value)

    waiting = threading.Thread(target=wait_long)
    waiting.start()
    wait_until(lambda: bool(client._connection._waiting), LONG_S, "the get is on its way")
    with pytest.raises(RequestTimeout):
        client.version()
    waiting.join()
    assert "is lost: a request on it was not answered in time" in str(errors[0])


def test_close_wakes_who_waits_and_is_final(stack: contextlib.ExitStack) -> None:
    """MQ-054: no thread hangs on a client that another one closed."""
    broker, client = start(stack, lambda commands: b"")
    threads = [threading.Thread(target=_expect_closed, args=(client,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(broker.received) == 3, LONG_S, "all three requests have arrived")
    client.close()
    client.close()
    for thread in threads:
        thread.join()
    with pytest.raises(ClientError, match="this client was closed"):
        client.version()
    assert len(broker.connections) == 1


def _expect_closed(client: TextClient) -> None:
    with pytest.raises(ConnectionFailed, match="the client was closed"):
        client.version()


class _HalfSending:
    """A socket whose owner presses Ctrl-C in the middle of a ``sendall``."""

    def __init__(self, real: BlockingStream) -> None:
        self._real = real

    def settimeout(self, timeout_s: float) -> None:
        self._real.settimeout(timeout_s)

    def sendall(self, data: bytes) -> None:
        self._real.sendall(data[: len(data) // 2])
        raise KeyboardInterrupt

    def close(self) -> None:
        self._real.close()


def test_an_interrupted_request_ends_the_connection(stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """MQ-057: half a frame may be out, so nothing can follow it; the next call has a new connection."""
    broker, client = start(stack, each(store))

    half_sent = _HalfSending(client._connection._outgoing)
    monkeypatch.setattr(client._connection, "_outgoing", half_sent)
    with pytest.raises(KeyboardInterrupt):
        client.put("orders", b"1")
    assert client.put("orders", b"2").id == 2
    assert len(broker.connections) == 2


def test_nobody_listens() -> None:
    """MQ-054: the error names the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailed, match=f"cannot connect to 127.0.0.1:{port}: .*check that metaq listens there"):
        TextClient("127.0.0.1", port)


def test_public_names_exist() -> None:
    """Every name that the package offers can be imported from it, and no other."""
    assert metaq.TextClient is TextClient
    named = {name: getattr(getattr(metaq, name), "__name__", name).rpartition(".")[2] for name in metaq.__all__}
    assert all(name == own for name, own in named.items())
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        metaq.__getattr__("Nothing")
