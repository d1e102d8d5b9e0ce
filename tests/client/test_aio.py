"""The client for asyncio."""

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import metaq.aio
from metaq.aio.faces import Threads, iterated
from metaq.client import ConsumeFrom, ReceivedMessage
from metaq.client.connecting.core import Core
from metaq.client.consuming import push
from metaq.errors import BadRequest, ClientClosed
from metaq.testing import InMemoryBroker
from tests.support.broker import BrokerProcess

DEADLINE_S = 60.0
FIRST = ConsumeFrom.FIRST


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    asyncio.run(limited())


def test_messages_are_sent_and_iterated_over(address: str) -> None:
    """P44, P20: the same names, to be awaited; commits count."""

    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            producer = client.producer()
            await producer.send("orders", b"")
            results = await asyncio.gather(*(producer.send("orders", str(number).encode()) for number in range(50)))
            results += await producer.send_batch("orders", [b"a", b"b"])
            assert len({(result.queue, result.queue_offset) for result in results}) == 52
            seen: list[str] = []
            async with await client.consumer("orders", "billing", consume_from=FIRST) as consumer:
                async for message in consumer:
                    seen.append(message.id)
                    if len(seen) == 53:
                        await consumer.commit()
                        break
            assert {result.id for result in results} < set(seen)
            async with await client.consumer("orders", "billing", consume_from=FIRST) as consumer:
                assert await consumer.receive(timeout_s=0.3) is None
                late = await producer.send("orders", b"late")
                message = await anext(aiter(consumer))
                assert message.id == late.id

    run(work())


def test_a_listener_is_a_coroutine_on_the_loop(address: str) -> None:
    """SG-119: several at a time; one that raises gets its message later."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        together = asyncio.Barrier(4)
        seen: list[bytes] = []

        async def listener(message: ReceivedMessage) -> None:
            assert asyncio.get_running_loop() is loop
            await together.wait()
            seen.append(message.body)

        async with metaq.aio.connect(address) as client:
            await client.producer().send_batch("orders", [b"1", b"2", b"3", b"4"])
            async with await client.listen("orders", "billing", listener, threads=4, consume_from=FIRST):
                while len(seen) < 4:
                    await asyncio.sleep(0.01)
        assert sorted(seen) == [b"1", b"2", b"3", b"4"]

    run(work())


@pytest.mark.parametrize("closed", ["consumer", "client"])
def test_a_listener_may_close_its_consumer_or_its_client(address: str, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-119: as one of the blocking client may, also in a task that it makes itself; only other listeners are waited for."""
    monkeypatch.setattr(push, "_DRAIN_S", 2 * DEADLINE_S)

    async def work() -> None:
        is_closed = asyncio.Event()
        async with metaq.aio.connect(address) as client:
            made: asyncio.Future[metaq.aio.PushConsumer] = asyncio.get_running_loop().create_future()

            async def listener(message: ReceivedMessage) -> None:
                consumer = await made
                await asyncio.gather(consumer.close() if closed == "consumer" else client.close())
                is_closed.set()

            await client.producer().send("orders", b"x")
            made.set_result(await client.listen("orders", "billing", listener, consume_from=FIRST))
            await is_closed.wait()

    run(work())


def test_a_task_that_closes_the_consumer_waits_for_listeners_that_began_after_the_one_that_made_it(address: str) -> None:
    """SG-119: also when that one has returned, and its thread calls the listener for another message."""

    async def work() -> None:
        second_runs, second_goes_on = asyncio.Event(), asyncio.Event()
        ended: list[bytes] = []
        async with metaq.aio.connect(address) as client:
            made: asyncio.Future[metaq.aio.PushConsumer] = asyncio.get_running_loop().create_future()
            closing: asyncio.Future[asyncio.Task[list[bytes]]] = asyncio.get_running_loop().create_future()

            async def close(consumer: metaq.aio.PushConsumer) -> list[bytes]:
                await second_runs.wait()
                await consumer.close()
                return list(ended)

            async def listener(message: ReceivedMessage) -> None:
                if not closing.done():
                    closing.set_result(asyncio.create_task(close(await made)))
                    return
                second_runs.set()
                await second_goes_on.wait()
                ended.append(message.body)

            await client.producer().send_batch("orders", [b"1", b"2"])
            made.set_result(await client.listen("orders", "billing", listener, threads=1, consume_from=FIRST))
            task = await closing
            await second_runs.wait()
            await asyncio.wait({task}, timeout=0.5)  # time for it to end too early
            second_goes_on.set()
            assert len(await task) == 1

    run(work())


def test_waiting_can_be_cancelled_without_loss(address: str) -> None:
    """P44: whoever asks next gets the message; the loop is never held up."""

    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            await client.producer().send("orders", b"first")
            async with (
                await client.consumer("orders", "billing", consume_from=FIRST) as consumer,
                client.pull_consumer("orders") as reader,
            ):
                await reader.assign(await reader.partitions())
                await reader.seek_to_end()
                assert await consumer.receive() is not None
                for wait in (consumer.receive(), reader.poll(timeout_s=DEADLINE_S)):
                    waiting = asyncio.ensure_future(wait)
                    await asyncio.sleep(0.05)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                await client.producer().send("orders", b"second")
                message = await consumer.receive()
                assert message is not None
                assert message.body == b"second"
                assert [message.body for message in await reader.poll(timeout_s=DEADLINE_S)] == [b"second"]

    run(work())


class OneThread:
    """Stands before a consumer and fails when two threads are in it at once."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self._inside = threading.Lock()

    def watch(self, *names: str) -> None:
        """These methods of the consumer are looked at from now on; each takes a little longer."""
        for name in names:
            setattr(self._inner, name, functools.partial(self._call, getattr(self._inner, name)))

    def _call(self, method: Callable[..., object], *arguments: object, **named: object) -> object:
        assert self._inside.acquire(blocking=False), "two threads use the consumer"
        try:
            time.sleep(0.001)
            return method(*arguments, **named)
        finally:
            self._inside.release()


@pytest.mark.parametrize("seed", range(5))
def test_cancelling_loses_nothing_and_brings_nothing_stale(memory: InMemoryBroker, seed: int) -> None:
    """P44: whatever is cancelled, the next message is the one at the position, and one thread at a time uses the consumer."""
    rng = Random(seed)
    count = 200

    async def work() -> None:
        async with metaq.aio.connect(memory.address) as client, client.pull_consumer("orders", "readers") as reader:
            producer = client.producer()
            for number in range(count // 2):
                await producer.send("orders", b"%d" % number, ordering_key="one")
            (queue,) = [queue for queue in await reader.partitions() if await reader.end_offset(queue)]
            await reader.assign([queue])
            OneThread(reader._blocking).watch("fetch", "take", "seek", "commit", "position", "assign")
            expected = committed = 0
            for number in range(count // 2, count):
                await producer.send("orders", b"%d" % number, ordering_key="one")
                what = rng.choice(["poll", "poll", "cancelled", "cancelled", "seek", "cancelled commit", "commit"])
                if what == "seek":
                    expected = rng.randrange(number)
                    await reader.seek(queue, expected)
                elif what.endswith("commit"):
                    committing = asyncio.ensure_future(reader.commit())
                    if what == "commit":
                        await committing
                    else:
                        await cancel(committing, rng)
                else:
                    polling = asyncio.ensure_future(reader.poll(rng.choice([0.0, 0.05]), rng.choice([1, 3, 1000])))
                    messages = await polling if what == "poll" else await cancel(polling, rng)
                    assert [message.queue_offset for message in messages] == list(range(expected, expected + len(messages)))
                    expected += len(messages)
                assert await reader.position(queue) == expected
                committed = await reader.committed(queue) or 0
                assert committed <= number + 1
            await reader.commit()
            assert await reader.committed(queue) == max(committed, expected)

    async def cancel(task: asyncio.Task[Any], rng: Random) -> list[ReceivedMessage]:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
        task.cancel()
        try:
            found: list[ReceivedMessage] | None = await task
        except asyncio.CancelledError:
            return []
        return found or []

    run(work())


def test_a_commit_that_is_cancelled_counts_nothing_that_came_after_it(memory: InMemoryBroker) -> None:
    """P44: the next message waits until the commit has ended."""

    async def work() -> None:
        async with metaq.aio.connect(memory.address) as client:
            for body in (b"first", b"second"):
                await client.producer().send("orders", body, ordering_key="one")
            async with await client.consumer("orders", "billing", consume_from=FIRST) as consumer:
                first = await consumer.receive(timeout_s=DEADLINE_S)
                assert first is not None
                blocking, began, go_on = consumer._blocking, threading.Event(), threading.Event()
                really = blocking.commit

                def slow_commit(self: object) -> None:
                    began.set()
                    go_on.wait(DEADLINE_S)
                    really()

                committing = asyncio.ensure_future(consumer._calls.call(functools.partial(slow_commit, blocking)))
                await asyncio.to_thread(began.wait, DEADLINE_S)
                committing.cancel()
                receiving = asyncio.ensure_future(consumer.receive(timeout_s=DEADLINE_S))
                await asyncio.sleep(0.05)
                assert not receiving.done()
                go_on.set()
                second = await receiving
                assert second is not None
                assert memory.committed("billing", "orders") == {first.partition: 1}

    run(work())


@pytest.mark.parametrize("kind", ["consumer", "lease_consumer", "listen"])
def test_a_consumer_whose_making_is_cancelled_is_closed(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SG-120: nobody else could; the client can make another one of the group."""
    memory.create_topic("orders", 1)
    begun, go = threading.Event(), threading.Event()
    usual = Core.heartbeat

    def heartbeat(core: Core, *, wait_s: float = 0.0) -> None:
        if wait_s and not begun.is_set():
            begun.set()
            assert go.wait(DEADLINE_S)
        usual(core, wait_s=wait_s)

    async def listener(message: ReceivedMessage) -> None:
        raise AssertionError(message)

    async def work() -> None:
        async with metaq.aio.connect(memory.address) as client:
            making = asyncio.create_task(
                client.listen("orders", "billing", listener) if kind == "listen" else getattr(client, kind)("orders", "billing")
            )
            while not begun.is_set():
                await asyncio.sleep(0.01)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
            go.set()
            while client._blocking._core._consumers:
                await asyncio.sleep(0.01)
            await client.consumer("orders", "billing")

    monkeypatch.setattr(Core, "heartbeat", heartbeat)
    run(work())


def test_requests_that_wait_keep_nothing_else_waiting(memory: InMemoryBroker) -> None:
    """SG-126: their replies may be made by the same client."""
    memory.create_topic("sums", 1)

    async def work() -> None:
        async with metaq.aio.connect(memory.address, timeout_s=DEADLINE_S) as client:
            producer = client.producer()

            async def add(message: ReceivedMessage) -> None:
                await producer.reply(message, message.body + b"!")

            async with await client.listen("sums", "adders", add):
                replies = await asyncio.gather(*(producer.request("sums", b"%d" % number) for number in range(32)))
            assert [reply.body for reply in replies] == [b"%d!" % number for number in range(32)]

    run(work())


def test_an_iterator_that_is_cancelled_while_it_waits_is_closed() -> None:
    """P44: the cancellation is what the program sees, and the blocking iterator ends after the item that it waited for."""
    waits, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Reports:
        def pages(self) -> Iterator[int]:
            try:
                yield 1
                waits.set()
                assert go.wait(DEADLINE_S)
                yield 2
            finally:
                closed.set()

    face = SimpleNamespace(_blocking=Reports(), _threads=Threads())

    async def read() -> None:
        async for page in iterated(Reports.pages)(face):
            raise AssertionError(page)

    async def work() -> None:
        reading = asyncio.ensure_future(read())
        assert await asyncio.to_thread(waits.wait, DEADLINE_S)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not closed.is_set()
        go.set()
        assert await asyncio.to_thread(closed.wait, DEADLINE_S)

    run(work())
    face._threads.close()


def test_an_iterator_that_fails_yields_what_it_had_before() -> None:
    """P44: as the blocking one does, however many items are fetched at once."""

    class Reports:
        def pages(self) -> Iterator[int]:
            yield from range(100)
            raise BadRequest("page 100 cannot be read")

    face, pages = SimpleNamespace(_blocking=Reports(), _threads=Threads()), list[int]()

    async def work() -> None:
        with pytest.raises(BadRequest, match="page 100"):
            async for page in iterated(Reports.pages)(face):
                pages.append(page)

    run(work())
    assert pages == [*range(100)]
    face._threads.close()


def test_a_client_that_was_closed_says_so_and_can_be_closed_again(address: str) -> None:
    """P44: as the blocking client does; what is still open around it is closed by then."""

    async def ignore(message: metaq.aio.LeasedMessage) -> None:
        pass

    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            await client.producer().send("orders", b"x")
            async with (
                client.producer() as producer,
                await client.consumer("orders", "billing") as consumer,
                await client.lease_consumer("orders", "packing") as leases,
                client.pull_consumer("orders") as reader,
                client.xa_session() as session,
            ):
                admin = client.admin()
                running = asyncio.ensure_future(leases.run(ignore))
                await asyncio.sleep(0)
                await client.close()
                await running
                calls: list[Callable[[], Awaitable[object]]] = [
                    lambda: producer.send("orders", b"y"),
                    lambda: producer.request("orders", b"y"),
                    consumer.commit,
                    reader.partitions,
                    lambda: session.tpc_begin(session.xid(1, "g", "b")),
                    lambda: client.consumer("orders", "billing"),
                    admin.topics,
                ]
                for call in calls:
                    with pytest.raises(ClientClosed, match="was closed"):
                        await call()

    run(work())


def test_iteration_ends_when_the_consumer_is_closed(address: str) -> None:
    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            await client.producer().send("orders", b"first")
            consumer = await client.consumer("orders", "billing", consume_from=FIRST)
            first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

            async def iterate() -> None:
                async for message in consumer:
                    first.set_result(message.body)

            iterating = asyncio.ensure_future(iterate())
            assert await first == b"first"
            await consumer.close()
            await iterating

    run(work())


def test_errors_and_administration(address: str) -> None:
    """P14: the errors are those of the blocking client."""

    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            with pytest.raises(BadRequest, match="topic ''"):
                await client.producer().send("", b"")
            admin = client.admin()
            await admin.create_topic("returns", 2)
            assert "returns" in await admin.topics()
            assert await admin.dead_letters("billing") == []

    run(work())


def test_iterators_and_branches(process: BrokerProcess) -> None:
    """P44: iterators are left early, too; the steps of a branch wait for each other."""

    async def work() -> None:
        began = datetime.now(UTC) - timedelta(minutes=1)
        async with metaq.aio.connect(process.registry) as client:
            session = client.xa_session("orders", qualifier="aio")
            async with session:
                await session.tpc_begin(session.xid(1, "order", "messages"))
                await asyncio.gather(*(session.send("orders", b"%d" % number) for number in range(200)))
                await session.tpc_prepare()
                assert await session.tpc_recover() == [session.branch]
                await session.tpc_commit()
            admin = client.admin()
            assert len([message async for message in admin.query_by_time("orders", began)]) == 200
            first = await anext(admin.query_by_time("orders", began))
            (broker,) = await admin.brokers()
            assert [page.next async for page in admin.offset_export().pages(broker.address)] == [None]
            assert [branch async for branch in admin.transactions().branches(broker.address)] == []
            async with client.pull_consumer("orders") as reader:
                await reader.read_from(first.queue, first.queue_offset)
                assert (await reader.poll(DEADLINE_S, 1))[0].id == first.id

    run(work())
