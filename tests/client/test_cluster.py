"""Clients of two brokers, one of which dies."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from metaq.client import Client, ConsumeFrom, SendResult, connect
from metaq.client.connecting import core
from metaq.client.connecting.health import BrokerHealth
from metaq.errors import ClientError
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import READ, WRITE
from tests.client.test_consumers import FIRST, Heard
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until

DEADLINE_S = 120.0
TOPIC = "orders"
FIRST_KEY = "\0"
"""Has the hash 0: an ordering key whose messages go to the first partition of all."""


class Pair:
    """A registry, two brokers with the same topic, and a client."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.registry = stack.enter_context(RegistryProcess(folder / "registry"))
        self.brokers = {
            name: stack.enter_context(
                BrokerProcess(folder / name, "--registries", self.registry.address, "--broker-name", name)
            )
            for name in ("a", "b")
        }
        self.client = self.connect(stack)
        admin = self.client.admin()
        wait_until(lambda: len(admin.masters()) == 2, DEADLINE_S, "both brokers are registered")
        admin.create_topic(TOPIC, 2)

    def connect(self, stack: ExitStack) -> Client:
        return stack.enter_context(connect(self.registry.address))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(
        core, "BrokerHealth", partial(BrokerHealth, ())
    )  # a machine that stands still for a moment makes no broker a slow one
    return Pair(tmp_path, stack)


def queues(*names: str) -> list[MessageQueue]:
    return [MessageQueue(TOPIC, name, partition) for name in names for partition in range(2)]


def test_members_share_the_partitions_of_both_brokers(pair: Pair, stack: ExitStack) -> None:
    """MQ-001, MQ-007, MQ-018, SG-117, RD-104, SG-129, MY-003: sends go to all, members share them."""
    producer = pair.client.producer()
    assert sorted({producer.send(TOPIC, b"x").queue for _ in range(8)}) == queues("a", "b")
    members = [pair.connect(stack).consumer(TOPIC, "billing") for _ in range(2)]

    def shared() -> bool:
        own = [[queue for queue in member.assignment() if queue.topic == TOPIC] for member in members]
        return sorted(own) == [queues("a"), queues("b")]

    wait_until(shared, DEADLINE_S, "each member has the partitions of one broker")


def test_the_newest_messages_with_a_key_are_found_on_all_brokers(pair: Pair) -> None:
    """SG-132: whichever brokers have them, the oldest of them first."""
    admin, producer = pair.client.admin(), pair.client.producer()
    found = []
    for number in range(12):
        # of four partitions, two on each broker, in turn: whoever chooses freely may pass over a broker that was slow
        sent = producer.send(TOPIC, str(number).encode(), keys="order", ordering_key="0213"[number % 4])
        found.append(sent.queue.broker_name)
        while time.time_ns() // 1_000_000 <= sent_ms(pair.client, sent):  # brokers tell the time in milliseconds
            time.sleep(0.001)
    assert {*found[:10]} == {*found[-2:]} == {"a", "b"}
    wait_until(lambda: len(admin.query_by_key(TOPIC, "order")) == 12, DEADLINE_S, "the keys are indexed")
    for most in (1, 2, 3, 5, 12, 64):
        bodies = [int(message.body) for message in admin.query_by_key(TOPIC, "order", most=most)]
        assert bodies == [*range(12)][-most:]


def sent_ms(client: Client, sent: SendResult) -> int:
    """When a message was stored."""
    message = client.admin().query_by_offset_id(sent.offset_id)
    assert message is not None
    return message.store_ms


def test_a_topic_grows_onto_another_broker(pair: Pair) -> None:
    """MQ-019: with as many partitions as its weight, while it is used."""
    admin, producer = pair.client.admin(), pair.client.producer()
    admin.create_topic("growing", 1, broker_names=("a",))
    assert {producer.send("growing", b"x").queue.broker_name for _ in range(4)} == {"a"}
    admin.create_topic("growing", 3, broker_names=("b",))
    names = [producer.send("growing", b"x").queue.broker_name for _ in range(8)]
    assert (names.count("a"), names.count("b")) == (2, 6)


def test_a_change_on_all_brokers_leaves_what_one_has_of_its_own(pair: Pair) -> None:
    """SG-125: the permission of a topic may differ from broker to broker; what a change does not name stays so."""
    admin = pair.client.admin()
    admin.create_topic("apart", 2, permission=READ, broker_names=("a",))
    admin.create_topic("apart", 2, broker_names=("b",))
    admin.create_topic("apart", 3)

    def settings() -> list[tuple[str, int, str]]:
        found = [view for view in admin.all_topic_configs() if view.topic == "apart"]
        return [(view.broker_name, view.write_partitions, view.permission_text) for view in found]

    assert settings() == [("a", 3, "R-"), ("b", 3, "RW")]
    admin.create_topic("apart", 3, permission=READ | WRITE)
    assert settings() == [("a", 3, "RW"), ("b", 3, "RW")]


@pytest.mark.slow
def test_sends_and_consumers_go_on_when_a_broker_dies(pair: Pair, stack: ExitStack) -> None:
    """SG-134, RD-103, P24: the next try is the other broker; what the dead one has comes when it is back."""
    heard = Heard()
    producer = pair.client.producer()
    sent = [producer.send(TOPIC, str(number).encode()).id for number in range(20)]
    with pair.connect(stack).listen(TOPIC, "billing", heard, consume_from=ConsumeFrom.FIRST):
        heard.wait(20)
        pair.brokers["a"].kill()
        results = [producer.send(TOPIC, b"after") for _ in range(20)]
        assert {result.queue.broker_name for result in results} == {"b"}
        sent += [result.id for result in results]
        wait_until(lambda: {message.id for message in heard.messages} >= set(sent), DEADLINE_S, "the living broker is heard")
        pair.brokers["a"].restart(same_port=True)

        def back() -> bool:
            try:
                result = producer.send(TOPIC, b"back", ordering_key=FIRST_KEY)
            except ClientError:
                return False
            sent.append(result.id)
            return result.queue.broker_name == "a"

        wait_until(back, DEADLINE_S, "the broker takes messages again")
        wait_until(lambda: {message.id for message in heard.messages} >= set(sent), DEADLINE_S, "both are heard")


def test_one_topic_on_two_brokers(pair: Pair, stack: ExitStack) -> None:
    """SG-001: sent to both, given to each group by tag, found by key; what was committed does not come again."""
    producer = pair.client.producer()
    sent = [producer.send(TOPIC, b"%d" % number, tag="ab"[number % 2], keys="k") for number in range(40)]
    ordered = [producer.send(TOPIC, b"o%d" % number, tag="a", ordering_key="k") for number in range(5)]
    assert {result.queue.broker_name for result in sent} == {"a", "b"}
    assert len({result.queue for result in ordered}) == 1
    assert [result.queue_offset for result in ordered] == sorted(result.queue_offset for result in ordered)
    ids = {result.id for result in (*sent, *ordered)}
    heard = {"billing": Heard(), "audit": Heard(), "tagged": Heard()}
    members = [pair.connect(stack).listen(TOPIC, "billing", heard["billing"], consume_from=FIRST) for _ in range(2)]
    members.append(pair.connect(stack).listen(TOPIC, "audit", heard["audit"], consume_from=FIRST))
    members.append(pair.connect(stack).listen(TOPIC, "tagged", heard["tagged"], tags="b", consume_from=FIRST))
    for name, wanted in (("billing", ids), ("audit", ids), ("tagged", {result.id for result in sent[1::2]})):
        wait_until(lambda: {message.id for message in heard[name].messages} >= wanted, DEADLINE_S, f"{name} has all")  # noqa: B023
        assert {message.id for message in heard[name].messages} == wanted
    bodies = [message.body for message in heard["audit"].messages if message.body.startswith(b"o")]
    assert sorted(bodies) == [b"o%d" % number for number in range(5)]
    for member in members:
        member.close()
    with pair.connect(stack).consumer(TOPIC, "audit", consume_from=FIRST) as consumer:
        later = producer.send(TOPIC, b"later")
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None and message.id == later.id
    assert {found.body for found in pair.client.admin().query_by_key(TOPIC, "k", most=64)} >= {b"0", b"1"}


class Sender:
    """Sends from a thread until it is stopped, and remembers where each message went."""

    def __init__(self, client: Client) -> None:
        self._producer = client.producer()
        self._names: list[str] = []
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._sending = self._pool.submit(self._send)

    def _send(self) -> None:
        while not self._ended.wait(0.005):
            self._names.append(self._producer.send(TOPIC, b"x").queue.broker_name)

    def wait_for(self, name: str) -> None:
        """Until a message goes to a broker from now on."""
        before = len(self._names)
        came = lambda: self._sending.done() or name in self._names[before:]  # noqa: E731
        wait_until(came, DEADLINE_S, f"a message goes to {name}")
        assert not self._sending.done(), self._sending.exception()

    def stop(self) -> None:
        """Raises what a send has raised."""
        self._ended.set()
        self._sending.result(DEADLINE_S)
        self._pool.shutdown()


def test_a_cluster_changes_while_it_is_used(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-008, MY-035: brokers and a registry come and go, the topic grows onto a new broker, and no send fails."""
    monkeypatch.setattr(core, "ROUTES_S", 0.3)
    monkeypatch.setattr(core, "BrokerHealth", partial(BrokerHealth, failure_isolation_s=0.5))
    registries = [stack.enter_context(RegistryProcess(tmp_path / f"registry{number}")) for number in range(2)]
    named = ";".join(registry.address for registry in registries)
    brokers = {}

    def start(name: str, number: int) -> None:
        flags = ("--registries", named, "--broker-name", name, "--broker-number", str(number))
        brokers[name] = stack.enter_context(BrokerProcess(tmp_path / name, *flags, "--registration-interval-ms", "200"))

    start("a", 0)
    client = stack.enter_context(connect(named))
    admin = client.admin()
    wait_until(lambda: len(admin.masters()) == 1, DEADLINE_S, "the first broker is registered")
    admin.create_topic(TOPIC, 2)
    sender = Sender(client)
    stack.callback(sender.stop)
    sender.wait_for("a")
    start("b", 1)
    wait_until(lambda: len(admin.masters()) == 2, DEADLINE_S, "the second one, too")
    admin.create_topic(TOPIC, 2, broker_names=("b",))
    sender.wait_for("b")
    registries[0].kill()
    assert brokers["a"].terminate() == 0
    sender.wait_for("b")
    with client.consumer(TOPIC, "billing") as consumer:
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None and message.queue.broker_name == "b"
    brokers["a"].restart()
    sender.wait_for("a")
    sender.wait_for("b")
    sender.stop()
