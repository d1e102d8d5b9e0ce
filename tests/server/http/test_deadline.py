"""The time that a request has left: it can be moved both ways, and nothing of it remains when it has ended."""

import time
from typing import Final

import gevent
import pytest

from metaq.server.http.httpserver import Deadline

SHORT_S: Final = 0.05
LONG_S: Final = 60.0


def ended_after(seconds: float, *then: float) -> bool:
    """Whether a greenlet is ended by its limits before ``LONG_S``; the first one is set, then the others."""

    def work() -> bool:
        deadline = Deadline()
        try:
            for limit in (seconds, *then):
                deadline.within(limit)
            gevent.sleep(LONG_S / 2)
        except gevent.Timeout:
            return True
        finally:
            deadline.end()
        return False

    began = time.monotonic()
    ended = gevent.spawn(work).get(timeout=LONG_S)
    assert not ended or time.monotonic() - began >= min(seconds, *then, LONG_S)
    return bool(ended)


def test_an_earlier_end_counts() -> None:
    """E-01: also when the timer was set for a later one."""
    assert ended_after(SHORT_S)
    assert ended_after(LONG_S, SHORT_S)


def test_a_later_end_counts() -> None:
    """E-01: the timer of the earlier one looks, and goes on."""
    began = time.monotonic()
    assert ended_after(SHORT_S, 5 * SHORT_S)
    assert time.monotonic() - began >= 5 * SHORT_S


def test_no_end_counts_any_more() -> None:
    """E-01: after its end, and after another request has begun with more time."""

    def work() -> str:
        deadline = Deadline()
        deadline.within(SHORT_S)
        deadline.end()
        gevent.sleep(2 * SHORT_S)
        return "still here"

    with gevent.Timeout(LONG_S):
        assert gevent.spawn(work).get() == "still here"


def test_the_limit_is_that_of_the_greenlet_it_was_made_in() -> None:
    """E-01: another one, which writes meanwhile, is not ended."""
    ended = []

    def work() -> None:
        deadline = Deadline()
        deadline.within(SHORT_S)
        another = gevent.spawn(gevent.sleep, 3 * SHORT_S)
        with pytest.raises(gevent.Timeout):
            gevent.sleep(LONG_S)
        another.join()
        ended.append(another.successful())

    gevent.spawn(work).join(LONG_S)
    assert ended == [True]
