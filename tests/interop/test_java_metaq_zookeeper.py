"""The unmodified Java MetaQ client, 1.4.6.2, as its users run it, with ZooKeeper.

It finds our brokers through a real ZooKeeper, shares their partitions with other consumers, and keeps its offsets there."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from metaq.client import TextClient
from metaq.protocol.text.commands import END_OF_LOG
from metaq.registry.paths import TOPICS_TO_SUBSCRIBE, Layout, decode_offset, parse_partition
from tests.interop.metaq_java.driver import JavaError, JavaMember, Outgoing, build
from tests.support.broker import BrokerProcess, wait_until
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

DEADLINE_S: Final = 90.0
SESSION_MS: Final = 3000
GROUP: Final = "readers"
TOPIC: Final = "orders"
PARTITIONS: Final = 3
LAYOUT: Final = Layout()
ALL: Final = {(broker, partition) for broker in (0, 1) for partition in range(PARTITIONS)}


@pytest.fixture(scope="module")
def class_path() -> str:
    return build()


class Cluster:
    """A ZooKeeper, two brokers with three partitions each, and Java clients."""

    def __init__(self, folder: Path, class_path: str) -> None:
        self._folder = folder
        self._class_path = class_path
        self._stack = ExitStack()
        self._members = 0
        self.received: list[bytes] = []

    def __enter__(self) -> "Cluster":
        self.zookeeper = self._stack.enter_context(ZooKeeperProcess(self._folder / "zk"))
        self.look: KazooClient = self._stack.enter_context(self.zookeeper.client(60))
        self.brokers = [self._start(number) for number in (0, 1)]
        for number in (0, 1):
            self.wait_registered(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, number: int) -> BrokerProcess:
        flags = ["--zookeeper", self.zookeeper.address, "--zookeeper-session-ms", str(SESSION_MS)]
        flags += ["--broker-number", str(number), "--broker-name", f"b{number}"]
        broker = self._stack.enter_context(BrokerProcess(self._folder / f"broker{number}", *flags))
        with TextClient(broker.host, broker.port) as text:
            text.create(TOPIC, PARTITIONS)
        return broker

    def wait_registered(self, number: int) -> None:
        path = f"{LAYOUT.topics(TOPICS_TO_SUBSCRIBE)}/{TOPIC}/{number}-m"
        wait_until(lambda: self.look.retry(self.look.exists, path) is not None, DEADLINE_S, f"{path} is there")

    def member(self) -> JavaMember:
        self._members += 1
        home = self._folder / f"java{self._members}"
        return self._stack.enter_context(JavaMember(self._class_path, self.zookeeper.address, SESSION_MS, home))

    def owners(self) -> dict[tuple[int, int], str]:
        """Which consumer has which partition of which broker."""
        path = LAYOUT.owners(GROUP, TOPIC)
        found = {}
        try:
            for name in self.look.get_children(path):
                found[parse_partition(name)] = self.look.get(f"{path}/{name}")[0].decode()
        except NoNodeError:
            return {}
        return found

    def wait_shares(self, *shares: int) -> None:
        def shared() -> bool:
            owners = self.owners()
            return owners.keys() == ALL and sorted(Counter(owners.values()).values()) == sorted(shares)

        wait_until(shared, DEADLINE_S, f"the consumers have {shares} partitions")

    def wait_received(self, wanted: set[bytes], *members: JavaMember) -> None:
        def received() -> bool:
            for member in members:
                self.received += member.drain()
            return wanted <= set(self.received)

        wait_until(received, DEADLINE_S, "every message is consumed")

    def put_everywhere(self, name: str) -> dict[bytes, tuple[int, int]]:
        """Some messages for each partition: where each is."""
        places = {}
        for number, broker in enumerate(self.brokers):
            with TextClient(broker.host, broker.port) as text:
                for partition in range(PARTITIONS):
                    for body in bodies(f"{name} {number}-{partition}", 5):
                        text.put(TOPIC, body, partition=partition)
                        places[body] = number, partition
        return places

    def stored_offsets(self) -> dict[tuple[int, int], int]:
        found = {}
        for broker, partition in ALL:
            path = LAYOUT.offset(GROUP, TOPIC, broker, partition)
            if self.look.exists(path):
                found[broker, partition] = decode_offset(self.look.get(path)[0])[1]
        return found

    def ends(self) -> dict[tuple[int, int], int]:
        """Where each partition ends, in bytes."""
        found: dict[tuple[int, int], int] = {}
        for number, broker in enumerate(self.brokers):
            with TextClient(broker.host, broker.port) as text:
                for partition in range(PARTITIONS):
                    found[number, partition] = text.offset(TOPIC, END_OF_LOG, partition=partition)
        return found


@pytest.fixture
def cluster(class_path: str, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, class_path) as cluster:
        yield cluster


def send(producer: JavaMember, *bodies: bytes) -> Counter[Any]:
    """Send each until it is taken; how many each partition took."""
    places: Counter[Any] = Counter()
    for body in bodies:

        def taken(body: bytes = body) -> bool:
            try:
                placed = producer.put(Outgoing(TOPIC, body))
            except JavaError:
                return False
            if placed.success:
                places[placed.broker, placed.partition] += 1
            return placed.success

        wait_until(taken, DEADLINE_S, f"{body!r} is taken")
    return places


def bodies(name: str, count: int) -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


@pytest.mark.slow
def test_two_consumers_share_two_brokers(cluster: Cluster) -> None:
    """MQ-020, MQ-023, MQ-024, MQ-034, MQ-049, MQ-050, MQ-052, MQ-053: the producer takes all partitions in turn, each consumer
    has half of them, offsets are stored up to the end; one consumer is killed, the other takes its partitions; nothing is
    missed."""
    first, second, producer = cluster.member(), cluster.member(), cluster.member()
    first.subscribe(TOPIC, GROUP)
    cluster.wait_shares(6)
    second.subscribe(TOPIC, GROUP)
    cluster.wait_shares(3, 3)
    consumers = cluster.look.get_children(LAYOUT.consumers(GROUP))
    assert set(consumers) == set(cluster.owners().values())
    assert all(consumer.startswith(f"{GROUP}_") for consumer in consumers)

    before = bodies("before", 60)
    assert send(producer, *before) == Counter(dict.fromkeys(ALL, 10))
    cluster.wait_received(set(before), first, second)
    wait_until(lambda: cluster.stored_offsets() == cluster.ends(), DEADLINE_S, "the offsets are those of the ends")

    first.kill()
    after = bodies("after", 30)
    send(producer, *after)
    cluster.wait_shares(6)
    cluster.wait_received(set(after), second)
    assert set(cluster.received) == {*before, *after}
    wait_until(lambda: cluster.stored_offsets() == cluster.ends(), DEADLINE_S, "the offsets are those of the ends")


@pytest.mark.slow
def test_the_session_of_a_consumer_expires(cluster: Cluster) -> None:
    """F-ZK, MQ-023, MQ-053: it is stopped for so long that the other one is given its partitions. When it goes on, each
    partition has one owner again, and only that one is given what comes then; nothing is missed.

    What came while it was stopped, the client may deliver once more before it hears that its session has ended: it asks nobody,
    and the protocol does not tell a broker who asks."""
    first, second = cluster.member(), cluster.member()
    first.subscribe(TOPIC, GROUP)
    cluster.wait_shares(6)
    (its_name,) = set(cluster.owners().values())
    second.subscribe(TOPIC, GROUP)
    cluster.wait_shares(3, 3)
    cluster.wait_received(set(cluster.put_everywhere("before")), first, second)

    first.pause()
    cluster.wait_shares(6)
    assert its_name not in cluster.owners().values()
    meanwhile = cluster.put_everywhere("meanwhile")
    cluster.wait_received(set(meanwhile), second)
    first.go_on()
    cluster.wait_shares(3, 3)
    assert its_name in cluster.owners().values()

    wait_until(lambda: cluster.stored_offsets() == cluster.ends(), DEADLINE_S, "the offsets are those of the ends")
    again = Counter([*first.drain(), *second.drain()])
    assert again.keys() <= meanwhile.keys()
    after = cluster.put_everywhere("after")
    given: dict[bytes, list[bool]] = {}

    def all_given() -> bool:
        for member in (first, second):
            for body in member.drain():
                given.setdefault(body, []).append(member is first)
        return given.keys() >= after.keys()

    wait_until(all_given, DEADLINE_S, "every message is consumed")
    owners = cluster.owners()
    assert given == {body: [owners[place] == its_name] for body, place in after.items()}


@pytest.mark.slow
def test_a_broker_is_restarted(cluster: Cluster) -> None:
    """MQ-022, MQ-044: SIGKILL; meanwhile the other broker is used, and then both again, by clients that went on."""
    consumer, producer = cluster.member(), cluster.member()
    consumer.subscribe(TOPIC, GROUP)
    cluster.wait_shares(6)
    sent = bodies("both", 12)
    send(producer, *sent)
    cluster.wait_received(set(sent), consumer)

    cluster.brokers[1].kill()
    alone = bodies("alone", 12)
    assert {broker for broker, _ in send(producer, *alone)} == {0}
    cluster.wait_received(set(alone), consumer)
    cluster.brokers[1].restart(same_port=True)
    cluster.wait_registered(1)

    again: list[bytes] = []

    def both() -> bool:
        again.append(b"again %d" % len(again))
        return 1 in {broker for broker, _ in send(producer, again[-1])}

    wait_until(both, DEADLINE_S, "the broker that was restarted is used")
    cluster.wait_received({*sent, *alone, *again}, consumer)


def test_a_broker_and_partitions_that_come_later(cluster: Cluster) -> None:
    """MQ-046, MQ-081: more partitions reach producers and consumers that run already."""
    consumer, producer = cluster.member(), cluster.member()
    consumer.subscribe(TOPIC, GROUP)
    cluster.wait_shares(6)
    send(producer, b"first")
    broker = cluster.brokers[1]
    with TextClient(broker.host, broker.port) as text:
        text.create(TOPIC, PARTITIONS + 2)
    wait_until(lambda: cluster.owners().keys() == {*ALL, (1, 3), (1, 4)}, DEADLINE_S, "the new partitions are consumed")
    sent: list[bytes] = []
    used: set[Any] = set()

    def new_one() -> bool:
        sent.append(b"later %d" % len(sent))
        used.update(send(producer, sent[-1]))
        return used >= {(1, 3), (1, 4)}

    wait_until(new_one, DEADLINE_S, "the new partitions are used")
    cluster.wait_received({b"first", *sent}, consumer)
