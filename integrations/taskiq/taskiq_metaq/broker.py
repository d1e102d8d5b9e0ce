"""The broker of taskiq: it sends and leases messages of metaq."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from datetime import datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

from taskiq import AckableMessage, AsyncBroker, BrokerMessage

import metaq.aio
from metaq.client import checks
from metaq.client.connecting.transport import may_pass

logger = logging.getLogger(__name__)

_MOST_PRIORITY: Final = 255
_AGAIN_S: Final = 0.5
"""The pause before an ack is sent again."""
_TICK_S: Final = 0.5
"""The longest time after which a worker that has nothing to do sees that it is to stop."""


class _Connected(NamedTuple):
    client: metaq.aio.Client
    producer: metaq.aio.Producer


class MetaqBroker(AsyncBroker):
    """A broker that keeps its tasks in a topic of metaq, and leases them to workers.

    ::

        broker = MetaqBroker("127.0.0.1:9876").with_result_backend(…)

    The label ``delay`` of a task, in seconds, is a timer of metaq: no worker has the task before. The label ``priority`` counts
    in queues with priorities: the greater, the sooner.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9876",
        *,
        queue: str = "taskiq",
        max_priority: int | None = None,
        invisible: timedelta | float = 60.0,
        batch: int = 1,
    ) -> None:
        """Create it. It connects in ``startup``, which workers and schedulers of taskiq call.

        Args:
            address: one or more registries of metaq, as ``metaq.connect`` takes them, with user, time limit and TLS in a URL:
                ``metaq://user:password@host:9876/?timeout_s=5&tls=true``.
            queue: the name of the topic and of its group, which leases. Brokers with other names have other tasks.
            max_priority: the greatest ``priority`` of tasks, from 1 to 255, if this broker makes the queue. Two to ten are
                enough for most.
            invisible: the time after which others get the tasks of a worker that died, a ``timedelta`` or seconds.
            batch: how many tasks may come at once, from 1 to 32. More make short tasks faster, but a task may wait for one that
                came with it while another worker has nothing to do.

        Raises:
            ValueError: the priority is out of its range.
        """
        super().__init__()
        if max_priority is not None and not 0 < max_priority <= _MOST_PRIORITY:
            raise ValueError(f"max_priority is {max_priority}; it takes 1 to {_MOST_PRIORITY}, or None")
        self.queue = queue
        self._address = address
        self._max_priority = max_priority
        self._invisible = invisible
        self._batch = batch
        self._connected: _Connected | None = None

    @property
    def client(self) -> metaq.aio.Client:
        """Also for what taskiq has no words for, such as ``client.admin().dead_letters("taskiq")``.

        Raises:
            RuntimeError: the broker was not started, or was shut down.
        """
        return self._parts.client

    @property
    def _parts(self) -> _Connected:
        if self._connected is None:
            raise RuntimeError("the broker is not connected: `await broker.startup()` comes first")
        return self._connected

    async def startup(self) -> None:
        """Connect, and make the topic of the queue unless it exists; one that exists stays as it is.

        Raises:
            metaq.BadRequest: the address or the name of the queue is invalid.
            metaq.ClientError: no broker can be asked, or it refuses.
        """
        if self._connected is None:
            client = metaq.aio.connect(self._address)
            self._connected = _Connected(client, client.producer(self.queue))
        await self._ensure_topic(self.client.admin())
        await super().startup()

    async def shutdown(self) -> None:
        """Close the connections. Tasks that were not acked come again when their leases end."""
        try:
            await super().shutdown()
        finally:
            if self._connected is not None:
                await self._connected.client.close()
                self._connected = None

    async def _ensure_topic(self, admin: metaq.aio.Admin) -> None:
        """A group shares the messages of one partition among any number of workers, so a topic has one, or one a priority."""
        try:
            await admin.route(self.queue)
        except metaq.RouteNotFound as error:
            if error.reason is not metaq.RouteProblem.TOPIC_ABSENT:
                raise
            if self._max_priority is None:
                await admin.create_topic(self.queue, 1)
            else:
                await admin.create_topic(self.queue, self._max_priority + 1, priority=True)

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task; when this returns, the broker has stored it.

        Args:
            message: the task. Its label ``delay`` is the time in seconds before any worker gets it, up to ``max_delay_ms`` of
                the broker, 400 days by default.

        Raises:
            metaq.MetaqError: no broker takes it; taskiq raises ``SendTaskError`` for this.
            ValueError: a label is not a number.
        """
        delay = message.labels.get("delay")
        await self.send(message, delay=None if delay is None else timedelta(seconds=max(0.0, float(delay))))

    async def send(
        self, message: BrokerMessage, *, delay: timedelta | None = None, deliver_at: datetime | None = None
    ) -> metaq.SendResult:
        """Send a task as ``kick`` does, and return where it is, and the handle that cancels it while it is delayed.

        Args:
            message: the task; its label ``delay`` does not count here.
            delay: the time before any worker gets it.
            deliver_at: instead of ``delay``, the time at which workers get it.

        Raises:
            metaq.MetaqError: no broker takes it.
            ValueError: its label ``priority`` is not a number.
        """
        priority = message.labels.get("priority")
        return await self._parts.producer.send(
            self.queue,
            message.message,
            keys=message.task_id,
            priority=None if priority is None else int(priority),
            delay=delay,
            deliver_at=deliver_at,
        )

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield tasks as they come. Each is this worker's until it is acked, or until taskiq drops it and its lease ends.

        A message that cannot be read becomes a dead letter.

        Raises:
            RuntimeError: the broker was not started.
            metaq.ClientError: no broker can be asked, or this broker listens already.
        """
        consumer = await self.client.lease_consumer(
            self.queue, self.queue, batch=self._batch, invisible=self._invisible, from_first=True, keep=True
        )
        lease_s = checks.span("invisible", self._invisible)
        ticking = asyncio.create_task(_tick())
        try:
            async with consumer:
                async for message in consumer:
                    if message.error is not None:
                        logger.warning(
                            "message unreadable queue=%s message=%s reason=%s", self.queue, message.id, message.error
                        )
                        await message.reject()
                    else:
                        yield AckableMessage(data=message.body, ack=partial(ack, message, lease_s))
        finally:
            ticking.cancel()


async def ack(message: metaq.aio.LeasedMessage, lease_s: float) -> None:
    """Finish a task: again and again while its broker is away, until its lease has ended. Taskiq does not repeat it.

    Raises:
        metaq.ClientError: the broker refuses, or was away for longer.
    """
    until_s = time.monotonic() + lease_s
    while True:
        try:
            await message.ack()
        except metaq.ClientError as error:
            if not may_pass(error) or time.monotonic() >= until_s:
                raise
            await asyncio.sleep(_AGAIN_S)
        else:
            return


async def _tick() -> None:
    """Wake the event loop now and then: the event that the signal handler of taskiq's workers sets wakes no loop that waits."""
    while True:
        await asyncio.sleep(_TICK_S)
