"""Messages without a body: those that wait for the disk count in the account of memory, whatever the protocol."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.halfmessages import HalfMessages
from metaq.engine.timers.timers import Timers
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.server.remoting.sending.outcome import SENT_BYTES
from metaq.server.remoting.sending.partitions import Partitions
from metaq.server.remoting.sending.send import SendHandler
from metaq.server.text.put import PutHandler
from metaq.server.text.session import REPLY_BYTES
from metaq.server.wire.session import GRAIN
from metaq.store.files.filecache import run_here
from metaq.tx.halves import Halves
from tests.support.inprocess import Parts, Remoting, Text
from tests.support.messages import send_header

TOPIC: Final = "orders"
MANY: Final = 200


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data", topics={TOPIC: {"partitions": 1}})
    timers = Timers(parts.context, parts.turns, run_here)
    dedupe = Dedupe(parts.context, parts.turns, timers.parked_handle, run_here)
    halves = HalfMessages(parts.context, parts.turns, Halves(parts.store, tmp_path / "halves", 1000), dedupe)
    sends = SendHandler(parts.context, parts.turns, halves, timers, dedupe, Partitions(parts.context, parts.turns))
    parts.endpoint.answer(sends.requests())
    parts.endpoint.answer_runs({Request.SEND_MESSAGE_V2: sends.sends})
    puts = PutHandler(parts.context, parts.turns).puts
    parts.endpoint.answer_text({}, puts, puts)
    yield parts
    dedupe.close()
    timers.close()
    parts.close()


def _send_alone(parts: Parts) -> Callable[[], int]:
    """Send one by one, with the code that always goes the long way."""
    client = Remoting(parts)
    for _ in range(MANY):
        client.send(Request.SEND_MESSAGE, send_header(TOPIC))
    return lambda: sum(answer.code == Response.SUCCESS for answer in client.answers())


def _send_together(parts: Parts) -> Callable[[], int]:
    client, fields = Remoting(parts), with_letters(encode_header(send_header(TOPIC)))
    client.send_together(Request.SEND_MESSAGE_V2, [fields] * MANY)
    return lambda: sum(answer.code == Response.SUCCESS for answer in client.answers())


def _put(parts: Parts) -> Callable[[], int]:
    client = Text(parts)
    client.send(b"put orders 0 0 0\r\n" * MANY)
    return lambda: client.answers().count(b"result 200 ")


@pytest.mark.parametrize(("send", "each"), [(_send_alone, SENT_BYTES), (_send_together, SENT_BYTES), (_put, REPLY_BYTES)])
def test_what_has_no_body_counts_while_it_waits(parts: Parts, send: Callable[[Parts], Callable[[], int]], each: int) -> None:
    """SG-089: so that they, too, are limited for each connection and for all; nothing is left of it afterwards."""
    answered = send(parts)
    memory = parts.endpoint.memory
    assert MANY * each - GRAIN < memory.held <= MANY * each
    parts.end_turn()
    assert answered() == MANY
    assert abs(memory.held) < GRAIN
    for session in list(parts.endpoint.sessions):
        assert (session.owed, session.owed_bytes) == (0, 0)
        session.close()
    assert memory.held == 0
