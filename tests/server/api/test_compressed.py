"""Compressed bodies, which may be a thousand times as large as they are stored: pages of them end early, and nobody waits."""

import zlib
from collections.abc import Iterator
from typing import Final

import gevent
import pytest

from metaq.client.consuming.records import decode_messages
from metaq.server.services.messages import MOST_BODY, MOST_SHOWN, row_of
from tests.support.admin import connect, create_topic, pull
from tests.support.broker import BrokerProcess
from tests.support.messages import send, send_header
from tests.support.rest import Rest
from tests.support.websocket import Subscriber

TOPIC: Final = "compressed"
MESSAGES: Final = 40
SIZE: Final = 1 << 20
COMPRESSED: Final = 1
MOST_ROWS: Final = MOST_SHOWN // MOST_BODY


@pytest.fixture(scope="module")
def rest(broker: BrokerProcess) -> Iterator[Rest]:
    body = zlib.compress(b"x" * SIZE)
    with connect(broker) as client, Rest(broker.http) as rest:
        create_topic(client, TOPIC, write=2, read=2)
        for number in range(MESSAGES):
            header = send_header(TOPIC, "KEYS\x01k", partition=number % 2, sys_flag=COMPRESSED)
            assert client.response(send(client, header, body)).code == 0
        yield rest


def test_others_run_while_a_body_is_inflated(rest: Rest, broker: BrokerProcess) -> None:
    """E-02: the event loop does not inflate."""
    with connect(broker) as client:
        message = decode_messages(pull(client, TOPIC, 0).body, "metaq")[0]
    other = gevent.spawn(lambda: None)
    row = row_of(message)
    assert other.ready()
    assert (row.size, row.cut, row.body) == (SIZE, True, "x" * MOST_BODY)


def test_a_page_ends_early(rest: Rest) -> None:
    """E-02: what is newest is there; reading goes on where it ended."""
    newest = rest.get(f"/topics/{TOPIC}/newest", limit=64)["rows"]
    assert [(row["partition"], row["offset"]) for row in newest] == [
        (number % 2, number // 2) for number in range(MESSAGES - 1, MESSAGES - 1 - MOST_ROWS, -1)
    ]
    found = rest.get(f"/topics/{TOPIC}/messages", key="k", limit=64)["rows"]
    assert found == newest[::-1]
    path = f"/topics/{TOPIC}/partitions/0/messages"
    first = rest.get(path, limit=64)
    assert len(first["messages"]) == first["next"] == MOST_ROWS
    rest_of_it = rest.get(path, limit=64, offset=first["next"])
    assert [row["offset"] for row in rest_of_it["messages"]] == list(range(MOST_ROWS, MESSAGES // 2))


def test_leases_and_pushes_have_all(rest: Rest, broker: BrokerProcess) -> None:
    """E-07, E-33: what is leased is shown, however large."""
    leased = rest.post("/groups/g-leases/leases", {"topic": TOPIC, "limit": 32})["messages"]
    assert len(leased) > MOST_ROWS
    assert {row["message"]["size"] for row in leased} == {SIZE}
    with Subscriber(broker.http, "g-pushes", TOPIC, ready=MESSAGES) as member:
        pushed = [member.hear()["message"] for _ in range(MESSAGES)]
    assert {(row["partition"], row["offset"]) for row in pushed} == {(n % 2, n // 2) for n in range(MESSAGES)}
    assert {(row["size"], len(row["body"])) for row in pushed} == {(SIZE, MOST_BODY)}
