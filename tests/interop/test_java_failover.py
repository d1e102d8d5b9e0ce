"""The unmodified Java clients of both protocols while the master of a broker is lost.

They read from its slaves, and go on with the master that ZooKeeper elects. None of them is restarted or reconfigured."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from metaq.client import TextClient
from metaq.protocol.text.commands import END_OF_LOG
from metaq.registry.paths import TOPICS_TO_SUBSCRIBE, Layout, decode_offset, parse_partition
from tests.interop import clients as rocketmq
from tests.interop.clients import ClientProcess
from tests.interop.metaq_java.driver import JavaError, JavaMember, Outgoing, build
from tests.interop.test_java_metaq_zookeeper import bodies, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cluster import Cluster, wait_caught_up
from tests.support.group import SESSION_MS, Group
from tests.support.zookeeper import ZooKeeperProcess

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

DEADLINE_S: Final = 90.0
CLIENT_SESSION_MS: Final = 30_000
GROUP: Final = "readers"
TOPIC: Final = "orders"
PARTITIONS: Final = 3
HURRY_MS: Final = 1000
STREAM: Final = 400
LAYOUT: Final = Layout()
ALL: Final = {(0, partition) for partition in range(PARTITIONS)}


@pytest.fixture(scope="module")
def class_path() -> str:
    return build()


@pytest.fixture(scope="module")
def program(java_program: tuple[str, ...]) -> tuple[str, ...]:
    return java_program


class Scene(ExitStack):
    """A ZooKeeper, and Java clients of it."""

    def __init__(self, folder: Path, class_path: str) -> None:
        super().__init__()
        self._folder = folder
        self._class_path = class_path
        self._members = 0
        self.received: list[bytes] = []

    def __enter__(self) -> "Scene":
        self.zookeeper = self.enter_context(ZooKeeperProcess(self._folder / "zk"))
        self.look: KazooClient = self.enter_context(self.zookeeper.client(60))
        return self

    def member(self) -> JavaMember:
        """A client of MetaQ."""
        self._members += 1
        home = self._folder / f"java{self._members}"
        return self.enter_context(JavaMember(self._class_path, self.zookeeper.address, CLIENT_SESSION_MS, home))

    def wait_readable_at(self, *names: str) -> None:
        """Wait until ZooKeeper says that exactly these replicas have the topic for readers."""
        path = f"{LAYOUT.topics(TOPICS_TO_SUBSCRIBE)}/{TOPIC}"
        wait_until(lambda: self._children(path) == set(names), DEADLINE_S, f"{path} has {names}")

    def _children(self, path: str) -> set[str]:
        try:
            return set(self.look.get_children(path))
        except NoNodeError:
            return set()

    def owned(self) -> bool:
        """Return whether each partition is owned by some consumer."""
        return {parse_partition(name) for name in self._children(LAYOUT.owners(GROUP, TOPIC))} == ALL

    def owner_nodes(self) -> dict[str, int]:
        """When each partition was taken by its owner, as ZooKeeper counts."""
        path = LAYOUT.owners(GROUP, TOPIC)
        return {name: self.look.get(f"{path}/{name}")[1].czxid for name in self._children(path)}

    def wait_received(self, wanted: set[bytes], member: JavaMember) -> None:
        def received() -> bool:
            self.received += member.drain()
            return wanted <= set(self.received)

        wait_until(received, DEADLINE_S, "every message is consumed")

    def wait_offsets_at_the_ends(self, broker: BrokerProcess) -> None:
        """Wait until the consumer has stored the ends of all partitions."""

        def stored() -> bool:
            paths = {partition: LAYOUT.offset(GROUP, TOPIC, 0, partition) for partition in range(PARTITIONS)}
            offsets = {at: decode_offset(self.look.get(path)[0])[1] for at, path in paths.items() if self.look.exists(path)}
            return offsets == ends(broker)

        wait_until(stored, DEADLINE_S, "the offsets are those of the ends")


def ends(broker: BrokerProcess) -> dict[int, int]:
    """Where each partition ends, in bytes."""
    with TextClient(broker.host, broker.port) as text:
        return {partition: text.offset(TOPIC, END_OF_LOG, partition=partition) for partition in range(PARTITIONS)}


def create_topic(broker: BrokerProcess) -> None:
    with TextClient(broker.host, broker.port) as text:
        text.create(TOPIC, PARTITIONS)


@pytest.fixture
def scene(class_path: str, tmp_path: Path) -> Iterator[Scene]:
    with Scene(tmp_path, class_path) as scene:
        yield scene


@pytest.mark.slow
def test_metaq_clients_read_from_the_slave(scene: Scene, tmp_path: Path) -> None:
    """MQ-045, F-COMPAT: while there is no master, readers that run and those that come get everything from the slave; then the
    master is back, and producers go on."""
    flags = ("--zookeeper", scene.zookeeper.address, "--zookeeper-session-ms", str(SESSION_MS))
    master, slave = scene.enter_context(Cluster(tmp_path, *flags)).pair()
    create_topic(master)
    scene.wait_readable_at("0-m", "0-s1")
    consumer, producer = scene.member(), scene.member()
    consumer.subscribe(TOPIC, GROUP)
    wait_until(scene.owned, DEADLINE_S, "the partitions are owned")
    sent = bodies("before", 12)
    send(producer, *sent)
    scene.wait_received(set(sent), consumer)
    scene.wait_offsets_at_the_ends(master)

    consumer.pause()
    waiting = bodies("waiting", 12)
    send(producer, *waiting)
    wait_caught_up(master, slave)  # a slave is told what readers may see a little later
    master.kill()
    consumer.go_on()
    scene.wait_received(set(waiting), consumer)
    scene.wait_offsets_at_the_ends(slave)
    scene.wait_readable_at("0-s1")
    late = scene.member()
    late.subscribe(TOPIC, "late")
    seen: list[bytes] = []

    def all_seen() -> bool:
        seen.extend(late.drain())
        return {*sent, *waiting} <= set(seen)

    wait_until(all_seen, DEADLINE_S, "a reader that came without a master has everything")
    with pytest.raises(JavaError):
        producer.put(Outgoing(TOPIC, b"to nobody"))
    assert not master.running

    master.restart(same_port=True)
    scene.wait_readable_at("0-m", "0-s1")
    after = bodies("after", 12)
    send(producer, *after)
    scene.wait_received(set(after), consumer)
    scene.wait_offsets_at_the_ends(master)
    assert all(times == 1 for body, times in Counter(scene.received).items() if body in sent)


@pytest.mark.slow
def test_metaq_clients_go_on_with_the_next_master(scene: Scene, tmp_path: Path) -> None:
    """MQ-022, MQ-034, MQ-043, F-COMPAT: the master is killed and a slave elected; nothing acknowledged is missed, offsets go
    on, and the killed one, which comes back as a slave, disturbs nobody."""
    group = scene.enter_context(Group(tmp_path, scene.zookeeper.address))
    master = group.wait_master()
    create_topic(master)
    slaves = {number: f"0-s{number - 1}" for number in group.members}
    scene.wait_readable_at("0-m", *(name for number, name in slaves.items() if number != master.number))
    consumer, producer = scene.member(), scene.member()
    consumer.subscribe(TOPIC, GROUP)
    wait_until(scene.owned, DEADLINE_S, "the partitions are owned")
    sent = bodies("before", 30)
    send(producer, *sent)
    scene.wait_received(set(sent), consumer)
    scene.wait_offsets_at_the_ends(master)

    consumer.pause()
    waiting, during = bodies("waiting", 12), bodies("during", 12)
    send(producer, *waiting)
    master.kill()
    consumer.go_on()
    send(producer, *during)
    scene.wait_received({*waiting, *during}, consumer)
    successor = group.wait_master()
    assert successor is not master
    scene.wait_offsets_at_the_ends(successor)

    owners = scene.owner_nodes()
    master.restart(same_port=True)
    group.wait_whole()
    scene.wait_readable_at("0-m", *(name for number, name in slaves.items() if number != successor.number))
    after = bodies("after", 30)
    send(producer, *after)
    scene.wait_received(set(after), consumer)
    scene.wait_offsets_at_the_ends(successor)
    assert group.wait_master() is successor
    assert scene.owner_nodes() == owners
    times = Counter(scene.received)
    assert {times[body] for body in (*sent, *after)} == {1}


# -- RocketMQ ---------------------------------------------------------------------------------------------------------


class RocketMq:
    """A producer and a push consumer, each a process of its own, with all replicas as name servers."""

    def __init__(self, scene: Scene, program: tuple[str, ...], folder: Path, replicas: Iterable[BrokerProcess]) -> None:
        registries = ";".join(replica.registry for replica in replicas)
        self.producer, self.consumer = (
            scene.enter_context(ClientProcess(program, registries, folder / name)) for name in ("producer", "consumer")
        )
        self.producer.start_producer("p", "producers", hurry_ms=HURRY_MS)
        self.consumer.start_consumer("c", GROUP, TOPIC, hurry_ms=HURRY_MS)

    def send(self, *bodies: bytes) -> None:
        """Send each until it is acknowledged."""
        for body in bodies:

            def taken(body: bytes = body) -> bool:
                try:
                    return self.producer.send("p", rocketmq.Outgoing(TOPIC, body)).status == "SEND_OK"
                except rocketmq.ClientError:
                    return False

            wait_until(taken, DEADLINE_S, f"{body!r} is taken")

    def consumed(self) -> int:
        """How many messages lie before the group's offsets, as the master has them."""
        offsets: dict[str, int] = self.consumer.call("group_offsets", group=GROUP, topic=TOPIC)
        return sum(offsets.values())

    def wait_received(self, *bodies: bytes) -> None:
        self.consumer.wait_for_bodies("c", bodies, DEADLINE_S)


@pytest.mark.slow
def test_rocketmq_clients_read_from_the_slave(scene: Scene, program: tuple[str, ...], tmp_path: Path) -> None:
    """SG-083, F-COMPAT: while there is no master, a push consumer gets from the slave what it has not had, and a new one
    gets everything; then all go on."""
    flags = ("--zookeeper", scene.zookeeper.address, "--zookeeper-session-ms", str(SESSION_MS))
    master, slave = scene.enter_context(Cluster(tmp_path, *flags)).pair()
    create_topic(master)
    scene.wait_readable_at("0-m", "0-s1")
    clients = RocketMq(scene, program, tmp_path, (master, slave))
    sent = bodies("before", 12)
    clients.send(*sent)
    clients.wait_received(*sent)

    clients.consumer.pause()
    waiting = bodies("waiting", 12)
    clients.send(*waiting)
    wait_caught_up(master, slave)
    master.kill()
    clients.consumer.go_on()  # what it asks the dead master as it wakes it may await for its 30 s
    clients.wait_received(*waiting)
    clients.consumer.start_consumer("late", "late", TOPIC)
    clients.consumer.wait_for_bodies("late", [*sent, *waiting], DEADLINE_S)
    with pytest.raises(rocketmq.ClientError):
        clients.producer.send("p", rocketmq.Outgoing(TOPIC, b"to nobody"))
    assert not master.running

    master.restart(same_port=True)
    after = bodies("after", 12)
    clients.send(*after)
    clients.wait_received(*after)


@pytest.mark.slow
def test_rocketmq_clients_go_on_with_the_next_master(scene: Scene, program: tuple[str, ...], tmp_path: Path) -> None:
    """SG-055, SG-134, F-COMPAT: a stream of sends meets a failover; everything acknowledged is consumed, and the killed one,
    which comes back as a slave, disturbs nobody."""
    group = scene.enter_context(Group(tmp_path, scene.zookeeper.address))
    master = group.wait_master()
    create_topic(master)
    clients = RocketMq(scene, program, tmp_path, group.members.values())
    producer = clients.producer
    sent = bodies("before", 12)
    clients.send(*sent)
    clients.wait_received(*sent)

    producer.call("stream", producer="p", topic=TOPIC, count=STREAM, pause_ms=5)
    producer.wait(lambda: len(producer.acknowledged(TOPIC)) >= STREAM // 4, "a part of the stream is acknowledged")
    master.kill()
    producer.wait(lambda: len(producer.acknowledged(TOPIC)) == STREAM, "the whole stream is acknowledged")
    clients.wait_received(*(text.encode() for text in producer.acknowledged(TOPIC)))
    successor = group.wait_master()
    assert successor is not master

    master.restart(same_port=True)
    group.wait_whole()
    after = bodies("after", 12)
    clients.send(*after)
    clients.wait_received(*after)
    whole = len(sent) + STREAM + len(after)
    wait_until(lambda: clients.consumed() >= whole, DEADLINE_S, "the offsets are stored")
    assert group.wait_master() is successor
    times = Counter(clients.consumer.bodies("c"))
    assert {times[body] for body in (*sent, *after)} == {1}
