"""Wrong calls: each is refused at the call, with an error that names the parameter, the value, and what it accepts."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final

import pytest

import metaq
import metaq.testing
from metaq.client.transactions import xasession
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import CreateTopic, Int32
from tests.support.broker import BrokerProcess

Call = Callable[[Any], object]
"""Takes what a program has; typed as nothing, because type checkers find these mistakes, too."""

SOME: Final = datetime(2026, 1, 1, tzinfo=UTC)
MISTAKES: Final[dict[str, tuple[Call, str]]] = {
    "body text": (lambda on: on.producer.send("t", "text"), r"body is of type str; it takes bytes, as of text.encode\(\)"),
    "body none": (lambda on: on.producer.send("t", None), "body is None; it takes bytes"),
    "body async": (lambda on: on.producer.send_async("t", "text"), "body is of type str"),
    "body oneway": (lambda on: on.producer.send_oneway("t", 7), "body is of type int"),
    "body of a request": (lambda on: on.producer.request("t", "text"), "body is of type str"),
    "body in a transaction": (lambda on: on.transactions.send("t", "text"), "body is of type str"),
    "body in a branch": (lambda on: on.branches.send("t", "text"), "body is of type str"),
    "topic none": (lambda on: on.producer.send(None, b""), "topic is None; it takes the name of a topic"),
    "topic bytes": (lambda on: on.producer.send(b"t", b""), r"topic is b't' \(bytes\)"),
    "topic with blanks": (lambda on: on.producer.send("a b", b""), "topic 'a b': write 1 to 127 letters"),
    "tag of two": (lambda on: on.producer.send("t", b"", tag="a||b"), r"tag is 'a\|\|b' \(str\); it takes one tag without"),
    "tag for all": (lambda on: on.producer.send("t", b"", tag="*"), r"tag is '\*' \(str\)"),
    "tag with blanks": (lambda on: on.producer.send("t", b"", tag=" a"), "tag is ' a'"),
    "tag number": (lambda on: on.producer.send("t", b"", tag=7), r"tag is 7 \(int\); it takes one text, or None"),
    "tags in a send": (lambda on: on.producer.send("t", b"", tag=["a"]), r"tag is \['a'\] \(list\)"),
    "keys bytes": (
        lambda on: on.producer.send("t", b"", keys=b"2003"),
        r"keys is b'2003' \(bytes\); it takes a text, or several",
    ),
    "keys numbers": (lambda on: on.producer.send("t", b"", keys=[2003]), r"keys is 2003 \(int\)"),
    "properties list": (lambda on: on.producer.send("t", b"", properties=["a"]), r"properties is \['a'\] \(list\)"),
    "property number": (
        lambda on: on.producer.send("t", b"", properties={"a": 1}),
        r"property 'a' is 1 \(int\); it takes text",
    ),
    "ordering key": (lambda on: on.producer.send("t", b"", ordering_key=2003), r"ordering_key is 2003 \(int\)"),
    "ordering key of properties": (
        lambda on: on.producer.send("t", b"", ordering_key="k\x02DELAY\x0118"),
        r"ordering_key is 'k\\x02DELAY\\x0118' \(str\); it takes a text without the characters 1 and 2",
    ),
    "ordering key with a 1": (lambda on: on.producer.send_async("t", b"", ordering_key="k\x01"), "ordering_key is .* without"),
    "delay text": (
        lambda on: on.producer.send("t", b"", delay_level="1"),
        r"delay_level is '1' \(str\); it takes a whole number",
    ),
    "delay high": (lambda on: on.producer.send("t", b"", delay_level=19), r"delay_level is 19 \(int\).* from 0 to 18"),
    "timeout text": (
        lambda on: on.producer.send("t", b"", timeout_s="3"),
        r"timeout_s is '3' \(str\); it takes a number of sec",
    ),
    "timeout negative": (lambda on: on.producer.send("t", b"", timeout_s=-1), "timeout_s is -1"),
    "timeout nan": (lambda on: on.producer.send("t", b"", timeout_s=float("nan")), "timeout_s is nan"),
    "batch of one": (lambda on: on.producer.send_batch("t", b"abc"), "messages is b'abc'.* several messages"),
    "batch of texts": (
        lambda on: on.producer.send_batch("t", [b"a", "b"]),
        r"messages\[1\] is 'b' \(str\); it takes bytes, or",
    ),
    "batch message": (lambda on: on.producer.send_batch("t", [on.outgoing("a")]), "body is of type str"),
    "reply to nothing": (lambda on: on.producer.reply("request", b""), "request is 'request'.* a message that was received"),
    "producer group": (lambda on: on.client.producer(None), "group is None; it takes the name of a group"),
    "execute": (
        lambda on: on.client.transaction_producer("g", None, check=len),
        "execute is None; it takes a function that does",
    ),
    "check": (lambda on: on.client.transaction_producer("g", len, check="len"), "check is 'len'.* a function that finds out"),
    "tags list": (lambda on: on.client.consumer("t", "g", tags=["a"]), r"tags is \['a'\] \(list\); it takes \*, or tags with"),
    "sql list": (lambda on: on.client.consumer("t", "g", sql=["a"]), r"sql is \['a'\] \(list\); it takes a condition"),
    "consume from": (
        lambda on: on.client.consumer("t", "g", consume_from="first"),
        r"'first'.* metaq.ConsumeFrom.LAST, metaq.Con",
    ),
    "model": (lambda on: on.client.consumer("t", "g", model="BROADCASTING"), "model is .*metaq.Model.BROADCASTING"),
    "assign": (lambda on: on.client.consumer("t", "g", assign="average"), "assign is 'average'.* shares queues"),
    "auto commit": (lambda on: on.client.consumer("t", "g", auto_commit="no"), "auto_commit is 'no'.* True or False"),
    "folder": (lambda on: on.client.consumer("t", "g", offsets_folder="/tmp"), "offsets_folder is .*a pathlib.Path"),
    "group of a consumer": (lambda on: on.client.consumer("t", 7), r"group is 7 \(int\)"),
    "topics of a consumer": (lambda on: on.client.consumer(["t"], "g"), r"topic is \['t'\] \(list\)"),
    "listener and group": (lambda on: on.client.listen("t", print, "g"), "listener is 'g'.* a function that takes a message"),
    "threads": (lambda on: on.client.listen("t", "g", print, threads=0), r"threads is 0 \(int\).* from 1 on"),
    "ordered": (lambda on: on.client.listen("t", "g", print, ordered=1), "ordered is 1"),
    "receive": (lambda on: on.consumer.receive("5"), "timeout_s is '5'"),
    "retry": (lambda on: on.consumer.retry_later(b"message"), "message is b'message'.* a message that was received"),
    "subscribe": (lambda on: on.consumer.subscribe("u", ["a"]), r"tags is \['a'\]"),
    "assign one": (lambda on: on.reader.assign(on.reader.partitions()[0]), "queues is .* several queues"),
    "assign numbers": (lambda on: on.reader.assign([0, 1]), r"queue is 0 \(int\); it takes a metaq.MessageQueue"),
    "seek a number": (lambda on: on.reader.seek(0, 0), "queue is 0"),
    "seek a time": (lambda on: on.reader.seek_to_time("yesterday"), "when is 'yesterday'.* a datetime"),
    "offset a time": (lambda on: on.reader.read_from(on.reader.partitions()[0], SOME), "offset is .* a whole number"),
    "poll none": (lambda on: on.reader.poll(max_messages=0), "max_messages is 0.* from 1 on"),
    "no partitions": (
        lambda on: on.admin.create_topic("z", 0),
        r"partitions is 0 \(int\); it takes a whole number from 1 to 1024",
    ),
    "many partitions": (lambda on: on.admin.create_topic("z", 1025), "partitions is 1025"),
    "partitions text": (lambda on: on.admin.create_topic("z", "4"), r"partitions is '4' \(str\)"),
    "no partitions in tests": (lambda on: on.broker.create_topic("z", 0), "partitions is 0"),
    "key number": (lambda on: on.admin.query_by_key("t", 2003), r"key is 2003 \(int\); it takes text"),
    "none of a key": (lambda on: on.admin.query_by_key("t", "k", most=0), "most is 0"),
    "reset": (lambda on: on.admin.reset_offset("g", "t", "first"), "to is 'first'.* or a datetime"),
    "batch of leases": (lambda on: on.client.lease_consumer("t", "l", batch=33), r"batch is 33 \(int\).* from 1 to 32"),
    "invisible": (
        lambda on: on.client.lease_consumer("t", "l", invisible=0.5),
        r"invisible is 0.5 \(float\); it takes a timedelta or a number of seconds, 1 or more",
    ),
    "invisible text": (lambda on: on.client.lease_consumer("t", "l", invisible="1"), "invisible is '1'"),
    "wait": (lambda on: on.client.lease_consumer("t", "l", wait=timedelta(seconds=-1)), "wait is .* 0 or more"),
    "from first": (lambda on: on.client.lease_consumer("t", "l", from_first=0), "from_first is 0.* True or False"),
    "topic of leases": (lambda on: on.client.lease_consumer("a b", "l"), "topic 'a b'"),
    "group of leases": (lambda on: on.client.lease_consumer("t", ""), "group ''"),
    "nack": (lambda on: on.leased.nack(-1), r"delay is -1 \(int\)"),
    "extend": (lambda on: on.leased.extend(float("nan")), "seconds is nan"),
    "handler": (lambda on: on.leasing.run("print"), "handler is 'print'.* a function that takes a message"),
    "concurrency": (lambda on: on.leasing.run(print, concurrency=0), "concurrency is 0.* from 1 on"),
    "receive a lease": (lambda on: on.leasing.receive("5"), "timeout_s is '5'"),
    "topics of a session": (lambda on: on.client.xa_session(["t"]), r"topic is \['t'\]"),
    "qualifier": (lambda on: on.client.xa_session("t", qualifier=7), "qualifier is 7"),
    "address": (lambda on: on.connect(("127.0.0.1", 9876)), r"address is \('127.0.0.1', 9876\) \(tuple\)"),
    "time of a client": (lambda on: on.connect("a:1", timeout_s="3"), "timeout_s is '3'"),
    "password": (lambda on: on.connect("a:1", user="u", password=b"geheim"), "^password is of type bytes; it takes text$"),
    "tls": (lambda on: on.connect("a:1", tls=7), "tls is of type int; it takes True, the name of a file"),
}


@pytest.fixture(scope="module")
def on() -> Iterator[SimpleNamespace]:
    """Yield one object of each kind that a program of the client can have."""
    with metaq.testing.broker() as broker, metaq.connect(broker.address, timeout_s=60.0) as client:
        broker.create_topic("t")

        def commit(*given: object) -> metaq.Outcome:
            return metaq.Outcome.COMMIT

        client.producer().send("t", b"")
        leasing = client.lease_consumer("t", "leasing")
        branches = client.xa_session("t")
        branches._branch = xasession._Branch(branches.xid(1, "order", "messages"), address="")
        yield SimpleNamespace(
            broker=broker,
            client=client,
            producer=client.producer(),
            transactions=client.transaction_producer("desk", commit, check=commit),
            branches=branches,
            consumer=client.consumer("t", "iterating"),
            reader=client.pull_consumer("t"),
            leasing=leasing,
            leased=leasing.receive(timeout_s=60.0),
            admin=client.admin(),
            connect=metaq.connect,
            outgoing=metaq.OutgoingMessage,
        )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_at_the_call(on: SimpleNamespace, mistake: str) -> None:
    """P14: before anything is sent, or started."""
    call, told = MISTAKES[mistake]
    before = (len(on.broker.messages("t")), on.client._core._producers.copy(), set(on.client._core._consumers))
    with pytest.raises(metaq.BadRequest, match=told):
        call(on)
    assert (len(on.broker.messages("t")), on.client._core._producers, set(on.client._core._consumers)) == before


def test_a_broker_refuses_a_topic_without_partitions(process: BrokerProcess) -> None:
    """MQ-004: also from clients that do not look; one without a partition to write, to be drained, is legal."""
    with metaq.connect(process.registry, timeout_s=60.0) as client:
        admin = client.admin()
        address = admin.brokers()[0].address
        for read, write, fits in ((0, 0, False), (-1, 1, False), (4, 0, True), (4, 4, True)):
            header = CreateTopic("z", "TBW102", Int32(read), Int32(write), Int32(6))
            if fits:
                admin._ask(address, Request.UPDATE_AND_CREATE_TOPIC, header)
            else:
                with pytest.raises(metaq.Refused, match="the topic z needs at least one partition"):
                    admin._ask(address, Request.UPDATE_AND_CREATE_TOPIC, header)
                assert "z" not in admin.topics()
