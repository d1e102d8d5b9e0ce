"""The pace of the loop, with sessions that keep the processor busy for some time."""

import time
from collections.abc import Iterator
from typing import Final, cast

import gevent
import pytest
from gevent.hub import get_hub

from metaq.server.wire.pace import TURN_S, Pace
from metaq.server.wire.session import Session

SESSIONS: Final = 5
REQUESTS: Final = 4
DEADLINE_S: Final = 60.0


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Busy:
    """A session with a backlog: each request takes more than a turn has."""

    def __init__(self, pace: Pace, name: int, log: list[int]) -> None:
        self._pace = pace
        self._name = name
        self._log = log
        self._left = REQUESTS

    def flush(self) -> None:
        while self._left:
            if self._pace.spent:
                self._pace.put_off(cast(Session, self))
                return
            burn(1.5 * TURN_S)
            self._log.append(self._name)
            self._left -= 1


@pytest.fixture
def pace() -> Iterator[Pace]:
    running = Pace(get_hub().loop)
    running.start()
    yield running
    running.stop()


def test_sessions_take_turns(pace: Pace) -> None:
    """E-05: in the order in which they were stopped, while others go on between."""
    log: list[int] = []
    for name in range(SESSIONS):
        pace.put_off(cast(Session, Busy(pace, name, log)))
    seen = []
    end = time.monotonic() + DEADLINE_S
    while len(log) < SESSIONS * REQUESTS and time.monotonic() < end:
        gevent.sleep(0.0001)  # a turn
        assert not pace.spent  # who was not stopped has time in each of them
        seen.append(len(log))
    assert log == [*range(SESSIONS)] * REQUESTS
    assert len(set(seen)) >= SESSIONS * REQUESTS / 2  # others went on between
    assert pace.longest_s >= 1.5 * TURN_S
    assert not pace.spent


def test_a_turn_is_spent(pace: Pace) -> None:
    """E-05: by the processor's time, not by the clock's; and the next one is not."""
    gevent.sleep(0.001)
    time.sleep(2 * TURN_S)
    assert not pace.spent
    burn(1.1 * TURN_S)
    assert pace.spent
    gevent.sleep(0.001)
    assert not pace.spent


class Last:
    """The last session of an endpoint: it is put off again, but its client is gone, so it closes, and the pace is stopped."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._closed = False

    def flush(self) -> None:
        if not self._closed:
            self._closed = True
            self._pace.put_off(cast(Session, self))
            self._pace.stop()


def test_who_was_put_off_goes_on_when_the_pace_stops(pace: Pace) -> None:
    """E-05: sessions of HTTP outlive the broker whose turns they waited for."""
    log: list[int] = []
    for name in range(SESSIONS):
        pace.put_off(cast(Session, Busy(pace, name, log)))
    pace.stop()
    assert sorted(log) == sorted([*range(SESSIONS)] * REQUESTS)


def test_the_last_session_closes_while_others_go_on(pace: Pace) -> None:
    """E-05: those that wait behind it go on, too."""
    log: list[int] = []
    pace.put_off(cast(Session, Last(pace)))
    for name in range(SESSIONS):
        pace.put_off(cast(Session, Busy(pace, name, log)))
    pace._go_on()  # here, so that an error is not only printed
    assert sorted(log) == sorted([*range(SESSIONS)] * REQUESTS)
