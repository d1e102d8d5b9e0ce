"""Parks and marks as a start reads them, against the same records sorted by their places."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from metaq.engine.writing import Draft, internal_mark, stage
from metaq.protocol.properties import CRON
from metaq.store.files.filecache import read_here
from metaq.timers.fold import Fold, Ordinals, ends
from metaq.timers.records import (
    MARKS,
    MOST_IN_RUN,
    PARKS,
    Delivered,
    Key,
    Park,
    Parks,
    TimerEvent,
    deliver_mark,
    key_of,
    properties_of_park,
)
from tests.support.inprocess import Parts


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data")
    yield parts
    parts.close()


def put_park(parts: Parts, due_ms: int, **pairs: str) -> Park:
    draft = Draft(*PARKS, b"body", pairs | properties_of_park(due_ms, "orders", 0), 0, 0, 5, bytes(8))
    place = stage(parts.context, draft, {CRON: pairs[CRON]} if CRON in pairs else {}).log_offset
    number = int(pairs[CRON].rpartition(":")[2]) if CRON in pairs else None
    return Park(key_of(due_ms, place), place, None, parts.store.log.staged_end, number)


def put_mark(parts: Parts, to: Key) -> Delivered:
    stage(parts.context, internal_mark(parts.context, MARKS, deliver_mark(to, 1, 0, {0: 1})))
    return Delivered(to, {0: 1}, parts.store.log.staged_end)


def single(events: list[TimerEvent]) -> list[TimerEvent]:
    """Return events with a park for each of a run, whose ends are only known of the last ones."""
    found: list[TimerEvent] = []
    for event in events:
        if isinstance(event, Parks):
            found += [Park(key, place, None, 0) for key, place in zip(event.keys, event.places, strict=True)]
            found[-1] = Park(event.keys[-1], event.places[-1], None, event.end)
        else:
            found.append(event)
    return found


def told(events: Sequence[Any]) -> list[tuple[object, ...]]:
    """Return all that is told of each event but the end of its record."""
    return [event[:3] + event[4:] if isinstance(event, Park) else tuple(event)[:2] for event in events]


@pytest.mark.parametrize("most", [1, 2, 7, 100, 10_000])
def test_the_events_come_in_the_order_of_the_log(parts: Parts, most: int) -> None:
    """I-1: however many are read in one go, and wherever marks stand among the parks."""
    rng, put = random.Random(most), list[TimerEvent]()
    for _ in range(400):
        kind = rng.randrange(12)
        if kind < 2:
            put.append(put_mark(parts, key_of(rng.randrange(100), 5)))
        else:
            put.append(put_park(parts, rng.randrange(10_000), **({CRON: "n:7"} if kind == 2 else {})))
    parts.store.append()
    fold, found, end = Fold(parts.store, Ordinals(0, 0)), list[TimerEvent](), ends(parts.store)
    while events := fold.next(end, most, read_here):
        assert len(single(events)) <= most
        found += events
    assert fold.place == end
    assert told(single(found)) == told(put)
    assert found[-1].end == put[-1].end
    assert all(len(event.keys) <= MOST_IN_RUN for event in found if isinstance(event, Parks))


def test_it_goes_on_as_the_log_grows(parts: Parts) -> None:
    """A slave reads a mark after which there is nothing yet, and parks that come after it."""
    fold, first = (
        Fold(parts.store, Ordinals(0, 0)),
        [put_park(parts, 1), put_mark(parts, key_of(1, 5)), put_mark(parts, key_of(2, 5))],
    )
    parts.store.append()
    assert told(single(fold.next(Ordinals(1, 1), 10, read_here))) == told(first[:2])
    later = [put_park(parts, 9), put_mark(parts, key_of(9, 5))]
    parts.store.append()
    assert told(single(fold.next(ends(parts.store), 10, read_here))) == told([first[2], *later])
