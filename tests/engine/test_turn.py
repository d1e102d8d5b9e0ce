"""Turns at DISK: puts that come during a sync are appended together once it has ended, and nothing else waits for that."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import gevent
import pytest
from gevent.event import Event

from metaq.engine.turn import MOST_DEFERRED_BYTES
from metaq.errors import DiskFailed
from metaq.server.text.put import PutHandler
from tests.support.inprocess import Parts, Text

T = TypeVar("T")


class Syncs:
    """A ``Run`` whose calls end when the test says so."""

    def __init__(self) -> None:
        self.running = False
        self.failure: DiskFailed | None = None
        self._may_end = Event()

    def __call__(self, call: Callable[[], T]) -> T:
        self.running = True
        self._may_end.wait()
        self._may_end.clear()
        self.running = False
        if self.failure is not None:
            raise self.failure
        return call()

    def end(self) -> None:
        """End the sync that is running."""
        self._may_end.set()
        gevent.sleep(0)
        gevent.sleep(0)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data", durability="disk")
    puts = PutHandler(parts.context, parts.turns).puts
    parts.endpoint.answer_text({}, puts, puts)
    yield parts
    parts.close()


@pytest.fixture
def syncs(parts: Parts) -> Iterator[Syncs]:
    """The syncs of the broker, of which one is running: that of the first message."""
    syncs = Syncs()
    parts.turns._run = syncs
    syncing = gevent.spawn(parts.turns.sync_forever)
    put(parts)
    parts.end_turn()
    assert syncs.running
    yield syncs
    syncing.kill()


def put(parts: Parts, body: bytes = b"x") -> Text:
    client = Text(parts)
    assert client.send(b"put orders 0 %d 0 1\r\n%s" % (len(body), body)) == b""
    return client


def test_puts_during_a_sync_are_appended_once_when_it_has_ended(parts: Parts, syncs: Syncs) -> None:
    """And are answered by the next."""
    clients, end, number = [], parts.store.log.end, parts.turns.number
    for _ in range(3):
        clients.append(put(parts))
        parts.end_turn()
    assert parts.store.log.end == end
    syncs.end()
    parts.end_turn()
    assert parts.store.log.end > end
    assert parts.turns.number == number + 1
    assert [client.answers() for client in clients] == [b"", b"", b""]
    syncs.end()
    assert all(client.answers().startswith(b"result 200") for client in clients)


def test_what_is_no_put_does_not_wait_for_the_sync(parts: Parts, syncs: Syncs) -> None:
    """Its turn ends as any other, with the puts that came before."""
    results: list[object] = []
    put(parts)
    parts.turns.after_append(results.append)
    parts.end_turn()
    assert results == [None]
    assert syncs.running


def test_a_turn_takes_in_a_bounded_number_of_bytes(parts: Parts, syncs: Syncs) -> None:
    """Then it ends although the sync goes on."""
    body, end = bytes(MOST_DEFERRED_BYTES // 2), parts.store.log.end
    for _ in range(3):
        put(parts, body)
        parts.end_turn()
    assert parts.store.log.end == end
    put(parts, body)
    parts.end_turn()
    assert parts.store.log.end > end
    assert syncs.running


def test_duties_that_need_the_end_of_a_turn_bring_it_about(parts: Parts, syncs: Syncs) -> None:
    """They would wait for the disk otherwise."""
    put(parts)
    assert not parts.store.settled
    parts.turns.end_soon()
    parts.end_turn()
    assert parts.store.settled
    assert syncs.running


def test_puts_during_a_sync_that_fails_are_refused(parts: Parts, syncs: Syncs) -> None:
    """The store is read-only from then on."""
    client = put(parts)
    syncs.failure = DiskFailed("cannot sync")
    syncs.end()
    parts.end_turn()
    assert client.answers().startswith(b"result 5")
