"""Wrong arguments of what the client for asyncio does itself: they are refused at the call, as by the blocking client."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

import metaq.aio
from metaq.client import connect
from metaq.errors import BadRequest
from metaq.testing import InMemoryBroker

NOTHING: Final[Any] = None

Mistake = Callable[[metaq.aio.Client], Awaitable[object]]


async def nothing(*arguments: object) -> Any:
    """Do nothing, as a coroutine function of the program."""


async def receive(client: metaq.aio.Client, timeout_s: Any) -> object:
    async with await client.consumer("orders", "g") as consumer:
        return await consumer.receive(timeout_s)


async def lease(client: metaq.aio.Client, timeout_s: Any) -> object:
    async with await client.lease_consumer("orders", "g") as consumer:
        return await consumer.receive(timeout_s)


async def poll(client: metaq.aio.Client, *arguments: Any) -> object:
    async with client.pull_consumer("orders") as consumer:
        return await consumer.poll(*arguments)


async def take(client: metaq.aio.Client, most: int) -> object:
    async with client.pull_consumer("orders") as consumer:
        return await consumer.take(most)


async def produce(client: metaq.aio.Client, execute: Any, check: Any) -> object:
    return client.transaction_producer("g", execute, check=check)


MISTAKES: Final[dict[str, Mistake]] = {
    "listener is None": lambda client: client.listen("orders", "g", NOTHING),
    "execute is None": lambda client: produce(client, NOTHING, nothing),
    "check is None": lambda client: produce(client, nothing, NOTHING),
    "timeout_s is -1": lambda client: receive(client, -1),
    "timeout_s is '1'": lambda client: receive(client, "1"),
    "timeout_s is -2": lambda client: lease(client, -2),
    "timeout_s is '2'": lambda client: lease(client, "2"),
    "timeout_s is -3": lambda client: poll(client, -3),
    "timeout_s is None": lambda client: poll(client, None),
    "max_messages is 0": lambda client: poll(client, 1.0, 0),
    "max_messages is -1": lambda client: take(client, -1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_at_the_call(memory: InMemoryBroker, mistake: str) -> None:
    async def work() -> None:
        async with metaq.aio.connect(memory.address) as client:
            with pytest.raises(BadRequest, match=f"^{mistake}"):
                await MISTAKES[mistake](client)

    memory.create_topic("orders", 1)
    asyncio.run(work())


def test_no_messages_cannot_be_taken(memory: InMemoryBroker) -> None:
    memory.create_topic("orders", 1)
    with (
        connect(memory.address) as client,
        client.pull_consumer("orders") as consumer,
        pytest.raises(BadRequest, match="max_messages is 0"),
    ):
        consumer.take(0)
