"""The end of a request: its time can be moved both ways, and a client that leaves can end it, too. Nothing of it remains."""

import time
from collections.abc import Iterator
from typing import Final

import gevent
import gevent.event
import pytest
from gevent import socket

from metaq.server.http.httpserver import Deadline

SHORT_S: Final = 0.05
LONG_S: Final = 60.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection: the broker's end, and the client's."""
    own, client = socket.socketpair()
    with own, client:
        yield own, client


def ended_after(pair: Pair, seconds: float, *then: float) -> bool:
    """Whether a greenlet is ended by its limits before ``LONG_S``; the first one is set, then the others."""

    def work() -> bool:
        deadline = Deadline(pair[0])
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


def test_an_earlier_end_counts(pair: Pair) -> None:
    """E-01: also when the timer was set for a later one."""
    assert ended_after(pair, SHORT_S)
    assert ended_after(pair, LONG_S, SHORT_S)


def test_a_later_end_counts(pair: Pair) -> None:
    """E-01: the timer of the earlier one looks, and goes on."""
    began = time.monotonic()
    assert ended_after(pair, SHORT_S, 5 * SHORT_S)
    assert time.monotonic() - began >= 5 * SHORT_S


def test_no_end_counts_any_more(pair: Pair) -> None:
    """E-01: after its end, and after another request has begun with more time."""

    def work() -> str:
        deadline = Deadline(pair[0])
        deadline.within(SHORT_S)
        deadline.end()
        gevent.sleep(2 * SHORT_S)
        return "still here"

    with gevent.Timeout(LONG_S):
        assert gevent.spawn(work).get() == "still here"


def test_the_limit_is_that_of_the_greenlet_it_was_made_in(pair: Pair) -> None:
    """E-01: another one, which writes meanwhile, is not ended."""
    ended = []

    def work() -> None:
        deadline = Deadline(pair[0])
        deadline.within(SHORT_S)
        another = gevent.spawn(gevent.sleep, 3 * SHORT_S)
        with pytest.raises(gevent.Timeout):
            gevent.sleep(LONG_S)
        another.join()
        ended.append(another.successful())

    gevent.spawn(work).join(LONG_S)
    assert ended == [True]


@pytest.mark.parametrize("said", [b"", b"the next request"])
def test_a_client_that_leaves_ends_it(pair: Pair, said: bytes) -> None:
    """E-01: while it is looked for, and no longer; what comes over the connection is not read."""
    own, client = pair
    began = gevent.event.Event()

    def work() -> str:
        deadline = Deadline(own)
        with deadline.or_departure():
            began.set()
            try:
                gevent.sleep(LONG_S / 2)
            except ConnectionResetError:
                return "gone"
        return "still here"

    waiting = gevent.spawn(work)
    began.wait(LONG_S)
    client.sendall(said)
    client.close()
    assert waiting.get(timeout=LONG_S) == "gone"
    assert own.recv(100) == said

    def later() -> str:
        deadline = Deadline(own)
        with deadline.or_departure():
            pass
        gevent.sleep(SHORT_S)
        return "still here"

    assert gevent.spawn(later).get(timeout=LONG_S) == "still here"
