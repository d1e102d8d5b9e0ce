"""What a call sees of the broker's role: on a slave, and when the broker stops or changes its role meanwhile."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import gevent
import pytest

from metaq.engine.role import Replicas
from metaq.errors import Fenced
from metaq.server.services.call import Call
from metaq.server.services.messages import ReadQuery, TailQuery, read_messages, tail
from tests.support.served import Browser, Served, dead_letter, request, warm

DEADLINE_S: Final = 60.0
TOPIC: Final = "told"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack, gevent.Timeout(DEADLINE_S):
        served = Served(stack, tmp_path / "data")
        warm(served, TOPIC)
        yield served


def test_a_slave_has_a_reader_that_is_ahead_wait(served: Served) -> None:
    """SG-083: it has yet to copy what the reader has from the master; a master's reader goes to the end."""
    interior, user = served.broker._make_interior(), served.broker.authentication.anonymous
    slave = cast(Replicas, cast(Any, SimpleNamespace(is_master=False)))
    end = served.broker.store.queue(TOPIC, 0).next
    for context, following in ((interior.context, end), (replace(interior.context, replicas=slave), end + 5)):
        call = Call(replace(interior, context=context), user, ("127.0.0.1", 1))
        found = read_messages(call, TOPIC, 0, ReadQuery(offset=end + 5))
        assert (found.messages, found.next, found.end) == ([], following, end)


def test_a_change_of_role_ends_streams(served: Served) -> None:
    """E-15: they would show a broker that is no more; a browser connects again when the console's ends without a problem."""
    paths = ("/api/v1/broker/live?interval_ms=500", f"/api/v1/topics/{TOPIC}/tail", f"/console/topics/{TOPIC}/tail/events")
    streams = [Browser(served) for _ in paths]
    received = []
    for browser, path in zip(streams, paths, strict=True):
        browser.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received.append(until(browser, b"retry: "))
    while not served.broker.engine.holds.count:
        gevent.sleep(0.01)
    served.broker.engine.holds.stop()
    served.broker.engine.holds.wake_all()
    ends = [until(browser, b"\r\n0\r\n\r\n") for browser in streams]
    said = [b"event: problem" in end and b'"status":503' in end and b"changes its role" in end for end in ends]
    assert said == [True, True, False]
    assert b"problem" not in ends[2]
    where = f"/api/v1/topics/{TOPIC}/partitions/0/messages?offset=99&wait_ms=9"
    waiting = Browser(served).ask(f"GET {where} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert waiting is not None and "changes its role" in waiting.body


def test_a_change_of_role_ends_a_tail_that_has_more_to_read(served: Served) -> None:
    """E-15: its reader may have taken long for the message before."""
    rows = tail(served.call(), TOPIC, TailQuery())
    for partition in (0, 1):
        Browser(served).ask(request(TOPIC, {"body": "told", "partition": partition}))
    first = next(rows)
    assert first is not None and first.partition == 0
    served.broker.engine.holds.stop()
    with pytest.raises(Fenced, match="changes its role"):
        next(rows)


def test_a_change_of_role_cuts_off_a_file_of_dead_letters(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    """E-15: so that nobody takes it for all of them; that is no error of the broker."""
    dead_letter(served, TOPIC, "teller")
    export = b"GET /console/dead-letters/teller/export HTTP/1.1\r\nHost: localhost\r\n\r\n"
    whole = Browser(served)
    whole.send(export)
    assert b'"deliveries"' in until(whole, b"\r\n0\r\n\r\n")
    served.broker.engine.holds.stop()
    assert Browser(served).ask(export) is None
    assert "Traceback" not in capfd.readouterr().err


def until(browser: Browser, end: bytes) -> bytes:
    """What comes up to some bytes."""
    received = b""
    while end not in received:
        data = browser.socket.recv(65536)
        assert data
        received += data
    return received
