"""The connections of the client library: sharing, deadlines, loss."""

import contextlib
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from metaq.address import Address, parse_address
from metaq.client.connecting.access import Access, BlockingStream
from metaq.client.connecting.connection import STALL_S
from metaq.client.connecting.link import Link, Links, _Place
from metaq.client.connecting.transport import ClientAnswer, Outcome, RemotingRequest
from metaq.errors import BadRequest, ClientClosed, ConnectionFailed, NotConnected, RequestTimeout
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply

DEADLINE_S = 60.0
NEVER = RemotingRequest(Request.GET_MAX_OFFSET)
ECHO = Request.GET_KV_CONFIG


def echo(request: RemotingCommand) -> Reply:
    return Reply(body=request.body)


def asked_nothing(address: str, request: RemotingCommand, answer: Callable[[ClientAnswer], None]) -> None:
    answer(ClientAnswer(1, remark=f"{request.code} was not expected"))


def later(seconds: float = DEADLINE_S) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def server() -> Iterator[FakeRemoting]:
    with FakeRemoting(get_kv_config=echo, get_max_offset=lambda request: None) as fake:
        yield fake


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links(asked_nothing, lambda address: None)
    yield links
    links.close()


def test_threads_share_one_connection_and_each_gets_its_own_answer(server: FakeRemoting, links: Links) -> None:
    """SG-097, SG-091: requests of many threads travel on one connection, matched by opaque."""
    wrong: list[bytes] = []

    def ask(thread: int) -> None:
        for number in range(50):
            body = f"{thread}-{number}".encode()
            if links.call(server.address, RemotingRequest(ECHO, None, body), later()).body != body:
                wrong.append(body)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(server.connections) == 1
    assert server.count(ECHO) == 400


def test_answers_may_come_in_any_order(server: FakeRemoting, links: Links) -> None:
    """SG-097: a request that waits does not hold up those behind it."""
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    links.submit(server.address, NEVER, later(), done.put)
    assert links.call(server.address, RemotingRequest(ECHO, None, b"behind it"), later()).body == b"behind it"
    assert done.empty()


def test_a_time_out_leaves_the_other_requests_alone(server: FakeRemoting, links: Links) -> None:
    """SG-134: only the late request fails, and the connection stays."""
    held: queue.SimpleQueue[object] = queue.SimpleQueue()
    links.submit(server.address, NEVER, later(), held.put)
    with pytest.raises(RequestTimeout, match="GET_MAX_OFFSET from 127"):
        links.call(server.address, NEVER, later(0.01))
    links.expire()
    assert held.empty()
    assert links.call(server.address, RemotingRequest(ECHO, None, b"x"), later()).body == b"x"
    assert len(server.connections) == 1


def test_requests_without_a_waiting_thread_expire(server: FakeRemoting, links: Links) -> None:
    """RD-022: an asynchronous call gets an outcome even when no answer comes."""
    done: queue.SimpleQueue[object] = queue.SimpleQueue()
    links.submit(server.address, NEVER, later(0.2), done.put)

    def expired() -> bool:
        links.expire()
        return not done.empty()

    wait_until(expired, DEADLINE_S, "the request expires")
    assert isinstance(done.get(), RequestTimeout)


def test_nothing_is_sent_after_its_deadline(server: FakeRemoting, links: Links) -> None:
    """SG-134: a send that has timed out is not stored by a late attempt."""
    links.call(server.address, RemotingRequest(ECHO), later())
    with pytest.raises(RequestTimeout, match="was over before it was sent"):
        links.call(server.address, NEVER, later(-0.01))
    links.call(server.address, RemotingRequest(ECHO), later())
    assert server.count(Request.GET_MAX_OFFSET) == 0


def test_writing_ends_at_the_deadline(links: Links) -> None:
    """SG-134: when the other side reads nothing; the rest of a frame cannot be left out, so the connection is given up."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host, port = deaf.getsockname()
        began = time.monotonic()
        with pytest.raises(ConnectionFailed, match="sending failed: timed out"):
            links.call(f"{host}:{port}", RemotingRequest(ECHO, None, bytes(1 << 26)), later(0.5))
        assert time.monotonic() - began < STALL_S / 2


def test_a_host_that_vanishes_is_noticed(server: FakeRemoting) -> None:
    """SG-092: without a reset, the system would send again for a quarter of an hour; who only receives would never know."""
    link = Link(server.address, DEADLINE_S, asked_nothing)
    with socket.socket(fileno=os.dup(link._connection.outgoing.fileno())) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        assert [connection.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [10, 10]
    link.lose("the test is over")


def test_a_lost_connection_fails_what_is_in_flight_and_is_opened_again(server: FakeRemoting, links: Links) -> None:
    """SG-092: the loss is told to every request, and the next request connects anew."""
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    for _ in range(3):
        links.submit(server.address, NEVER, later(), outcomes.put)
    wait_until(lambda: server.count(Request.GET_MAX_OFFSET) == 3, DEADLINE_S, "the requests arrive")
    server.hang_up()
    assert [type(outcomes.get(timeout=DEADLINE_S)) for _ in range(3)] == [ConnectionFailed] * 3
    assert links.call(server.address, RemotingRequest(ECHO, None, b"again"), later()).body == b"again"


def test_who_sends_calls_no_callback() -> None:
    """SG-092: a consumer asks for more while it holds the lock that the callback of what it has asked before waits for."""
    sender = threading.get_ident()
    told: queue.SimpleQueue[tuple[object, int]] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        link = Link(f"{host}:{port}", DEADLINE_S, asked_nothing)
        served, _ = silent.accept()

        def ask() -> None:
            link.submit(NEVER, later(), lambda outcome: told.put((outcome, threading.get_ident())))

        with served:
            ask()
            link._connection.outgoing.shutdown(socket.SHUT_WR)  # now sending fails, and whoever reads has not heard of it
            with contextlib.suppress(ConnectionFailed):  # or it is told, as the first one is
                ask()
            outcome, thread = told.get(timeout=DEADLINE_S)
    assert isinstance(outcome, ConnectionFailed) and "sending failed" in str(outcome)
    assert thread != sender


def test_a_refused_connection_names_the_address(links: Links) -> None:
    """P14: what was tried, and what the system said."""
    with FakeRemoting() as gone:
        address = gone.address
    with pytest.raises(ConnectionFailed, match=rf"cannot connect to {address}: .*refused"):
        links.call(address, NEVER, later())


@pytest.mark.parametrize(("short_of", "reason"), [("descriptor", "Too many open files"), ("thread", "can't start new thread")])
def test_a_process_that_is_short_of_something_connects_later(
    server: FakeRemoting, links: Links, monkeypatch: pytest.MonkeyPatch, short_of: str, reason: str
) -> None:
    """SG-092: until then it is as if the broker could not be reached, so that all who ask try again; nothing stays open."""
    usual_connect, usual_start, opened = Access.connect, threading.Thread.start, list[BlockingStream]()

    def connect(access: Access, address: Address, timeout_s: float) -> BlockingStream:
        opened.append(usual_connect(access, address, timeout_s))
        return opened[-1]

    def dup(self: socket.socket) -> socket.socket:
        raise OSError(errno.EMFILE, reason)

    def start(self: threading.Thread) -> None:
        if self.name.startswith("metaq-link-"):
            raise RuntimeError(reason)
        usual_start(self)

    with monkeypatch.context() as short:
        short.setattr(Access, "connect", connect)
        if short_of == "descriptor":
            short.setattr(socket.socket, "dup", dup)
        else:
            short.setattr(threading.Thread, "start", start)
        with pytest.raises(NotConnected, match=f"no {short_of} for a connection to {server.address}: {reason}; .*raise the"):
            links.submit(server.address, NEVER, later(), lambda outcome: None)
    assert [stream.fileno() for stream in opened] == [-1]
    assert links.call(server.address, RemotingRequest(ECHO, body=b"x"), later()).body == b"x"


def test_who_sends_writes_itself_while_there_is_no_thread_for_it(
    server: FakeRemoting, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SG-092: each time, until a thread can be started."""
    usual, started, told = threading.Thread.start, list[str](), queue.SimpleQueue[bytes]()

    def start(self: threading.Thread) -> None:
        if self.name.startswith("metaq-write-"):
            raise RuntimeError("can't start new thread")
        usual(self)

    def count(self: threading.Thread) -> None:
        started.append(self.name)
        usual(self)

    def done(outcome: Outcome) -> None:
        assert isinstance(outcome, RemotingCommand)
        told.put(outcome.body)

    def ask(body: bytes) -> bytes:
        links.submit(server.address, RemotingRequest(ECHO, body=body), later(), done, soon=True)
        return told.get(timeout=DEADLINE_S)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", start)
        assert [ask(b"1"), ask(b"2")] == [b"1", b"2"]
    monkeypatch.setattr(threading.Thread, "start", count)
    assert [ask(b"3"), ask(b"4")] == [b"3", b"4"]
    assert started == [f"metaq-write-{server.address}"]


def test_who_waited_while_connecting_failed_does_not_try_again(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-092: threads that wait for a host that has vanished would each wait for all before them; a later one tries."""
    go, tries, errors = threading.Event(), list[float](), queue.SimpleQueue[Exception]()

    def connect(access: Access, address: Address, timeout_s: float) -> BlockingStream:
        tries.append(timeout_s)
        assert go.wait(DEADLINE_S)
        raise NotConnected(f"try {len(tries)}: timed out")

    def ask(deadline: float) -> None:
        try:
            links.call("127.0.0.1:1", NEVER, deadline)
        except NotConnected as error:
            errors.put(error)

    class Turn:
        """A lock that counts who wants it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.wanted: list[float] = []
            self.release = self._lock.release

        def acquire(self, *, timeout: float) -> bool:
            self.wanted.append(timeout)
            return self._lock.acquire(timeout=timeout)

    turn, place = Turn(), _Place()
    place.turn = cast(threading.Lock, turn)
    links._places["127.0.0.1:1"] = place
    monkeypatch.setattr(Access, "connect", connect)
    threads = [threading.Thread(target=ask, args=(later(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(turn.wanted) == 4 and bool(tries), DEADLINE_S, "one connects, and the others wait")
    ask(later(0.01))
    assert "no connection to 127.0.0.1:1 in time" in str(errors.get())
    go.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {str(errors.get(timeout=DEADLINE_S)) for _ in threads} == {"try 1: timed out"}
    ask(later())
    assert "try 2" in str(errors.get())


def test_nonsense_from_the_other_side_ends_the_connection(server: FakeRemoting, links: Links) -> None:
    """SG-093: a stream that is out of step is given up, with the reason."""
    outcomes: queue.SimpleQueue[object] = queue.SimpleQueue()
    links.submit(server.address, NEVER, later(), outcomes.put)
    wait_until(lambda: server.count(Request.GET_MAX_OFFSET) == 1, DEADLINE_S, "the request arrives")
    server.connections[0].sendall(b"\x7f\xff\xff\xff\x00\x00\x00\x00")
    error = outcomes.get(timeout=DEADLINE_S)
    assert isinstance(error, ConnectionFailed)
    assert "2147483647 bytes" in str(error)


def test_a_closed_client_opens_nothing(server: FakeRemoting) -> None:
    links = Links(asked_nothing, lambda address: None)
    links.close()
    with pytest.raises(ClientClosed):
        links.call(server.address, NEVER, later())


def test_a_greeting_is_the_first_frame_of_each_connection(server: FakeRemoting) -> None:
    """SG-054, SG-089: a broker knows a member before it is asked anything else."""
    server.scripts[Request.HEART_BEAT] = lambda request: Reply()
    links = Links(asked_nothing, lambda address: RemotingRequest(Request.HEART_BEAT, None, b"{}"))
    links.call(server.address, RemotingRequest(ECHO), later())
    server.hang_up()
    wait_until(lambda: not any(link.alive for link in links._links.values()), DEADLINE_S, "the loss is noticed")
    links.call(server.address, RemotingRequest(ECHO), later())
    links.close()
    assert [request.code for request in server.requests] == [Request.HEART_BEAT, ECHO] * 2


def test_requests_of_the_broker_are_answered(server: FakeRemoting) -> None:
    """SG-096: they are told apart from answers by the flag alone, whatever their numbers."""
    links = Links(lambda address, request, answer: answer(ClientAnswer(0, b"it is " + request.body)), lambda address: None)
    links.call(server.address, RemotingRequest(ECHO), later())
    opaque = server.push(Request.GET_CONSUMER_RUNNING_INFO, {}, b"well")
    server.push(Request.NOTIFY_CONSUMER_IDS_CHANGED, {}, oneway=True)
    links.call(server.address, RemotingRequest(ECHO), later())
    wait_until(lambda: len(server.requests) == 3, DEADLINE_S, "the answer comes")
    links.close()
    (answer,) = [request for request in server.requests if request.is_response]
    assert (answer.opaque, answer.code, answer.body) == (opaque, 0, b"it is well")


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:port", "host:70000"])
def test_an_address_that_cannot_be_read(address: str) -> None:
    with pytest.raises(BadRequest, match="write host:port"):
        parse_address(address)


def test_addresses() -> None:
    assert parse_address("broker.example:10911") == ("broker.example", 10911)
    assert parse_address("[::1]:9876") == ("::1", 9876)
