"""The client's side of a bulk fetch: its reactions to brokers that are busy, silent, gone, or send nonsense."""

import time
from collections.abc import Iterator
from typing import Final

import pytest

import metaq.testing
from metaq.client.consuming.bulk import BulkConnection
from metaq.errors import BadRequest, BrokerBusy, ConnectionFailed, OffsetOutOfRange, Refused, RequestTimeout
from metaq.protocol.remoting.bulk import Bulk, BulkFetch, encode_bulk_head
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import MAX_FRAME_BYTES, RemotingCommand, encode_request, encode_response
from metaq.protocol.remoting.headers import Int32
from tests.support.fakeremoting import FakeRemoting, Reply, Script

TIMEOUT_S: Final = 60.0
SHORT_S: Final = 0.2
RECORD: Final = b"a record " * 100_000
FIELDS: Final = {"nextBeginOffset": "8", "minOffset": "2", "maxOffset": "9"}
BODY: Final = encode_bulk_head((0).to_bytes(8) + len(RECORD).to_bytes(4) + bytes(4)) + RECORD


def found(request: RemotingCommand) -> Reply:
    return Reply(fields=FIELDS, body=BODY)


@pytest.fixture
def server() -> Iterator[FakeRemoting]:
    with FakeRemoting(bulk_fetch=found) as fake:
        yield fake


@pytest.fixture
def connection(server: FakeRemoting) -> Iterator[BulkConnection]:
    with BulkConnection(server.address, TIMEOUT_S) as connection:
        yield connection


def fetch(connection: BulkConnection) -> Bulk:
    return connection.fetch(BulkFetch("orders", Int32(3), 7, Int32(5), Int32(6)))


def test_what_is_asked_and_what_comes(server: FakeRemoting, connection: BulkConnection) -> None:
    """P47: the second answer is no part of the first one's buffer, while that is in use."""
    first, second = fetch(connection), fetch(connection)
    for bulk in (first, second):
        assert (bulk.first, bytes(bulk.records), bulk.next, bulk.least, bulk.most) == (7, RECORD, 8, 2, 9)
    assert first.records.obj is not second.records.obj
    memory = first.records.obj
    del first, bulk
    third = fetch(connection)
    assert third.records.obj is memory
    assert bytes(second.records) == bytes(third.records) == RECORD
    asked = {"topic": "orders", "queueId": "3", "queueOffset": "7", "maxMsgNums": "5", "maxBytes": "6", "verified": "true"}
    assert [request.fields for request in server.requests] == [asked, asked, asked]


def test_a_busy_broker_is_asked_again(server: FakeRemoting, connection: BulkConnection) -> None:
    """E-15: after the time that it says, until the fetch's own time is over."""
    busy = Reply(Response.SYSTEM_BUSY, remark="8 fetches; retry after 20 ms")
    answers = iter([busy, busy, Reply(fields=FIELDS, body=BODY)])
    server.scripts[Request.BULK_FETCH] = lambda request: next(answers)
    began = time.monotonic()
    assert fetch(connection).next == 8
    assert time.monotonic() - began >= 0.04
    for_long = Reply(Response.SYSTEM_BUSY, remark="8 fetches; retry after 900000 ms")
    server.scripts[Request.BULK_FETCH] = lambda request: for_long
    with pytest.raises(BrokerBusy, match="8 fetches"):
        fetch(connection)


def test_refusals_leave_the_connection(server: FakeRemoting, connection: BulkConnection) -> None:
    """P48: what has aged out, and what a broker that knows no bulk fetch says."""
    moved = Reply(Response.PULL_OFFSET_MOVED, {**FIELDS, "nextBeginOffset": "2"}, remark="7 lies before")
    server.scripts[Request.BULK_FETCH] = lambda request: moved
    with pytest.raises(OffsetOutOfRange, match="7 lies before") as outside:
        fetch(connection)
    assert (outside.value.least, outside.value.most) == (2, 9)
    del server.scripts[Request.BULK_FETCH]
    with pytest.raises(Refused, match="the broker refused: no script"):
        fetch(connection)
    server.scripts[Request.BULK_FETCH] = found
    assert fetch(connection).next == 8


def check_lost(server: FakeRemoting, script: Script, reason: str) -> None:
    """A connection fails by what the script sends, and says so from then on."""
    server.scripts[Request.BULK_FETCH] = script
    with BulkConnection(server.address, TIMEOUT_S) as connection:
        for _ in range(2):
            with pytest.raises(ConnectionFailed, match=f"the connection to {server.address} is lost: .*{reason}"):
                fetch(connection)


def sends(server: FakeRemoting, data: bytes, *, then_closes: bool = False) -> Script:
    def script(request: RemotingCommand) -> None:
        server.connections[-1].sendall(data)
        if then_closes:
            server.hang_up()

    return script


def test_nonsense_ends_the_connection(server: FakeRemoting) -> None:
    """F-PROTO: frames that are none, answers to something else, and bodies that contradict themselves."""
    question = RemotingCommand(Request.BULK_FETCH, 1, 0, {}, b"", None, "JAVA", 0, 0)
    answer = encode_response(question, 0, FIELDS, body_size=len(BODY)) + BODY
    check_lost(server, sends(server, b"result 400 30 -1\r\n" * 10), "a frame of")
    check_lost(server, sends(server, (MAX_FRAME_BYTES + 1).to_bytes(4) + answer[4:]), "a frame of 16777217 bytes")
    check_lost(server, sends(server, answer[:8] + b"x" * (len(answer) - 8)), "header that cannot be read")
    check_lost(server, sends(server, answer.replace(b'"opaque":1', b'"opaque":2')), "does not answer the request")
    check_lost(server, sends(server, encode_request(Request.HEART_BEAT, 1)), "does not answer the request")
    check_lost(server, lambda request: Reply(fields=FIELDS, body=BODY[:-1]), "bytes of records")
    check_lost(server, lambda request: Reply(fields={}, body=BODY), "without its ordinals")
    check_lost(server, sends(server, answer[:100], then_closes=True), "closed|reset")
    check_lost(server, sends(server, answer[:-1], then_closes=True), "closed|reset")


def test_a_silent_broker_and_a_slow_one(server: FakeRemoting) -> None:
    """F-LORIS: the time is for the whole answer; after it the connection is of no use, since the answer may still come."""
    server.scripts[Request.BULK_FETCH] = lambda request: None
    with BulkConnection(server.address, SHORT_S) as connection:
        with pytest.raises(RequestTimeout, match="BULK_FETCH"):
            fetch(connection)
        with pytest.raises(ConnectionFailed, match="not answered in time"):
            fetch(connection)

    def trickle(request: RemotingCommand) -> None:
        head, client = encode_response(request, 0, FIELDS, body_size=len(BODY)), server.connections[-1]
        for at in range(0, len(head), 10):
            client.sendall(head[at : at + 10])
            time.sleep(SHORT_S / 3)

    server.scripts[Request.BULK_FETCH] = trickle
    with BulkConnection(server.address, SHORT_S) as connection, pytest.raises(RequestTimeout):
        fetch(connection)


def test_nobody_there(server: FakeRemoting) -> None:
    """F-PART: the address is named; so is one that is none, as the in-memory broker's."""
    address = server.address
    with FakeRemoting() as gone:
        closed = gone.address
    with pytest.raises(ConnectionFailed, match=f"cannot connect to {closed}"):
        BulkConnection(closed, TIMEOUT_S)
    with metaq.testing.broker() as broker, pytest.raises(BadRequest, match="is not an address; write host:port"):
        BulkConnection(broker.address, TIMEOUT_S)
    with BulkConnection(address, TIMEOUT_S) as connection:
        pass
    with pytest.raises(ConnectionFailed, match="it was closed"):
        fetch(connection)
