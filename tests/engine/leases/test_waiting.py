"""Consumers that wait in line for messages to lease."""

from typing import Final

import pytest

from metaq.message import GroupPartition
from tests.engine.leases.leased import GROUPS, TOPIC, LeasedBroker

GROUP: Final = GROUPS[0]
PLACE: Final = GroupPartition(GROUP, TOPIC, 0)
LEASE_MS: Final = 10_000


class Line:
    """A broker with a leased message, and consumers that wait."""

    def __init__(self) -> None:
        self.broker = LeasedBroker()
        self.woken: list[str] = []
        assert self.broker.put(TOPIC, 0, b"0")
        self.broker.end_turn()
        request = self.broker.request(GROUP, 0, 1, LEASE_MS)
        result = self.broker.take(request, self.broker.plan(request))
        assert result is not None
        self.pop_ms = result.pop_ms
        self.broker.end_turn()

    def wait(self, name: str, partition: int | None = None, seconds: float | None = None) -> None:
        lines = self.broker.leasing.lines
        lines.wait(
            GROUP,
            TOPIC,
            number=lines.next_number(),
            again=lambda: self.woken.append(name),
            partitions=None if partition is None else (partition,),
            seconds=seconds,
        )


@pytest.fixture
def line() -> Line:
    return Line()


def test_a_message_that_is_given_back_wakes_who_waits(line: Line) -> None:
    """E-08: at the end of the turn."""
    line.wait("one")
    leases = line.broker.leases
    leases.change(PLACE, 0, line.pop_ms, leases.due_ms(line.pop_ms, 0, LEASE_MS))
    assert line.woken == []
    line.broker.end_turn()
    assert line.woken == ["one"]


def test_a_lease_that_ends_wakes_who_waits(line: Line) -> None:
    """E-08: not before its end."""
    line.wait("one")
    line.broker.advance(LEASE_MS / 1000 - 1)
    assert line.woken == []
    line.broker.advance(1.01)
    assert line.woken == ["one"]


def test_nobody_is_woken_for_another_partition(line: Line) -> None:
    """E-08: who wants another partition stands in nobody's way."""
    line.wait("other", partition=1)
    line.wait("one", partition=0)
    line.broker.advance(LEASE_MS / 1000 + 0.01)
    assert line.woken == ["one"]
    assert line.broker.leasing.lines.count_of(GROUP, TOPIC) == 1


def test_a_lease_that_ended_where_nobody_looks_wakes_a_line_once(line: Line) -> None:
    """Not again and again, for as long as its message waits."""
    lines = line.broker.leasing.lines
    line.wait("other", partition=1)
    line.broker.advance(LEASE_MS / 1000)
    wakes = lines.wakes
    for _ in range(100):
        line.broker.advance(0.001)
    assert lines.wakes - wakes <= 2
    assert line.woken == []


def test_nobody_waits_longer_than_asked_for(line: Line) -> None:
    """E-08: nor when the broker stops."""
    line.wait("short", seconds=1)
    line.wait("long")
    line.broker.advance(1)
    assert line.woken == ["short"]
    line.broker.leasing.lines.stop()
    assert line.woken == ["short", "long"]
    assert line.broker.leasing.lines.count == 0
