"""Logins: who must, what the cookie is like, when a login ends, and what the rights of a user let it see and change."""

import re
import socket
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Final

import pytest

from metaq.server.access.logins import IDLE_S, LONGEST_S, MOST_LOGINS, Logins
from metaq.server.access.users import User
from metaq.server.console.routes import ROUTES
from metaq.server.console.visit import ROOT, PageChange
from tests.support.broker import BrokerProcess, wait_until
from tests.support.console import FORM, Visits
from tests.support.rest import Rest
from tests.support.users import ADMIN, GROUP, READER, TOPIC, USERS, write_users

DEADLINE_S: Final = 30.0
A_MINUTE: Final = 10_000
"""Failed logins: tests that wait until a login is possible have some."""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_users(tmp_path_factory.mktemp("users") / "users.yaml")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, users: Path) -> Iterator[BrokerProcess]:
    folder: Path = tmp_path_factory.mktemp("logins")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", str(A_MINUTE))
    with BrokerProcess(folder / "data", *flags) as broker:
        with Rest(broker.http, ADMIN) as rest:
            rest.put(f"/topics/{TOPIC}", {"partitions": 1})
            rest.put(f"/groups/{GROUP}", {})
            rest.publish(TOPIC, "x")
        yield broker


def test_nobody_sees_a_page(broker: BrokerProcess) -> None:
    """E-05: all lead to the login, and it leads back; a part that loads itself leads there as a whole."""
    with Visits(broker.http) as nobody:
        for route in ROUTES:
            path = ROOT + re.sub(r"{\w+}", "1", route.path)
            method = "POST" if isinstance(route, PageChange) else "GET"
            answer = nobody.send(method, path, {} if method == "POST" else None)
            assert answer.status == 303 and answer.headers["location"].startswith(f"{ROOT}/login"), route.path
        wanted = nobody.send("GET", f"{ROOT}/topics/{TOPIC}?x=1").headers["location"]
        form = nobody.send("GET", wanted)
        fields = {**form.form(f"{ROOT}/login").fields, "name": READER.name, "password": READER.secret}
        assert nobody.send("POST", f"{ROOT}/login", fields).headers["location"] == f"{ROOT}/topics/{TOPIC}?x=1"
    with Visits(broker.http) as part:
        answer = part.send("GET", f"{ROOT}/topics", headers={"HX-Request": "true"})
        assert (answer.status, answer.headers["hx-redirect"]) == (401, f"{ROOT}/login")


def test_a_link_from_another_site_leads_to_the_page(broker: BrokerProcess) -> None:
    """E-05: a browser follows it without the cookie; the answer asks for the page again, and then there is one."""
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    with Visits(broker.http) as visits:
        answer = visits.send("GET", f"{ROOT}/topics", headers=link)
        assert (answer.status, ("meta", {"http-equiv": "refresh", "content": "0"}) in answer.elements) == (200, True)
        assert visits.send("GET", f"{ROOT}/topics", headers={**link, "Sec-Fetch-Site": "same-origin"}).status == 303


@pytest.mark.parametrize("wanted", ["http://evil.example/", "//evil.example", "/console/\\evil", "/api", "/console/\r\nX: y"])
def test_a_login_leads_nowhere_else(broker: BrokerProcess, wanted: str) -> None:
    """E-05: only to pages of the console."""
    with Visits(broker.http) as visits:
        answer = visits.send("POST", f"{ROOT}/login", {"name": READER.name, "password": READER.secret, "next": wanted})
        assert (answer.status, answer.headers["location"]) == (303, f"{ROOT}/")


def test_the_cookie(broker: BrokerProcess) -> None:
    """E-05: no script reads it, no other site has it sent, and nothing but the console gets it; a new one with each login."""
    with Visits(broker.http, READER) as visits:
        cookie, token = visits.last_cookie, visits.cookie
        assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["max-age"]) == (True, "Strict", ROOT, "")
        assert token not in visits.page("/topics").data.decode()
        assert READER.name in visits.page("/").text
    with Visits(broker.http, READER) as again:
        assert again.cookie != token


def test_a_logout_ends_it(broker: BrokerProcess) -> None:
    """E-05: for the cookie's copies, too."""
    with Visits(broker.http, READER) as visits:
        token = visits.cookie
        visits.submit(visits.page("/topics"), "/logout")
        assert visits.cookie == ""
        visits.cookie = token
        assert visits.page("/topics", 303).headers["location"].startswith(f"{ROOT}/login")


def test_a_live_tail_ends_with_its_login(broker: BrokerProcess) -> None:
    """E-05: what is published after it is not shown, and the page says why."""
    with Visits(broker.http, READER) as visits, Rest(broker.http, ADMIN) as admin:
        host, _, port = broker.http.rpartition(":")
        with closing(HTTPConnection(host, int(port), timeout=DEADLINE_S)) as connection:
            cookie = f"{visits.last_cookie.key}={visits.cookie}"
            connection.request("GET", f"{ROOT}/topics/{TOPIC}/tail/events", headers={"Cookie": cookie})
            tail = connection.getresponse()
            assert (tail.status, tail.readline()) == (200, b"retry: 2000\n")
            visits.submit(visits.page("/topics"), "/logout")
            admin.publish(TOPIC, "unseen")
            assert b"the login has ended" in (shown := tail.read()) and b"unseen" not in shown


def test_who_may_only_read_is_refused_a_change(broker: BrokerProcess) -> None:
    """E-05: pages are shown, with their forms; each change ends with the sentence of the other protocols."""
    with Visits(broker.http, READER) as reader, Rest(broker.http, ADMIN) as admin:
        before = admin.get(f"/topics/{TOPIC}")["messages"]
        assert TOPIC in reader.page("/topics").links
        assert "x" in reader.page(f"/topics/{TOPIC}/messages").text.split()
        for path, fields in (
            ("/new-topic", {"topic": "mine"}),
            (f"/topics/{TOPIC}/settings", {"partitions": "9"}),
            (f"/topics/{TOPIC}/delete", {"name": TOPIC}),
            (f"/topics/{TOPIC}/publish", {"body": "y"}),
            ("/new-group", {"group": "mine"}),
            (f"/groups/{GROUP}/settings", {"retry_max_times": "1"}),
            (f"/groups/{GROUP}/delete", {"name": GROUP}),
        ):
            refused = reader.submit(reader.page(path), path, 403, **fields)
            assert refused.alert.startswith("reader may not"), path
        assert (admin.get(f"/topics/{TOPIC}")["messages"], admin.get(f"/topics/{TOPIC}")["partitions"]) == (before, 1)
        assert [row["group"] for row in admin.get("/groups")["rows"]] == [GROUP]


def test_a_stranger_cannot_send_much(broker: BrokerProcess) -> None:
    """E-05: a login is short, in bytes and in time; nobody reads more before it is known who asks."""
    with Visits(broker.http) as nobody:
        refused = nobody.send("POST", f"{ROOT}/login", {"name": "x" * 16 * 1024, "password": ""})
        assert (refused.status, "over the limit of 16384" in refused.alert) == (413, True)
    host, _, port = broker.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as idle:
        head = f"POST {ROOT}/login HTTP/1.1\r\nHost: {broker.http}\r\nContent-Type: {FORM}\r\nContent-Length: 100\r\n\r\n"
        idle.sendall(head.encode())
        assert idle.recv(1) == b""


def test_a_login_has_its_own_token(broker: BrokerProcess) -> None:
    """E-05: a form of another login changes nothing."""
    with Visits(broker.http, ADMIN) as one, Visits(broker.http, ADMIN) as other:
        fields = {**one.page("/new-topic").form(f"{ROOT}/new-topic").fields, "topic": "crossed"}
        assert other.send("POST", f"{ROOT}/new-topic", fields).status == 403
        assert one.send("POST", f"{ROOT}/new-topic", fields).status == 303


def test_wrong_logins_are_counted_with_all_others(tmp_path: Path) -> None:
    """E-05: those of the console and of the API together."""
    users = write_users(tmp_path / "users.yaml")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", "3")
    with BrokerProcess(tmp_path / "data", *flags) as broker, Visits(broker.http) as visits:
        for _ in range(3):
            wrong = visits.send("POST", f"{ROOT}/login", {"name": "eve", "password": "guess"})
            assert (wrong.status, "wrong user or password" in wrong.alert) == (401, True)
            assert wrong.form(f"{ROOT}/login").fields["password"] == ""
        late = visits.send("POST", f"{ROOT}/login", {"name": ADMIN.name, "password": ADMIN.secret})
        assert (late.status, "too many wrong passwords" in late.alert) == (401, True)
        with Rest(broker.http, ADMIN) as rest:
            assert "too many wrong passwords" in rest.refused(401, "GET", "/topics")["detail"]


def test_a_change_of_the_user_ends_its_logins(broker: BrokerProcess, users: Path) -> None:
    """E-05: of its rights as well as of its secret; those of others go on."""
    with Visits(broker.http, READER) as reader, Visits(broker.http, ADMIN) as admin:
        assert reader.page("/topics").status == 200
        for changed in (
            USERS.replace(READER.secret, "another-secret-1"),
            USERS.replace(f"groups: {{{GROUP}: SUB}}", "groups: {}"),
        ):
            assert changed != USERS
            write_users(users, changed)
            wait_until(lambda: reader.send("GET", f"{ROOT}/topics").status == 303, DEADLINE_S, "the login ends", 0.1)
            write_users(users)
            wait_until(lambda: can_log_in(broker), DEADLINE_S, "the users are as before", 0.1)
            assert admin.page("/topics").status == 200
            reader.send("POST", f"{ROOT}/login", {"name": READER.name, "password": READER.secret})


def can_log_in(broker: BrokerProcess) -> bool:
    with Rest(broker.http, READER) as rest:
        return rest.ask("POST", f"/groups/{GROUP}/leases", {"topic": TOPIC}).status == 200


# -- the table of logins ----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_login_ends_by_itself() -> None:
    """E-05: when it was not used for a while, whatever loads itself; and after the longest time in any case."""
    clock, user = Clock(), User(secret="secret-1")
    logins = Logins(clock)
    idle, busy = logins.begin("ann", user), logins.begin("ann", user)
    passed = 0.0
    while passed + IDLE_S / 2 <= LONGEST_S:
        assert logins.find(busy, {"ann": user}.get, used=True) == "ann"
        assert logins.find(idle, {"ann": user}.get, used=False) == ("ann" if passed <= IDLE_S else None)
        clock.now_s += IDLE_S / 2
        passed += IDLE_S / 2
    clock.now_s += 1
    assert logins.find(busy, {"ann": user}.get, used=True) is None
    assert len(logins) == 0


def test_logins_are_bounded() -> None:
    """E-05: the one that was used longest ago makes room."""
    user = User(secret="secret-1")
    logins = Logins(Clock())
    first, second = logins.begin("ann", user), logins.begin("ann", user)
    assert logins.find(first, {"ann": user}.get, used=True) == "ann"
    assert logins.find(second, {"ann": user}.get, used=False) == "ann"  # what a page does by itself is no use
    for _ in range(MOST_LOGINS - 1):
        logins.begin("ann", user)
    assert len(logins) == MOST_LOGINS
    assert logins.find(second, {"ann": user}.get, used=True) is None
    assert logins.find(first, {"ann": user}.get, used=True) == "ann"
