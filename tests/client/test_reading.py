"""Who reads a connection: callers that wait, or the connection's own thread; and what the one leaves to the other."""

import contextlib
import functools
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client.connecting.link import Link, Links
from metaq.client.connecting.presence import Presence
from metaq.client.connecting.transport import RemotingRequest
from metaq.client.connecting.writing import LARGE_BYTES, MOST_WAITING, LinkWriter
from metaq.errors import ConnectionFailed, NotConnected, RequestTimeout
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand, encode_response
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply

DEADLINE_S = 60.0
ECHO, HELD = Request.GET_KV_CONFIG, Request.GET_MAX_OFFSET
PING = RemotingRequest(ECHO, None, b"ping")


def later(seconds: float = DEADLINE_S) -> float:
    return time.monotonic() + seconds


def no_answer(request: RemotingCommand) -> None:
    return None


class Reading:
    """The connection to a server that echoes, and answers held requests when it is told to."""

    def __init__(self, server: FakeRemoting, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.asked: queue.SimpleQueue[RemotingCommand] = queue.SimpleQueue()
        self.links = Links(lambda address, request, answer: self.asked.put(request), lambda address: None)
        self.reader = 0
        """The thread that has taken the last answer of a caller."""
        heard = Presence.heard

        def spy(presence: Presence, address: str) -> None:
            self.reader = threading.get_ident()
            heard(presence, address)

        monkeypatch.setattr(Presence, "heard", spy)

    def call(self, request: RemotingRequest = PING, seconds: float = DEADLINE_S) -> RemotingCommand:
        return self.links.call(self.server.address, request, later(seconds))

    def submit(self, request: RemotingRequest, done: Callable[[Any], None]) -> None:
        self.links.submit(self.server.address, request, later(), done)

    def lead(self) -> None:
        """Call until the caller reads its answers itself: at once again, since the connection's thread waits only a moment."""
        self.reader, end = 0, later()
        while self.reader != threading.get_ident():
            assert time.monotonic() < end, "the caller never reads"
            self.call()

    def start(self, request: RemotingRequest, seconds: float = DEADLINE_S) -> "queue.SimpleQueue[object]":
        """Make a held call on a thread of its own, whose outcome comes in the queue, and return when the server has it."""
        outcome: queue.SimpleQueue[object] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put(self.call(request, seconds))
            except ConnectionFailed as error:
                outcome.put(error)
            except RequestTimeout as error:
                outcome.put(error)

        before = self.server.count(HELD)
        threading.Thread(target=run, daemon=True).start()
        wait_until(lambda: self.server.count(HELD) > before, DEADLINE_S, "the request arrives")
        return outcome

    def answer(self, number: int, body: bytes, *slices: int) -> Iterator[None]:
        """Answer a held request, in slices that end at these bytes; the next slice goes at each step."""
        held = [request for request in self.server.requests if request.code == HELD][number]
        frame = encode_response(held, 0, body_size=len(body)) + body
        for begin, end in zip((0, *slices), (*slices, len(frame)), strict=True):
            self.server.connections[-1].sendall(frame[begin:end])
            yield


def held(body: bytes = b"") -> RemotingRequest:
    return RemotingRequest(HELD, None, body)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reading]:
    echo: Callable[[RemotingCommand], Reply] = lambda request: Reply(body=request.body)  # noqa: E731
    with FakeRemoting(get_kv_config=echo, get_max_offset=no_answer) as server:
        made = Reading(server, monkeypatch)
        yield made
        made.links.close()


def test_a_caller_that_asks_again_reads_its_answer_itself(reading: Reading) -> None:
    """SG-091: no other thread has to wake for it."""
    reading.lead()


def test_a_caller_that_reads_runs_no_callback(reading: Reading) -> None:
    """SG-092: it may hold the lock that a callback takes; the connection's own thread runs it, while the caller still waits."""
    reading.lead()
    waiting = reading.start(held())
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    reading.submit(PING, lambda outcome: told.put(threading.current_thread().name))
    assert told.get(timeout=DEADLINE_S).startswith("metaq-link-")
    assert waiting.empty()
    list(reading.answer(0, b"done"))
    outcome = waiting.get(timeout=DEADLINE_S)
    assert isinstance(outcome, RemotingCommand) and outcome.body == b"done"


def test_a_request_of_the_broker_is_read_when_no_caller_reads_any_more(reading: Reading) -> None:
    """SG-096: also right after a caller has read, and while one reads."""
    reading.lead()
    reading.server.push(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"n": "1"}, oneway=True)
    assert reading.asked.get(timeout=DEADLINE_S).fields["n"] == "1"
    reading.start(held())
    reading.server.push(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"n": "2"}, oneway=True)
    assert reading.asked.get(timeout=DEADLINE_S).fields["n"] == "2"


def test_a_caller_that_times_out_leaves_reading_to_those_who_wait(reading: Reading) -> None:
    """SG-134: nobody who waits is forgotten."""
    reading.lead()
    short = reading.start(held(), seconds=0.5)
    long = reading.start(held())
    assert isinstance(short.get(timeout=DEADLINE_S), RequestTimeout)
    list(reading.answer(1, b"for the second"))
    outcome = long.get(timeout=DEADLINE_S)
    assert isinstance(outcome, RemotingCommand) and outcome.body == b"for the second"
    assert len(reading.server.connections) == 1


def test_the_next_reader_goes_on_in_the_middle_of_a_frame(reading: Reading) -> None:
    """SG-093: what a caller has read of an answer that comes too late is not lost, and the answer itself is dropped."""
    reading.lead()
    short = reading.start(held(), seconds=0.5)
    slices = reading.answer(0, b"late" * 10, 3, 20)
    next(slices)
    assert isinstance(short.get(timeout=DEADLINE_S), RequestTimeout)
    next(slices)
    list(slices)
    assert reading.call().body == b"ping"
    assert len(reading.server.connections) == 1


@pytest.mark.parametrize("end", ["close", "hang up"])
def test_a_connection_that_ends_fails_the_caller_that_reads(reading: Reading, end: str) -> None:
    """SG-092: whichever side has ended it, with the reason; and those who wait beside."""
    reading.lead()
    outcomes = [reading.start(held()), reading.start(held())]
    reading.submit(held(), outcomes[0].put)
    if end == "close":
        reading.links.close()
    else:
        reading.server.hang_up()
    for outcome in (outcomes[0], outcomes[0], outcomes[1]):
        error = outcome.get(timeout=DEADLINE_S)
        assert isinstance(error, ConnectionFailed)
        assert ("the client was closed" if end == "close" else "the other side closed it") in str(error)


def test_an_interrupt_of_a_caller_that_waits_leaves_the_connection_whole(reading: Reading) -> None:
    """SG-134: Ctrl-C ends the call and nothing else."""
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.5, functools.partial(signal.pthread_kill, main, signal.SIGINT))
    reading.lead()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        reading.call(held())
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    reading.submit(held(), told.put)
    wait_until(lambda: reading.server.count(HELD) == 2, DEADLINE_S, "the request arrives")
    list(reading.answer(1, b"whole"))
    outcome = told.get(timeout=DEADLINE_S)
    assert isinstance(outcome, RemotingCommand) and outcome.body == b"whole"
    assert reading.call().body == b"ping"
    assert len(reading.server.connections) == 1


def test_callers_and_callbacks_of_many_threads(reading: Reading) -> None:
    """SG-097: whoever reads, each gets its own answer; some give up in between."""
    wrong: list[object] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for number in range(60):
            body = b"%d-%d" % (seed, number)
            match dice.randrange(4):
                case 0:
                    with contextlib.suppress(RequestTimeout):
                        reading.call(held(), seconds=0.002)
                case 1:
                    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
                    reading.submit(RemotingRequest(ECHO, None, body), told.put)
                    wrong.extend({told.get(timeout=DEADLINE_S).body} - {body})
                case _:
                    wrong.extend({reading.call(RemotingRequest(ECHO, None, body)).body} - {body})

    reading.call()  # those that give up have a connection
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(reading.server.connections) == 1


# -- writing ----------------------------------------------------------------------------------------------------------


class Slow:
    """A stream whose first write waits until it is let go."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.go_on = threading.Event()

    def sendall(self, data: bytes) -> None:
        self.writes.append(data)
        assert self.go_on.wait(DEADLINE_S)


def writer(stream: Slow) -> LinkWriter:
    connection: Any = SimpleNamespace(address="a:1", lost="", outgoing=stream)
    return LinkWriter(connection)


def test_frames_that_wait_are_written_together_and_in_order() -> None:
    """SG-091: one system call for all that came during the one before."""
    stream = Slow()
    one = writer(stream)
    one.soon(b"first.", later())
    wait_until(lambda: bool(stream.writes), DEADLINE_S, "the first is written")
    for number in range(100):
        one.soon(b"%d." % number, later())
    stream.go_on.set()
    one.write(b"last.", later())
    wanted = b"first." + b"".join(b"%d." % number for number in range(100)) + b"last."
    wait_until(lambda: b"".join(stream.writes) == wanted, DEADLINE_S, "all is written")
    assert len(stream.writes) <= 3


def test_a_slow_connection_slows_whoever_sends() -> None:
    """P14: what waits is bounded; at the bound, and with a large frame, the caller waits itself, up to its deadline."""
    stream = Slow()
    one = writer(stream)
    one.soon(b"first", later())
    wait_until(lambda: bool(stream.writes), DEADLINE_S, "the first is written")
    with pytest.raises(RequestTimeout, match="accepts no data"):
        one.soon(bytes(LARGE_BYTES), later(0.01))
    for _ in range(MOST_WAITING):
        one.soon(b".", later())
    with pytest.raises(RequestTimeout, match="accepts no data"):
        one.soon(b"too many", later(0.01))
    stream.go_on.set()


def test_a_writer_of_a_closed_socket_says_that_the_connection_is_lost() -> None:
    """SG-092: also when the time limit of the write is another one than before."""
    outgoing = socket.socket()
    outgoing.close()
    connection: Any = SimpleNamespace(
        address="a:1", lost="it is over", outgoing=outgoing, failure=lambda: ConnectionFailed("it is over")
    )
    with pytest.raises(NotConnected, match="it is over"):
        LinkWriter(connection).write(b"frame", later(2.0))


def outcome_of(link: Link, *, soon: bool) -> object:
    """The outcome of a request, whether it is raised, or reported by the thread that ends the connection."""
    outcomes: list[object] = []
    try:
        link.submit(PING, later(), outcomes.append, soon=soon)
    except ConnectionFailed as error:
        outcomes.append(error)
    wait_until(lambda: bool(outcomes), DEADLINE_S, "it fails")
    (outcome,) = outcomes
    return outcome


def test_what_a_caller_does_meanwhile(reading: Reading) -> None:
    """It is called when the request is written, and before the answer is waited for; not when nothing is written."""
    reading.call()

    def meanwhile() -> None:
        wait_until(lambda: reading.server.count(HELD) == 1, DEADLINE_S, "the request arrives")
        next(reading.answer(0, b"late"), None)

    assert reading.links.call(reading.server.address, held(), later(), meanwhile).body == b"late"
    (link,) = reading.links._links.values()
    link.lose("it is over")
    with pytest.raises(NotConnected):
        link.call(held(), later(), meanwhile)
    assert reading.server.count(HELD) == 1


def test_nothing_is_in_flight_on_a_lost_connection(reading: Reading) -> None:
    """SG-092: a request that would be written soon is refused as one that is written at once."""
    reading.call()
    (link,) = reading.links._links.values()
    link.lose("it is over")
    for soon in (False, True):
        outcome = outcome_of(link, soon=soon)
        assert isinstance(outcome, ConnectionFailed) and "it is over" in str(outcome)
    with pytest.raises(NotConnected):
        link.call(PING, later())
    assert not link.in_flight()


def test_nobody_asks(reading: Reading) -> None:
    """P4: an idle connection wakes no thread: its own one waits for the socket again."""
    reading.lead()
    (link,) = reading.links._links.values()
    wait_until(lambda: not link._reader._rests, DEADLINE_S, "its own thread reads again")
