"""The remoting benchmark: the load generator's frames, held pulls, many topics, our client, and the checks."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.consuming import consume
from benchmarks.figures import Load, MeasurementError, Verdict, percentile
from benchmarks.holding import Holding, holder, measure_holding
from benchmarks.link import Link
from benchmarks.peers import Level, metaq
from benchmarks.programs import LoadPlan, run_load
from benchmarks.suites.remoting import SENDS, held_checks, topic_checks
from benchmarks.topics import Serving, Topics, measure_topics
from metaq.protocol.properties import KEYS, UNIQUE_KEY, parse
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_response
from metaq.protocol.remoting.sending.batch import BatchItem, decode_batch
from tests.support.broker import BrokerProcess

pytestmark = pytest.mark.partner("gcc")

SMALL: Final = ("--segment-bytes", "33554432")
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


@given(st.lists(st.floats(min_value=0, max_value=1e9), min_size=1), st.floats(min_value=0, max_value=1))
def test_a_percentile_is_a_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) <= max(0.0, share * len(values))
    assert (percentile(values, 0), percentile(values, 1)) == (min(values), max(values))


def figures(rate: float) -> Load:
    numbers = dict.fromkeys(Load.model_fields, 1)
    return Load.model_validate({**numbers, "messages_per_second": rate, "protocol": "remoting-send", "first_error": ""})


def test_every_way_of_sending_is_compared_with_text_puts() -> None:
    rates = {"send, bare": 40.0, "send, as Java does": 24.0, "batch of 32, bare": 200.0}
    pairs = {name: [(figures(rate * part), figures(100 * part)) for part in (0.5, 1.0, 3.0)] for name, rate in rates.items()}
    verdicts = {check.name: (check.must_verdict, check.aim_verdict) for check in SENDS.checks(pairs)}
    assert verdicts == {
        "send, bare, 128 B: of text put": (Verdict.HELD, Verdict.NOT_REACHED),
        "send, as Java does, 128 B: of text put": (Verdict.MISSED, Verdict.NOT_REACHED),
        "batch of 32, bare, 128 B: of text put": (Verdict.HELD, Verdict.REACHED),
        "batch of 32, as Java does, 128 B: of text put": (Verdict.NOT_MEASURED, Verdict.NOT_MEASURED),
    }


def test_of_held_pulls_the_slowest_wake_up_of_a_round_counts() -> None:
    calm, busy = Holding(3000.0, [100.0, 4000.0, 200.0]), Holding(13_000.0, [6000.0, 100.0])
    assert [check.must_verdict for check in held_checks([calm, busy, calm])] == [Verdict.HELD, Verdict.HELD]
    assert [check.must_verdict for check in held_checks([busy])] == [Verdict.MISSED, Verdict.MISSED]
    assert [check.must_verdict for check in held_checks([])] == [Verdict.NOT_MEASURED, Verdict.NOT_MEASURED]


def test_of_two_starts_the_worse_counts() -> None:
    good, slow, large = (
        Serving(started_seconds=seconds, started_bytes=1, used_bytes=size, used_descriptors=files)
        for seconds, size, files in ((1.0, 100_000_000, 500), (6.0, 100_000_000, 500), (1.0, 300_000_000, 700))
    )
    verdicts = [
        [check.must_verdict is Verdict.HELD for check in topic_checks("many", [Topics(1.0, stopped, killed)])]
        for stopped, killed in ((good, good), (good, slow), (large, good))
    ]
    assert verdicts == [[True, True, True], [False, True, True], [True, False, False]]


@pytest.mark.slow
def test_held_pulls_are_woken_one_by_one(tmp_path: Path) -> None:
    with holder(SMALL).running(tmp_path / "server") as server:
        found = measure_holding(server, pulls=40, wakes=50)
    assert len(found.wakes_us) == 50
    assert min(found.wakes_us) > 0


@pytest.mark.slow
def test_many_topics_are_there_after_a_stop_and_a_kill(tmp_path: Path) -> None:
    found = measure_topics(metaq(Level.MEMORY, SMALL), tmp_path / "server", topics=3)
    topics = {folder.name for folder in (tmp_path / "server" / "data" / "consumequeue").iterdir()}
    assert {"topic-00000", "topic-00001", "topic-00002"} <= topics
    assert all(
        serving.started_seconds > 0 and serving.started_bytes > 0 and serving.used_descriptors > 0
        for serving in (found.stopped, found.killed)
    )


def test_our_client_reads_a_topic_again_and_again(tmp_path: Path) -> None:
    with metaq(Level.MEMORY, SMALL).running(tmp_path / "server") as server:
        run_load("metaq-put", server.port, LoadPlan(1, 5, 100, 60.0, 0.0, count=5))
        consumed = consume(server, "bench", 100, seconds=1.0, warmup_seconds=0.1)
        with pytest.raises(MeasurementError, match="a message that does not have 101 bytes"):
            consume(server, "bench", 101, seconds=0.5, warmup_seconds=0.0)
    assert consumed.messages > 5
    assert consumed.mb_per_second == pytest.approx(consumed.messages_per_second * 100 / 1e6)


def test_a_broker_that_answers_with_an_error_ends_the_measurement(tmp_path: Path) -> None:
    with metaq(Level.MEMORY, SMALL).running(tmp_path / "server") as server, Link(server.port) as link:
        with pytest.raises(MeasurementError, match="a request was answered with 17"):
            link.ask_all([link.pull("absent", 0, 0, 0)])
        with pytest.raises(MeasurementError, match="a request was answered with 1:"):
            link.ask_all([link.message("BenchmarkTest", 1024, b"")])
