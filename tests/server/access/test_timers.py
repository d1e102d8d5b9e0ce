"""The rights to requests about delayed and recurring messages (30050, 30051, 30053), whose parts have rights of their own."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final

import pytest

from metaq.protocol.properties import TIMER_DELAY
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.signature import Credentials
from tests.support.admin import ask, create_topic
from tests.support.broker import BrokerProcess
from tests.support.messages import send, send_header, sent
from tests.support.users import ADMIN, READER, TOPIC, WRITER, SigningClient, write_users

DEFINE: Final = {"do": "define", "name": "n", "cron": "@daily", "topic": TOPIC, "body": b64encode(b"x").decode()}
UNDEFINE: Final = {"do": "undefine", "name": "n"}
LIST: Final = {"do": "list"}
MALFORMED: Final = [b"", b"{", b"[]", b'{"do":"explode"}', b'{"do":7}']
OTHERS: Final = pytest.mark.parametrize("who", [None, READER, WRITER], ids=["nobody", "reader", "writer"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("rights")
    with BrokerProcess(folder / "data", "--users-file", str(write_users(folder / "users.yaml"))) as process:
        with SigningClient(process.host, process.port, ADMIN) as client:
            create_topic(client, TOPIC)
            sent(client, send(client, send_header(TOPIC, f"{TIMER_DELAY}\x013600000\x02"), b"later"))
        yield process


def call(broker: BrokerProcess, who: Credentials | None, code: int, content: bytes | dict[str, Any] = b"") -> RemotingCommand:
    with SigningClient(broker.host, broker.port, who) as client:
        return client.call(code, {}, content if isinstance(content, bytes) else json.dumps(content).encode())


def rows(answer: RemotingCommand) -> list[dict[str, Any]]:
    assert answer.code == Response.SUCCESS, answer.remark
    found: list[dict[str, Any]] = json.loads(bytes(answer.body))["rows"]
    return found


@OTHERS
def test_only_who_administers_defines_and_ends(broker: BrokerProcess, who: Credentials | None) -> None:
    """E-05, E-13: 16 with the name of who asked, also for a right to publish to the topic; nothing is changed."""
    assert call(broker, ADMIN, Request.CRON, DEFINE).code == Response.SUCCESS
    before = rows(call(broker, ADMIN, Request.CRON, LIST))
    for content in (DEFINE, DEFINE | {"name": "m"}, UNDEFINE, UNDEFINE | {"name": "absent"}, DEFINE | {"cron": "wrong"}):
        answer = call(broker, who, Request.CRON, content)
        name = "anonymous" if who is None else who.name
        assert (answer.code, (answer.remark or "").startswith(f"{name} may not ")) == (Response.NO_PERMISSION, True)
    assert rows(call(broker, ADMIN, Request.CRON, LIST)) == before
    assert call(broker, ADMIN, Request.CRON, UNDEFINE).code == Response.SUCCESS
    assert rows(call(broker, ADMIN, Request.CRON, LIST)) == []


def test_users_see_what_waits_and_strangers_nothing(broker: BrokerProcess) -> None:
    """E-05: users see the figures and lists, but only who administers the handles, which cancel."""
    for code, content in ((Request.LIST_TIMERS, b""), (Request.TIMER_STATS, b""), (Request.CRON, LIST)):
        assert call(broker, None, code, content).code == Response.NO_PERMISSION
    for who in (READER, WRITER, ADMIN):
        (row,) = rows(call(broker, who, Request.LIST_TIMERS))
        assert (row["topic"], row["handle"] is not None) == (TOPIC, who is ADMIN)
        assert rows(call(broker, who, Request.CRON, LIST)) == []
        stats = json.loads(bytes(call(broker, who, Request.TIMER_STATS).body))
        assert (stats["timers_pending"], stats["timers_recurring"]) == (1, 0)


@pytest.mark.parametrize("body", MALFORMED)
def test_the_right_comes_before_the_request_is_read(broker: BrokerProcess, body: bytes) -> None:
    """E-05: strangers do not learn what is wrong with it; users do, and go on."""
    assert call(broker, None, Request.CRON, body).code == Response.NO_PERMISSION
    with SigningClient(broker.host, broker.port, READER) as client:
        assert client.call(Request.CRON, {}, body).code == Response.SYSTEM_ERROR
        assert json.loads(bytes(ask(client, Request.CRON, json.dumps(LIST).encode()).body))["rows"] == []
