"""The load generator's remoting protocol: frames as Java clients send them, whose numbers differ in every request."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from benchmarks.figures import Load, MeasurementError
from benchmarks.programs import LoadPlan, run_load
from metaq.protocol.batch import BatchItem, decode_batch
from metaq.protocol.codes import Request, Response
from metaq.protocol.properties import KEYS, UNIQUE_KEY, parse
from metaq.protocol.remoting import FrameReader, RemotingCommand, encode_response
from tests.support.broker import BrokerProcess

pytestmark = pytest.mark.partner("gcc")

MORE_THAN_ONE_PATTERN: Final = 9000
"""The load generator prepares 1 MiB of requests: about 3,500 of the smallest."""


class SendServer:
    """Answers every frame on one connection with the given code, and keeps what came."""

    def __init__(self, code: int) -> None:
        self.requests: list[RemotingCommand] = []
        self._code = code
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    @contextmanager
    def serving(self) -> Iterator["SendServer"]:
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield self
        finally:
            thread.join(timeout=60)
            self._listener.close()
        assert not thread.is_alive()

    def _serve(self) -> None:
        reader = FrameReader()
        with self._listener.accept()[0] as connection:
            while data := connection.recv(65536):
                frames = reader.receive(data)
                assert reader.error is None
                self.requests += frames
                fields = {"msgId": "7F00000100001FBB0000000000000000", "queueId": "0", "queueOffset": "1"}
                connection.sendall(b"".join(encode_response(frame, self._code, fields) for frame in frames))

    def load(self, protocol: str, plan: LoadPlan) -> Load:
        """The figures of one run."""
        with self.serving():
            return run_load(protocol, self.port, plan)


def test_a_bare_send() -> None:
    server = SendServer(Response.SUCCESS)
    figures = server.load("remoting-send", LoadPlan(1, 100, 16, 60.0, 0.0, count=MORE_THAN_ONE_PATTERN))
    assert figures.messages == figures.requests == len(server.requests) == MORE_THAN_ONE_PATTERN
    assert figures.bytes == sum(len(request.body) for request in server.requests) == 16 * MORE_THAN_ONE_PATTERN
    assert {request.code for request in server.requests} == {Request.SEND_MESSAGE_V2}
    assert {request.fields["b"] + request.fields["i"] for request in server.requests} == {"bench"}
    assert len({request.opaque for request in server.requests}) == MORE_THAN_ONE_PATTERN


def test_a_send_with_properties() -> None:
    server = SendServer(Response.SUCCESS)
    server.load("remoting-send-keyed", LoadPlan(1, 16, 128, 60.0, 0.0, count=MORE_THAN_ONE_PATTERN))
    sent = [parse(request.fields["i"]) for request in server.requests]
    assert all((pairs["WAIT"], pairs["TAGS"], len(pairs[UNIQUE_KEY])) == ("true", "paid", 32) for pairs in sent)
    assert len({pairs[UNIQUE_KEY] for pairs in sent}) == len({pairs[KEYS] for pairs in sent}) == MORE_THAN_ONE_PATTERN


@pytest.mark.parametrize("keyed", [False, True])
def test_a_batch(keyed: bool) -> None:
    server = SendServer(Response.SUCCESS)
    protocol = "remoting-batch-keyed" if keyed else "remoting-batch"
    figures = server.load(protocol, LoadPlan(1, 4, 128, 60.0, 0.0, count=32 * 400, batch=32))
    assert (figures.requests, figures.messages, figures.batch) == (400, 32 * 400, 32)
    assert {(request.code, request.fields["m"]) for request in server.requests} == {(Request.SEND_BATCH_MESSAGE, "true")}
    items = [item for request in server.requests for item in decode_batch(request.body)]
    assert {len(item.body) for item in items} == {128}
    if keyed:
        sent = [parse(item.properties) for item in items]
        assert {pairs["TAGS"] for pairs in sent} == {"paid"}
        assert len({pairs[UNIQUE_KEY] for pairs in sent}) == len(items) == figures.messages
    else:
        assert items == [BatchItem(0, items[0].body, "")] * figures.messages


def test_a_refused_send_makes_the_figure_invalid() -> None:
    server = SendServer(Response.NO_PERMISSION)
    with pytest.raises(MeasurementError, match=r"20 of 20 replies were errors, the first: .{1,3}code.{1,3}16"):
        server.load("remoting-send", LoadPlan(1, 4, 8, 60.0, 0.0, count=20))


def test_pulls_walk_the_whole_partition_and_start_over(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        run_load("metaq-put", broker.port, LoadPlan(1, 16, 1000, 60.0, 0.0, count=500))
        once = run_load("remoting-pull", broker.port, LoadPlan(1, 1, 1000, 60.0, 0.0, count=500, batch=32))
        assert (once.messages, once.requests, once.wraps) == (500, 16, 0)
        assert once.bytes == 500 * 1000
        again = run_load("remoting-pull", broker.port, LoadPlan(1, 1, 1000, 60.0, 0.0, count=1000, batch=32))
        assert (again.messages, again.wraps) == (1000, 1)
        with pytest.raises(MeasurementError, match="a get at 0 was answered: a record of another size"):
            run_load("remoting-pull", broker.port, LoadPlan(1, 1, 999, 60.0, 0.0, count=1))
