"""Clients of a broker that has a replica beside its master."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from metaq.client import ConsumeFrom, ReceivedMessage, Retry, SimpleConsumer, connect
from metaq.errors import RouteNotFound, SendFailed
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.routes import BrokerData, QueueData, TopicRoute, encode_route
from tests.support.admin import connect as connect_remoting
from tests.support.broker import RegistryProcess, wait_until
from tests.support.cluster import Cluster, ReplicaProcess, wait_caught_up
from tests.support.fakeremoting import FakeRemoting, Reply, Script, accept

DEADLINE_S = 60.0
PULL = Request.PULL_MESSAGE
SEND = Request.SEND_MESSAGE_V2
QUEUE = MessageQueue("orders", "metaq", 0)


def routed(*brokers: dict[int, str]) -> Script:
    """To brokers ``a``, ``b`` and so on with one queue each: the addresses of the master, 0, and of the replicas."""
    named = dict(zip("ab", brokers, strict=False))
    rows = tuple(QueueData(name, 1, 1, 6) for name in named)
    route = TopicRoute(rows, tuple(BrokerData("c", name, addresses) for name, addresses in named.items()))
    return lambda request: Reply(body=encode_route(route))


def committed(request: RemotingCommand) -> Reply:
    """How far the group is."""
    return Reply(fields={"offset": "5"})


def nothing_yet(suggested: int) -> Script:
    """The answer to a pull at the end of a queue, which names the broker to ask next."""

    def answer(request: RemotingCommand) -> Reply:
        begin = request.fields["queueOffset"]
        limits = {"nextBeginOffset": begin, "minOffset": "0", "maxOffset": begin, "suggestWhichBrokerId": str(suggested)}
        return Reply(19, limits)

    return answer


@pytest.mark.slow
def test_a_replica_is_read_from_when_that_is_advised_and_never_written_to() -> None:
    """SG-083, SG-071: also when the master that sent the consumer there is gone; messages go to the master or nowhere."""
    queue = MessageQueue("T", "a", 0)
    with (
        FakeRemoting(pull_message=nothing_yet(1), send_message_v2=accept, query_consumer_offset=committed) as replica,
        ExitStack() as gone,
    ):
        master = gone.enter_context(
            FakeRemoting(pull_message=nothing_yet(1), send_message_v2=accept, query_consumer_offset=committed)
        )
        route = routed({0: master.address, 1: replica.address})
        with (
            FakeRemoting(get_routeinfo_by_topic=route) as registry,
            connect(registry.address) as client,
            client.pull_consumer("T", "g") as consumer,
        ):
            consumer.assign([queue])
            wait_until(lambda: not consumer.poll(0.05) and replica.count(PULL) > 0, DEADLINE_S, "the replica is asked")
            assert master.count(PULL) == 1
            client.producer().send("T", b"x")
            assert master.count(SEND) == 1
            gone.close()
            before = replica.count(PULL)
            wait_until(lambda: not consumer.poll(0.05) and replica.count(PULL) > before, DEADLINE_S, "it is asked again")
            with pytest.raises(SendFailed):
                client.producer().send("T", b"x")
            assert replica.count(SEND) == 0


def test_a_replica_sends_back_to_a_master_that_is_gone() -> None:
    """SG-083: as RocketMQ's slaves always do: the consumer tries the master, and comes back."""

    def passed(request: RemotingCommand) -> Reply:
        limits = {"nextBeginOffset": str(int(request.fields["queueOffset"]) + 1), "minOffset": "0", "maxOffset": "100"}
        return Reply(20, {**limits, "suggestWhichBrokerId": "0"})

    with FakeRemoting(pull_message=passed, query_consumer_offset=committed) as replica, ExitStack() as gone:
        master = gone.enter_context(FakeRemoting())
        gone.close()
        route = routed({0: master.address, 1: replica.address})
        with (
            FakeRemoting(get_routeinfo_by_topic=route) as registry,
            connect(registry.address) as client,
            client.pull_consumer("T", "g") as consumer,
        ):
            consumer.assign([MessageQueue("T", "a", 0)])
            wait_until(lambda: not consumer.poll(0.05) and replica.count(PULL) > 3, DEADLINE_S, "the replica is asked again")


def test_a_send_waits_for_a_master() -> None:
    """SG-138, SG-083: a broker that is master no more refuses; routes are asked again, until one that is takes the message."""
    refusals = iter(range(2))
    registered = iter(("old", "old", "none", "new"))

    def refuse(request: RemotingCommand) -> Reply:
        next(refusals)
        return Reply(14, remark="this replica is a slave")

    with FakeRemoting(send_message_v2=refuse) as old, FakeRemoting(send_message_v2=accept) as new:
        routes = {"old": {0: old.address, 2: new.address}, "none": {1: old.address, 2: new.address}}
        routes["new"] = {0: new.address, 1: old.address}

        def route(request: RemotingCommand) -> Reply | None:
            return routed(routes[next(registered)])(request)

        with FakeRemoting(get_routeinfo_by_topic=route) as registry, connect(registry.address, timeout_s=DEADLINE_S) as client:
            client.producer().send("T", b"x")
        assert (old.count(SEND), new.count(SEND)) == (2, 1)


HOME_A = "b"
"""An id and a key whose home is the first of two brokers, ``a``: their hash is even."""


class Failover:
    """Brokers ``a`` and ``b``; the master of ``a`` hangs up at a send, and its slave is elected a few questions later."""

    def __init__(self, stack: ExitStack, *, is_over: bool = False) -> None:
        self.old = stack.enter_context(FakeRemoting(send_message_v2=self._die))
        self.new = stack.enter_context(FakeRemoting(send_message_v2=accept))
        self.other = stack.enter_context(FakeRemoting(send_message_v2=accept))
        self.registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=self._route))
        self._questions = 0
        """Questions for the route since the old master has died."""
        self.is_dead = is_over

    def _die(self, request: RemotingCommand) -> None:
        self.is_dead = True
        self.old.hang_up()

    def _route(self, request: RemotingCommand) -> Reply | None:
        self._questions += self.is_dead
        addresses = {1: self.new.address} if self.is_dead else {0: self.old.address, 1: self.new.address}
        if self._questions > 3:
            addresses = {0: self.new.address}
        return routed(addresses, {0: self.other.address})(request)

    def sends(self) -> tuple[int, int, int]:
        """How many sends the old master of ``a`` has got, the new one, and ``b``."""
        return self.old.count(SEND), self.new.count(SEND), self.other.count(SEND)


@pytest.mark.parametrize(
    "where", [{"dedupe_id": HOME_A}, {"ordering_key": HOME_A}, {"dedupe_id": HOME_A, "ordering_key": HOME_A}]
)
def test_a_send_that_got_no_answer_waits_for_the_next_master_of_its_broker(where: dict[str, Any]) -> None:
    """SG-138, E-07: while another broker takes messages; there an id would be stored twice, and a key lose its order."""
    with ExitStack() as stack:
        brokers = Failover(stack)
        client = stack.enter_context(connect(brokers.registry.address, timeout_s=DEADLINE_S))
        assert client.producer().send("T", b"x", **where).queue == MessageQueue("T", "a", 0)
        assert brokers.sends() == (1, 1, 0)


def test_a_batch_for_a_partition_waits_for_the_next_master_of_its_broker() -> None:
    """SG-138: its route is asked for again until one is there."""
    batch = Request.SEND_BATCH_MESSAGE
    with ExitStack() as stack:
        brokers = Failover(stack)
        for broker in (brokers.old, brokers.new):
            broker.scripts[batch] = broker.scripts[SEND]
        client = stack.enter_context(connect(brokers.registry.address, timeout_s=DEADLINE_S))
        queue = MessageQueue("T", "a", 0)
        assert [sent.queue for sent in client.producer().send_packed("T", b"x", 1, queue=queue)] == [queue]
        assert (brokers.old.count(batch), brokers.new.count(batch), brokers.other.requests) == (1, 1, [])


def test_an_id_waits_for_the_next_master_of_its_broker_from_the_first_try_on() -> None:
    """E-07: an earlier send with the id may be stored there; who says so goes elsewhere at once."""
    with ExitStack() as stack:
        brokers = Failover(stack, is_over=True)
        client = stack.enter_context(connect(brokers.registry.address, timeout_s=DEADLINE_S))
        elsewhere = client.producer().send("T", b"x", dedupe_id=HOME_A, or_elsewhere=True)
        assert (elsewhere.queue.broker_name, brokers.sends()) == ("b", (0, 0, 1))
        with pytest.raises(RouteNotFound, match="Only a may get the message, and it has no master now") as caught:
            client.producer().send("T", b"x", dedupe_id=HOME_A, timeout_s=0.05)
        assert caught.value.retriable
        assert client.producer().send("T", b"x", dedupe_id=HOME_A).queue.broker_name == "a"
        assert brokers.sends() == (0, 1, 1)


def test_a_key_waits_for_the_next_master_after_a_refusal_of_the_last_one() -> None:
    """SG-138: a master that has become a slave says that another one takes its place."""
    with ExitStack() as stack:
        brokers = Failover(stack)

        def refuse(request: RemotingCommand) -> Reply:
            brokers.is_dead = True
            return Reply(14, remark="this replica is a slave")

        brokers.old.scripts[SEND] = refuse
        client = stack.enter_context(connect(brokers.registry.address, timeout_s=DEADLINE_S))
        assert client.producer().send("T", b"x", ordering_key=HOME_A).queue.broker_name == "a"
        assert brokers.sends() == (1, 1, 0)


@pytest.mark.parametrize(("retry", "sends"), [(Retry(0), 1), (None, 3)])
def test_what_a_master_with_a_replica_may_have_got_is_sent_no_more_often(retry: Retry | None, sends: int) -> None:
    """SG-134: each of these sends may have been stored."""

    def hang_up(request: RemotingCommand) -> None:
        master.hang_up()

    with ExitStack() as stack:
        master, replica = stack.enter_context(FakeRemoting(send_message_v2=hang_up)), stack.enter_context(FakeRemoting())
        route = routed({0: master.address, 1: replica.address})
        registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=route))
        client = stack.enter_context(connect(registry.address, timeout_s=DEADLINE_S))
        with pytest.raises(SendFailed, match=f"in {sends} tries"):
            client.producer(retry=retry).send("T", b"x")
        assert master.count(SEND) == sends


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    with RegistryProcess(tmp_path / "registry") as process:
        yield process.address


@pytest.fixture
def cluster(tmp_path: Path, registry: str) -> Iterator[Cluster]:
    # one replica alone is enough: nobody has to wait for the one that was killed
    with Cluster(tmp_path, "--registries", registry, "--min-in-sync", "1") as cluster:
        yield cluster
    for folder in tmp_path.glob("replica?"):
        shutil.rmtree(folder)


def test_a_group_goes_over_to_the_next_master(cluster: Cluster, registry: str) -> None:
    """SG-138, MQ-068, P26: a send that is under way waits for it; nobody misses a message, and offsets are kept there."""
    master, slave = cluster.pair()
    got: list[bytes] = []
    with connect(registry, timeout_s=DEADLINE_S) as client, connect(registry, timeout_s=DEADLINE_S) as sender:
        wait_until(lambda: bool(client.admin().masters()), DEADLINE_S, "the registry knows the master")
        client.admin().create_topic("orders", 1)
        producer = sender.producer()

        def listen(message: ReceivedMessage) -> None:
            got.append(message.body)

        with client.listen("orders", "billing", listen, consume_from=ConsumeFrom.FIRST):
            for number in range(4):
                producer.send("orders", b"%d" % number)
            wait_until(lambda: len(got) == 4, DEADLINE_S, "all is consumed")
            wait_caught_up(master, slave)
            master.kill()
            sent = producer.send_async("orders", b"4")
            slave.promote()
            assert sent.result(DEADLINE_S).queue.broker_name == "metaq"
            wait_until(lambda: b"4" in got, DEADLINE_S, "the new master gives, too")

            def kept() -> bool:
                return client.admin().offsets("billing", "orders").get(QUEUE) == 5

            wait_until(kept, DEADLINE_S, "and keeps how far the group is")
    assert sorted(set(got)) == [b"%d" % number for number in range(5)]


def test_a_group_goes_on_from_a_slave_and_returns(cluster: Cluster, registry: str) -> None:
    """SG-083, MQ-067: without a master it begins where the slave knows that it was; a master that is there again gives."""
    master, slave = cluster.pair()
    with connect(registry, timeout_s=DEADLINE_S) as client:
        wait_until(lambda: bool(client.admin().masters()), DEADLINE_S, "the registry knows the master")
        client.admin().create_topic("orders", 1)
        producer = client.producer()
        for number in range(3):
            producer.send("orders", b"%d" % number)
        with client.consumer("orders", "billing", consume_from=ConsumeFrom.FIRST) as consumer:
            assert [received(consumer) for _ in range(2)] == [b"0", b"1"]
            consumer.commit()
        wait_until(lambda: committed_at(slave) == 2, DEADLINE_S, "the slave knows how far the group is")
        master.kill()
        with connect(registry, timeout_s=DEADLINE_S) as later, later.consumer("orders", "billing") as consumer:
            assert received(consumer) == b"2"
            master.restart(same_port=True)
            producer.send("orders", b"3")
            assert received(consumer) == b"3"


def received(consumer: SimpleConsumer) -> bytes:
    message = consumer.receive(timeout_s=DEADLINE_S)
    assert message is not None
    return message.body


def committed_at(broker: ReplicaProcess) -> int | None:
    """How far a replica knows the group to be."""
    with connect_remoting(broker) as client:
        fields = {"consumerGroup": "billing", "topic": "orders", "queueId": "0", "setZeroIfNotFound": "false"}
        answer = client.call(Request.QUERY_CONSUMER_OFFSET, fields)
    return int(answer.fields["offset"]) if answer.code == 0 else None
