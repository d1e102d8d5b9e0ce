"""Streams of events: what they have, what a reader that does not read costs, and that nothing else waits for them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.tables.groups import Group
from metaq.server.api.site import BOUNDS
from metaq.server.console.visit import PAGE_ROWS
from metaq.server.services import brokers
from metaq.server.services.call import Call
from metaq.server.services.messages import MOST_TAILED
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, wait_until
from tests.support.rest import ROOT, Rest
from tests.support.served import Browser, Served, request, warm
from tests.support.users import ADMIN, READER, TOPIC, USERS, write_users

DEADLINE_S: Final = 60.0
OTHERS: Final = 8
"""Streams of other tests that the broker does not know yet to have ended."""
MOST_GROWTH_KB: Final = 24 * 1024
MANY: Final = 100


@pytest.fixture
def rest(broker: BrokerProcess) -> Iterator[Rest]:
    with Rest(broker.http) as rest:
        yield rest


def open_stream(stack: ExitStack, broker: BrokerProcess, path: str) -> socket.socket | None:
    """Begin a stream over a connection that takes little before it is read; ``None`` when there are too many."""
    host, _, port = broker.http.rpartition(":")
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(SOCKET_TIMEOUT_S)
    connection.connect((host, int(port)))
    connection.sendall(f"GET {ROOT}{path} HTTP/1.1\r\nHost: {broker.http}\r\n\r\n".encode())
    return connection if b"200 OK" in connection.recv(200) else None


def resident_kb(broker: BrokerProcess) -> int:
    lines = Path(f"/proc/{broker.pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_a_tail_has_what_is_published_from_now_on(rest: Rest) -> None:
    """E-04: of all partitions, each in its order, and only what the filter wants; nobody waits after its reader has left."""
    rest.put("/topics/tailed", {"partitions": 3})
    rest.publish("tailed", "before", tag="a")
    events = rest.events("/topics/tailed/tail", tags="a")
    next(events)
    wait_until(lambda: rest.get("/broker")["gets_waiting"] == 3, DEADLINE_S, "the tail waits in each partition")
    for number in range(9):
        rest.publish("tailed", str(number), tag="a" if number % 2 else "b", partition=number % 3)
    found = [next(events) for _ in range(4)]
    assert sorted(message["body"] for message in found) == ["1", "3", "5", "7"]
    assert [message["body"] for message in found if message["partition"] == 1] == ["1", "7"]
    events.close()  # type: ignore[attr-defined]

    def nobody_waits() -> bool:  # a write shows that the reader has left
        rest.publish("tailed", "after", tag="a", partition=0)
        return bool(rest.get("/broker")["gets_waiting"] == 0)

    wait_until(nobody_waits, DEADLINE_S, "nobody waits")


def test_a_tail_has_partitions_that_are_added(rest: Rest) -> None:
    """E-04: all that is in them; it ends when there are more than it can follow."""
    rest.put("/topics/growing", {"partitions": 1})
    events = rest.events("/topics/growing/tail")
    next(events)
    rest.put("/topics/growing", {"partitions": 3})
    rest.publish("growing", "first", partition=2)
    rest.publish("growing", "second", partition=0)
    assert sorted(next(events)["body"] for _ in range(2)) == ["first", "second"]
    rest.put("/topics/growing", {"partitions": MOST_TAILED + 1})
    rest.publish("growing", "third", partition=0)
    assert f"a tail follows {MOST_TAILED} at most" in list(events)[-1]["detail"]


def test_live_figures(rest: Rest) -> None:
    """E-01: the state of the broker, again and again."""
    rest.put("/topics/counted", {"partitions": 1})
    events = rest.events("/broker/live", interval_ms=500)
    next(events)
    before = next(events)
    assert before.keys() == rest.get("/broker").keys()
    rest.publish("counted", *"abc")
    assert next(events)["put_messages"] >= before["put_messages"] + 3
    events.close()  # type: ignore[attr-defined]


def test_a_tail_that_cannot_begin(rest: Rest) -> None:
    """E-15: is refused as any request; one of more partitions than it can follow, too."""
    assert rest.refused(404, "GET", "/topics/nothing/tail")["code"] == 17
    assert "partitions" in rest.refused(400, "GET", "/topics/BenchmarkTest/tail")["detail"]


def test_a_reader_that_does_not_read(rest: Rest, broker: BrokerProcess) -> None:
    """E-15: costs the broker no memory, whatever is published; and what it has missed waits in the log."""
    rest.put("/topics/slow", {"partitions": 1})
    body = "x" * 100_000
    with ExitStack() as stack:
        connection = open_stream(stack, broker, "/topics/slow/tail")
        assert connection is not None
        rest.publish("slow", body)
        before = resident_kb(broker)
        for _ in range(20):
            rest.post("/topics/slow/messages/many", {"messages": [{"body": body}] * 20})
        grown = resident_kb(broker) - before
        mapped_kb = 20 * 20 * 100  # the log is mapped, and what of it was touched counts as resident
        assert grown < mapped_kb + MOST_GROWTH_KB
        got = 0
        while got < 10 * len(body):
            got += len(connection.recv(65536))


def test_streams_keep_nothing_else_waiting(broker: BrokerProcess) -> None:
    """E-02: as many streams as there may be; one request more is told so, and metrics and health are as ever."""
    with ExitStack() as stack:
        rest = stack.enter_context(Rest(broker.http))
        rest.put("/topics/crowd", {"partitions": 1})
        streams: list[socket.socket] = []
        while (stream := open_stream(stack, broker, "/topics/crowd/tail")) is not None:
            streams.append(stream)
        assert BOUNDS.calls - OTHERS <= len(streams) <= BOUNDS.calls
        refused = rest.ask("GET", "/topics")
        assert (refused.status, refused.headers["retry-after"], refused.content["code"]) == (503, "1", 2)
        for path in ("/healthz", "/readyz", "/metrics"):
            with Rest(broker.http) as another:
                assert another.send("GET", path).status == 200
        for stream in streams:
            stream.close()

        def answered() -> bool:
            with Rest(broker.http) as another:
                return another.ask("GET", "/topics").status == 200

        with broker.connect() as connection:  # it is written to that they notice that they are alone
            connection.sendall(b"put crowd 0 1 0 0\r\nx\r\n")
            wait_until(answered, DEADLINE_S, "the streams have ended", pause_s=0.1)


def test_who_loses_the_right_loses_the_stream(tmp_path: Path) -> None:
    """E-06: with the reason, before the next message."""
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker, Rest(broker.http, ADMIN) as admin:
        admin.put(f"/topics/{TOPIC}", {"partitions": 1})
        with Rest(broker.http, READER) as reader:
            events = reader.events(f"/topics/{TOPIC}/tail")
            next(events)
            admin.publish(TOPIC, "one")
            assert next(events)["body"] == "one"
            write_users(users, USERS.replace(f"{TOPIC}: SUB", f"{TOPIC}: DENY"))
            wait_until(lambda: reader.ask("GET", f"/topics/{TOPIC}/partitions/0/messages").status == 403, DEADLINE_S, "denied")
            admin.publish(TOPIC, "two")
            assert next(events)["code"] == 16
            with pytest.raises(StopIteration):
                next(events)


def test_one_connection_carries_many_requests(broker: BrokerProcess) -> None:
    """MY-032: a program that publishes connects once; requests that follow at once are answered in their order."""
    host, _, port = broker.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S) as connection:
        requests = [f"GET {ROOT}/topics?limit={number} HTTP/1.1\r\nHost: {broker.http}\r\n\r\n" for number in range(1, 6)]
        connection.sendall("".join(requests).encode())
        data = b""
        while data.count(b'"next":') < len(requests):
            data += connection.recv(65536)
    assert data.count(b"HTTP/1.1 200 OK") == len(requests)


def test_live_figures_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-33: for all who look within a time, and anew after it; who may not look sees nothing of them."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data", users_file=str(write_users(tmp_path / "users.yaml")))
        monkeypatch.setattr(brokers, "LIVE_S", 0.0)
        assert len({watched(served) for _ in range(3)}) == 3
        monkeypatch.setattr(brokers, "LIVE_S", DEADLINE_S)
        assert len({watched(served) for _ in range(3)}) == 1
        assert watched(served, "") is None


def watched(served: Served, proof: str = f"Authorization: Bearer {READER.secret}\r\n") -> str | None:
    """The first event of a stream of live figures; ``None`` when it is refused."""
    browser = Browser(served)
    browser.send(f"GET /api/v1/broker/live HTTP/1.1\r\nHost: localhost\r\n{proof}\r\n".encode())
    received = b""
    while b"}\n\n" not in received:
        received += browser.socket.recv(65536)
        if b" 401 " in received:
            return None
    browser.socket.close()
    gevent.sleep(0.002)  # the time in the figures is in milliseconds
    return received[received.index(b"data: ") :].decode()


def test_an_upgrade_with_a_body_is_no_upgrade(broker: BrokerProcess) -> None:
    """E-33: else its body would be taken from the request that comes after it, which may be another user's behind a proxy."""
    with Rest(broker.http) as rest:
        rest.put("/topics/stepped", {"partitions": 1})
    host, _, port = broker.http.rpartition(":")
    data = b'{"body":"12345"}'
    head = f"POST {ROOT}/topics/stepped/messages HTTP/1.1\r\nHost: {broker.http}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=SOCKET_TIMEOUT_S) as connection:
        upgrade = f"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: {len(data)}\r\n\r\n"
        following = f"GET {ROOT}/topics/stepped HTTP/1.1\r\nHost: {broker.http}\r\nConnection: close\r\n\r\n"
        connection.sendall((head + upgrade).encode() + data + following.encode())
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK") == 2


def test_a_page_lets_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-02: between the rows of a list; in the console also between their lags."""
    rested: list[int] = []
    monkeypatch.setattr(Call, "rest_after", lambda _, number: rested.append(number))
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        for number in range(MANY):
            served.broker.engine.context.groups.put(Group(f"many-{number:03}"))
        browser = Browser(served)
        for path, rows, times in ((f"{ROOT}/groups", MANY, 1), ("/console/groups", PAGE_ROWS, 2)):
            rested.clear()
            answer = browser.ask(f"GET {path}?search=many HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert answer is not None and f"many-{rows - 1:03}" in answer.body
            assert rested.count(rows) == times


def test_a_tail_that_catches_up_lets_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-02: whoever takes each row at once never makes the tail wait, so it rests of itself."""
    rested: list[int] = []
    monkeypatch.setattr(Call, "rest_after", lambda _, number: rested.append(number))
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "caught")
        reader, writer = Browser(served), Browser(served)
        reader.send(f"GET {ROOT}/topics/caught/tail HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = b""
        while b"retry: " not in received:
            received += reader.socket.recv(65536)
        rested.clear()
        for _ in range(MANY):
            writer.ask(request("caught", {"body": "x"}))
        while received.count(b"data: ") < MANY:
            received += reader.socket.recv(65536)
    assert rested == list(range(1, len(rested) + 1)) and len(rested) >= MANY
