"""Consumers of an ordered topic while masters are killed: each partition has at most one consumer."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from metaq.client import ConsumeFrom, ReceivedMessage, TextClient, connect
from metaq.message import MessageQueue
from tests.support.broker import wait_until
from tests.support.group import Group
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = pytest.mark.partner("java")

TOPIC: Final = "ordered"
PARTITIONS: Final = 4
CONSUMERS: Final = 3
MESSAGES: Final = 6000
"""In each partition: more than are consumed."""
WORK_S: Final = 0.03
"""What a listener does with a message."""
MORE: Final = 20
DEADLINE_S: Final = 90.0
MASTERS_KILLED: Final = 2


class Call(NamedTuple):
    """One call of a listener. Times of the monotonic clock."""

    began: float
    ended: float
    consumer: int
    offset: int


class Calls:
    """The listener calls of all consumers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[MessageQueue, list[Call]] = defaultdict(list)

    def listener(self, consumer: int) -> Callable[[ReceivedMessage], None]:
        def listen(message: ReceivedMessage) -> None:
            began = time.monotonic()
            time.sleep(WORK_S)
            with self._lock:
                self._of[message.queue].append(Call(began, time.monotonic(), consumer, message.queue_offset))

        return listen

    def counts(self) -> dict[MessageQueue, int]:
        with self._lock:
            return {queue: len(calls) for queue, calls in self._of.items()}

    def wait_more(self) -> None:
        """Wait until some more messages of every partition are consumed."""
        before = self.counts()
        wait_until(
            lambda: all(count >= before.get(queue, 0) + MORE for queue, count in self.counts().items()),
            DEADLINE_S,
            f"every partition goes on after {before}",
        )

    def together(self) -> list[tuple[MessageQueue, Call, Call]]:
        """Calls for messages of one partition at the same time."""
        pairs = [(queue, one, other) for queue, calls in self._of.items() for one, other in pairwise(sorted(calls))]
        return [(queue, one, other) for queue, one, other in pairs if other.began < one.ended]


@pytest.mark.slow
def test_no_partition_has_two_owners_when_masters_are_killed(tmp_path: Path) -> None:
    """SG-005, SG-123, F-FAIL: locks are in the log: the next master gives no partition away that somebody consumes."""
    calls = Calls()
    with (
        ZooKeeperProcess(tmp_path / "zookeeper") as zookeeper,
        Group(tmp_path, zookeeper.address, "--replica-timeout-ms", "30000") as group,
    ):
        master = group.wait_master()
        with TextClient(master.host, master.port) as text:
            text.create(TOPIC, PARTITIONS)
            for partition in range(PARTITIONS):
                text.put_many(TOPIC, [b"x"] * MESSAGES, partition=partition)
        with ExitStack() as stack:
            for number in range(CONSUMERS):
                client = stack.enter_context(connect(f"zk://{zookeeper.address}", instance=f"consumer{number}"))
                listener = calls.listener(number)
                stack.enter_context(client.listen(TOPIC, "group", listener, ordered=True, consume_from=ConsumeFrom.FIRST))
            wait_until(lambda: len(calls.counts()) == PARTITIONS, DEADLINE_S, "all partitions are consumed")
            calls.wait_more()
            for _ in range(MASTERS_KILLED):
                killed = group.wait_master()
                killed.kill()
                wait_until(lambda: group.master() not in (None, killed), DEADLINE_S, "there is a new master")  # noqa: B023
                calls.wait_more()
                killed.start()
                group.wait_whole()
                calls.wait_more()
    assert calls.together() == []
