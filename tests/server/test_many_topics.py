"""Many topics: the resources that a broker needs do not grow with their files."""

import os
from pathlib import Path
from typing import Final

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.fastjson import decode
from tests.support.admin import ask_body, connect, fields_of, pull, records
from tests.support.broker import BrokerProcess
from tests.support.remoting import RemotingClient

TOPICS: Final = 150
PARTITIONS: Final = 8
OPEN_FILES: Final = 64
AT_ONCE: Final = 200
OTHER_DESCRIPTORS: Final = 64
"""At most, beside files of the store: sockets, pipes and the event loop's own."""

PLACES: Final = [(f"topic-{number:04d}", partition) for number in range(TOPICS) for partition in range(PARTITIONS)]


def put_everywhere(client: RemotingClient, body: bytes) -> None:
    """A message into each partition, which makes the topics."""
    for begin in range(0, len(PLACES), AT_ONCE):
        asked = [
            client.send(
                Request.SEND_MESSAGE_V2,
                fields_of(a="pg", b=topic, c="TBW102", d=PARTITIONS, e=partition, f=0, g=1700000000000, h=0, j=0, k=False),
                body,
            )
            for topic, partition in PLACES[begin : begin + AT_ONCE]
        ]
        assert {client.response(opaque).code for opaque in asked} == {Response.SUCCESS}


def descriptors(broker: BrokerProcess) -> int:
    return len(os.listdir(f"/proc/{broker.pid}/fd"))


def test_descriptors_are_bounded(tmp_path: Path) -> None:
    """SG-062, SG-066, MQ-016: 1,200 partitions in use need ``max_open_files``; after kill -9 all are there, and routed."""
    flags = ("--max-open-files", str(OPEN_FILES), "--sweep-interval-ms", "20", "--checkpoint-interval-ms", "200")
    with BrokerProcess(tmp_path / "data", *flags, durability="disk") as broker:
        with connect(broker) as client:
            put_everywhere(client, b"first")
            assert descriptors(broker) < OPEN_FILES + OTHER_DESCRIPTORS
        broker.restart()
        with connect(broker) as client:
            put_everywhere(client, b"second")
            for topic, partition in PLACES:
                found = records(pull(client, topic, 0, partition=partition))
                assert [record.body for record in found] == [b"first", b"second"], (topic, partition)
            assert descriptors(broker) < OPEN_FILES + OTHER_DESCRIPTORS
            routed = set(ask_body(client, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"])
            assert routed >= {topic for topic, _ in PLACES}
            route = decode(client.call(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": PLACES[-1][0]}).body)
            assert route["queueDatas"][0]["readQueueNums"] == PARTITIONS
