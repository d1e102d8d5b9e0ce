"""A sample of the consumers' lives, and proof that the comparison finds errors."""

import asyncio
import functools
import time
from collections.abc import Iterator

import pytest

import metaq.aio
from metaq.client import ReceivedMessage, SimpleConsumer
from metaq.client.consuming.fetching import PulledBatch
from metaq.client.consuming.progress import Progress
from tests.crash import asyncconsumers, consumers
from tests.crash.consumers import Broker, Life, one_case, run
from tests.crash.driver import CaseFailed


def test_what_consumers_get() -> None:
    """SG-077, SG-118, SG-119, SG-120, P44: all messages, and nothing is committed that they did not get."""
    result = run(seed=0, count=10)
    assert result.cases == 10
    assert result.details["messages"] > 50


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.close()


def skip_one(monkeypatch: pytest.MonkeyPatch) -> None:
    really = SimpleConsumer._open

    def worse(consumer: SimpleConsumer, batch: PulledBatch) -> None:
        batch.messages[:] = batch.messages[1:]
        really(consumer, batch)

    monkeypatch.setattr(SimpleConsumer, "_open", worse)


def commit_what_is_being_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a listener that takes its time: one that does not is done before anything is committed."""
    listener = consumers.Case.listener

    def slow(case: consumers.Case, message: ReceivedMessage) -> None:
        time.sleep(0.02)
        listener(case, message)

    monkeypatch.setattr(consumers.Case, "listener", slow)
    monkeypatch.setattr(Progress, "position", property(lambda progress: progress._next))


def poll_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def worse(self: metaq.aio.PullConsumer, timeout_s: float, max_messages: int) -> list[ReceivedMessage]:
        poll = functools.partial(self._blocking.poll, timeout_s, max_messages)
        return await asyncio.get_running_loop().run_in_executor(None, poll)

    monkeypatch.setattr(metaq.aio.PullConsumer, "poll", worse)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("life", "worse"),
    [
        (consumers._iterates, skip_one),
        (consumers._listens, commit_what_is_being_consumed),
        (asyncconsumers.pulls, poll_in_a_thread),
    ],
)
def test_a_worse_client_is_noticed(broker: Broker, monkeypatch: pytest.MonkeyPatch, life: Life, worse: object) -> None:
    """SG-077: by what it commits too early."""
    assert callable(worse)
    worse(monkeypatch)
    monkeypatch.setattr(consumers, "LIVES", [life])
    monkeypatch.setattr(consumers, "DEADLINE_S", 5.0)
    monkeypatch.setattr(consumers, "KILLS", 0.0)
    with pytest.raises(CaseFailed, match="no commit is ahead of delivery"):
        for seed in range(30):
            one_case(seed, broker)
