"""The transaction producer of the unmodified RocketMQ Java client, 4.9.8, against a real broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop.clients import ClientProcess, Outgoing
from tests.interop.conftest import Spawn
from tests.interop.scenarios import WAIT_S, bodies, create_topic
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

COMMIT: Final = "COMMIT_MESSAGE"
ROLLBACK: Final = "ROLLBACK_MESSAGE"
UNKNOWN: Final = "UNKNOW"
ASKING_SOON: Final = ("--check-after-ms", "300", "--check-interval-ms", "300", "--max-checks", "1000000")
"""Of a broker that asks producers often, and never gives up."""


@pytest.fixture(scope="module")
def program(java_program: tuple[str, ...]) -> tuple[str, ...]:
    return java_program


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", *ASKING_SOON) as process:
        yield process


class Desk:
    """A transaction producer of one group; a body says which message is meant."""

    def __init__(self, client: ClientProcess, group: str, topic: str, name: str = "") -> None:
        self.client = client
        self.topic = topic
        self.name = name or group
        client.call("start_transaction_producer", producer=self.name, group=group)

    def begin(self, body: bytes) -> None:
        """Store a half message, and stay in its local transaction."""
        message = Outgoing(self.topic, body, "paid", ["k1", "k2"], {"city": "Kiel"})
        self.client.call("begin_transaction", producer=self.name, key=body.decode(), message=message.view())
        self.client.wait(lambda: body in self.told("executing"), f"the local transaction for {body!r} begins")

    def decide(self, body: bytes, state: str) -> dict[str, Any]:
        """Let the local transaction end; the client's result."""
        result: dict[str, Any] = self.client.call("decide_transaction", producer=self.name, key=body.decode(), state=state)
        assert (result["status"], result["state"]) == ("SEND_OK", state)
        return result

    def send(self, body: bytes, state: str) -> dict[str, Any]:
        """Both at once."""
        self.begin(body)
        return self.decide(body, state)

    def find(self, state: str) -> None:
        """Set the state that checks find from now on; at first, nothing is known."""
        self.client.call("find_transactions", producer=self.name, state=state)

    def told(self, kind: str) -> list[bytes]:
        """The bodies with which the listener was called: ``executing`` or ``checked``."""
        return [event["text"].encode() for event in self.client.events(kind) if event["producer"] == self.name]

    def wait_for_check(self, body: bytes, more: int = 1) -> None:
        """Wait until the listener was asked so many times more about what it does not know."""
        count = self.told("checked").count(body) + more
        self.client.wait(lambda: self.told("checked").count(body) >= count, f"{body!r} is checked")


def stored(client: ClientProcess, topic: str) -> list[bytes]:
    """All that anybody can get of the topic."""
    return bodies(client.pull(f"{topic}-pullers", topic))


@pytest.mark.slow
def test_commit_and_rollback(client: ClientProcess, broker: BrokerProcess) -> None:
    """RD-105: what is committed comes once and as it was sent; what is rolled back, never; before, neither is seen."""
    topic = create_topic(client, broker, "decided")
    client.start_consumer("decided", "decided-consumers", topic)
    desk = Desk(client, "deciders", topic)
    for body in (b"committed", b"rolled back"):
        desk.begin(body)
    assert stored(client, topic) == []
    desk.decide(b"rolled back", ROLLBACK)
    result = desk.decide(b"committed", COMMIT)
    desk.send(b"last", COMMIT)

    messages = client.wait_for_bodies("decided", [b"committed", b"last"])
    assert sorted(message.body for message in messages) == stored(client, topic) == [b"committed", b"last"]
    first = next(message for message in messages if message.body == b"committed")
    assert (first.id, first.tag, first.topic) == (result["id"], "paid", topic)
    assert (first.queue, result["transaction"]) == (result["queue"], result["id"])
    assert {"KEYS": "k1 k2", "city": "Kiel", "PGROUP": "deciders"}.items() <= first.properties.items()
    assert not {"TRAN_MSG", "REAL_TOPIC", "REAL_QID"} & first.properties.keys()


@pytest.mark.slow
def test_a_check_decides(client: ClientProcess, broker: BrokerProcess) -> None:
    """RD-105: a local transaction whose outcome is unknown is asked for again and again, until somebody knows."""
    topic = create_topic(client, broker, "checked")
    desks = {state: Desk(client, f"checked-{state}", topic) for state in (COMMIT, ROLLBACK, UNKNOWN)}
    for state, desk in desks.items():
        desk.send(state.encode(), UNKNOWN)
    for state, desk in desks.items():
        desk.wait_for_check(state.encode(), 3)
    assert stored(client, topic) == []
    for state, desk in desks.items():
        desk.find(state)

    def only_the_unknown_one_is_checked() -> bool:
        before = [desks[state].told("checked") for state in (COMMIT, ROLLBACK)]
        desks[UNKNOWN].wait_for_check(UNKNOWN.encode(), 3)
        return before == [desks[state].told("checked") for state in (COMMIT, ROLLBACK)]

    wait_until(only_the_unknown_one_is_checked, WAIT_S, "two are decided")
    client.start_consumer("checked", "checked-consumers", topic)
    client.wait_for_bodies("checked", [COMMIT.encode()])
    assert client.bodies("checked") == stored(client, topic) == [COMMIT.encode()]
    event = next(event for event in client.events("checked") if event["text"] == COMMIT)
    assert (event["topic"], event["properties"]["city"]) == (topic, "Kiel")
    assert event["transaction"] == event["properties"]["UNIQ_KEY"]


@pytest.mark.slow
def test_another_producer_answers_for_one_that_was_killed(
    client: ClientProcess, broker: BrokerProcess, spawn: Spawn, program: tuple[str, ...]
) -> None:
    """RD-105: SIGKILL in the middle of a local transaction; the group's other producer is asked."""
    topic = create_topic(client, broker, "orphaned")
    survivor = Desk(client, "orphans", topic)
    first = spawn(program, broker.registry)
    desk = Desk(first, "orphans", topic, "first")
    desk.begin(b"orphan")
    first.kill()
    survivor.wait_for_check(b"orphan")
    survivor.find(COMMIT)
    client.start_consumer("orphaned", "orphaned-consumers", topic)
    client.wait_for_bodies("orphaned", [b"orphan"])
    survivor.send(b"last", COMMIT)
    client.wait_for_bodies("orphaned", [b"last"])
    assert sorted(client.bodies("orphaned")) == stored(client, topic) == [b"last", b"orphan"]


@pytest.mark.slow
def test_a_broker_that_was_killed_asks(spawn: Spawn, program: tuple[str, ...], tmp_path: Path) -> None:
    """RD-105, SG-068: SIGKILL between half message and outcome, which nobody hears; it is asked for after the restart."""
    with BrokerProcess(tmp_path / "data", *ASKING_SOON, durability="disk") as broker:
        client = spawn(program, broker.registry)
        topic = create_topic(client, broker, "interrupted")
        client.start_consumer("interrupted", "interrupted-consumers", topic)
        desks = {state: Desk(client, f"interrupted-{state}", topic) for state in (COMMIT, ROLLBACK)}
        for state, desk in desks.items():
            desk.begin(state.encode())
        broker.kill()
        for state, desk in desks.items():
            desk.decide(state.encode(), state)
            desk.find(state)
        before = {desk: desk.told("checked") for desk in desks.values()}
        broker.restart(same_port=True)
        client.wait(lambda: all(desk.told("checked") != before[desk] for desk in before), "both are checked")

        desks[COMMIT].send(b"last", COMMIT)
        client.wait_for_bodies("interrupted", [COMMIT.encode(), b"last"])
        assert sorted(client.bodies("interrupted")) == stored(client, topic) == [COMMIT.encode(), b"last"]
        client.kill()
