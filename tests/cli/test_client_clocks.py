"""The doctor finds consumers whose clocks make them drop what they lease."""

import json
import re
import time
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.leases.clocks import KEPT_S, MOST, SHOWN, ConsumerClocks
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, encode_header
from metaq.protocol.remoting.leases.pop import ALL_QUEUES, PopMessage
from tests.support.admin import connect, create_topic
from tests.support.broker import BrokerProcess
from tests.support.cli import Cli
from tests.support.manualclock import ManualClock

LEASE_MS: Final = 60_000


@pytest.mark.parametrize(("ahead_ms", "is_found"), [(50_000, False), (-3_600_000, False), (70_000, True)])
def test_the_doctor_tells_whose_clock_is_ahead(tmp_path: Path, ahead_ms: int, is_found: bool) -> None:
    """A-15: 50 s ahead and an hour behind are well with leases of a minute, 70 s ahead are not."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client:
        create_topic(client, "orders")
        born_ms = time.time_ns() // 1_000_000 + ahead_ms
        header = PopMessage("billing", "orders", Int32(ALL_QUEUES), Int32(1), LEASE_MS, 0, Int32(0), born_ms)
        assert client.call(Request.POP_MESSAGE, encode_header(header)).code == Response.POLLING_TIMEOUT
        result = Cli(broker.registry).run_any("doctor", "--watch", "0", "--json")  # its code depends on this machine's disk
    rows = [row for row in map(json.loads, result.stdout.splitlines()) if row["check"] == "client clock"]
    assert [row["level"] for row in rows] == ["warning"] * is_found
    for row in rows:
        assert re.search(r"\(billing\) is (69|70) s ahead of metaq: its leases of 60 s seem over", row["found"])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def note(clocks: ConsumerClocks, clock: ManualClock, client: str, ahead_ms: int) -> None:
    clocks.note("billing", (client, 1), clock.now_ms() + ahead_ms, LEASE_MS)


def test_a_pop_by_a_right_clock_ends_it(clock: ManualClock) -> None:
    clocks = ConsumerClocks(clock)
    for client in ("a", "b"):
        note(clocks, clock, client, LEASE_MS)
    assert [each.client for each in clocks.ahead()] == ["b:1", "a:1"]
    note(clocks, clock, "b", LEASE_MS - 1)
    assert [each.client for each in clocks.ahead()] == ["a:1"]
    clock.advance(KEPT_S + 1)
    assert clocks.ahead() == []


def test_what_is_remembered_is_bounded(clock: ManualClock) -> None:
    clocks = ConsumerClocks(clock)
    for number in range(MOST + SHOWN):
        note(clocks, clock, str(number), LEASE_MS)
    assert [each.client for each in clocks.ahead()] == [f"{MOST + SHOWN - 1 - number}:1" for number in range(SHOWN)]
    for number in range(SHOWN, MOST + SHOWN):
        note(clocks, clock, str(number), 0)
    assert clocks.ahead() == []
