"""The HTTP port in this process: connections and scrapes that take too long, sources that fail, and who may ask."""

import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

import gevent
import pytest
from gevent import socket
from gevent import ssl as gevent_ssl
from gevent.event import Event

from metaq.config import Settings, load
from metaq.engine.figures.metrics import Family, Metric, MetricKind
from metaq.errors import AccessDenied, ConfigError
from metaq.server.access.authentication import Authentication
from metaq.server.access.permissions import Principal
from metaq.server.http import http, httpserver, scrapes
from metaq.server.http.environ import Environ, StartResponse
from metaq.server.http.http import Monitor, Site
from metaq.server.http.port import MOST_CONNECTIONS
from metaq.server.wire.pace import TURN_S, Pace
from metaq.store.files.filecache import Rest
from tests.support.tls import issue

DEADLINE_S: Final = 60.0
SHORT_S: Final = 0.2
METRIC: Final = Metric("m", MetricKind.GAUGE, "1", "M.")
HUGE: Final = 64 * 1024 * 1024
NOBODY: Final = Authentication("", 1, lambda: 0.0)


class Source:
    """A process of which the test says what its metrics do."""

    def __init__(self, work: Callable[[], object] = lambda: None) -> None:
        self.work = work
        self.scrapes = 0

    def reasons(self) -> list[str]:
        return []

    def facts(self) -> Mapping[str, object]:
        return {}

    def families(self, rest: Rest) -> Iterator[Family]:
        self.scrapes += 1
        self.work()
        yield METRIC, [((), self.scrapes)]

    def stalled(self, seconds: float) -> None:
        """Keep no history."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack, gevent.Timeout(DEADLINE_S):
        yield stack


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a scrape, and a connection, as much time as the test has."""
    monkeypatch.setattr(scrapes, "SCRAPE_S", DEADLINE_S)
    monkeypatch.setattr(httpserver, "CONNECTION_S", DEADLINE_S)


def settings(**given: Any) -> Settings:
    return load(None, {}, {"http_listen": "127.0.0.1:0", **given})


def serve(stack: ExitStack, source: Source, site: Site | None = None, **given: Any) -> Monitor:
    monitor = Monitor(settings(**given), "127.0.0.1:0")
    stack.callback(monitor.close)
    monitor.serving(lambda: source, NOBODY, lambda: site)
    return monitor


def connect(stack: ExitStack, monitor: Monitor) -> socket.socket:
    assert monitor.address is not None
    connection = socket.create_connection(monitor.address)
    stack.callback(connection.close)
    return connection


def answered(connection: socket.socket, path: str) -> tuple[int, bytes]:
    """Status and body of what a connection is answered."""
    connection.sendall(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % path.encode())
    return read(connection)


def read(connection: socket.socket) -> tuple[int, bytes]:
    head, body = parts(connection)
    return int(head.split()[1]), body


def parts(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of what comes until the other side ends a connection."""
    data = b""
    while part := connection.recv(65536):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


def ends(connection: socket.socket) -> bool:
    """Waits until the other side has ended a connection."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


# -- connections ------------------------------------------------------------------------------------------------------


def test_no_name_is_looked_up(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-02: a DNS that does not answer is no reason to start late."""
    monkeypatch.setattr(socket, "getfqdn", pytest.fail)
    assert answered(connect(stack, serve(stack, Source())), "/healthz")[0] == 200


def test_a_handshake_and_then_silence(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-01, E-05: the limit of time is for the connection, in TLS or not."""
    files = issue(tmp_path)
    monitor = serve(stack, Source(), tls_certificate=str(files.chain))
    context = gevent_ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # what gevent's create_default_context makes blocks the loop
    context.load_verify_locations(files.authority)
    limit, secured = SHORT_S, None
    while secured is None:
        monkeypatch.setattr(httpserver, "CONNECTION_S", limit)
        try:
            secured = context.wrap_socket(connect(stack, monitor), server_hostname="127.0.0.1")
        except (ssl.SSLEOFError, ConnectionError):  # the machine needs more time for the handshake alone
            limit *= 2
    stack.callback(secured.close)
    try:
        assert secured.recv(1) == b""
    except ConnectionResetError:  # its time was over before the end of the handshake was read
        pass
    except ssl.SSLError as error:
        assert "EOF" in str(error)
    monkeypatch.setattr(httpserver, "CONNECTION_S", SHORT_S)
    begun = connect(stack, monitor)
    begun.sendall(b"\x16")
    assert ends(begun)


def test_who_does_not_take_its_answer(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """E-01: is ended when its time is over, and nothing is said about it."""
    monkeypatch.setattr(httpserver, "CONNECTION_S", SHORT_S)
    monkeypatch.setattr(scrapes.Scrapes, "text", lambda _: "x" * HUGE)
    monitor = serve(stack, Source())
    slow = connect(stack, monitor)
    slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
    assert monitor._port is not None
    while not monitor._port.away:
        gevent.sleep(0.01)
    while monitor._port.away:  # its time, in which it reads nothing
        gevent.sleep(0.01)
    taken = 0
    try:
        while part := slow.recv(65536):
            taken += len(part)
    except ConnectionResetError:
        pass
    assert taken < HUGE
    assert capfd.readouterr().err == ""


def test_connections_that_say_nothing_keep_nobody_out(stack: ExitStack, no_hurry: None) -> None:
    """E-02: nor do those whose requests have no end; the oldest ends, and who has asked is answered."""
    gate = Event()
    monitor = serve(stack, Source(gate.wait))
    asked = connect(stack, monitor)
    asked.sendall(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
    silent = [connect(stack, monitor) for _ in range(MOST_CONNECTIONS - 1)]
    for connection in silent[1::2]:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
    gevent.sleep(0)
    assert answered(connect(stack, monitor), "/healthz")[0] == 200
    assert ends(silent[0])
    for _ in range(2 * MOST_CONNECTIONS):
        connect(stack, monitor)
        assert answered(connect(stack, monitor), "/healthz")[0] == 200
    gate.set()
    assert read(asked)[0] == 200


class Busy:
    """A site whose answers take the processor a while."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.answers = 0

    def __call__(self, environ: Environ, start_response: StartResponse) -> list[bytes]:
        until = time.thread_time() + TURN_S / 5
        while time.thread_time() < until:
            pass
        self.answers += 1
        start_response("200 OK", [("Content-Length", "0")])
        return []


@pytest.mark.parametrize("is_measured", [True, False])
def test_who_asks_without_a_pause_lets_others_run(stack: ExitStack, tmp_path: Path, is_measured: bool) -> None:
    """E-02: also in TLS, where one greenlet answers all of its requests, and while the broker stops."""
    busy, files, most = Busy(Pace(gevent.get_hub().loop)), issue(tmp_path), 50
    if is_measured:
        busy.pace.start()
        stack.callback(busy.pace.stop)
    monitor = serve(stack, Source(), busy, tls_certificate=str(files.chain))
    context = gevent_ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.authority)
    secured = stack.enter_context(context.wrap_socket(connect(stack, monitor), server_hostname="127.0.0.1"))
    secured.sendall(b"GET /api HTTP/1.1\r\nHost: h\r\n\r\n" * most)
    seen = set()
    while busy.answers < most:
        seen.add(busy.answers)
        gevent.sleep(0)
    assert len(seen) >= 3


def test_who_sends_without_a_pause_lets_others_run(stack: ExitStack) -> None:
    """E-02: also when more of a body is always there."""
    own, client = (stack.enter_context(each) for each in socket.socketpair())
    rested: list[None] = []
    received, buffer = httpserver._Received(own, b"head", lambda: rested.append(None)), bytearray(4)
    client.sendall(b"body")
    for had, rests in ((b"head", 0), (b"body", 1)):
        assert (received.readinto(buffer), bytes(buffer), len(rested)) == (4, had, rests)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /api HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /api HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /api HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    ],
)
def test_the_last_answer_says_so(stack: ExitStack, no_hurry: None, head: bytes) -> None:
    """E-02: else a client takes the connection for its next request, which is lost."""
    connection = connect(stack, serve(stack, Source(), Busy(Pace(gevent.get_hub().loop))))
    connection.sendall(head)
    assert parts(connection)[0].lower().count(b"\r\nconnection: close") == 1


def test_chunks_without_an_end(stack: ExitStack, no_hurry: None) -> None:
    """E-02: are not read to their end; whose chunks have one can read the answer, however late they come."""
    busy = Busy(Pace(gevent.get_hub().loop))
    monitor = serve(stack, Source(), busy)
    head = b"POST /api HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    slow = connect(stack, monitor)
    slow.sendall(head)
    while not busy.answers:
        gevent.sleep(0)
    slow.sendall(b"1\r\nx\r\n0\r\n")
    gevent.sleep(0)
    slow.sendall(b"\r\n")
    assert read(slow)[0] == 200
    endless, chunks = connect(stack, monitor), (b"400\r\n" + bytes(1024) + b"\r\n") * 1024
    endless.sendall(head)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(32):
            endless.sendall(chunks)


# -- scrapes ----------------------------------------------------------------------------------------------------------


def test_one_scrape_is_made_and_one_waits(stack: ExitStack, no_hurry: None) -> None:
    """E-01: any more are told to come again, at once; health is answered meanwhile."""
    gate = Event()
    source = Source(gate.wait)
    monitor = serve(stack, source)
    made, waiting = (gevent.spawn(answered, connect(stack, monitor), "/metrics") for _ in range(2))
    while not (source.scrapes and monitor._scrapes._waits):
        gevent.sleep(0.01)
    refused = [answered(connect(stack, monitor), "/metrics") for _ in range(2 * MOST_CONNECTIONS)]
    assert {status for status, _ in refused} == {503}
    assert b"another one waits" in refused[0][1]
    assert answered(connect(stack, monitor), "/healthz")[0] == 200
    gate.set()
    assert [scrape.get()[0] for scrape in (made, waiting)] == [200, 200]
    assert source.scrapes == 2


def test_a_scrape_that_hangs(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-01: is given up, as is one that waits for it; no second one is begun, and afterwards all is as before."""
    gate = Event()
    source = Source(gate.wait)
    monitor = serve(stack, source)
    with monkeypatch.context() as limits:
        limits.setattr(scrapes, "SCRAPE_S", SHORT_S)
        for _ in range(3):
            status, body = answered(connect(stack, monitor), "/metrics")
            assert (status, b"does the disk answer?" in body) == (503, True)
            assert answered(connect(stack, monitor), "/readyz")[0] == 200
    assert source.scrapes == 1
    gate.set()
    assert answered(connect(stack, monitor), "/metrics")[0] == 200


def test_a_scrape_that_meets_an_error_of_the_broker(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """E-01: is answered 500, the trace is in the log, and the next one is made."""

    def fail() -> None:
        raise KeyError("nobody expected this")

    source = Source(fail)
    monitor = serve(stack, source)
    with caplog.at_level(logging.ERROR):
        assert answered(connect(stack, monitor), "/metrics")[0] == 500
    assert [record.getMessage() for record in caplog.records] == ["http request failed route=_metrics"]
    assert capfd.readouterr().err == ""
    source.work = lambda: None
    assert answered(connect(stack, monitor), "/metrics")[0] == 200


# -- who may ask, and where -------------------------------------------------------------------------------------------


class Known:
    """An authentication that knows everybody as one user."""

    def __init__(self) -> None:
        self.anonymous = Principal("anonymous")
        self.addresses: list[str] = []

    def holder(self, secret: str, address: str) -> Principal:
        self.addresses.append(address)
        return Principal("reader")


def test_a_user_who_may_not_is_not_asked_to_log_in(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: 403, since another password would not help."""

    def refuse(principal: Principal, action: object) -> None:
        raise AccessDenied(f"{principal} may not")

    monkeypatch.setattr(http, "demand", refuse)
    authentication = Known()
    monitor = Monitor(settings(users_file="users"), "127.0.0.1:0")
    stack.callback(monitor.close)
    monitor.serving(Source, cast(Authentication, authentication))
    assert answered(connect(stack, monitor), "/metrics")[0] == 401
    connection = connect(stack, monitor)
    connection.sendall(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
    assert read(connection) == (403, b"reader may not\n")


def test_the_address_of_a_user_is_that_of_other_ports(stack: ExitStack) -> None:
    """E-05: an IPv4 address is one, on a listener of IPv6, too: failed logins are counted by it."""
    authentication = Known()
    monitor = Monitor(settings(users_file="users", http_listen="[::]:0"), "127.0.0.1:0")
    stack.callback(monitor.close)
    monitor.serving(Source, cast(Authentication, authentication))
    assert monitor.address is not None
    with socket.create_connection(("127.0.0.1", monitor.address[1])) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer secret\r\n\r\n")
        assert read(connection)[0] == 200
    assert authentication.addresses == ["127.0.0.1"]


@pytest.mark.parametrize("taken", [False, True])
def test_a_port_that_nobody_has_set_is_named_so(stack: ExitStack, taken: bool) -> None:
    """E-02: whoever reads the error looks for a setting that is not there."""
    port = 65536
    if taken:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(
                ConfigError, match=f"http_listen, which is not set: the port above 127.0.0.1:{port - 1}: cannot"
            ):
                Monitor(settings(http_listen=""), f"127.0.0.1:{port - 1}")
    else:
        with pytest.raises(
            ConfigError, match=r"http_listen, which is not set: the port above 127.0.0.1:65535: '127.0.0.1:65536'"
        ):
            Monitor(settings(http_listen=""), f"127.0.0.1:{port - 1}")
