"""Who may call the API: users and their rights, pages of other sites, hostile names, and bodies that are too large."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.server.api.operations import OPERATIONS, ROOT
from metaq.server.api.site import BOUNDS
from tests.support.broker import BrokerProcess
from tests.support.console import FORM
from tests.support.rest import JSON, Rest, basic, named
from tests.support.served import Browser, Served
from tests.support.users import ADMIN, GROUP, READER, TOPIC, WRITER, write_users

LARGE: Final = 8 * 1024 * 1024
"""Bytes of a body."""
A_MINUTE: Final = 5
"""Failed logins."""
ADVERTISED: Final = "Broker.example:10911"
HOSTILE: Final = (
    "<script>alert(1)</script>",
    "a b",
    "ä",
    "../../etc/passwd",
    "%00",
    "\x00",
    "a\x01b\x02c",
    "x" * 256,
    "x" * 200,
    "'; DROP TABLE topics; --",
    "null",
    "\U0001f600",
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with users."""
    folder: Path = tmp_path_factory.mktemp("guarded")
    users = write_users(folder / "users.yaml")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", str(A_MINUTE))
    with BrokerProcess(folder / "data", *flags) as broker:
        with Rest(broker.http, ADMIN) as rest:
            rest.put(f"/topics/{TOPIC}", {"partitions": 1})
            rest.put(f"/groups/{GROUP}", {})
        yield broker


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker without users."""
    folder: Path = tmp_path_factory.mktemp("open")
    with BrokerProcess(folder / "data", "--max-message-bytes", "65536", "--advertise", ADVERTISED) as broker:
        yield broker


@pytest.fixture
def rest(broker: BrokerProcess) -> Iterator[Rest]:
    with Rest(broker.http) as rest:
        yield rest


# -- users ------------------------------------------------------------------------------------------------------------


def test_who_is_nobody_may_do_nothing(guarded: BrokerProcess) -> None:
    """E-05: every operation asks for a login; the document and its page are for everybody."""
    with Rest(guarded.http) as nobody:
        for operation in OPERATIONS:
            path = operation.path.format(**dict.fromkeys(operation.takes.path, "1"))
            answer = nobody.ask(operation.method, path, None if operation.takes.body is None else {})
            assert (answer.status, answer.headers["www-authenticate"]) == (401, 'Basic realm="metaq"'), operation.id
        assert nobody.refused(401, "GET", "/topics")["detail"].endswith("log in first")
        assert [nobody.send("GET", path).status for path in ("/api/docs", "/api/openapi.json")] == [200, 200]


def test_rights_are_those_of_other_protocols(guarded: BrokerProcess) -> None:
    """E-05: the reader reads and consumes, and changes nothing; the writer writes to its topics, and reads nothing."""
    with Rest(guarded.http, READER) as reader, Rest(guarded.http, WRITER) as writer:
        (sent,) = writer.publish(TOPIC, "x")
        assert reader.get(f"/messages/{sent['offset_id']}")["body"] == "x"
        assert reader.get(f"/topics/{TOPIC}/partitions/0/messages")["messages"][0]["body"] == "x"
        assert reader.post(f"/groups/{GROUP}/leases", {"topic": TOPIC})["messages"][0]["message"]["body"] == "x"
        done = reader.post(f"/groups/{GROUP}/offsets", {"topic": TOPIC, "offsets": {"0": 1}})
        assert [(row["committed"], row["end"]) for row in done["partitions"]] == [(1, 1)]
        assert writer.refused(403, "GET", f"/topics/{TOPIC}/partitions/0/messages")["code"] == 16
        assert writer.refused(403, "GET", f"/messages/{sent['offset_id']}")["code"] in (16, 22)
        assert reader.refused(403, "POST", f"/topics/{TOPIC}/messages", {"body": "x"})["code"] == 16
        assert writer.refused(403, "POST", "/topics/other/messages", {"body": "x"})["code"] == 16
        for method, path, body in (
            ("PUT", f"/topics/{TOPIC}", {"partitions": 2}),
            ("DELETE", f"/topics/{TOPIC}", None),
            ("PUT", f"/groups/{GROUP}", {}),
            ("DELETE", f"/groups/{GROUP}", None),
            ("POST", f"/groups/{GROUP}/offsets/reset", {"topic": TOPIC, "to": "first", "apply": True}),
            ("DELETE", f"/groups/{GROUP}/dead-letters", None),
            ("PUT", "/recurring/x", {"cron": "@daily", "topic": TOPIC}),
            ("DELETE", "/recurring/x", None),
            ("PATCH", "/broker/settings", {"keep_hours": 1}),
            ("POST", "/transactions/XID:1:0a:0b/decision", {"outcome": "commit"}),
        ):
            assert reader.refused(403, method, path, body)["code"] == 16, path
            assert writer.refused(403, method, path, body)["code"] == 16, path


def test_wrong_logins_are_counted(tmp_path: Path) -> None:
    """E-05: as on all ports: after some, right ones from there are refused too."""
    users = write_users(tmp_path / "users.yaml")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", "3")
    with BrokerProcess(tmp_path / "data", *flags) as broker, Rest(broker.http) as rest:
        where = f"{ROOT}/topics"
        assert rest.send("GET", where, headers=basic(*READER)).status == 200
        for _ in range(3):
            assert "wrong user or password" in rest.send("GET", where, headers=basic("eve", "guess")).content["detail"]
        late = rest.send("GET", where, headers=basic(*ADMIN))
        assert (late.status, "too many wrong passwords" in late.content["detail"]) == (401, True)
        assert rest.send("GET", where, headers=basic(*READER)).status == 200


def test_changes_are_in_the_log(guarded: BrokerProcess) -> None:
    """E-05: who, from where, and what; looking and publishing are not."""
    with Rest(guarded.http, ADMIN) as admin:
        before = guarded.stderr()
        admin.put("/topics/audited", {})
        admin.publish("audited", "x")
        admin.get("/topics/audited")
        admin.post(f"/groups/{GROUP}/offsets/reset", {"topic": "audited", "to": "first"})
        admin.delete("/topics/audited")
    lines = [line for line in guarded.stderr().removeprefix(before).splitlines() if "api change" in line]
    assert ["operation=put_topic" in lines[0], "operation=delete_topic" in lines[1], len(lines)] == [True, True, 2]
    assert all(f"user={ADMIN.name} address=127.0.0.1" in line and "/topics/audited" in line for line in lines)


# -- browsers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example:8124"},
        {"Host": "localhost.evil.example"},
        {"Host": "["},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "http://["},
    ],
)
def test_a_page_of_another_site_gets_nothing(rest: Rest, headers: dict[str, str]) -> None:
    """E-05: neither through the browser's rules nor by a name that leads here."""
    for method, data in (("GET", None), ("PUT", b"{}")):
        answer = rest.send(method, f"{ROOT}/topics/evil", data, headers)
        assert (answer.status, answer.content["code"]) == (403, 16), answer
    assert [row["topic"] for row in rest.get("/topics", search="evil")["rows"]] == []


def test_pages_of_the_broker_itself_may(rest: Rest) -> None:
    """E-05: by number, as localhost, or by the name that clients are told."""
    port = rest.address.rpartition(":")[2]
    name = ADVERTISED.partition(":")[0]
    for host in (rest.address, f"localhost:{port}", f"[::1]:{port}", f"{name}:{port}", name.lower()):
        headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert rest.send("GET", f"{ROOT}/topics", headers=headers).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""])
def test_only_json_is_a_body(rest: Rest, kind: str) -> None:
    """E-05: a form of another site can send all other types without being asked whether it may."""
    answer = rest.send("POST", f"{ROOT}/topics/forms/messages", b'{"body":"x"}', {"Content-Type": kind})
    assert (answer.status, answer.headers["content-type"]) == (415, "application/problem+json")
    assert rest.refused(404, "GET", "/topics/forms")["code"] == 17


# -- hostile input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(rest: Rest, broker: BrokerProcess, name: str) -> None:
    """E-05: are refused, or kept as they are; nothing of them is in a header, and no line of the log is made of them."""
    before = len(broker.stderr().splitlines())
    made = 0
    for method, path, body in (
        ("GET", f"/topics/{named(name)}", None),
        ("PUT", f"/topics/{named(name)}", {}),
        ("PUT", f"/groups/{named(name)}", {}),
        ("POST", f"/topics/{named(name)}/messages", {"body": name, "keys": [name], "tag": name}),
        ("GET", f"/topics/{named(name)}/messages?key={named(name)}", None),
        ("DELETE", f"/recurring/{named(name)}", None),
        ("DELETE", f"/timers/{named(name)}", None),
    ):
        answer = rest.ask(method, path, body)
        assert answer.status in (200, 400, 404, 409), (path, answer)
        assert answer.headers["content-type"] in (JSON, "application/problem+json")
        made += answer.status == 200 and method == "PUT"
    changes = [line for line in broker.stderr().splitlines()[before:] if "api change" in line]
    assert len(changes) == made
    assert "Traceback" not in broker.stderr()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b'{"body":1}', b'{"body":"\xff"}', b'{"body":"\\ud800"}', b"[" * 100_000, b'{"body":"x"}x'],
)
def test_bodies_that_are_no_json(rest: Rest, data: bytes) -> None:
    """E-05: 400 with the reason, and the connection goes on."""
    answer = rest.send("POST", f"{ROOT}/topics/t/messages", data)
    assert (answer.status, answer.content["title"]) == (400, "Bad Request"), answer


def test_bodies_that_are_too_large(rest: Rest, broker: BrokerProcess) -> None:
    """E-05: are refused before they are read; a message over the limit as everywhere."""
    huge = rest.send("POST", f"{ROOT}/topics/t/messages", None, {"Content-Type": JSON, "Content-Length": str(1 << 40)})
    assert (huge.status, "over the limit" in huge.content["detail"]) == (413, True)
    with Rest(broker.http) as another:
        large = json.dumps({"body": "x" * 70_000})
        answer = another.send("POST", f"{ROOT}/topics/t/messages", large.encode())
        assert (answer.status, answer.content["code"]) == (400, 13), answer
        assert "max_message_bytes" in answer.content["detail"] or "65536" in answer.content["detail"]


def test_what_is_not_there(rest: Rest) -> None:
    """E-32: paths and methods that do not exist are problems, too."""
    assert rest.refused(404, "GET", "/nothing")["code"] == 3
    answer = rest.ask("DELETE", "/topics")
    assert (answer.status, answer.headers["allow"]) == (405, "GET, OPTIONS")
    assert "in the query 2 times" in rest.send("GET", f"{ROOT}/topics?limit=1&limit=2").content["detail"]
    assert "unknown" in rest.refused(400, "GET", "/topics", nothing="x")["detail"]
    assert rest.refused(400, "GET", "/broker", nothing="x")["code"] == 1


@pytest.mark.parametrize(
    ("path", "kind", "status"), [(f"{ROOT}/topics/t/messages", JSON, 200), ("/console/new-topic", FORM, 403)]
)
def test_bodies_that_do_not_come_keep_nobody_out(tmp_path: Path, path: str, kind: str, status: int) -> None:
    """E-05: however many are announced: they count as they come. A form without a token is read, and refused."""
    with ExitStack() as stack:
        served = Served(stack, tmp_path / "data")
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: "
        idle = BOUNDS.bodies_bytes // LARGE + 1
        for _ in range(idle):
            Browser(served).send(f"{head}{LARGE}\r\n\r\n".encode())
        sites = served.broker.site._api, served.broker.site._console
        while sum(site._calls for site in sites) < idle:
            gevent.sleep(0)
        gevent.sleep(0)
        answer = Browser(served).ask(f"{head}12\r\n\r\n{{'body':'x'}}".replace("'", '"').encode())
        assert answer is not None and f" {status} " in answer.status
