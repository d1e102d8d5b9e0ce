"""Commands that are handled while a turn is answered belong to the next turn, also when only that one is not stored."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import gevent
import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.leases.leasing import Leasing
from metaq.engine.timers.timers import Timers
from metaq.errors import DiskFull
from metaq.message import TopicPartition
from metaq.server.text.later import LaterHandler
from metaq.server.text.leases import LeaseHandler
from metaq.server.text.put import PutHandler
from metaq.store.files.filecache import run_here
from tests.server.remoting.test_refused_leases import BreakingDisk
from tests.support.broker import wait_until
from tests.support.inprocess import Connection, Parts, Text

DEADLINE_S: Final = 30.0
TOPICS: Final = {"orders": {"partitions": 1}, "once": {"partitions": 1, "dedupe_window_ms": 60_000}}
OWED: Final = {"an ack": "ack {} 8", "an ack that means nothing": "ack {0} 8\r\nack {0} 8", "a pop": "pop orders billing 1 8"}
"""Commands that are answered at the end of their turn, before that of a put of this turn."""


class Filling(Connection):
    """A connection whose first answer comes when the disk has no room any more."""

    def __init__(self, disk: BreakingDisk) -> None:
        super().__init__()
        self._disk = disk

    def sendmsg(self, buffers: Sequence[bytes]) -> int:
        self._disk.error = DiskFull("a test says so")
        return super().sendmsg(buffers)


class Broker:
    """A broker with leases, ids and timers, of which one turn is stored and the next one is not."""

    def __init__(self, data: Path) -> None:
        self._disk = BreakingDisk()
        self.parts = parts = Parts(data, self._disk, topics=TOPICS)
        leases = LeaseHandler(parts.context, Leasing.open(parts.context, parts.turns, parts.loop.timer), parts.reads)
        puts = PutHandler(parts.context, parts.turns)
        self.timers = Timers(parts.context, parts.turns, run_here)
        self._dedupe = Dedupe(parts.context, parts.turns, self.timers.parked_handle, run_here)
        self._dedupe.start()
        wait_until(self._knows_ids, DEADLINE_S, "the log is read for ids")
        later = LaterHandler(parts.context, puts, self.timers, cast(Any, None), self._dedupe)
        parts.endpoint.answer_text({**leases.commands(), **later.commands()}, puts.puts, puts.puts)
        self.client = Text(parts)

    def _knows_ids(self) -> bool:
        gevent.sleep(0)
        return self._dedupe.numbers()["dedupe_index"] == "yes"

    def say(self, command: str) -> str:
        """Send a command, and end the turn; return the answer."""
        at_once = self.client.send(command.encode())
        self.parts.end_turn()
        return (at_once + self.client.answers()).decode()

    def answer_and_fill(self, owed: str, put: str, other: str) -> list[int]:
        """Have a put wait for the answer to a command, and another client put in the same turn; only that turn is stored.

        Return the codes of the answers to the first client. There is room again then.
        """
        for _ in range(2):
            self.say("put orders 0 1 0 1\r\na")
        ident = re.findall(r"\d+-\d+-\w+", self.say("pop orders billing 1 2\r\n"))[0]
        filling = Text(self.parts)
        filling._session._socket = cast(Any, Filling(self._disk))
        at_once = self.client.send(f"{owed.format(ident)}\r\n{put}".encode())
        assert not at_once
        filling.send(other.encode())
        self.parts.end_turn()
        assert self._disk.error is not None
        self._disk.error = None
        self.parts.store.sweep()
        return [int(code) for code in re.findall(r"result (\d+) ", self.client.answers().decode())]

    def close(self) -> None:
        self._dedupe.stop()
        self._dedupe.close()
        self.timers.close()
        self.parts.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.close()


@pytest.mark.parametrize("owed", OWED.values(), ids=OWED)
def test_the_id_of_a_put_that_was_refused_is_free(broker: Broker, owed: str) -> None:
    """D-1: although the turn that was answered when the put was handled has stored another id."""
    put = "put once 0 1 0 id=a 9\r\na"
    assert broker.answer_and_fill(owed, put, "put once 0 1 0 id=b 9\r\nb")[-1] == 503
    assert broker.say(put).startswith("result 200 ")
    assert broker.parts.store.queues[TopicPartition("once", 0)].readable == 2


@pytest.mark.parametrize("owed", OWED.values(), ids=OWED)
def test_a_delayed_put_that_was_refused_is_not_pending(broker: Broker, owed: str) -> None:
    put = "put orders 0 1 0 delay=60000 9\r\na"
    assert broker.answer_and_fill(owed, put, "put orders 0 1 0 delay=50000 9\r\nb")[-1] == 503
    assert broker.timers.pending == 1
    assert broker.say(put).startswith("result 200 ")
    assert broker.timers.pending == 2
