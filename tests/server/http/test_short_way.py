"""The short way of a publish over HTTP: when it is taken, in what pieces, and what ends it."""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from ssl import PROTOCOL_TLS_CLIENT
from typing import Any, Final

import gevent
import pytest
from gevent import socket, ssl

from metaq.errors import BadRequest, DiskFull, MetaqError
from metaq.server.access.permissions import Principal
from metaq.server.api.publishing import Publishing
from metaq.server.http import port as http_port
from metaq.server.http.port import MOST_UNSENT
from metaq.server.http.session import HttpSession
from metaq.store.files.disk import RealDisk, RealFile
from tests.support.served import DEADLINE_S, Browser, Served, request, warm
from tests.support.tls import issue
from tests.support.users import ADMIN, TOPIC, WRITER, write_users

SHORT_S: Final = 0.2
UNUSED: Final = count()

# -- the usual case ---------------------------------------------------------------------------------------------------


def test_a_publish_like_the_one_before_is_short(served: Served) -> None:
    """E-32: whatever its length, and in whatever pieces it comes."""
    warm(served, "plain")
    browser, before = Browser(served), served.long
    for size in (0, 1, 10, 1000, 60_000):
        whole = request("plain", {"body": "x" * size, "tag": "paid", "keys": ["a", "b"]})
        at = whole.index(b"\r\n\r\n") + 4
        for parts in ([whole], [whole[:at], whole[at:]], [whole[: at + 3], whole[at + 3 :]]):
            answer = browser.ask(*parts)
            assert answer is not None
            assert answer.status == "HTTP/1.1 200 OK"
    assert served.long == before


def test_a_body_that_comes_byte_by_byte(served: Served) -> None:
    """E-32: is waited for; a head that comes so is for the long way."""
    warm(served, "plain")
    browser, before, whole = Browser(served), served.long, request("plain", {"body": "é"})
    at = whole.index(b"\r\n\r\n") + 4
    answer = browser.ask(whole[:at], *(bytes([byte]) for byte in whole[at:]))
    assert (answer is not None and answer.status, served.long) == ("HTTP/1.1 200 OK", before)
    browser.send(whole[:1])
    while served.long == before:
        gevent.sleep(0.01)
    answer = browser.ask(*(bytes([byte]) for byte in whole[1:]))
    assert (answer is not None and answer.status, served.long) == ("HTTP/1.1 200 OK", before + 1)


def test_each_topic_has_turns_of_its_own(served: Served) -> None:
    """E-04: a program that publishes to two topics by turns reaches all partitions of both, on each way."""
    names = ("one-turn", "another-turn")
    warm(served, *names)
    browser = Browser(served)
    places: dict[str, set[int]] = {name: set() for name in names}
    for _ in range(4):
        for name in names:
            answer = browser.ask(request(name, {"body": "x"}))
            assert answer is not None
            places[name].add(json.loads(answer.body)["partition"])
    assert list(places.values()) == [{0, 1, 2, 3}] * 2


def test_partitions_that_no_publish_had_before(served: Served) -> None:
    """E-32: each goes the long way once, and then no more: what is not short takes no turn."""
    browser, before = Browser(served), served.long
    places = []
    for _ in range(16):
        answer = browser.ask(request("turns", {"body": "x"}))
        assert answer is not None
        places.append(json.loads(answer.body)["partition"])
    assert sorted(places) == sorted([*range(4)] * 4)
    assert served.long - before == 4


def test_requests_in_one_piece_are_answered_in_their_order(served: Served) -> None:
    """E-32: publishes, and what goes the long way between them; what is not a publish does not keep the others from theirs."""
    warm(served, "ordered")
    browser, before = Browser(served), served.long
    publish = request("ordered", {"body": "x"})
    other = b"GET /api/v1/topics/ordered HTTP/1.1\r\nHost: localhost\r\n\r\n"
    browser.send(publish * 3 + other + publish * 2 + request("ordered", {"bodi": "x"}) + publish + other)
    answers = [browser.read() for _ in range(9)]
    found = [json.loads(answer.body) for answer in answers if answer is not None]
    places = [each["offset"] for each in found if "offset" in each]
    assert places == list(range(places[0], places[0] + 6))
    assert [each.get("messages") for each in (found[3], found[8])] == [places[3], places[5] + 1]
    assert found[6]["status"] == 400
    assert served.long == before + 3


def test_many_requests_in_one_piece(served: Served) -> None:
    """E-32: more than one reading takes, so that heads are cut."""
    browser, publish = Browser(served), request("ordered", {"body": "x" * 200})
    sender = gevent.spawn(browser.send, publish * 2000)
    answers = [browser.read() for _ in range(2000)]
    sender.get()
    offsets = [json.loads(answer.body)["offset"] for answer in answers if answer is not None]
    assert offsets == list(range(offsets[0], offsets[0] + 2000))
    [session] = [each for each in served.port.sessions if each.address == browser.socket.getsockname()]
    assert (session.owed, session.owed_bytes) == (0, 0)


# -- clients that do not read, do not send, or go -----------------------------------------------------------------------


def test_a_client_that_does_not_read(served: Served) -> None:
    """E-32: no more is begun for it than the port holds for it; when it reads, it gets all."""
    browser, publish, many = Browser(served), request("ordered", {"body": ""}), 20_000
    browser.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
    sender = gevent.spawn(browser.socket.sendall, publish * many)
    before, stored = served.stored("ordered"), -1
    while stored != served.stored("ordered"):
        stored = served.stored("ordered")
        gevent.sleep(0.2)
    assert stored - before < many
    assert served.port.memory.held < 8 * MOST_UNSENT
    for _ in range(many):
        answer = browser.read()
        assert answer is not None
        assert answer.status == "HTTP/1.1 200 OK"
    sender.get()
    browser.socket.close()


def test_a_client_that_ends_its_side(served: Served) -> None:
    """E-32: gets the answers to what it has sent, but none to half a request."""
    for rest in (b"", request("plain", {"body": "x"})[:-3]):
        browser = Browser(served)
        browser.send(request("plain", {"body": "x"}) + rest)
        browser.socket.shutdown(socket.SHUT_WR)
        answers = [browser.read(), browser.read()]
        assert [answer and answer.status for answer in answers] == ["HTTP/1.1 200 OK", None]


def test_half_a_request_behind_owed_answers(tmp_path: Path) -> None:
    """E-05: counts as memory until they are sent, although nothing more comes."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "t")
        [key] = served.port.heads
        seen: list[HttpSession] = []

        def owe(session: HttpSession, _: bytes) -> bool:
            session.owed += 1
            seen.append(session)
            return True

        served.port.heads[key] = owe
        browser, half = Browser(served), request("t", {"body": "x" * 60_000})[:-3]
        browser.send(request("t", {"body": "x"}) + half)
        browser.socket.shutdown(socket.SHUT_WR)
        before = served.long
        deadline = gevent.Timeout.start_new(DEADLINE_S)
        while not (seen and seen[0]._backlog):
            gevent.sleep(0.01)
        deadline.close()
        assert served.port.memory.held >= len(half)
        seen[0].answer(1, 0, b"HTTP/1.1 204 No Content\r\n\r\n")
        assert (served.long, served.port.memory.held) == (before + 1, 0)
        assert [browser.read() and None, browser.read()] == [None, None]


def test_connections_that_are_silent_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-01: before a request, in the middle of one, and after an answer."""
    monkeypatch.setattr(http_port, "SWEEP_S", SHORT_S / 4)
    monkeypatch.setattr(http_port, "CONNECTION_S", SHORT_S)
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "t")
        silent, half, after = Browser(served), Browser(served), Browser(served)
        half.send(request("t", {"body": "x"})[:-3])
        answer = after.ask(request("t", {"body": "x"}))
        assert answer is not None
        assert [browser.read() for browser in (silent, half, after)] == [None] * 3
        assert served.port.memory.held == 0


def test_a_port_with_a_certificate(tmp_path: Path) -> None:
    """E-05: what is not in TLS has the short way, too; what is in TLS is answered."""
    files = issue(tmp_path)
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data", tls_certificate=str(files.chain))
        warm(served, "t")
        browser, secured = Browser(served), Browser(served)
        context = ssl.SSLContext(PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(files.authority)
        secured.socket = context.wrap_socket(secured.socket, server_hostname="127.0.0.1")
        browser.ask(request("t", {"body": "x"}))
        before = served.long
        for each in (browser, secured, browser, secured):
            answer = each.ask(request("t", {"body": "x"}))
            assert answer is not None
            assert answer.status == "HTTP/1.1 200 OK"
        secured.socket.close()
        assert served.long == before


# -- users, settings, and the end --------------------------------------------------------------------------------------


def test_users_that_change(tmp_path: Path) -> None:
    """E-05: count from the next request on, whatever was found out before."""
    users = tmp_path / "users.yaml"

    def write(secret: str, grant: str) -> None:
        write_users(users, f"users:\n  {WRITER.name}: {{secret: {secret}, topics: {{{TOPIC}: {grant}}}}}\n")

    with ExitStack() as stack:
        write(WRITER.secret, "PUB|CREATE")
        served = Served(stack, tmp_path / "data", users_file=str(users))
        browser, proof = Browser(served), f"Authorization: Bearer {WRITER.secret}"

        def published() -> tuple[str, int]:
            before = served.long
            answer = browser.ask(request(TOPIC, {"body": "x", "partition": 0}, proof))
            assert answer is not None
            return answer.status.partition(" ")[2], served.long - before

        assert [published() for _ in range(3)] == [("200 OK", 1), ("200 OK", 1), ("200 OK", 0)]  # the first makes the topic
        for secret, grant, status in (
            (WRITER.secret, "SUB", "403 Forbidden"),
            ("another-secret-1", "PUB", "401 Unauthorized"),
            (WRITER.secret, "PUB", "200 OK"),
        ):
            write(secret, grant)
            served.broker.authentication.reload()
            assert published() == (status, 1)
        assert published() == ("200 OK", 0)
        users.write_text("users: {}\n")
        served.broker.authentication.reload()
        assert published() == ("401 Unauthorized", 1)


def test_a_broker_that_stops(tmp_path: Path) -> None:
    """E-32: takes no more by either way."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "t")
        browser, before = Browser(served), served.stored("t")
        served.broker.site.stop()
        for _ in range(2):
            answer = browser.ask(request("t", {"body": "x"}))
            assert answer is not None
            assert answer.status == "HTTP/1.1 503 Service Unavailable"
        assert served.stored("t") == before


def test_what_is_counted(tmp_path: Path) -> None:
    """E-19: puts, their bytes and those of the topic, the same for both ways."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "t")
        counters, counted = served.broker.engine.context.counters, []
        browser = Browser(served)
        for own in (f"X: {next(UNUSED)}", "X: seen", "X: seen"):
            puts = counters.put
            before, long = (puts.count, puts.recent_value), served.long
            browser.ask(request("t", {"body": "12345"}, own))
            counted.append((puts.count - before[0], puts.recent_value - before[1], served.long - long))
        assert counted == [(1, 5, 1), (1, 5, 1), (1, 5, 0)]


FULL: Final[list[bool]] = []
"""Not empty while the disk is full."""


class FullFile(RealFile):
    """A file that has no room while the disk is full."""

    __slots__ = ()

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if FULL:
            raise DiskFull("no room: a test says so")
        super().write(data, offset)


class FullDisk(RealDisk):
    """The real one with such files."""

    def open(self, path: Path) -> RealFile:
        return FullFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    """E-32: is answered the same by both ways when only the end of the turn shows it."""
    answers = []
    for own in ("X: seen", f"X: {next(UNUSED)}"):
        with ExitStack() as stack:
            served = Served(stack, tmp_path / own, FullDisk())
            warm(served, "t")
            browser = Browser(served)
            browser.ask(request("t", {"body": "x"}, "X: seen"))
            before, refused = served.long, served.broker.engine.context.counters.put_failed.count
            stack.callback(FULL.clear)
            FULL.append(True)
            answers.append(browser.ask(request("t", {"body": "x"}, own)))
            FULL.clear()
            assert served.long - before == (own != "X: seen")
            assert served.broker.engine.context.counters.put_failed.count == refused + 1
    assert answers[0] == answers[1]
    assert answers[0] is not None
    assert "no room: a test says so" in answers[0].body


# -- what outcomes are told -------------------------------------------------------------------------------------------


def publishing_of(served: Served) -> Publishing:
    """The short ways of a broker that has some."""
    take: Any = next(iter(served.port.heads.values()))
    found: Publishing = take.__self__._publishing
    return found


def test_a_row_that_cannot_be_made(tmp_path: Path) -> None:
    """E-32: is a problem of its own; the other answers of the turn are sent."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "t", "wrong", "t")  # a new topic: the first publish to each is long once more
        publishing = publishing_of(served)
        row = publishing.forms.row

        def row_or_error(topic: str, *given: Any) -> bytes:
            if topic == "wrong":
                raise BadRequest("a test says so")
            return row(topic, *given)

        publishing.forms = publishing.forms._replace(row=row_or_error)
        browser, before = Browser(served), served.long
        browser.send(b"".join(request(topic, {"body": "x"}) for topic in ("t", "wrong", "t")))
        answers = [browser.read() for _ in range(3)]
        statuses = ["HTTP/1.1 200 OK", "HTTP/1.1 400 Bad Request", "HTTP/1.1 200 OK"]
        assert ([answer and answer.status for answer in answers], served.long) == (statuses, before)
        assert answers[1] is not None
        assert "the message is stored, but its row cannot be made: a test says so" in answers[1].body


def test_each_user_is_told_by_own_rights(tmp_path: Path) -> None:
    """E-05: those of a proxy's connection, too, in one turn."""
    users = write_users(
        tmp_path / "users.yaml",
        "users:\n" + "".join(f"  {who.name}: {{secret: {who.secret}, admin: true}}\n" for who in (ADMIN, WRITER)),
    )
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data", FullDisk(), users_file=str(users))
        browser, told = Browser(served), list[str]()
        publishes = {
            who: request(TOPIC, {"body": "x", "partition": 0}, f"Authorization: Bearer {who.secret}") for who in (ADMIN, WRITER)
        }
        for publish in (*publishes.values(), *publishes.values()):  # the first makes the topic
            browser.ask(publish)
        publishing = publishing_of(served)
        problem = publishing.forms.problem

        def noted(error: MetaqError, outcome: str, principal: Principal) -> tuple[str, Mapping[str, str], bytes]:
            told.append(principal.name)
            return problem(error, outcome, principal)

        publishing.forms = publishing.forms._replace(problem=noted)
        before = served.long
        stack.callback(FULL.clear)
        FULL.append(True)
        browser.send(publishes[ADMIN] + publishes[WRITER] * 2 + publishes[ADMIN])
        answers = [browser.read() for _ in range(4)]
        FULL.clear()
        assert all(answer is not None and "no room" in answer.body for answer in answers)
        assert (told, served.long) == ([ADMIN.name, WRITER.name, ADMIN.name], before)


# -- a change of role --------------------------------------------------------------------------------------------------


def test_a_turn_of_another_broker_with_the_same_number(tmp_path: Path) -> None:
    """E-32: is not the turn of the broker before, although each counts from 0."""
    with ExitStack() as stack:
        served, other = Served(stack, tmp_path / "one"), Served(stack, tmp_path / "two")
        for each in (served, other):
            warm(each, "t")
        browser, before = Browser(served), (served.long, other.stored("t"))
        browser.ask(request("t", {"body": "x"}))
        [session] = [each for each in served.port.sessions if each.address == browser.socket.getsockname()]
        served.port.heads.update(other.port.heads)
        other.broker.engine.turns.number = session.outcome.turn
        answer = browser.ask(request("t", {"body": "x"}))
        assert answer is not None
        assert (answer.status, served.long, other.stored("t")) == ("HTTP/1.1 200 OK", before[0], before[1] + 1)


def test_heads_are_forgotten_with_their_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: what takes their requests would keep it and its store."""
    monkeypatch.setattr(http_port, "SWEEP_S", SHORT_S)
    with ExitStack() as stack:
        served, other = Served(stack, tmp_path / "one"), Served(stack, tmp_path / "two")
        warm(served, "t")
        gevent.sleep(2 * SHORT_S)  # while a broker serves, its heads stay
        assert served.port.heads
        broker = other.broker
        served.monitor._site = lambda: broker.site
        deadline = gevent.Timeout.start_new(DEADLINE_S)
        while served.port.heads:
            gevent.sleep(0.01)
        deadline.close()


def test_a_stopped_broker_leaves_no_heads(tmp_path: Path) -> None:
    """E-05: although a publish that was begun before is done."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        warm(served, "t")
        publishing, known = publishing_of(served), len(served.port.heads)
        publishing.is_stopped = lambda: True
        answer = Browser(served).ask(request("t", {"body": "x"}, f"X: {next(UNUSED)}"))
        assert answer is not None
        assert (answer.status, len(served.port.heads)) == ("HTTP/1.1 200 OK", known)
