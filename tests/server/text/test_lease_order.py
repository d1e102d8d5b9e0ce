"""Answers to ends of leases come in the order of the commands, in the process of the test."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import Fenced
from metaq.server.access.permissions import Permission, Principal
from tests.server.text.test_leases import Broker, Client

STALE: Final = "0-7-000000"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


@pytest.fixture
def client(broker: Broker) -> Client:
    """One that has two messages, and may consume for one group only."""
    user = Principal("bob")
    user.become({"*": Permission.SUB}, {"billing": Permission.SUB}, admin=False)
    client = Client(broker)
    client.text._session.principal = user
    broker.put("a", "b")
    client.say("pop orders billing 2 9")
    return client


def between_two_acks(client: Client, line: str) -> bytes:
    """Send a command between two acks that are good; return what is answered at once."""
    first, last = client.ids["0-0"], client.ids["0-1"]
    return client.text.send(f"ack {first} 1\r\n{line} 2\r\nack {last} 3\r\n".encode())


def results(lines: list[str]) -> list[tuple[str, str]]:
    """Return the codes and opaques of answers."""
    return re.findall(r"result (\d+) \d+ (\d)", "\n".join(lines))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"ack {STALE}", "404"),
        (f"nack {STALE}", "404"),
        (f"nack {STALE} dead", "404"),
        (f"extend {STALE} 5000", "404"),
        (f"ack orders audit {STALE}", "403"),
        (f"nack orders audit {STALE} dead", "403"),
    ],
)
def test_what_is_known_at_once_overtakes_no_ack(broker: Broker, client: Client, line: str, code: str) -> None:
    """ES-102: and no ack overtakes it. With nothing before it, it is answered at once."""
    assert between_two_acks(client, line) == b""
    broker.settle()
    assert results(client.heard()) == [("200", "1"), (code, "2"), ("200", "3")]
    assert results([client.text.send(f"{line} 4\r\n".encode()).decode()]) == [(code, "4")]


def test_what_is_known_at_once_is_answered_although_the_acks_are_not_stored(broker: Broker, client: Client) -> None:
    between_two_acks(client, f"ack {STALE}")
    broker.parts.store.fence.guard(refuse)
    broker.settle()
    assert results(client.heard()) == [("503", "1"), ("404", "2"), ("503", "3")]


def refuse() -> None:
    raise Fenced("another replica is the master")
