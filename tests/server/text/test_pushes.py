"""Pushes while something changes: the partitions of the topic, or the credit, in the process of the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.text.test_leases import Broker, Client


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


@pytest.mark.parametrize("count", [1, 5])
def test_a_partition_that_is_added_is_dealt(broker: Broker, count: int) -> None:
    """MY-010: its first message is pushed, also to a member that had no partition."""
    members = [Client(broker) for _ in range(count)]
    for member in members:
        member.say("subscribe orders billing assign=own ready=9 1")
    broker.parts.context.topics.ensure("orders", 5)
    broker.settle()
    broker.put("a", partition=4)
    assert members[-1].heard() == ["message 1 1 4-0 orders 4 0 1 0", "a"]
