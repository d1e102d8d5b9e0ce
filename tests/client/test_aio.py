"""The client for asyncio."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

import metaq.aio
from metaq.client import ConsumeFrom, ReceivedMessage
from metaq.errors import BadRequest

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
                assert [message.body for message in await reader.poll()] == [b"second"]

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
