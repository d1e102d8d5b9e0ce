"""Requests that wait for the index of ids keep their order, also those that ask once more, without sockets."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.dedupe.asking import ColdIds
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.timers.timers import Timers
from metaq.store.files.filecache import Read, run_here
from tests.support.inprocess import Parts

TOPIC: Final = "once"
DEADLINE_S: Final = 60.0


def _nothing() -> None:
    """Answer nobody."""


@pytest.fixture
def dedupe(tmp_path: Path) -> Iterator[Dedupe]:
    parts = Parts(tmp_path / "data", topics={TOPIC: {"partitions": 1, "dedupe_window_ms": 60_000}})
    timers = Timers(parts.context, parts.turns, run_here)
    dedupe = Dedupe(parts.context, parts.turns, timers.parked_handle, run_here)
    dedupe.start()
    gevent.sleep(0)  # it reads an empty log
    yield dedupe
    dedupe.stop()
    dedupe.close()
    timers.close()
    parts.close()


class Sender:
    """Sends messages by name; the names of those that were stored are in ``stored``."""

    def __init__(self, dedupe: Dedupe) -> None:
        self._dedupe = dedupe
        self.stored: list[str] = []

    def send(self, name: str) -> None:
        """Store a message, now or once the index was asked."""
        try:
            self._dedupe.look(TOPIC, name, 1_000_000)
        except ColdIds as cold:
            self._dedupe.asking.ask(cold, partial(self.again, name))
        else:
            self.stored.append(name)

    def all_stored(self, count: int) -> list[str]:
        """Wait until so many messages are stored; return their names."""
        with gevent.Timeout(DEADLINE_S):
            while len(self.stored) < count:
                gevent.sleep(0.001)
        return self.stored

    def again(self, name: str, answered: Callable[[], None] = _nothing) -> Callable[[], None]:
        """Handle a message again; return what happens with its answer."""
        self.send(name)
        return answered


def test_who_asks_once_more_keeps_its_place(dedupe: Dedupe) -> None:
    """D-2: those after it wait for it, and those that came while the index was asked come last."""
    sender = Sender(dedupe)

    def ask_once_more() -> Callable[[], None]:
        """Do what a request does whose id the index excluded before, and excludes no more."""
        dedupe.asking.ask(ColdIds([b"key"]), partial(sender.again, "first"))
        return _nothing

    def come_meanwhile(_: Read) -> None:
        sender.send("last")

    dedupe.asking.ask(ColdIds([], come_meanwhile), ask_once_more)
    sender.send("second")
    sender.send("third")
    assert sender.all_stored(4) == ["first", "second", "third", "last"]


def test_what_comes_with_an_answer_comes_last(dedupe: Dedupe) -> None:
    """D-2: a session goes on with its backlog when it is answered, while what it sent before may still wait."""
    sender = Sender(dedupe)

    def come_meanwhile(_: Read) -> None:
        sender.send("third")

    dedupe.asking.ask(ColdIds([], come_meanwhile), partial(sender.again, "first", partial(sender.send, "last")))
    sender.send("second")
    assert sender.all_stored(4) == ["first", "second", "third", "last"]
