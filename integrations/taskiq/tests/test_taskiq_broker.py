"""The broker of taskiq, with real receivers and a real broker of metaq."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, cast

import pytest
from taskiq import InMemoryBroker, SendTaskError, SimpleRetryMiddleware, SmartRetryMiddleware, TaskiqMessage, TaskiqMiddleware
from taskiq.acks import AcknowledgeType
from taskiq.result import TaskiqResult
from taskiq.utils import maybe_awaitable
from taskiq_metaq import MetaqBroker, MetaqScheduleSource
from taskiq_metaq.broker import ack
from taskiq_support import broker, comes, lag, run, started, until, until_done, working

import metaq
import metaq.aio
from tests.client.poison import ZLIB, send_packed
from tests.support.broker import BrokerProcess

__all__ = ["broker"]  # a fixture

SOON_S = 0.3
"""How long a test waits for what must not come."""


def another(broker: MetaqBroker, process: BrokerProcess, **options: Any) -> MetaqBroker:
    """One of the same queue, as another process has it."""
    return MetaqBroker(f"metaq://{process.registry}/?timeout_s=30", queue=broker.queue, **options)


def name_of(body: bytes | None) -> str | None:
    """The only argument of a task."""
    return None if body is None else str(json.loads(body)["args"][0])


async def pending(broker: MetaqBroker) -> int:
    """The tasks that wait for their time."""
    admin = broker.client.admin()
    (master,) = await admin.masters()
    return len([timer async for timer in admin.timers().pending(master.address) if timer.topic == broker.queue])


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_tasks_are_done_once(broker: MetaqBroker) -> None:
    """Coroutines and functions."""
    seen: list[int] = []

    @broker.task(task_name="later")
    async def later(number: int) -> None:
        seen.append(number)

    @broker.task(task_name="blocking")
    def blocking(number: int) -> None:
        seen.append(number)

    async def work() -> None:
        async with started(broker):
            for number in range(0, 50, 2):
                await later.kiq(number)
                await blocking.kiq(number + 1)
            async with working(broker):
                await until_done(broker)

    run(work)
    assert sorted(seen) == list(range(50))


def test_results_come_back(broker: MetaqBroker) -> None:
    """From the backend that the program has chosen."""
    broker.with_result_backend(InMemoryBroker().result_backend)

    @broker.task(task_name="add")
    async def add(left: int, right: int) -> int:
        return left + right

    async def work() -> None:
        async with started(broker), working(broker):
            task = await add.kiq(1, 2)
            result = await task.wait_result(check_interval=0.01, timeout=60)
            assert result.return_value == 3

    run(work)


def test_a_task_is_found_by_its_id(broker: MetaqBroker) -> None:
    """As `metaq message query` does it."""

    @broker.task(task_name="noted")
    async def noted() -> None: ...

    async def work() -> None:
        async with started(broker):
            task = await noted.kiq()
            (found,) = await broker.client.admin().query_by_key(broker.queue, task.task_id)
            assert json.loads(found.body)["task_name"] == "noted"

    run(work)


# -- delays and schedules ---------------------------------------------------------------------------------------------


def test_tasks_are_delayed_by_a_label(broker: MetaqBroker) -> None:
    """Of the call or of the task, independently of each other; no worker has them before."""
    ran: dict[str, float] = {}

    @broker.task(task_name="record", delay=0.5)
    async def record(name: str) -> None:
        ran[name] = time.time()

    async def work() -> None:
        async with started(broker):
            async with working(broker, at_once=1):
                begin = time.time()
                await record.kicker().with_labels(delay=1.2).kiq("late")
                await record.kiq("soon")
                assert (await pending(broker), await lag(broker)) == (2, 0)
                await until(lambda: len(ran) == 2)
            await record.kicker().with_labels(delay=-1).kiq("now")
            assert name_of(await comes(broker, 60)) == "now"
        assert list(ran) == ["soon", "late"]
        assert ran["soon"] >= begin + 0.5 and ran["late"] >= begin + 1.2

    run(work)


def test_a_label_that_is_no_number_is_refused(broker: MetaqBroker) -> None:
    @broker.task(task_name="never")
    async def never() -> None: ...

    async def work() -> None:
        async with started(broker):
            for label in ("delay", "priority"):
                with pytest.raises(SendTaskError) as failed:
                    await never.kicker().with_labels(**{label: "soon"}).kiq()
                assert isinstance(failed.value.__cause__, ValueError)

    run(work)


class Recorder(TaskiqMiddleware):
    """Writes down what a broker says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        self.said.append(f"before {message.task_name}")
        return message.model_copy(update={"labels": {**message.labels, "seen": "yes"}})

    def post_send(self, message: TaskiqMessage) -> None:
        self.said.append(f"after {message.task_name} {message.labels['seen']}")


def test_a_schedule_needs_no_scheduler(broker: MetaqBroker) -> None:
    """Its id cancels it, in another process, too; middleware sees it as any other task."""
    recorder, seen = Recorder(), list[str]()
    broker.add_middlewares(recorder)
    source = MetaqScheduleSource(broker)

    @broker.task(task_name="scheduled", delay=3600)
    async def scheduled(name: str) -> None:
        seen.append(name)

    async def work() -> None:
        now = datetime.now(UTC)
        async with started(broker), working(broker):
            far = await scheduled.schedule_by_time(source, now + timedelta(days=30), "far")
            await scheduled.schedule_by_time(source, now + timedelta(seconds=0.5), "zoned")
            await scheduled.schedule_by_time(source, (now + timedelta(seconds=0.5)).replace(tzinfo=None), "naive")
            await scheduled.schedule_by_time(source, now - timedelta(days=1), "past")
            assert recorder.said == ["before scheduled", "after scheduled yes"] * 4
            await until(lambda: len(seen) == 3)
            assert await pending(broker) == 1
            await MetaqScheduleSource(broker).delete_schedule(far.schedule_id)
            await far.unschedule()
            assert await pending(broker) == 0
            with pytest.raises(metaq.BadRequest):
                await source.delete_schedule("no handle")
            assert await source.get_schedules() == []
        assert datetime.now(UTC) >= now + timedelta(seconds=0.5)
        assert seen[0] == "past" and sorted(seen[1:]) == ["naive", "zoned"]

    run(work)


def test_what_recurs_needs_another_source(broker: MetaqBroker) -> None:
    @broker.task(task_name="never")
    async def never() -> None: ...

    async def work() -> None:
        async with started(broker):
            with pytest.raises(ValueError, match="takes a time only"):
                await never.schedule_by_cron(MetaqScheduleSource(broker), "* * * * *")
            assert await pending(broker) == 0

    run(work)


@pytest.mark.parametrize("kind", ["at once", "label", "source"])
def test_retries(broker: MetaqBroker, kind: str) -> None:
    """By the middleware of taskiq, which sends the task again: at once, with the label `delay`, or by a source."""
    retries: dict[str, Callable[[], TaskiqMiddleware]] = {
        "at once": lambda: SimpleRetryMiddleware(default_retry_count=3),
        "label": lambda: SmartRetryMiddleware(default_retry_count=3, default_delay=0.3),
        "source": lambda: SmartRetryMiddleware(
            default_retry_count=3, default_delay=0.3, schedule_source=MetaqScheduleSource(broker)
        ),
    }
    broker.add_middlewares(retries[kind]())
    tried: list[float] = []

    @broker.task(task_name="fails", retry_on_error=True)
    async def fails() -> None:
        tried.append(time.time())
        raise RuntimeError("always")

    async def work() -> None:
        async with started(broker):
            await fails.kiq()
            async with working(broker):
                await until(lambda: len(tried) == 3)
                await until_done(broker)
            assert await pending(broker) == 0

    run(work)
    pauses = [after - before for before, after in pairwise(tried)]
    assert len(tried) == 3 and (kind == "at once" or min(pauses) >= 0.3)


# -- acks and leases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ack", "lags"),
    [
        (AcknowledgeType.WHEN_RECEIVED, [0, 0]),
        (AcknowledgeType.WHEN_EXECUTED, [1, 0]),
        (AcknowledgeType.WHEN_SAVED, [1, 1]),
    ],
)
def test_acks_come_when_they_should(broker: MetaqBroker, ack: AcknowledgeType, lags: list[int]) -> None:
    """What is left while the task runs and while its result is saved; nothing is in the end."""
    found: list[int] = []

    class Looks(TaskiqMiddleware):
        async def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
            found.append(await lag(broker))

    broker.add_middlewares(Looks())

    @broker.task(task_name="look")
    async def look() -> None:
        found.append(await lag(broker))

    async def work() -> None:
        async with started(broker):
            async with working(broker, ack=ack):
                await look.kiq()
                await until(lambda: len(found) == 2)
                await until_done(broker)
            assert await comes(broker, SOON_S) is None

    run(work)
    assert found == lags


def test_what_taskiq_drops_comes_again(broker: MetaqBroker, process: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """A task that was not acked, as middleware has raised: when its lease of a second is over, once there was another task."""
    caplog.set_level("CRITICAL", "asyncio")  # a record of the error would hold the message
    seen: list[str] = []
    broker = another(broker, process, invisible=1)

    class Fails(TaskiqMiddleware):
        def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
            if seen == ["dropped"]:
                raise RuntimeError("once")

    broker.add_middlewares(Fails())

    @broker.task(task_name="attempt")
    async def attempt(name: str) -> None:
        seen.append(name)

    async def work() -> None:
        async with started(broker), working(broker):
            await attempt.kiq("dropped")
            await until(lambda: seen == ["dropped"])
            await attempt.kiq("next")
            await until_done(broker)

    run(work)
    assert seen == ["dropped", "next", "dropped"]


def test_a_long_task_keeps_its_message(broker: MetaqBroker, process: BrokerProcess) -> None:
    """Also while the worker stops: a lease of 3 s lasts for longer, and is acked in the end."""
    seen: list[str] = []
    broker, other = another(broker, process, invisible=3), another(broker, process)

    async def work() -> None:
        go_on = asyncio.Event()

        @broker.task(task_name="long")
        async def long(name: str) -> None:
            seen.append(name)
            await go_on.wait()

        async def look() -> None:
            assert await comes(other, 4.5) is None
            go_on.set()

        async with started(broker), started(other):
            await long.kiq("long")
            async with working(broker):
                await until(lambda: seen == ["long"])
                looking = asyncio.create_task(look())
            await looking
            assert await lag(broker) == 0

    run(work)
    assert seen == ["long"]


def test_what_was_not_begun_is_given_back_when_a_worker_stops(broker: MetaqBroker, process: BrokerProcess) -> None:
    """At once, although one task still runs: the leases would last for an hour."""
    seen: list[int] = []
    broker, other = another(broker, process, invisible=3600, batch=8), another(broker, process)

    async def work() -> None:
        go_on = asyncio.Event()

        @broker.task(task_name="slow")
        async def slow(number: int) -> None:
            seen.append(number)
            await go_on.wait()

        async def others() -> list[str | None]:
            found = [name_of(await comes(other, 60)) for _ in range(3)]
            go_on.set()
            return found

        async with started(broker), started(other):
            for number in range(5):
                await slow.kiq(number)
            async with working(broker, at_once=2):
                await until(lambda: seen == [0, 1])
                looking = asyncio.create_task(others())
                await asyncio.sleep(0)
            assert sorted(await looking) == ["2", "3", "4"]  # type: ignore[type-var]
            assert await lag(broker) == 0

    run(work)


def test_an_ack_of_a_task_that_was_given_again_fails(broker: MetaqBroker, process: BrokerProcess) -> None:
    """So a worker that acks first does not do what another does."""
    other = another(broker, process)

    @broker.task(task_name="lost")
    async def lost(name: str) -> None: ...

    async def work() -> None:
        async with started(broker), started(other), aclosing(broker.listen()) as mine, aclosing(other.listen()) as theirs:
            await lost.kiq("lost")
            before = await anext(mine)
            await broker.client.admin().reset_offset(broker.queue, broker.queue, metaq.ConsumeFrom.FIRST, apply=True)
            after = await anext(theirs)
            assert before.data == after.data
            with pytest.raises(metaq.LeaseLost, match="given again"):
                await maybe_awaitable(before.ack())
            await maybe_awaitable(after.ack())
            assert await lag(broker) == 0

    run(work)


def test_what_cannot_be_read_becomes_a_dead_letter(broker: MetaqBroker, process: BrokerProcess) -> None:
    """And what comes after it is done."""
    seen: list[int] = []

    @broker.task(task_name="after")
    async def after() -> None:
        seen.append(1)

    async def work() -> None:
        async with started(broker):
            with metaq.connect(process.registry) as client:
                send_packed(client, broker.queue, b"no zlib", ZLIB)
            await after.kiq()
            async with working(broker):
                await until(lambda: seen == [1])
                await until_done(broker)
            letters = await broker.client.admin().dead_letters(broker.queue)
            assert [letter.error is not None for letter in letters] == [True]

    run(work)


# -- priorities and errors --------------------------------------------------------------------------------------------


def test_urgent_tasks_come_first(broker: MetaqBroker, process: BrokerProcess) -> None:
    order: list[int] = []
    broker = another(broker, process, max_priority=3)

    @broker.task(task_name="prioritized")
    async def prioritized(priority: int) -> None:
        order.append(priority)

    async def work() -> None:
        async with started(broker):
            for priority in (1, 0, 3, 2, 9):
                await prioritized.kicker().with_labels(priority=priority).kiq(priority)
            async with working(broker, at_once=1):
                await until_done(broker)

    run(work)
    assert order == [3, 9, 2, 1, 0]


@pytest.mark.parametrize("most", [0, 256])
def test_a_priority_out_of_range_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match="it takes 1 to 255"):
        MetaqBroker(max_priority=most)


def test_a_broker_must_be_started(broker: MetaqBroker) -> None:
    @broker.task(task_name="never")
    async def never() -> None: ...

    async def work() -> None:
        with pytest.raises(SendTaskError) as failed:
            await never.kiq()
        assert "startup" in str(failed.value.__cause__)
        await broker.shutdown()

    run(work)


def test_a_broker_that_is_not_there_is_reported() -> None:
    broker = MetaqBroker("metaq://127.0.0.1:1/?timeout_s=0.2")

    async def work(call: Callable[[], Awaitable[None]] = broker.startup) -> None:
        with pytest.raises(metaq.RouteNotFound, match="no registry answers"):
            await call()
        await broker.shutdown()

    run(work)


class Unacked:
    """A task whose acks have outcomes that the test gives."""

    def __init__(self, *outcomes: metaq.ClientError | None) -> None:
        self.outcomes = list(outcomes)

    async def ack(self) -> None:
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome


def test_acks_are_repeated_while_the_lease_lasts() -> None:
    """A task is done twice only when the broker is away for longer than that."""
    lost, deposed, refused = metaq.ConnectionFailed("lost"), metaq.Refused(14, "no master"), metaq.LeaseLost(17, "given again")
    task = Unacked(lost, deposed, None, lost)
    asyncio.run(ack(cast(metaq.aio.LeasedMessage, task), 60.0))
    assert task.outcomes == [lost]
    with pytest.raises(metaq.ConnectionFailed):
        asyncio.run(ack(cast(metaq.aio.LeasedMessage, task), 0.0))
    with pytest.raises(metaq.LeaseLost):
        asyncio.run(ack(cast(metaq.aio.LeasedMessage, Unacked(refused)), 60.0))
