"""Messages that are delayed to any time, and cancelled: with every client, against both brokers."""

import asyncio
import base64
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import metaq.aio
from metaq.client import Client, ConsumeFrom, TextClient, connect
from metaq.client.sending import cancelling
from metaq.errors import BadRequest, ConnectionFailed, Refused, TooLate, UnknownHandle
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.recall import DELIVERED, TIMER_STATE, RecallHandle, decode_recall, encode_recall
from metaq.testing import InMemoryBroker
from tests.support.broker import BrokerProcess, wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, route_to

DEADLINE_S = 60.0
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One process for all tests of this module, which use topics of their own."""
    folder: Path = tmp_path_factory.mktemp("delays")
    with BrokerProcess(folder / "data") as broker:
        yield broker
    shutil.rmtree(broker.data)  # pytest keeps the folders of failed runs


@pytest.fixture
def process(brokers: BrokerProcess) -> BrokerProcess:
    return brokers


@pytest.fixture
def text(process: BrokerProcess) -> Iterator[TextClient]:
    with TextClient(process.host, process.port, timeout_s=DEADLINE_S) as client:
        yield client


def bodies(client: Client, topic: str, count: int) -> list[bytes]:
    """The bodies of so many messages, as a new group gets them."""
    found: list[bytes] = []
    with client.consumer(topic, f"{topic}-readers", consume_from=ConsumeFrom.FIRST) as consumer:
        while len(found) < count:
            message = consumer.receive(timeout_s=DEADLINE_S)
            assert message is not None
            found.append(message.body)
        consumer.commit()
    return found


# -- any broker -------------------------------------------------------------------------------------------------------


def test_a_cancelled_message_is_not_delivered(client: Client) -> None:
    """E-12: and to cancel it again does no harm."""
    producer = client.producer()
    cancelled = producer.send("cancels", b"cancelled", delay=HOUR)
    assert cancelled.handle is not None
    client.cancel(cancelled.handle)
    client.cancel(cancelled.handle)
    assert producer.send("cancels", b"at once").handle is None
    assert bodies(client, "cancels", 1) == [b"at once"]


def test_a_time_that_has_passed_is_now(client: Client) -> None:
    """ES-005: there is nothing to cancel then."""
    sent = client.producer().send("passed", b"x", deliver_at=datetime.now(UTC) - HOUR)
    assert sent.handle is None
    assert bodies(client, "passed", 1) == [b"x"]
    assert client.producer().send("passed", b"y", delay=timedelta(0)).handle is None


def test_handles_that_mean_nothing(client: Client) -> None:
    """E-12: each is refused with its own reason."""
    sent = client.producer().send("meant", b"x", deliver_at=datetime.now(UTC) + HOUR)
    assert sent.handle is not None
    words = decode_recall(sent.handle)
    assert (words.topic, words.broker_name, words.unique_key) == ("meant", sent.queue.broker_name, sent.id)
    forged = words._replace(handle=f"{words.handle[:-1]}{'0' if words.handle[-1] != '0' else '1'}")
    for other in (forged, words._replace(handle=""), words._replace(topic="elsewhere")):
        with pytest.raises(UnknownHandle) as unknown:
            client.cancel(encode_recall(other))
        assert (unknown.value.code, unknown.value.retriable) == (604, False)
    with pytest.raises(ConnectionFailed, match="no route names a master of elsewhere"):
        client.cancel(encode_recall(words._replace(broker_name="elsewhere")), timeout_s=0.1)
    for unreadable in ("", "nonsense", words.handle):
        with pytest.raises(BadRequest, match="not a handle that a send has returned"):
            client.cancel(unreadable)
    nothing: Any = None
    with pytest.raises(BadRequest, match="handle is None; it takes the handle in the result of a delayed send"):
        client.cancel(nothing)
    client.cancel(sent.handle)


def test_a_handle_of_another_kind_of_broker(client: Client) -> None:
    """E-12: is sent to that broker as it is; those of RocketMQ have no sixth word."""
    queue = client.producer().send("foreign", b"x").queue
    handle = base64.urlsafe_b64encode(f"v1 foreign {queue.broker_name} 1769857200000 7F00".encode()).decode()
    assert decode_recall(handle) == RecallHandle("foreign", queue.broker_name, 1769857200000, "7F00", "")
    with pytest.raises(UnknownHandle, match="is not the handle of a delayed message"):
        client.cancel(handle)


WRONG = {
    "two delays": ({"delay": HOUR, "delay_level": 3}, "delay_level and delay contradict each other; give one of them"),
    "delay and time": ({"delay": HOUR, "deliver_at": datetime(2030, 1, 1, tzinfo=UTC)}, "delay and deliver_at contradict"),
    "negative": ({"delay": -HOUR}, "it takes a timedelta, 0 or more"),
    "a number": ({"delay": 90}, r"delay is 90 \(int\); it takes a timedelta"),
    "no time": ({"deliver_at": "tomorrow"}, "deliver_at is 'tomorrow' .*it takes a datetime"),
    "no zone": ({"deliver_at": datetime(2030, 1, 1)}, "has no time zone; add one: astimezone"),
    "property": ({"properties": {"TIMER_DELAY_MS": "5"}}, "TIMER_DELAY_MS is reserved; use the parameter"),
}


@pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=WRONG)
def test_delays_that_cannot_be_sent(memory: InMemoryBroker, wrong: dict[str, Any], reason: str) -> None:
    """P14: each is refused at the call, whichever send it is."""
    with connect(memory.address) as client:
        producer = client.producer()
        for send in (producer.send, producer.send_async, producer.send_oneway):
            with pytest.raises(BadRequest, match=reason):
                send("t", b"x", **wrong)
        assert memory.messages("t") == []


# -- the clock --------------------------------------------------------------------------------------------------------


def test_messages_come_at_their_time(memory: InMemoryBroker) -> None:
    """ES-005: in the order of their times, whichever way these are given."""
    with connect(memory.address) as client:
        producer, soon = client.producer(), memory.now + timedelta(minutes=30)
        producer.send("later", b"4", delay=3 * HOUR)
        producer.send("later", b"2", deliver_at=soon)
        producer.send("later", b"3", deliver_at=soon)
        producer.send("later", b"1", delay_level=3)
        producer.send_async("later", b"5", delay=4 * HOUR).result()
        producer.send_oneway("later", b"6", delay=timedelta(days=300))
        wait_until(lambda: memory.delayed == 6, DEADLINE_S, "all wait")
        memory.advance(1800)
        assert [message.body for message in memory.messages("later")] == [b"1", b"2", b"3"]
        memory.advance(3 * 3600)
        memory.advance(300 * 86400)
        assert [message.body for message in memory.messages("later")] == [b"1", b"2", b"3", b"4", b"5", b"6"]
        assert memory.now > soon


def test_what_waits_can_be_cancelled_by_an_administrator(process: BrokerProcess) -> None:
    """E-12: whoever has sent it; not the runs of a recurring message."""
    with connect(process.registry) as client:
        for topic in ("kept", "swept"):
            client.producer().send(topic, topic.encode(), delay=HOUR)
        timers, (master,) = client.admin().timers(), client.admin().masters()
        (swept,) = (timer for timer in timers.pending(master.address) if timer.topic == "swept")
        timers.cancel(master.name, swept)
        timers.cancel(master.name, swept)
        left = [timer.topic for timer in timers.pending(master.address)]
        assert "kept" in left and "swept" not in left
        with pytest.raises(BadRequest, match="no handle"):
            timers.cancel(master.name, swept._replace(handle=None))


def test_a_cancel_that_comes_too_late(memory: InMemoryBroker) -> None:
    """E-12: is told from one of an unknown message."""
    with connect(memory.address) as client:
        handle = client.producer().send("late", b"x", delay=HOUR).handle
        cancelled = client.producer().send("late", b"cancelled", delay=HOUR).handle
        assert handle is not None
        assert cancelled is not None
        client.cancel(cancelled)
        assert memory.delayed == 1
        memory.advance(3600)
        with pytest.raises(TooLate, match="delivered") as late:
            client.cancel(handle)
        assert isinstance(late.value, Refused)
        client.cancel(cancelled)
        assert [message.body for message in memory.messages("late")] == [b"x"]


def test_a_broker_delivers_at_the_time_and_cancels_no_more(process: BrokerProcess) -> None:
    """ES-005, E-12: against a real clock."""
    with connect(process.registry, timeout_s=DEADLINE_S) as client:
        began = time.time()
        handle = client.producer().send("clock", b"x", delay=timedelta(milliseconds=300)).handle
        assert handle is not None
        assert bodies(client, "clock", 1) == [b"x"]
        assert time.time() - began >= 0.3
        with pytest.raises(TooLate):
            client.cancel(handle)


def test_handles_stay_good_when_a_broker_is_killed(tmp_path: Path) -> None:
    """E-12: those of both protocols; what was cancelled stays cancelled."""
    with BrokerProcess(tmp_path / "data") as broker:
        with connect(broker.registry, timeout_s=DEADLINE_S) as client, TextClient(broker.host, broker.port) as text:
            before, after = (client.producer().send("kept", b"x", delay=HOUR).handle for _ in range(2))
            put = text.put("kept", b"x", delay=HOUR)
            assert before and after and put.handle
            client.cancel(before)
        broker.kill()
        broker.start()
        with connect(broker.registry, timeout_s=DEADLINE_S) as client, TextClient(broker.host, broker.port) as text:
            for handle in (before, after):
                client.cancel(handle)
            text.cancel(put.handle)
    shutil.rmtree(broker.data)


def test_a_cancel_is_tried_again_while_the_broker_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-12: within its time limit, and not after an answer that will not change."""
    monkeypatch.setattr(cancelling, "PAUSE_S", 0.01)
    handle = encode_recall(RecallHandle("orders", "a", 1769857200000, "7F00", "1769857200000-0-0123456789abcdef"))
    not_ready = Reply(Response.SERVICE_NOT_AVAILABLE, remark="still being read")
    replies = [not_ready, Reply(Response.SYSTEM_BUSY, remark="retry after 1 ms"), Reply(fields={"msgId": "7F00"})]
    with FakeRemoting(recall_message=lambda request: replies.pop(0)) as broker, ExitStack() as stack:
        registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=route_to({"a": broker.address})))
        client = stack.enter_context(connect(registry.address, timeout_s=DEADLINE_S))
        client.cancel(handle)
        assert replies == []
        replies += [Reply(Response.ILLEGAL_OPERATION, {TIMER_STATE: DELIVERED}, remark="delivered")]
        with pytest.raises(TooLate, match="the broker refused: delivered"):
            client.cancel(handle)
        monkeypatch.setattr(cancelling, "PAUSE_S", 1.0)  # what the last try has for its answer
        replies += [not_ready] * 10
        with pytest.raises(Refused, match="still being read"):
            client.cancel(handle, timeout_s=3.5)
        assert len(replies) in (7, 8)
        broker.scripts.clear()  # as one that knows no cancels
        with pytest.raises(Refused, match="no script"):
            client.cancel(handle)


# -- asyncio, and the text protocol -----------------------------------------------------------------------------------


def test_asyncio(address: str) -> None:
    """P44: the same names."""

    async def work() -> None:
        async with metaq.aio.connect(address, timeout_s=DEADLINE_S) as client:
            sent = await client.producer().send("loops", b"x", delay=HOUR)
            assert sent.handle is not None
            await client.cancel(sent.handle)
            with pytest.raises(BadRequest):
                await client.cancel("nonsense")

    asyncio.run(work())


def test_text(process: BrokerProcess, text: TextClient) -> None:
    """E-12: a put has a short handle, which a person can type."""
    parked = text.put("typed", b"x", delay=HOUR)
    assert parked.handle is not None
    assert (parked.partition, parked.position) == (0, -1)
    text.cancel(parked.handle)
    text.cancel(parked.handle)
    at_once = text.put("typed", b"y", deliver_at=datetime.now(UTC) - HOUR, attribute="A")
    assert (at_once.position, at_once.handle) == (0, None)
    soon = text.put("typed", b"z", deliver_at=datetime.now(UTC) + timedelta(milliseconds=200), attribute="B")
    assert soon.handle is not None
    wait_until(lambda: len(text.get("typed").messages) == 2, DEADLINE_S, "it comes at its time")
    assert [(one.attribute, one.body) for one in text.iterate("typed")] == [("A", b"y"), ("B", b"z")]
    with pytest.raises(TooLate) as late:
        text.cancel(soon.handle)
    assert late.value.code == 409
    with pytest.raises(UnknownHandle):
        text.cancel(f"{soon.handle[:-1]}{'0' if soon.handle[-1] != '0' else '1'}")
    for unreadable in ("nonsense", "a b", ""):
        with pytest.raises((BadRequest, Refused)):
            text.cancel(unreadable)
    with pytest.raises(BadRequest, match="contradict"):
        text.put("typed", b"x", delay=HOUR, deliver_at=datetime.now(UTC))
    with connect(process.registry, timeout_s=DEADLINE_S) as client, pytest.raises(BadRequest):
        client.cancel(parked.handle)
