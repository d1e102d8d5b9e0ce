"""Messages with ids, while as many as may wait for the index of ids: they are refused, and nothing stays owed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.dedupe.asking import MOST_ASKED, ColdIds
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.halfmessages import HalfMessages
from metaq.engine.timers.cancelling import Cancels
from metaq.engine.timers.timers import Timers
from metaq.protocol.remoting.codes import Request, Response
from metaq.server.remoting.sending.partitions import Partitions
from metaq.server.remoting.sending.send import SendHandler
from metaq.server.text.later import LaterHandler
from metaq.server.text.put import PutHandler
from metaq.store.files.filecache import run_here
from metaq.tx.halves import Halves
from tests.support.inprocess import Parts, Remoting, Text
from tests.support.messages import send_header

TOPIC: Final = "once"


def _nothing() -> None:
    """Answer nobody."""


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data", topics={TOPIC: {"partitions": 1, "dedupe_window_ms": 60_000}})
    timers = Timers(parts.context, parts.turns, run_here)
    dedupe = Dedupe(parts.context, parts.turns, timers.parked_handle, run_here)
    dedupe.start()
    gevent.sleep(0)  # it reads an empty log
    halves = HalfMessages(parts.context, parts.turns, Halves(parts.store, tmp_path / "halves", 1000), dedupe)
    sends = SendHandler(parts.context, parts.turns, halves, timers, dedupe, Partitions(parts.context, parts.turns))
    parts.endpoint.answer(sends.requests())
    puts = PutHandler(parts.context, parts.turns)
    later = LaterHandler(parts.context, puts, timers, Cancels(timers, dedupe, run_here), dedupe)
    parts.endpoint.answer_text(later.commands(), puts.puts, puts.puts)
    for _ in range(MOST_ASKED):
        dedupe.asking.ask(ColdIds([]), lambda: _nothing)
    yield parts
    dedupe.stop()
    dedupe.close()
    timers.close()
    parts.close()


def test_a_send_that_is_refused_is_not_owed(parts: Parts) -> None:
    """D-2: else its connection would never be idle again, and in the end not be read any more."""
    client = Remoting(parts)
    client.send(Request.SEND_MESSAGE, send_header(TOPIC, "UNIQ_KEY\x01a\x02"), bytes(1000))
    (answer,) = client.answers()
    assert answer.code == Response.SYSTEM_BUSY
    assert (client._session.owed, client._session.owed_bytes) == (0, 0)
    assert parts.context.topic_counters(TOPIC).put_failed.count == 1


def test_a_put_that_is_refused_is_not_owed(parts: Parts) -> None:
    """D-2: and counts as refused."""
    client = Text(parts)
    assert client.send(b"put once 0 1 0 id=a 7\r\nx").startswith(b"result 503 ")
    assert client._session.owed == 0
    assert parts.context.topic_counters(TOPIC).put_failed.count == 1
