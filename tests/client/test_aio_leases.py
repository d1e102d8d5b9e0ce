"""Leased messages for asyncio: against the broker for tests and a real one."""

import asyncio

import pytest

import metaq
import metaq.aio
from metaq.client.leasing import holder
from metaq.errors import LeaseLost
from tests.client.test_leases import DEADLINE_S, GROUP, SOON_S, brokers, process, topic

__all__ = ["brokers", "process", "topic"]  # fixtures


def test_the_same_for_asyncio(address: str, topic: str) -> None:
    """P44: iteration, and all that can be done with a message."""

    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            await client.producer().send_batch(topic, [b"%d" % number for number in range(20)])
            async with await client.lease_consumer(topic, GROUP) as consumer:
                seen = []
                async for message in consumer:
                    seen.append(message.body)
                    await message.ack()
                    if len(seen) == 20:
                        break
                assert sorted(seen, key=int) == [b"%d" % number for number in range(20)]
                assert await consumer.receive(timeout_s=SOON_S) is None
                await client.producer().send(topic, b"again")
                first = await consumer.receive(timeout_s=DEADLINE_S)
                assert first is not None
                await first.extend(30)
                await first.nack(0)
                second = await consumer.receive(timeout_s=DEADLINE_S)
                assert second is not None
                assert (second.body, second.attempt) == (b"again", 2)
                with pytest.raises(LeaseLost, match="given again"):
                    await first.ack()
                await second.reject()
            assert [dead.body for dead in await client.admin().dead_letters(GROUP)][-1:] == [b"again"]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_a_coroutine_is_called_for_each_message(address: str, topic: str) -> None:
    """P44: several tasks at a time, on the loop; the consumer is closed by one of them."""

    async def work() -> None:
        together = asyncio.Barrier(4)
        seen: list[bytes] = []
        async with metaq.aio.connect(address) as client:
            await client.producer().send_batch(topic, [b"%d" % number for number in range(20)])
            consumer = await client.lease_consumer(topic, GROUP)

            async def handle(message: metaq.aio.LeasedMessage) -> None:
                await together.wait()
                seen.append(message.body)
                if len(seen) == 20:
                    await consumer.close()

            await consumer.run(handle, concurrency=4)
            assert len(set(seen)) == 20
            async with await client.lease_consumer(topic, GROUP) as after:
                assert await after.receive(timeout_s=SOON_S) is None

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.mark.parametrize("closed", ["consumer", "client"])
def test_a_handler_may_close_its_consumer_or_its_client(
    address: str, topic: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P44: also in a task that it makes itself; only other handlers are waited for."""
    monkeypatch.setattr(holder, "DRAIN_S", 2 * DEADLINE_S)

    async def work() -> None:
        both_run, ended = asyncio.Barrier(2), list[bytes]()
        async with metaq.aio.connect(address) as client:
            await client.producer().send_batch(topic, [b"closes", b"ends"])
            consumer = await client.lease_consumer(topic, GROUP)

            async def handle(message: metaq.aio.LeasedMessage) -> None:
                await both_run.wait()
                if message.body == b"closes":
                    await asyncio.gather(consumer.close() if closed == "consumer" else client.close())
                ended.append(message.body)

            await consumer.run(handle, concurrency=2)
            assert ended == [b"ends", b"closes"]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_a_cancelled_handler_gives_its_message_back(address: str, topic: str) -> None:
    """P44: at once, so that another consumer need not wait for the end of its lease."""

    async def work() -> None:
        begun = asyncio.Event()

        async def handle(message: metaq.aio.LeasedMessage) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with metaq.aio.connect(address) as client:
            await client.producer().send(topic, b"a")
            async with await client.lease_consumer(topic, GROUP) as consumer:
                running = asyncio.ensure_future(consumer.run(handle))
                await begun.wait()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            async with await client.lease_consumer(topic, GROUP) as after:
                again = await after.receive(timeout_s=DEADLINE_S)
                assert again is not None
                assert again.attempt >= 2  # the consumer may have got it again before it was closed

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_a_handler_that_awaits_what_others_have_cancelled_fails_like_any_other(address: str, topic: str) -> None:
    """P44: its task goes on, with the same message once more and with the others."""

    async def work() -> None:
        loaded: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
        loaded[0].cancel()
        loaded[1].set_result(None)
        seen: list[tuple[bytes, int]] = []
        async with metaq.aio.connect(address) as client:
            await client.producer().send(topic, b"a")
            consumer = await client.lease_consumer(topic, GROUP)

            async def handle(message: metaq.aio.LeasedMessage) -> None:
                seen.append((message.body, message.attempt))
                await loaded[min(message.attempt, 2) - 1]
                await consumer.close()

            await consumer.run(handle, concurrency=1, retry=metaq.Retry(1, metaq.Backoff(first=0.0)))
        assert seen == [(b"a", 1), (b"a", 2)]

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_waiting_for_a_lease_can_be_cancelled_without_loss(address: str, topic: str) -> None:
    """P44: whoever asks next gets the message."""

    async def work() -> None:
        async with metaq.aio.connect(address) as client:
            await client.producer().send(topic, b"first")
            async with await client.lease_consumer(topic, GROUP) as consumer:
                first = await consumer.receive()
                assert first is not None
                waiting = asyncio.ensure_future(consumer.receive())
                await asyncio.sleep(0.05)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await client.producer().send(topic, b"second")
                second = await consumer.receive(timeout_s=DEADLINE_S)
                assert second is not None
                assert (second.body, second.attempt) == (b"second", 1)

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
