"""Messages that linger: they go together, each with its own outcome, in order, and never later than they may."""

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

import metaq.aio
from metaq.client import Client, Producer, SendResult, connect
from metaq.client.sending import gathering
from metaq.errors import BadRequest, ClientClosed, MetaqError, Refused, RequestTimeout
from metaq.protocol.properties import SHARDING_KEY
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.sending.batch import decode_batch
from tests.client.test_producer import read_all
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, accept, route_to

DEADLINE_S = 60.0
LONG_MS = 3_600_000
"""A time for which no test waits: what is sent before was not sent by the clock."""
BATCH, SINGLE = Request.SEND_BATCH_MESSAGE, Request.SEND_MESSAGE_V2


def bodies(request: RemotingCommand) -> list[bytes]:
    return [item.body for item in decode_batch(request.body)]


def take(request: RemotingCommand) -> Reply:
    """Take a batch, of which each message has the offset that its place in the batch says."""
    ids = ",".join(f"{place:032X}" for place in range(len(bodies(request))))
    return Reply(fields={"msgId": ids, "queueId": request.fields["e"], "queueOffset": "0"})


class Broker:
    """A broker of two partitions that tells what it got."""

    def __init__(self, stack: ExitStack) -> None:
        self.server = stack.enter_context(FakeRemoting(send_batch_message=take, send_message_v2=accept))
        routes = route_to({"a": self.server.address}, queues=2)
        self._registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=routes))
        self.client = stack.enter_context(connect(self._registry.address, timeout_s=DEADLINE_S))

    def batches(self) -> list[list[bytes]]:
        return [bodies(request) for request in self.server.requests if request.code == BATCH]

    def singles(self) -> list[bytes]:
        return [request.body for request in self.server.requests if request.code == SINGLE]


@pytest.fixture
def broker() -> Iterator[Broker]:
    with ExitStack() as stack:
        yield Broker(stack)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def test_messages_that_come_together_go_together(broker: Broker) -> None:
    """RD-022: one request, and each future has the result of its own message."""
    producer = broker.client.producer(linger_ms=500)
    results = [future.result(DEADLINE_S) for future in [producer.send_async("orders", body) for body in numbers(0, 20)]]
    assert broker.batches() == [numbers(0, 20)]
    assert [result.queue_offset for result in results] == list(range(20))
    assert len({result.id for result in results}) == 20
    (request,) = [request for request in broker.server.requests if request.code == BATCH]
    assert [f"UNIQ_KEY\x01{result.id}\x02" for result in results] == [item.properties for item in decode_batch(request.body)]


def test_without_linger_nothing_waits(broker: Broker) -> None:
    """P14: it is an option, and off."""
    broker.client.producer().send_async("orders", b"alone").result(DEADLINE_S)
    assert (broker.batches(), broker.singles()) == ([], [b"alone"])


def test_a_full_batch_does_not_wait(broker: Broker) -> None:
    """P14: by size, and by the number of messages that a batch may have."""
    producer = broker.client.producer(linger_ms=LONG_MS, batch_bytes=10_000)
    futures = [producer.send_async("orders", bytes(1000)) for _ in range(10)]
    wait_until(lambda: len(broker.batches()) == 1, DEADLINE_S, "the full batch goes")
    assert len(broker.batches()[0]) == 9
    assert all(future.result(DEADLINE_S) for future in futures[:9])
    assert not futures[9].done()
    many = broker.client.producer(linger_ms=LONG_MS, batch_bytes=1 << 20)
    for future in [many.send_async("orders", b"") for _ in range(1024)]:
        future.result(DEADLINE_S)
    assert [len(batch) for batch in broker.batches()] == [9, 1024]


def test_what_waits_is_bounded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: at the bound everything goes, of whatever topic."""
    monkeypatch.setattr(gathering, "MOST_BYTES", 5_000)
    producer = broker.client.producer(linger_ms=LONG_MS)
    futures = [producer.send_async(f"orders{number}", bytes(1000)) for number in range(5)]
    for future in futures:
        future.result(DEADLINE_S)
    assert len(broker.batches()) == 5


def test_messages_of_a_key_stay_in_order(client: Client) -> None:
    """SG-124: lingering or not, delayed sends and those that wait for an answer between them."""
    producer = client.producer(linger_ms=5, batch_bytes=2_000)
    dice = random.Random(7)
    sent: defaultdict[str, list[bytes]] = defaultdict(list)
    futures = []
    for number in range(300):
        key, body = f"customer-{dice.randrange(5)}", b"%d" % number
        sent[key].append(body)
        way = dice.randrange(12)
        if way == 0:
            producer.send("orders", body, ordering_key=key)
        else:
            body = sent[key][-1] = body + b" " * (5000 if way == 1 else 0)
            futures.append(producer.send_async("orders", body, ordering_key=key))
    places = [future.result(DEADLINE_S) for future in futures]
    assert len({(place.queue, place.queue_offset) for place in places}) == len(places)
    with client.pull_consumer("orders") as consumer:
        messages = read_all(consumer, 300)
    for key, wanted in sent.items():
        of_key = [message for message in messages if message.properties[SHARDING_KEY] == key]
        assert [message.body for message in sorted(of_key, key=lambda message: message.queue_offset)] == wanted
        assert len({message.queue for message in of_key}) == 1


def test_what_cannot_be_in_a_batch_goes_alone_and_after_what_waits(broker: Broker) -> None:
    """SG-126, E-07: delays, priorities, ids and large bodies keep their meaning."""
    producer = broker.client.producer(linger_ms=LONG_MS)
    waiting = producer.send_async("orders", b"waiting")
    producer.send_async("orders", b"level", delay_level=1).result(DEADLINE_S)
    assert waiting.result(DEADLINE_S)
    producer.send_async("orders", b"delay", delay=timedelta(seconds=1)).result(DEADLINE_S)
    producer.send_async("orders", b"priority", priority=3).result(DEADLINE_S)
    producer.send_async("orders", b"id", dedupe_id="x").result(DEADLINE_S)
    producer.send_async("orders", random.Random(1).randbytes(5000)).result(DEADLINE_S)
    producer.send_async("orders", b"long", properties={"text": "x" * 5000}).result(DEADLINE_S)
    assert broker.batches() == [[b"waiting"]]
    assert [body[:9] for body in broker.singles()][:4] == [b"level", b"delay", b"priority", b"id"]
    assert len(broker.singles()) == 6
    codes = [request.code for request in broker.server.requests if request.code in (BATCH, SINGLE)]
    assert codes[0] == BATCH


def test_one_bad_message_does_not_stop_the_others(broker: Broker) -> None:
    """P14: a batch that is refused is sent one by one, so that the error is that of the message alone."""
    broker.server.scripts[BATCH] = lambda request: Reply(Response.MESSAGE_ILLEGAL, remark="one of them is bad")
    broker.server.scripts[SINGLE] = lambda request: (
        Reply(Response.MESSAGE_ILLEGAL, remark="this is bad") if request.body == b"3" else accept(request)
    )
    with broker.client.producer(linger_ms=50) as producer:
        futures = [producer.send_async("orders", body) for body in numbers(0, 6)]
    assert all(future.done() for future in futures)
    with pytest.raises(Refused, match="this is bad"):
        futures.pop(3).result()
    assert [future.result().queue_offset for future in futures] == [7] * 5


def test_an_error_names_the_message(broker: Broker) -> None:
    """P14: each future has an error of its own."""
    broker.server.scripts[BATCH] = lambda request: None
    producer = broker.client.producer(linger_ms=1)
    futures = [producer.send_async("orders", body, timeout_s=0.3) for body in numbers(0, 3)]
    errors = [future.exception(DEADLINE_S) for future in futures]
    assert [type(error) for error in errors] == [RequestTimeout] * 3
    assert len({id(error) for error in errors}) == 3
    (request,) = [request for request in broker.server.requests if request.code == BATCH]
    for error, item in zip(errors, decode_batch(request.body), strict=True):
        assert error is not None
        assert item.properties.split("\x01")[1].rstrip("\x02") in error.__notes__[0]


@pytest.mark.parametrize("closes", ["producer", "client"])
def test_closing_sends_what_waits(broker: Broker, closes: str) -> None:
    """P14: and waits for the answers; afterwards nothing is taken."""
    producer = broker.client.producer(linger_ms=LONG_MS)
    futures = [producer.send_async(topic, b"x") for topic in ("orders", "bills") for _ in range(5)]
    (producer if closes == "producer" else broker.client).close()
    assert [future.done() for future in futures] == [True] * 10
    assert all(future.result().offset_id for future in futures)
    with pytest.raises(ClientClosed):
        producer.send_async("orders", b"too late")


def test_a_closed_client_ends_what_has_no_answer() -> None:
    """SG-092: also what would have been tried again; callbacks run all the same."""
    told: list[object] = []
    with ExitStack() as stack:
        broker = Broker(stack)
        broker.server.scripts[SINGLE] = lambda request: None
        future = broker.client.producer().send_async("orders", b"x")
        future.add_done_callback(told.append)
        wait_until(lambda: len(broker.singles()) == 1, DEADLINE_S, "the message is sent")
        broker.client.close()
        assert isinstance(future.exception(DEADLINE_S), MetaqError)
        wait_until(lambda: told == [future], DEADLINE_S, "the callback is called")


def test_a_closed_client_ends_what_waits_for_another_try() -> None:
    """SG-092: its pause has no end otherwise."""
    with ExitStack() as stack:
        broker = Broker(stack)
        broker.server.scripts[SINGLE] = lambda request: Reply(Response.SYSTEM_BUSY, remark="retry after 30000 ms")
        future = broker.client.producer().send_async("orders", b"x")
        due = broker.client._core.scheduler._due
        wait_until(lambda: any(one.dropped for one in due), DEADLINE_S, "it waits")
        broker.client.close()
        with pytest.raises(ClientClosed, match="it may be stored"):
            future.result(DEADLINE_S)


def test_a_callback_that_waits_for_another_send(broker: Broker) -> None:
    """SG-127: it runs on a thread of the client that reads nothing."""
    producer = broker.client.producer(linger_ms=1)
    results: list[SendResult] = []
    done = threading.Event()

    def again(finished: object) -> None:
        results.append(producer.send_async("orders", b"second").result(DEADLINE_S))
        done.set()

    producer.send_async("orders", b"first").add_done_callback(again)
    assert done.wait(DEADLINE_S)
    assert len(results) == 1


def test_many_threads_linger_together(client: Client) -> None:
    """SG-097: each message is there once, and each future says where."""
    producer = client.producer(linger_ms=2, batch_bytes=3_000)
    found: list[tuple[bytes, SendResult]] = []

    def work(thread: int) -> None:
        names = [b"%d-%d" % (thread, number) for number in range(100)]
        futures = [producer.send_async("orders", name) for name in names]
        found.extend((name, future.result(DEADLINE_S)) for name, future in zip(names, futures, strict=True))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with client.pull_consumer("orders") as consumer:
        messages = {(message.queue, message.queue_offset): message for message in read_all(consumer, 400)}
    assert len(found) == len(messages) == 400
    for name, result in found:
        message = messages[result.queue, result.queue_offset]
        assert (message.body, message.id) == (name, result.id)


def test_asyncio_lingers_too(address: str) -> None:
    """P44: sends that are awaited together."""

    async def main() -> list[SendResult]:
        async with metaq.aio.connect(address, timeout_s=DEADLINE_S) as client:
            producer = client.producer(linger_ms=5)
            return await asyncio.gather(*[producer.send("orders", b"%d" % number) for number in range(50)])

    results = asyncio.run(main())
    assert len({result.id for result in results}) == 50


@pytest.mark.parametrize(
    ("linger_ms", "batch_bytes", "named"),
    [(-1, 1, "linger_ms"), (0.5, 1, "linger_ms"), (1, 0, "batch_bytes"), (1, 1 << 23, "batch_bytes")],
)
def test_wrong_numbers(client: Client, linger_ms: int, batch_bytes: int, named: str) -> None:
    """P14: named, with what they take."""
    with pytest.raises(BadRequest, match=f"{named} is .* it takes a whole number"):
        client.producer(linger_ms=linger_ms, batch_bytes=batch_bytes)
    assert isinstance(client.producer(linger_ms=1, batch_bytes=1), Producer)
