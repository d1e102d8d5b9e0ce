"""What one sender sends to a topic with a window keeps its order while the index of ids is asked, without sockets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.dedupe.asking import MOST_ASKED, ColdIds
from metaq.protocol.properties import TIMER_DELAY
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import SendMessage, encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from tests.server.remoting.test_batch_runs import TOPIC, Sends
from tests.support.broker import wait_until
from tests.support.inprocess import Remoting
from tests.support.messages import send_header

DEADLINE_S: Final = 30.0
PLAIN: Final = send_header(TOPIC), b"x"
WITHOUT_ID: Final[dict[str, tuple[SendMessage, bytes]]] = {
    "no properties": PLAIN,
    "keys": (send_header(TOPIC, "KEYS\x01k\x02"), b"x"),
    "a delay": (send_header(TOPIC, f"{TIMER_DELAY}\x0160000\x02"), b"x"),
    "a batch": (send_header(TOPIC)._replace(batch=True), encode_batch([BatchItem(0, b"x", "")] * 2)),
}


@pytest.fixture(params=[False, True], ids=["one by one", "runs"])
def sends(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sends]:
    sends = Sends(tmp_path / "data", has_runs=request.param)
    yield sends
    sends.close()


def _nothing() -> None:
    """Answer nobody."""


@pytest.mark.parametrize("other", WITHOUT_ID.values(), ids=WITHOUT_ID)
def test_a_message_without_an_id_comes_after_those_that_wait(sends: Sends, other: tuple[SendMessage, bytes]) -> None:
    """D-2: by its place and by its answer."""
    client = Remoting(sends.parts)
    answers: list[RemotingCommand] = []

    def send(header: SendMessage, body: bytes) -> None:
        code = Request.SEND_BATCH_MESSAGE if header.batch else Request.SEND_MESSAGE_V2
        client.send_fields(code, with_letters(encode_header(header)), body)

    def all_answered() -> bool:
        sends.parts.end_turn()
        answers.extend(client.answers())
        return len(answers) == 3

    sends.asking.ask(ColdIds([]), lambda: _nothing)
    send(send_header(TOPIC, "UNIQ_KEY\x01new\x02"), b"x")
    send(*other)
    send(*PLAIN)
    wait_until(all_answered, DEADLINE_S, "all is stored")
    assert [answer.opaque for answer in answers] == [0, 1, 2]
    assert [answer.code for answer in answers] == [Response.SUCCESS] * 3
    places = [int(answer.fields["queueOffset"]) for answer in answers]
    assert places[0] == 0 and places[2] == sends.parts.store.queue(TOPIC, 0).next - 1


def test_where_as_many_wait_as_may_a_message_without_an_id_is_stored(sends: Sends) -> None:
    """D-2: it is never refused."""
    client = Remoting(sends.parts)
    for _ in range(MOST_ASKED):
        sends.asking.ask(ColdIds([]), lambda: _nothing)
    client.send_fields(Request.SEND_MESSAGE_V2, with_letters(encode_header(PLAIN[0])), b"x")
    sends.parts.end_turn()
    assert [answer.code for answer in client.answers()] == [Response.SUCCESS]
