"""The memory that all connections together make a real broker hold is bounded, and other connections go on meanwhile."""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient, parse_stats
from metaq.protocol.remoting.codes import PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.frames import encode_request
from metaq.protocol.text.writing import write_line
from tests.support.admin import connect, create_topic, fields_of
from tests.support.broker import BrokerProcess, wait_until
from tests.support.users import TOPIC, WRITER, write_users

MIB: Final = 1 << 20
DEADLINE_S: Final = 60.0
STRANGERS: Final = 300
LIMIT: Final = 32 * MIB
FLAGS: Final = ("--max-connections-bytes", str(LIMIT))
GROWTH: Final = 3 * LIMIT // 2
"""Memory is cut up, and what is freed is not all given back at once."""
PUT: Final = f"put {TOPIC} 0 {MIB} 0 1\r\n".encode() + bytes(MIB - 1)
FRAME: Final = encode_request(Request.SEND_MESSAGE, 1, {}, bytes(MIB))[:-1]


def anonymous_bytes(broker: BrokerProcess) -> int:
    """Private memory of the process."""
    for line in Path(f"/proc/{broker.pid}/status").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "RssAnon":
            return int(rest.split()[0]) * 1024
    raise AssertionError("Linux does not say how much memory the broker has")


def say(broker: BrokerProcess, data: bytes) -> socket.socket:
    """A connection that says so much and then waits; it may be closed meanwhile."""
    connection = broker.connect()
    with contextlib.suppress(ConnectionError):
        connection.sendall(data)
    return connection


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    users = write_users(tmp_path / "users.yaml")
    with BrokerProcess(tmp_path / "data", *FLAGS, "--users-file", str(users)) as process:
        yield process


@pytest.mark.parametrize("unfinished", [PUT, FRAME], ids=["put", "frame"])
def test_strangers_with_commands_that_never_end(broker: BrokerProcess, unfinished: bytes) -> None:
    """P21, E-05, SG-054: 300 with 1 MiB each keep no more than the limit; a user's large put goes through."""
    with ExitStack() as stack:
        user = stack.enter_context(broker.connect())
        user.sendall(write_line("auth", WRITER.name, WRITER.secret, 0))
        assert user.recv(4096).startswith(b"result 200 ")
        user.sendall(PUT[: MIB // 2])
        other = stack.enter_context(TextClient(broker.host, broker.port, user=WRITER.name, password=WRITER.secret))
        before = most = anonymous_bytes(broker)
        for _ in range(STRANGERS):
            stack.enter_context(say(broker, unfinished))
            most = max(most, anonymous_bytes(broker))
            assert other.put(TOPIC, b"meanwhile").partition == 0
        assert most - before <= GROWTH
        stats = parse_stats(other.stats())
        assert int(stats["connections_bytes"]) <= LIMIT
        assert int(stats["connections_evicted"]) >= STRANGERS - 2 * LIMIT // MIB
        user.sendall(PUT[MIB // 2 :] + b"x")
        assert user.recv(4096).startswith(b"result 200 ")
    assert "connections closed for room" in broker.stderr()


def test_clients_that_never_read(tmp_path: Path) -> None:
    """SG-054, MQ-060: answers that nobody takes are in the account, too; who reads is served meanwhile."""
    with BrokerProcess(tmp_path / "data", *FLAGS) as broker, ExitStack() as stack, connect(broker) as client:
        create_topic(client, TOPIC)
        text = stack.enter_context(TextClient(broker.host, broker.port))
        text.put(TOPIC, bytes(MIB - 100))
        pull = b"".join([f"get {TOPIC} g 0 0 {MIB} {number}\r\n".encode() for number in range(20)])
        for _ in range(20):
            stack.enter_context(say(broker, pull))
        wait_until(lambda: int(parse_stats(text.stats())["connections_evicted"]) > 0, DEADLINE_S, "some are closed")
        assert int(parse_stats(text.stats())["connections_bytes"]) <= LIMIT
        assert text.put(TOPIC, b"meanwhile").partition == 0


def test_a_held_pull_lets_go_of_its_body(tmp_path: Path) -> None:
    """SG-097, SG-054: 200 pulls with bodies of 1 MiB, which no pull needs, are held in a tenth of one."""
    with BrokerProcess(tmp_path / "data") as broker, connect(broker) as client:
        create_topic(client, TOPIC)
        fields = fields_of(consumerGroup="g", topic=TOPIC, queueId=0, queueOffset=0, maxMsgNums=1, commitOffset=0, subVersion=0)
        fields |= fields_of(sysFlag=PULL_HAS_SUBSCRIPTION | PULL_SUSPENDS, suspendTimeoutMillis=30_000, subscription="*")
        client.send(Request.PULL_MESSAGE, fields, bytes(MIB))
        assert client.call(Request.GET_MAX_OFFSET, fields_of(topic=TOPIC, queueId=0)).code == Response.SUCCESS
        before = anonymous_bytes(broker)
        for _ in range(200):
            client.send(Request.PULL_MESSAGE, fields, bytes(MIB))
        assert client.call(Request.GET_MAX_OFFSET, fields_of(topic=TOPIC, queueId=0)).code == Response.SUCCESS
        assert anonymous_bytes(broker) - before < 20 * MIB
        with TextClient(broker.host, broker.port) as text:
            assert int(parse_stats(text.stats())["connections_bytes"]) < MIB
