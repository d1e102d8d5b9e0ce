"""A member of a consumer group, for tests, that does step by step what client libraries do by themselves."""

import json
from collections.abc import Mapping
from typing import Any, Final

from metaq.client.consuming.group import GroupConsumer
from metaq.message import MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import JSON, PULL_HAS_SUBSCRIPTION, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, PullMessage, UpdateConsumerOffset, encode_header
from metaq.protocol.remoting.heartbeats import CLUSTERING, FROM_END, PUSH
from tests.support.admin import records
from tests.support.broker import BrokerProcess
from tests.support.remoting import RemotingClient

BROKER: Final = "metaq"
WANTED: Final = Int32(32)


def subscription(
    topic: str, expression: str = "*", version: int = 1, kind: str | None = "TAG", **more: object
) -> dict[str, Any]:
    """A subscription as a heartbeat shows it; ``kind`` is left out when it is ``None``."""
    row = {"topic": topic, "subString": expression, "subVersion": version, "classFilterMode": False, **more}
    return row if kind is None else {**row, "expressionType": kind}


def owned(member: GroupConsumer, topic: str) -> int:
    """How many partitions of a topic the client library's consumer has; it is there before it has any."""
    return sum(queue.topic == topic for queue in member.assignment())


class Consumer:
    """One client of one group, over a connection of its own."""

    def __init__(self, broker: BrokerProcess, group: str, client_id: str = "10.0.0.9@1", *, serialization: int = JSON) -> None:
        self.group = group
        self.client_id = client_id
        self.serialization = serialization
        self.wire = RemotingClient(broker.host, broker.port)

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()

    def call(self, code: int, fields: Mapping[str, str] | None = None, body: bytes = b"") -> RemotingCommand:
        return self.wire.call(code, fields, body, serialization=self.serialization)

    # -- membership ---------------------------------------------------------------------------------------------------

    def heartbeat(self, *subscriptions: dict[str, Any], model: str = CLUSTERING, unit: bool = False) -> bytes:
        consumer = {
            "groupName": self.group,
            "consumeType": PUSH,
            "messageModel": model,
            "consumeFromWhere": FROM_END,
            "subscriptionDataSet": subscriptions,
            "unitMode": unit,
        }
        content = {"clientID": self.client_id, "consumerDataSet": [consumer], "producerDataSet": [{"groupName": "pg"}]}
        return json.dumps(content).encode()

    def beat(self, *subscriptions: dict[str, Any], model: str = CLUSTERING, unit: bool = False) -> None:
        """Tell the broker, and wait until it knows."""
        answer = self.call(Request.HEART_BEAT, {}, self.heartbeat(*subscriptions, model=model, unit=unit))
        assert answer.code == Response.SUCCESS, answer.remark

    def members(self) -> list[str]:
        """The group as the broker shows it, empty when there is none."""
        answer = self.call(Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": self.group})
        if answer.code == Response.SYSTEM_ERROR:
            return []
        assert answer.code == Response.SUCCESS, answer.remark
        return list(json.loads(answer.body)["consumerIdList"])

    def told(self) -> int:
        """How often the broker has said, before its last answer, that the group changed."""
        count = len(self.wire.requests)
        for request in self.wire.requests:
            assert (request.code, request.is_oneway) == (Request.NOTIFY_CONSUMER_IDS_CHANGED, True)
            assert request.fields == {"consumerGroup": self.group}
            assert request.serialization == self.serialization
        self.wire.requests.clear()
        return count

    # -- messages -----------------------------------------------------------------------------------------------------

    def pull_fields(
        self, topic: str, offset: int = 0, *, partition: int = 0, flags: int = 0, wait_ms: int = 0, **more: Any
    ) -> dict[str, str]:
        numbers = (Int32(partition), offset, WANTED, Int32(flags), more.pop("commit", 0), wait_ms, more.pop("version", 0))
        return encode_header(PullMessage(self.group, topic, *numbers, **more))

    def pull(self, topic: str, offset: int = 0, **how: Any) -> RemotingCommand:
        return self.call(Request.PULL_MESSAGE, self.pull_fields(topic, offset, **how))

    def bodies(self, topic: str, offset: int = 0, **how: Any) -> list[bytes]:
        """Return the bodies of a pull, which must succeed."""
        answer = self.pull(topic, offset, **how)
        assert answer.code == Response.SUCCESS, answer
        return [bytes(record.body) for record in records(answer)]

    def pull_as(self, topic: str, expression: str, kind: str | None = None) -> RemotingCommand:
        """A pull that brings its own subscription."""
        return self.pull(topic, flags=PULL_HAS_SUBSCRIPTION, subscription=expression, expression_type=kind)

    # -- offsets ------------------------------------------------------------------------------------------------------

    def offset(self, topic: str, partition: int = 0, **more: str) -> int | None:
        """Where the group goes on; ``None`` when the broker leaves that to the client."""
        fields = {"consumerGroup": self.group, "topic": topic, "queueId": str(partition), **more}
        answer = self.call(Request.QUERY_CONSUMER_OFFSET, fields)
        if answer.code == Response.QUERY_NOT_FOUND:
            return None
        assert answer.code == Response.SUCCESS, answer.remark
        return int(answer.fields["offset"])

    def commit(self, topic: str, offset: int, partition: int = 0) -> RemotingCommand:
        header = UpdateConsumerOffset(self.group, topic, Int32(partition), offset)
        return self.call(Request.UPDATE_CONSUMER_OFFSET, encode_header(header))

    def number(self, code: int, topic: str, partition: int = 0, **more: str) -> int:
        """The answer of 29 to 32."""
        answer = self.call(code, {"topic": topic, "queueId": str(partition), **more})
        assert answer.code == Response.SUCCESS, answer.remark
        (value,) = answer.fields.values()
        return int(value)

    # -- locks --------------------------------------------------------------------------------------------------------

    def queue_set(self, topic: str, *partitions: int) -> bytes:
        queues = [MessageQueue(topic, BROKER, partition) for partition in partitions]
        return fastjson.encode({"clientId": self.client_id, "consumerGroup": self.group, "mqSet": queues})

    def lock(self, topic: str, *partitions: int) -> list[int]:
        """The partitions that the client has now, of those that it asked for."""
        answer = self.call(Request.LOCK_BATCH_MQ, {}, self.queue_set(topic, *partitions))
        assert answer.code == Response.SUCCESS, answer.remark
        locked = json.loads(answer.body)["lockOKMQSet"]
        assert all((row["topic"], row["brokerName"]) == (topic, BROKER) for row in locked)
        return sorted(row["queueId"] for row in locked)

    def unlock(self, topic: str, *partitions: int) -> None:
        assert self.call(Request.UNLOCK_BATCH_MQ, {}, self.queue_set(topic, *partitions)).code == Response.SUCCESS
