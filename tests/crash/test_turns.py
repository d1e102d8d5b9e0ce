"""A sample of the turns run, and one turn that once ended the broker."""

import os
import signal
from pathlib import Path

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.text.writing import write_line
from tests.crash.turns import TextSpeaker, run
from tests.support.admin import connect, fields_of
from tests.support.broker import BrokerProcess


def test_what_many_connections_say_in_one_turn() -> None:
    """SG-090, SG-044: all of it is answered, whatever takes away what it is about."""
    result = run(seed=0, count=1)
    assert result.details["commands"] > 500
    assert result.details["broken"] > 5


def test_a_topic_is_made_and_deleted_in_one_turn(tmp_path: Path) -> None:
    """MQ-006, SG-005: both are answered, whichever comes first."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client:
        speaker = TextSpeaker(broker)
        for opaque in range(10):
            speaker.missing[opaque] = "create"
            speaker.socket.sendall(write_line("create", "T", 1, opaque))
            while speaker.missing:
                speaker.take()
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                speaker.missing[-opaque - 1] = "create"
                if opaque % 2:
                    speaker.socket.sendall(write_line("create", "T", 1, -opaque - 1))
                deleted = client.send(Request.DELETE_TOPIC_IN_BROKER, fields_of(topic="T"))
                if not opaque % 2:
                    speaker.socket.sendall(write_line("create", "T", 1, -opaque - 1))
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            assert client.response(deleted).code == Response.SUCCESS
            while speaker.missing:
                speaker.take()
        speaker.socket.close()
        assert broker.terminate() == 0
