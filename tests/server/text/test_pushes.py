"""Pushes while something changes: the partitions of the topic, or the credit, in the process of the test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest

from metaq.server.text.push import FULL_S
from metaq.server.text.session import MOST_UNREAD
from metaq.server.wire.pops import LOOK_S
from metaq.store.files.filecache import run_here
from tests.server.text.test_leases import Broker, Client, SlowReads, reopened
from tests.server.text.test_silent_subscribers import Stuck

Cold = tuple[Broker, SlowReads]
DELAY_S: Final = 5.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


@pytest.fixture
def client(broker: Broker) -> Client:
    return Client(broker)


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Cold]:
    """Yield a broker that has to read its two messages from the disk, and its reads, which wait."""
    first = Broker(tmp_path / "data")
    first.put("a", "b")
    broker, slow = reopened(first, tmp_path)
    yield broker, slow
    broker.parts.close()


@pytest.mark.parametrize("count", [1, 5])
def test_a_partition_that_is_added_is_dealt(broker: Broker, count: int) -> None:
    """MY-010: its first message is pushed, also to a member that had no partition."""
    members = [Client(broker) for _ in range(count)]
    for member in members:
        member.say("subscribe orders billing assign=own ready=9 1")
    broker.parts.context.topics.ensure("orders", 5)
    broker.settle()
    broker.put("a", partition=4)
    assert members[-1].heard() == ["message 1 1 4-0 orders 4 0 1 0", "a"]


def nack_elsewhere(broker: Broker, client: Client, ident: str) -> None:
    """Give a message of a client back with a delay, over another connection."""
    other = Client(broker)
    other.ids = client.ids
    assert other.say(f"nack orders billing {ident} delay={int(DELAY_S * 1000)} 9") == ["result 200 1 9", "1"]


def test_what_another_connection_gives_back_with_a_delay_takes_no_credit(broker: Broker, client: Client) -> None:
    """MY-008, MY-031: nobody has it until the delay is over."""
    client.say("subscribe orders billing ready=1 1")
    broker.put("a", "b")
    assert client.heard() == ["message 1 1 0-0 orders 0 0 1 0", "a"]
    nack_elsewhere(broker, client, "0-0")
    assert client.heard() == ["message 1 1 0-1 orders 0 21 1 0", "b"]


def test_what_another_connection_gives_back_with_a_delay_keeps_no_partition(broker: Broker, client: Client) -> None:
    """MY-010: it is not out any more, so the partition moves."""
    client.say("subscribe orders billing assign=own ready=9 1")
    broker.put("a", partition=1)
    assert client.heard() == ["message 1 1 1-0 orders 1 0 1 0", "a"]
    owner = Client(broker)
    owner.say("subscribe orders billing assign=own ready=9 2")
    broker.put("b", partition=1)
    assert owner.heard() == []
    nack_elsewhere(broker, client, "1-0")
    assert owner.heard() == ["message 1 2 1-1 orders 1 21 1 0", "b"]


def test_the_end_of_a_subscription_ends_no_delay(broker: Broker, client: Client) -> None:
    """MY-008: it gives back what it has out, and what another connection gave back is that no more."""
    client.say("subscribe orders billing ready=9 1")
    broker.put("a")
    client.heard()
    nack_elsewhere(broker, client, "0-0")
    client.say("unsubscribe orders billing 2")
    assert client.say("pop orders billing 1 3")[0].startswith("result 404 ")
    broker.advance(DELAY_S)
    assert client.say("pop orders billing 1 3")[0] == "message 1 3 0-0 orders 0 0 2 0"


def stop_reading(client: Client) -> None:
    client.text._session._socket = cast(Any, Stuck())
    client.text._session.reply(bytes(MOST_UNREAD + 1))


@pytest.mark.parametrize("end", [lambda client: client.say("ready 0 2"), lambda client: client.say("ready 1 2"), stop_reading])
def test_nothing_is_leased_that_may_not_be_pushed_any_more(cold: Cold, end: Callable[[Client], object]) -> None:
    """MY-008, MY-031: although it was planned before, and only the disk was waited for."""
    broker, slow = cold
    client, other = Client(broker), Client(broker)
    client.say("subscribe orders billing ready=9 1")
    assert slow.waiting
    end(client)
    slow.let_all()
    broker.parts.reads._run = run_here
    assert [line for line in client.heard() if "message" in line] == []
    assert other.say("pop orders billing 2 7")[0] == "message 1 7 0-0 orders 0 0 1 0"


def test_a_lower_credit_is_used_when_the_disk_was_read(cold: Cold) -> None:
    """MY-031: what may still be pushed is."""
    broker, slow = cold
    client = Client(broker)
    client.say("subscribe orders billing ready=9 1")
    assert slow.waiting
    assert client.say("ready 1 2") == ["result 200 0 2"]
    slow.let_all()
    broker.parts.reads._run = run_here
    broker.advance(LOOK_S)
    assert client.heard() == ["message 1 1 0-0 orders 0 0 1 0", "a"]


def test_what_a_filter_passes_over_is_done_although_nothing_may_be_pushed(cold: Cold) -> None:
    """MY-031: it needs no credit."""
    broker, slow = cold
    client = Client(broker)
    client.say("subscribe orders billing ready=9 attribute=red 1")
    assert slow.waiting
    stop_reading(client)
    slow.let_all()
    broker.settle()
    assert broker.parts.context.offsets.get("billing", "orders", 0) == 2


@pytest.mark.parametrize("line", ["subscribe orders billing ready=9 2", "ready 9 2"])
def test_a_command_that_comes_with_a_large_answer_before_it_pushes_what_there_is(
    broker: Broker, client: Client, line: str
) -> None:
    """MY-031: its client is only seen to read once the answer is sent, after the command; no message has to come first."""
    broker.put(*["x" * 1000] * 70)
    if line.startswith("ready"):
        client.say("subscribe orders billing ready=0 1")
    answers = client.text.send(f"get orders g 0 0 1000000 1\r\n{line}\r\n".encode())
    assert len(answers) > MOST_UNREAD
    assert b"\r\nmessage " not in answers
    broker.parts.end_turn()
    broker.parts.advance(FULL_S)
    assert client.text.answers().count(b"message 1000 ") == 9


def test_a_lower_credit_does_not_search_more_often_for_what_is_not_out_any_more(broker: Broker, client: Client) -> None:
    """MY-031: all that is out is looked at, so that is done after a pause, not each time that something changes."""
    client.say("subscribe orders billing ready=200 1")
    broker.put(*["a"] * 300)
    client.heard()
    client.say("ready 10 2")
    other = Client(broker)
    other.ids = client.ids
    assert other.say(f"ack orders billing {','.join(f'0-{number}' for number in range(195))} 3")[1] == "195"
    assert client.heard() == []
    broker.advance(FULL_S)
    assert sum("message 1 1 " in line for line in client.heard()) == 5
