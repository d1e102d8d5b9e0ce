"""A broker of taskiq for each test, and receivers in the test's process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from taskiq.acks import AcknowledgeType
from taskiq.receiver import Receiver
from taskiq.utils import maybe_awaitable
from taskiq_metaq import MetaqBroker

from tests.support.broker import BrokerProcess

DEADLINE_S: Final = 120.0


@pytest.fixture
def broker(process: BrokerProcess, namespace: str) -> MetaqBroker:
    """A broker that is not started yet."""
    return MetaqBroker(f"metaq://{process.registry}/?timeout_s=30", queue=namespace)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine function, which must come to an end."""
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@asynccontextmanager
async def started(broker: MetaqBroker) -> AsyncIterator[MetaqBroker]:
    """A broker between its startup and its shutdown."""
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


@asynccontextmanager
async def working(broker: MetaqBroker, at_once: int = 10, ack: AcknowledgeType | None = None) -> AsyncIterator[Receiver]:
    """A receiver of a started broker, as a worker of taskiq has it."""
    with ThreadPoolExecutor(4) as threads:
        receiver = Receiver(broker, executor=threads, max_async_tasks=at_once, run_startup=False, ack_type=ack)
        finish = asyncio.Event()
        listening = asyncio.create_task(receiver.listen(finish))
        try:
            yield receiver
        finally:
            finish.set()
            await listening


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the deadline is that of ``run``."""
    while not condition():
        await asyncio.sleep(0.005)


async def lag(broker: MetaqBroker) -> int:
    """The tasks that are not done."""
    return sum(view.lag for view in await broker.client.admin().group_lag(broker.queue, broker.queue))


async def until_done(broker: MetaqBroker) -> None:
    """Wait until all tasks of a queue are done that are not delayed."""
    while await lag(broker):
        await asyncio.sleep(0.02)


async def comes(broker: MetaqBroker, within_s: float) -> bytes | None:
    """The body of the next message that a consumer of the group gets, which finishes it."""
    with contextlib.suppress(TimeoutError):
        async with contextlib.aclosing(broker.listen()) as messages, asyncio.timeout(within_s):
            message = await anext(messages)
            await maybe_awaitable(message.ack())
            return message.data
    return None
