"""What a client does with a broker that has a replica beside its master."""

from contextlib import ExitStack

import pytest

from metaq.client import connect
from metaq.errors import SendFailed
from metaq.message import MessageQueue
from metaq.protocol.codes import Request
from metaq.protocol.remoting import RemotingCommand
from metaq.protocol.routes import BrokerData, QueueData, TopicRoute, encode_route
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, Script, accept

DEADLINE_S = 60.0
PULL = Request.PULL_MESSAGE
SEND = Request.SEND_MESSAGE_V2


def routed(addresses: dict[int, str]) -> Script:
    """To one broker with one queue: the addresses of its master, 0, and of its replicas."""
    route = TopicRoute((QueueData("a", 1, 1, 6),), (BrokerData("c", "a", addresses),))
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
