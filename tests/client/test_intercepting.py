"""The seam for tracing: what an interceptor is told, in which order, and what it can add."""

import asyncio
import contextvars
import functools
import random
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import pytest

import metaq
from metaq.testing import InMemoryBroker
from tests.support.broker import wait_until

WAIT_S = 60.0
LARGE = random.randbytes(4 * 1024 * 1024 + 1)
"""More than a message may have, also compressed."""


class Recorder(metaq.Interceptor):
    """Writes down what it is told, and adds a property to each message that is sent."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.threads: dict[tuple[Any, ...], int] = {}

    def _begin(self, *what: Any) -> Any:
        self.told.append(what)
        thread = threading.get_ident()

        def end(outcome: object) -> None:
            failed = type(outcome).__name__ if isinstance(outcome, BaseException) else ""
            self.threads[what] = threading.get_ident() - thread
            self.told.append(("end", *what, failed, outcome))

        return end

    def sending(self, client: str, group: str, topic: str, messages: Sequence[MutableMapping[str, str]]) -> Any:
        for number, properties in enumerate(messages):
            properties["mark"] = str(number)
        return self._begin("send", group, topic, len(messages))

    def written(self, sent: Any, queue: metaq.MessageQueue) -> None:
        self.told.append(("written", self.told[-1], queue))

    def received(self, client: str, group: str, messages: Sequence[metaq.ReceivedMessage]) -> None:
        self.told.append(("receive", group, tuple(message.body for message in messages)))

    def processing(self, client: str, group: str, messages: Sequence[metaq.ReceivedMessage]) -> Any:
        variable.set("processed")
        return self._begin("process", group, tuple(message.body for message in messages))

    def settling(self, client: str, group: str, action: str, message: Any) -> Any:
        return self._begin(action, group, message.topic, message.properties.get("mark"))

    def ended(self, *what: Any) -> list[Any]:
        """Return the outcomes of what is told by these words."""
        return [told[-1] for told in self.told if told[0] == "end" and told[1 : 1 + len(what)] == what]

    def failures(self, *what: Any) -> list[str]:
        return [told[-2] for told in self.told if told[0] == "end" and told[1 : 1 + len(what)] == what]


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    metaq.intercept(recorder)
    yield recorder
    metaq.intercept(None)


@pytest.fixture
def client(memory: InMemoryBroker) -> Iterator[metaq.Client]:
    with metaq.connect(memory.address) as client:
        yield client


def marks(client: metaq.Client, topic: str, count: int) -> list[str | None]:
    """Return the property that the recorder adds, of so many messages of a topic."""
    with client.consumer(topic, f"{topic}-readers", consume_from=metaq.ConsumeFrom.FIRST) as consumer:
        found = [consumer.receive(WAIT_S) for _ in range(count)]
    return [message.properties.get("mark") for message in found if message is not None]


def test_each_way_to_send(recorder: Recorder, client: metaq.Client) -> None:
    """Each message gets what is added, and each send its end: with results, without, or with the error."""
    with client.producer("senders") as producer, client.producer("gatherers", linger_ms=1) as gatherer:
        sent = [producer.send("letters", b"1"), producer.send_async("letters", b"2").result(WAIT_S)]
        sent.append(gatherer.send_async("letters", b"3").result(WAIT_S))
        producer.send_oneway("letters", b"4")
        batch = producer.send_batch("letters", [b"5", metaq.OutgoingMessage(b"6", properties={"own": "1"})])
        assert producer.send_batch("letters", []) == []
        with pytest.raises(metaq.BadRequest, match="over the limit"):
            producer.send("letters", LARGE)
        with pytest.raises(metaq.BadRequest, match=r"messages\[1\]"):
            producer.send_batch("letters", [b"7", "no bytes"])  # type: ignore[list-item]
    assert recorder.ended("send", "senders", "letters", 1)[:3] == [[sent[0]], [sent[1]], []]
    assert recorder.ended("send", "gatherers", "letters", 1) == [(sent[2],)]
    assert recorder.ended("send", "senders", "letters", 2) == [batch]
    assert recorder.failures("send") == ["", "", "", "", "", "BadRequest", "BadRequest"]
    assert sorted(map(str, marks(client, "letters", 6))) == ["0", "0", "0", "0", "0", "1"]


def test_while_an_answer_is_awaited(recorder: Recorder, client: metaq.Client) -> None:
    """Who waits is told of the queue before the end; who does not wait is not told."""
    with client.producer("senders") as producer:
        alone, batch = producer.send("letters", b"1"), producer.send_batch("letters", [b"2", b"3"])
        producer.send_async("letters", b"4").result(WAIT_S)
        producer.send_oneway("letters", b"5")
    written = [told for told in recorder.told if told[0] == "written"]
    begun = [("send", "senders", "letters", 1), ("send", "senders", "letters", 2)]
    assert written == [("written", begun[0], alone.queue), ("written", begun[1], batch[0].queue)]
    assert [told[0] for told in recorder.told][:6] == ["send", "written", "end"] * 2


def test_a_listener(recorder: Recorder, client: metaq.Client) -> None:
    """Told before and after, on one thread; a message that fails is told to go back."""
    seen: list[str] = []

    def listener(message: metaq.ReceivedMessage) -> None:
        seen.append(variable.get())
        if message.body == b"bad":
            raise ValueError("bad")

    with client.listen("letters", "listeners", listener, consume_from=metaq.ConsumeFrom.FIRST):
        for body in (b"good", b"bad"):
            client.producer().send("letters", body)
        wait_until(lambda: bool(recorder.ended("retry", "listeners")), WAIT_S, "the bad one went back")
        wait_until(lambda: len(recorder.ended("process")) == 2, WAIT_S, "both were processed")
    assert recorder.failures("process", "listeners", (b"good",)) == [""]
    assert recorder.failures("process", "listeners", (b"bad",)) == ["ValueError"]
    assert recorder.failures("retry", "listeners", "letters", "0") == [""]
    assert recorder.threads[("process", "listeners", (b"bad",))] == 0
    assert seen == ["processed"] * 2


def is_done(recorder: Recorder, action: str) -> bool:
    return recorder.failures(action) == [""]


def test_leased_messages(recorder: Recorder, client: metaq.Client) -> None:
    """Those that are received, and those that a handler gets; and what becomes of each."""
    producer = client.producer()
    with client.lease_consumer("letters", "lessees", from_first=True) as consumer:
        for action in ("ack", "nack", "reject"):
            producer.send("letters", action.encode())
            message = consumer.receive(WAIT_S)
            assert message is not None
            getattr(message, action)()
            wait_until(functools.partial(is_done, recorder, action), WAIT_S, action)

        def handler(message: metaq.LeasedMessage) -> None:
            threading.Thread(target=consumer.close).start()
            raise LookupError

        producer.send("letters", b"handled")
        consumer.run(handler, concurrency=1)
    assert [told[2] for told in recorder.told if told[0] == "receive"] == [(b"ack",), (b"nack",), (b"reject",)]
    assert recorder.failures("process", "lessees", (b"handled",)) == ["LookupError"]
    wait_until(lambda: recorder.failures("nack") == ["", ""], WAIT_S, "the handled one is given back")


def test_a_transaction(recorder: Recorder, client: metaq.Client) -> None:
    """The send is that of the half message; the outcome settles it."""

    def execute(message: metaq.HalfMessage, outcome: Any) -> metaq.Outcome:
        assert message.properties["mark"] == "0"
        assert recorder.failures("send") == [""]
        chosen: metaq.Outcome = outcome
        return chosen

    def check(message: metaq.HalfMessage) -> metaq.Outcome:
        return metaq.Outcome.COMMIT

    with client.transaction_producer("tellers", execute, check=check) as producer:
        producer.send("letters", b"body", argument=metaq.Outcome.COMMIT)
        with pytest.raises(metaq.BadRequest, match="over the limit"):
            producer.send("letters", LARGE)
    assert recorder.failures("commit", "tellers", "letters", "0") == [""]
    assert recorder.failures("send") == ["", "BadRequest"]


def test_a_check(recorder: Recorder, memory: InMemoryBroker, client: metaq.Client) -> None:
    """The outcome that a check finds settles the message, too."""
    with client.transaction_producer(
        "askers", lambda message, argument: metaq.Outcome.UNKNOWN, check=lambda message: metaq.Outcome.ROLLBACK
    ) as producer:
        producer.send("letters", b"body")
        memory.advance(60)
        memory.check_transactions()
        wait_until(lambda: recorder.failures("rollback", "askers", "letters", "0") == [""], WAIT_S, "it is rolled back")
    assert recorder.failures("unknown", "askers", "letters", "0") == [""]


def test_what_a_program_receives(recorder: Recorder, client: metaq.Client) -> None:
    """By receive, by iteration, and by poll; each message once, when it is handed over."""
    client.admin().create_topic("letters", 1)
    for body in (b"1", b"2", b"3"):
        client.producer().send("letters", body)
    with client.consumer("letters", "simple", consume_from=metaq.ConsumeFrom.FIRST) as consumer:
        assert consumer.receive(WAIT_S) is not None
        assert [told[2] for told in recorder.told if told[0] == "receive"] == [(b"1",)]
        for message in consumer:
            if message.body == b"3":
                break
    with client.pull_consumer("letters") as puller:
        puller.assign(puller.partitions())
        puller.seek_to_begin()
        wait_until(lambda: bool(puller.poll(1.0)), WAIT_S, "the pull consumer has them")
    assert [told[2] for told in recorder.told if told[0] == "receive"] == [(b"1",), (b"2",), (b"3",), (b"1", b"2", b"3")]


def test_asyncio(recorder: Recorder, memory: InMemoryBroker) -> None:
    """The same is told of tasks, in their own context."""
    contexts: list[str] = []

    async def listener(message: metaq.ReceivedMessage) -> None:
        contexts.append(variable.get())

    async def handler(message: metaq.aio.LeasedMessage) -> None:
        contexts.append(variable.get())
        await consumers[0].close()

    consumers: list[metaq.aio.LeaseConsumer] = []

    async def work() -> None:
        async with metaq.aio.connect(memory.address) as client:
            await client.producer("async").send("letters", b"1")
            first = metaq.ConsumeFrom.FIRST
            async with await client.consumer("letters", "simple", consume_from=first) as consumer:
                assert await consumer.receive(WAIT_S) is not None
            async with await client.listen("letters", "listeners", listener, consume_from=first):
                while not recorder.ended("process", "listeners"):
                    await asyncio.sleep(0.01)
            consumers.append(await client.lease_consumer("letters", "lessees", from_first=True))
            message = await consumers[0].receive(WAIT_S)
            assert message is not None
            await message.nack(timedelta())
            await consumers[0].run(handler, concurrency=1)

    asyncio.run(asyncio.wait_for(work(), 2 * WAIT_S))
    assert [told[1:] for told in recorder.told if told[0] == "receive"] == [("simple", (b"1",)), ("lessees", (b"1",))]
    assert recorder.failures("process", "listeners") == recorder.failures("process", "lessees") == [""]
    assert recorder.failures("send", "async") == [""]
    assert contexts == ["processed", "processed"]
    assert recorder.failures("nack") == [""]


def test_calls_of_asyncio_have_the_context_of_their_task(recorder: Recorder, memory: InMemoryBroker) -> None:
    """A send that runs on a thread sees the variables of its task."""
    seen: list[str] = []

    class Seeing(metaq.Interceptor):
        def sending(self, client: str, group: str, topic: str, messages: Sequence[MutableMapping[str, str]]) -> Any:
            seen.append(variable.get())
            return super().sending(client, group, topic, messages)

    async def work(name: str) -> None:
        variable.set(name)
        async with metaq.aio.connect(memory.address) as client:
            await client.producer().send("letters", b"1")
            await client.producer().send_batch("letters", [b"2"])

    metaq.intercept(None)
    metaq.intercept(Seeing())
    try:
        asyncio.run(work("a task"))
    finally:
        metaq.intercept(None)
    assert seen == ["a task", "a task"]


def test_one_interceptor(recorder: Recorder, client: metaq.Client) -> None:
    """A second one is refused, and so is what is none; without one nothing is told."""
    with pytest.raises(metaq.BadRequest, match="Recorder"):
        metaq.intercept(metaq.Interceptor())
    with pytest.raises(metaq.BadRequest, match=r"subclass of metaq\.Interceptor"):
        metaq.intercept(print)  # type: ignore[arg-type]
    metaq.intercept(recorder)
    metaq.intercept(None)
    client.producer().send("letters", b"1")
    assert recorder.told == []
