"""The connection that several greenlets of a process send requests over: frames stay whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import gevent
import pytest
from gevent import socket
from gevent.event import Event

from metaq.address import Address
from metaq.errors import ConnectionFailed, RequestTimeout
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import FrameReader, encode_response
from metaq.server.registering.outbound import Outbound

DEADLINE_S: Final = 60.0
SOON_S: Final = 0.5
LARGE: Final = bytes(8 << 20)
"""More than the buffers of a connection take."""
SMALL_PIECE: Final = 16 * 1024


@contextmanager
def served(serve: Callable[[Any], object]) -> Iterator[Address]:
    """Yield an address where each connection is served so."""
    listener = socket.socket()  # create_server makes one that would block the loop
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    serving: list[Any] = []

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            serving.append(gevent.spawn(serve, connection))

    accepting = gevent.spawn(accept)
    try:
        yield Address(*listener.getsockname()[:2])
    finally:
        gevent.killall([accepting, *serving])
        listener.close()


def never_read(connection: Any) -> None:
    """Keep the connection open."""
    with connection:
        Event().wait()


def test_a_registry_that_does_not_read() -> None:
    """SG-052: one greenlet is in the middle of a large request; another one's waits for it, and both end in time."""
    ended = Event()
    with served(never_read) as address:
        link = Outbound(address, SOON_S, ended.set)
        large = gevent.spawn(link.call, Request.REGISTER_BROKER, {}, LARGE)
        small = gevent.spawn(link.call, Request.GET_BROKER_CLUSTER_INFO, {})
        gevent.joinall([large, small], timeout=DEADLINE_S)
        for asked in (large, small):
            assert isinstance(asked.exception, RequestTimeout | ConnectionFailed), asked.exception
        assert ended.wait(DEADLINE_S)
        with pytest.raises(ConnectionFailed, match="sent in part only"):
            link.call(Request.GET_BROKER_CLUSTER_INFO, {})
        link.close()


def test_a_time_limit_of_the_caller_ends_what_is_sent_in_part() -> None:
    """SG-052: the next request would be taken for the rest of this one."""
    ended = Event()
    with served(never_read) as address:
        link = Outbound(address, DEADLINE_S, ended.set)
        with pytest.raises(RequestTimeout, match="the caller's"), gevent.Timeout(SOON_S, RequestTimeout("the caller's")):
            link.call(Request.REGISTER_BROKER, {}, LARGE)
        assert ended.wait(DEADLINE_S)
        with pytest.raises(ConnectionFailed, match="sent in part only"):
            link.call(Request.GET_BROKER_CLUSTER_INFO, {})
        link.close()


def test_a_request_without_an_answer_ends_no_connection() -> None:
    """SG-052: it was sent as a whole."""
    ended = Event()
    with served(never_read) as address:
        link = Outbound(address, SOON_S, ended.set)
        for _ in range(2):
            with pytest.raises(RequestTimeout):
                link.call(Request.GET_BROKER_CLUSTER_INFO, {})
        link.close()
        assert not ended.is_set()


def test_requests_end_with_a_connection_that_is_closed() -> None:
    """SG-052: those that wait to be sent, too; and a connection that is closed on purpose has not ended by itself."""
    ended = Event()
    with served(never_read) as address:
        link = Outbound(address, DEADLINE_S, ended.set)
        large = gevent.spawn(link.call, Request.REGISTER_BROKER, {}, LARGE)
        small = gevent.spawn(link.call, Request.GET_BROKER_CLUSTER_INFO, {})
        gevent.sleep(0)
        link.close()
        gevent.joinall([large, small], timeout=DEADLINE_S)
        for asked in (large, small):
            assert isinstance(asked.exception, ConnectionFailed), asked.exception
        assert not ended.is_set()


def test_frames_of_several_greenlets_arrive_whole() -> None:
    """SG-052: although the other side reads in small pieces, and each has to wait for room."""
    bodies: list[int] = []

    def read_slowly(connection: Any) -> None:
        reader = FrameReader()
        with connection:
            while data := connection.recv(SMALL_PIECE):
                gevent.sleep(0)
                for request in reader.receive(data):
                    bodies.append(len(request.body))
                    connection.sendall(encode_response(request, 0, {}, None, 0))

    with served(read_slowly) as address:
        link = Outbound(address, DEADLINE_S)
        sizes = [len(LARGE) if number % 3 == 0 else number for number in range(9)]
        asked = [gevent.spawn(link.call, Request.REGISTER_BROKER, {}, bytes(size)) for size in sizes]
        gevent.joinall(asked, timeout=DEADLINE_S, raise_error=True)
        assert sorted(bodies) == sorted(sizes)
        link.close()
