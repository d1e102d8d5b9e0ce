"""Requests that wait for the index of ids keep their order, also those that ask once more, without sockets."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.dedupe.dedupe import ColdIds, Dedupe
from metaq.engine.timers.timers import Timers
from metaq.store.files.filecache import Read, run_here
from tests.support.inprocess import Parts

TOPIC: Final = "once"


@pytest.fixture
def dedupe(tmp_path: Path) -> Iterator[Dedupe]:
    parts = Parts(tmp_path / "data", topics={TOPIC: {"partitions": 1, "dedupe_window_ms": 60_000}})
    timers = Timers(parts.context, parts.turns, run_here)
    dedupe = Dedupe(parts.context, parts.turns, timers, run_here)
    dedupe.start()
    gevent.sleep(0)  # it reads an empty log
    yield dedupe
    dedupe.stop()
    dedupe.close()
    timers.close()
    parts.close()


def test_who_asks_once_more_keeps_its_place(dedupe: Dedupe) -> None:
    """D-2: those after it wait for it, and those that came while the index was asked come last."""
    done: list[str] = []

    def store(name: str) -> None:
        try:
            dedupe.look(TOPIC, name, 1_000_000)
        except ColdIds as cold:
            dedupe.ask(cold, partial(store, name))
        else:
            done.append(name)

    def ask_once_more() -> None:
        """Do what a request does whose id the index excluded before, and excludes no more."""
        dedupe.ask(ColdIds([b"key"]), partial(store, "first"))

    def come_meanwhile(_: Read) -> None:
        store("last")

    dedupe.ask(ColdIds([], come_meanwhile), ask_once_more)
    store("second")
    store("third")
    gevent.wait(timeout=10.0)
    assert done == ["first", "second", "third", "last"]
