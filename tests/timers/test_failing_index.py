"""An index that turns out to be damaged while the broker runs."""

import json
import time
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import Request
from tests.support.broker import BrokerProcess, wait_until
from tests.support.remoting import RemotingClient
from tests.support.talk import Talk

MESSAGES: Final = 6_000
DELAY_MS: Final = 45_000
"""Longer than timers are in memory ahead of their time."""


def is_sorted_in(broker: BrokerProcess) -> bool:
    """Return whether the index has each timer in its place."""
    with RemotingClient(broker.host, broker.port) as client:
        figures = json.loads(client.call(Request.TIMER_STATS).body)
    return bool(figures["timer_index_waiting"] == figures["timer_index_packed"] == 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_damage_that_is_met_late_delays_timers_and_loses_none(tmp_path: Path) -> None:
    """F-13, T-1: the damaged block is none that the opening reads."""
    with BrokerProcess(tmp_path / "data", "--timer-engine", "rocksdict") as broker:
        with Talk(broker) as talk:
            talk.send(b"create later 1\r\n")
            for first in range(0, MESSAGES, 500):
                bodies = [b"%07d" % number for number in range(first, first + 500)]
                replies = talk.ask(*(b"put later 0 7 0 delay=%d 1\r\n%b" % (DELAY_MS, body) for body in bodies))
                assert {code for code, _ in replies} == {200}
            wait_until(lambda: is_sorted_in(broker), 30.0, "an opening need not read them", 0.1)
        began = time.monotonic()
        assert broker.terminate() == 0
        damaged = 0
        for table in (tmp_path / "data" / "timerindex").glob("*.sst"):
            data = bytearray(table.read_bytes())
            middle = len(data) // 2
            if len(data) > 20_000:
                data[middle : middle + 64] = bytes(64)
                table.write_bytes(data)
                damaged += 1
        assert damaged
        broker.start()
        assert time.monotonic() - began < 60
        with Talk(broker) as talk:
            wait_until(lambda: talk.end("later") > 0 and len(talk.bodies("later")) >= MESSAGES, 150.0, "all are delivered", 0.1)
            assert sorted(talk.bodies("later")) == [b"%07d" % number for number in range(MESSAGES)]
        assert "timer index failed" in broker.stderr()
        assert broker.terminate() == 0
        assert "Traceback" not in broker.stderr()
