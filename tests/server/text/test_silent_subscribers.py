"""Subscribers from which nothing comes: those that read may be silent, the others are closed, in the process of the test."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.server.text.test_leases import Broker, Client
from tests.support.inprocess import Connection

LONG_AGO_S = -1e9


class Stuck(Connection):
    """A connection whose client reads nothing."""

    def sendmsg(self, buffers: Sequence[bytes]) -> int:
        raise BlockingIOError


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


def be_silent(client: Client) -> None:
    """Let a client be silent for long."""
    session = client.text._session
    session.last_io = session._since = LONG_AGO_S


def close_idle(broker: Broker, client: Client) -> bool:
    """Close connections that have been silent; return whether that of a client is one."""
    session = client.text._session
    broker.parts.endpoint.sessions.add(session)
    broker.parts.endpoint.close_idle()
    return session.closed


def test_a_subscriber_may_be_silent(broker: Broker) -> None:
    """MQ-054: as long as nothing comes for it."""
    client = Client(broker)
    client.say("subscribe orders billing 1")
    be_silent(client)
    assert not close_idle(broker, client)


def test_a_subscriber_that_reads_nothing_is_closed(broker: Broker) -> None:
    """MQ-054: its partitions, and what it had, go to others."""
    stuck, other = Client(broker), Client(broker)
    stuck.say("subscribe orders billing assign=own ready=9 1")
    stuck.text._session._socket = cast(Any, Stuck())
    other.say("subscribe orders billing assign=own ready=9 2")
    broker.put("a")
    assert other.heard() == []
    be_silent(stuck)
    assert close_idle(broker, stuck)
    broker.settle()
    assert other.heard() == ["message 1 2 0-0 orders 0 0 2 0", "a"]


def test_a_subscriber_that_was_silent_has_time_to_read(broker: Broker) -> None:
    """MQ-054: from the first message on that it has not read; later ones give it no more."""
    client = Client(broker)
    client.say("subscribe orders billing ready=9 1")
    session = client.text._session
    session._socket = cast(Any, Stuck())
    be_silent(client)
    broker.put("a")
    assert not close_idle(broker, client)
    size, since_s = session.kept_waiting
    assert size
    assert since_s > LONG_AGO_S
    be_silent(client)
    broker.put("b")
    assert close_idle(broker, client)


def test_pushes_make_no_unfinished_command_newer(broker: Broker) -> None:
    """SG-054: a subscriber that reads, but never sends the rest of a put, weighs more every second."""
    client = Client(broker)
    client.say("subscribe orders billing ready=9 1")
    session = client.text._session
    client.text.send(b"put orders 0 5 0 2\r\nhe")
    be_silent(client)
    before = session.kept_waiting
    assert before[0]
    broker.put("a")
    assert client.heard() == ["message 1 1 0-0 orders 0 0 1 0", "a"]
    assert session.kept_waiting == before
    assert not close_idle(broker, client)
