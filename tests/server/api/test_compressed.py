"""Compressed bodies, which may be a thousand times as large as they are stored: pages of them end early, and nobody waits."""

import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import gevent
import pytest

from metaq.client.consuming.records import decode_messages
from metaq.engine.writing import internal, note, stage
from metaq.server.api.websocket import Frames
from metaq.server.services import messages
from metaq.server.services.messages import MOST_BODY, MOST_SHOWN, row_of
from metaq.server.services.subscribing import PushStream, SubscribeQuery
from metaq.server.text.leases import LeaseHandler
from metaq.server.text.push import PushHandler
from tests.server.text.test_leases import Broker
from tests.support.admin import connect, create_topic, pull
from tests.support.broker import BrokerProcess
from tests.support.inprocess import ADDRESS
from tests.support.messages import send, send_header
from tests.support.rest import Rest
from tests.support.websocket import Subscriber

TOPIC: Final = "compressed"
MESSAGES: Final = 40
FEW: Final = 8
DEADLINE_S: Final = 60.0
SIZE: Final = 1 << 20
COMPRESSED: Final = 1
MOST_ROWS: Final = MOST_SHOWN // MOST_BODY


class Pushing:
    """A broker in this process with compressed messages, and the talk of a subscription to them."""

    def __init__(self, data: Path) -> None:
        self.broker = Broker(data)
        parts = self.broker.parts
        for _ in range(FEW):
            draft = internal(parts.context, "orders", zlib.compress(b"x" * SIZE))
            draft.sys_flag = COMPRESSED
            stage(parts.context, draft)
            note(parts.turns, lambda error: None)
        self.broker.settle()

    def talk(self, ready: int) -> Generator[bytes]:
        """Return the frames that a client gets which says nothing."""
        parts = self.broker.parts
        pushes = PushHandler(LeaseHandler(parts.context, self.broker.leasing, parts.reads))
        interior = SimpleNamespace(endpoint=parts.endpoint, pushes=pushes)
        call: Any = SimpleNamespace(
            interior=interior, principal=parts.endpoint.anonymous, address=ADDRESS, broker="metaq", end=lambda: None
        )
        stream = PushStream(call, "billing", SubscribeQuery("orders", ready))
        silent = SimpleNamespace(read1=lambda size: gevent.sleep(DEADLINE_S))
        deadline: Any = SimpleNamespace(within=lambda seconds: None)
        return cast(Generator[bytes], iter(Frames(call, stream, silent, deadline)))


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


def test_each_push_is_inflated_when_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-33: what a subscriber may have not read is bounded as it is stored, so only one message more is inflated."""
    pushing, inflated = Pushing(tmp_path / "data"), 0

    def count(inflate: Callable[[], None]) -> None:
        nonlocal inflated
        inflated += 1
        inflate()

    monkeypatch.setattr(messages, "run_in_pool", count)
    talk = pushing.talk(ready=MESSAGES)
    next(talk)  # the ping after the handshake
    gevent.spawn(pushing.broker.settle)
    for number in range(FEW):
        assert f'"offset":{number},'.encode() in next(talk)
        assert inflated == number + 1
    talk.close()
    pushing.broker.parts.close()
