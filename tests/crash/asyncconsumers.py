"""The asyncio programs among the lives of ``tests.crash.consumers``; calls are cancelled at random moments."""

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import metaq.aio
from metaq.client import Client, ConsumeFrom, ReceivedMessage
from metaq.errors import ClientError

if TYPE_CHECKING:
    from tests.crash.consumers import Case

QUIET_S: Final = 0.3
T = TypeVar("T")


async def _perhaps(rng: random.Random, call: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of a call; ``None`` if it fails, or ends by the cancellation that hits about half of the calls."""
    task = asyncio.ensure_future(call)
    if rng.random() < 0.5:
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
        task.cancel()
    with suppress(asyncio.CancelledError, ClientError):
        return await task
    return None


def _client(case: "Case") -> metaq.aio.Client:
    return metaq.aio.connect(case.broker.registry, timeout_s=60.0)


def iterates(case: "Case", client: Client) -> None:
    """``receive`` and ``commit``."""

    async def live() -> None:
        async with (
            _client(case) as own,
            await own.consumer(case.topic, case.group, consume_from=ConsumeFrom.FIRST) as consumer,
        ):
            for _ in range(case.rng.randint(1, 40)):
                message = await _perhaps(case.rng, consumer.receive(timeout_s=QUIET_S))
                if message is not None:
                    case.got(message)
                await asyncio.to_thread(case.trouble, client)
                if case.rng.random() < 0.3:
                    await _perhaps(case.rng, consumer.commit())

    asyncio.run(live())


def pulls(case: "Case", client: Client) -> None:
    """``poll``, ``seek`` back to the last commit, ``commit``."""

    async def live() -> None:
        async with _client(case) as own, own.pull_consumer(case.topic, case.group) as reader:
            await reader.assign(await reader.partitions())
            for _ in range(case.rng.randint(1, 20)):
                for message in await _perhaps(case.rng, reader.poll(QUIET_S, case.rng.choice([1, 5, 1000]))) or []:
                    case.got(message)
                if case.rng.random() < 0.3:
                    await _perhaps(case.rng, reader.commit())
                if case.rng.random() < 0.1:
                    queue = case.rng.choice(await reader.assignment())
                    await reader.seek(queue, await reader.committed(queue) or 0)

    asyncio.run(live())


def listens(case: "Case", client: Client) -> None:
    """A listener that is closed while it works."""
    case.listens = True

    async def listener(message: ReceivedMessage) -> None:
        await asyncio.sleep(case.rng.choice([0, 0.001]))
        with suppress(SystemExit):  # one would end the loop
            case.listener(message)
            return
        raise ValueError

    async def live() -> None:
        async with (
            _client(case) as own,
            await own.listen(case.topic, case.group, listener, consume_from=ConsumeFrom.FIRST, max_reconsume_times=0),
        ):
            await asyncio.sleep(case.rng.choice([0.0, 0.02, 0.1, 0.3]))
            await asyncio.to_thread(case.trouble, client)

    asyncio.run(live())
