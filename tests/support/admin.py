"""Requests of an administrator, a producer and a consumer to a broker, over the plain client of the tests."""

from typing import Any

from metaq.message import MessageQueue
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from tests.support.broker import BrokerProcess
from tests.support.remoting import RemotingClient

BROKER = "metaq"
"""The name that brokers of tests have."""


class Refused(AssertionError):
    """The broker answered with another code than it should."""

    def __init__(self, answer: RemotingCommand) -> None:
        super().__init__(f"{answer.code}: {answer.remark}")
        self.code = answer.code
        self.remark = answer.remark or ""


def connect(broker: BrokerProcess, *, language: str = "JAVA") -> RemotingClient:
    return RemotingClient(broker.host, broker.port, language=language)


def fields_of(**values: object) -> dict[str, str]:
    """Header fields as they stand in a frame."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}


def ask(client: RemotingClient, code: int, body: bytes = b"", /, **fields: object) -> RemotingCommand:
    """The answer of a request that succeeds; :class:`Refused`."""
    answer = client.call(code, fields_of(**fields), body)
    if answer.code != Response.SUCCESS:
        raise Refused(answer)
    return answer


def ask_body(client: RemotingClient, code: int, body: bytes = b"", /, **fields: object) -> Any:
    """Return the decoded body of the answer to a request that succeeds."""
    return fastjson.decode(ask(client, code, body, **fields).body)


def queue(topic: str, partition: int = 0) -> MessageQueue:
    return MessageQueue(topic, BROKER, partition)


def create_topic(
    client: RemotingClient, topic: str, *, write: int = 1, read: int = 1, perm: int = 6, attributes: str = ""
) -> None:
    fields = fields_of(topic=topic, defaultTopic="TBW102", readQueueNums=read, writeQueueNums=write, perm=perm)
    fields |= {"attributes": attributes} if attributes else {}
    ask(client, Request.UPDATE_AND_CREATE_TOPIC, order=False, topicFilterType="SINGLE_TAG", **fields)


def send(client: RemotingClient, topic: str, *bodies: bytes, partition: int = 0, pairs: str = "") -> RemotingCommand:
    """Send messages one by one; the answer to the last one."""
    fields = fields_of(a="pg", b=topic, c="TBW102", d=4, e=partition, f=0, g=1700000000000, h=0, i=pairs, j=0, k=False)
    return [ask(client, Request.SEND_MESSAGE_V2, body, **fields) for body in bodies][-1]


def pull(
    client: RemotingClient, topic: str, offset: int, *, partition: int = 0, group: str = "cg", wait_ms: int = 0
) -> RemotingCommand:
    """The answer to a pull that brings its own subscription."""
    place = fields_of(consumerGroup=group, topic=topic, queueId=partition, queueOffset=offset, commitOffset=0, subVersion=0)
    sys_flag = PULL_HAS_SUBSCRIPTION | (PULL_SUSPENDS if wait_ms else 0)
    wanted = fields_of(maxMsgNums=32, sysFlag=sys_flag, suspendTimeoutMillis=wait_ms, subscription="*", expressionType="TAG")
    return client.call(Request.PULL_MESSAGE, {**place, **wanted})


def records(answer: RemotingCommand) -> list[Record]:
    """The messages in the answer to a pull."""
    found = []
    at = 0
    while at < len(answer.body):
        record = decode_record(answer.body[at:])
        found.append(record)
        at += record.size
    return found
