"""Rounds of checks of half messages, without a broker."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from metaq.engine.checkback import MOST_ASKED, CheckBack
from metaq.engine.writing import Draft, internal, stage
from metaq.message import HALF_TOPIC
from metaq.protocol import properties
from metaq.store.copies.applying import hide_from
from metaq.store.log.segments import segment_name
from metaq.store.queues.consumequeue import UNIT_SIZE
from metaq.tx.halves import Fate, Halves
from tests.support.inprocess import Parts

INTERVAL_S: Final = 10


class Bench:
    """The checks of a store whose producers are those that a test names."""

    def __init__(self, data: Path) -> None:
        parts = self._parts = Parts(data, check_interval_ms=1000 * INTERVAL_S)
        self.halves = Halves(parts.store, data / "config", 0)
        self.asked: list[tuple[str, int]] = []
        """Each check: the group that was asked, and the ordinal of the message."""
        self.decided: list[tuple[int, Fate, Draft | None]] = []
        self._groups: set[str] = set()
        clients = SimpleNamespace(producers=self._producers)
        context = SimpleNamespace(store=parts.store, settings=parts.settings, clients=clients)
        turns = SimpleNamespace(overloaded=False, number=0, staged=lambda outcome: None)
        handler = SimpleNamespace(context=context, halves=self.halves, turns=turns, decide=self._decide)
        self._checks = CheckBack(cast(Any, handler), lambda: None, lambda: False, lambda call: call())

    def put(self, group: str) -> int:
        """Store a half message of a group, and return its ordinal."""
        pairs = {properties.PRODUCER_GROUP: group, properties.REAL_TOPIC: "orders", properties.REAL_QUEUE: "0"}
        placed = stage(self._parts.context, internal(self._parts.context, HALF_TOPIC, b"paid", pairs))
        self._parts.store.append()
        return placed.ordinal

    def damage_unit(self, ordinal: int) -> None:
        """Overwrite a unit of the half topic on the disk."""
        queue = self._parts.store.queue(HALF_TOPIC, 0)
        queue.write()
        with (queue.directory / segment_name(0)).open("r+b") as file:
            file.seek(ordinal * UNIT_SIZE)
            file.write(b"\xff" * UNIT_SIZE)

    def connect(self, group: str) -> None:
        """Have a producer of a group."""
        self._groups.add(group)

    def hide(self) -> None:
        """Have all messages wait for replicas, as on a new master."""
        hide_from(self._parts.store, 0)

    def show(self) -> None:
        """Let readers see them again."""
        self._parts.store.publish(self._parts.store.log.end)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._parts.clock.advance(seconds)

    def check(self) -> None:
        """Do one round, an interval after the last one."""
        self._parts.clock.advance(INTERVAL_S)
        self._checks.check()

    def close(self) -> None:
        self._parts.close()

    def _producers(self, group: str) -> list[Any]:
        def tell(code: int, fields: Mapping[str, str], body: bytes) -> bool:
            self.asked.append((group, int(fields["tranStateTableOffset"])))
            return True

        return [SimpleNamespace(session=SimpleNamespace(tell=tell))] if group in self._groups else []

    def _decide(self, ordinal: int, fate: Fate, message: Draft | None = None, own: object = None) -> None:
        self.halves.claim(ordinal)
        self.decided.append((ordinal, fate, message))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_group_that_decides_nothing_keeps_no_other_waiting(bench: Bench) -> None:
    """RD-105: a round goes on where the last one ended, and messages that nobody is asked about do not fill it."""
    for group in ("gone", "silent", "silent"):
        for _ in range(MOST_ASKED):
            bench.put(group)
    last = bench.put("other")
    for group in ("silent", "other"):
        bench.connect(group)
    bench.check()
    assert [group for group, _ in bench.asked] == ["silent"] * MOST_ASKED
    bench.check()
    bench.check()
    assert bench.asked.index(("other", last)) == 2 * MOST_ASKED
    assert len(set(bench.asked)) == 2 * MOST_ASKED + 1


def test_a_unit_that_is_damaged_hides_no_half_message(bench: Bench) -> None:
    """RD-105: the table says where it is, so its producers are asked, and it does not pin the log."""
    damaged, intact = bench.put("pg"), bench.put("pg")
    bench.check()
    bench.damage_unit(damaged)
    bench.connect("pg")
    bench.check()
    assert bench.asked == [("pg", damaged), ("pg", intact)]
    bench.advance(73 * 3600)
    bench.check()
    assert [(ordinal, fate, message is not None) for ordinal, fate, message in bench.decided] == [
        (damaged, Fate.GIVEN_UP, True),
        (intact, Fate.GIVEN_UP, True),
    ]


def test_what_waits_for_replicas_is_not_lost(bench: Bench) -> None:
    """RD-105: a new master has in its table what readers may not see yet; nobody is asked about it, and it is not given up."""
    bench.put("pg")
    bench.check()
    bench.connect("pg")
    bench.hide()
    bench.check()
    assert (bench.asked, bench.decided) == ([], [])
    bench.show()
    bench.check()
    assert len(bench.asked) == 1
