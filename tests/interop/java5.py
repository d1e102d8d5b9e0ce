"""RocketMQ's Java client 5, unmodified, step by step (see rocketmq_java5); and a place where it consumes by pops."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import metaq
from metaq.client.admin.views import GroupView
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from tests.interop.clients import JVM_FLAGS, ClientProcess, Received, run_maven
from tests.interop.mqadmin import AdminTool
from tests.support.admin import ask, connect
from tests.support.broker import BrokerProcess

JAVA5: Final = Path(__file__).parent / "rocketmq_java5"
OLDER: Final = ("5.3.3",)
NEWEST: Final = "5.4.0"
COPY_JARS: Final = "dependency:copy-dependencies"
ALL_QUEUES: Final = 0
"""Every member pops all queues (popShareQueueNum)."""
HURRY_FLAGS: Final = ("-Drocketmq.client.rebalance.waitInterval=1000", "-Drocketmq.client.rebalance.minInterval=200")
"""How often a consumer asks for its queues: usually every 20 s."""


@functools.cache
def java5_command(version: str) -> tuple[str, ...]:
    """Return the program of a driver with the client of that version, built. All run the classes made with the newest one."""
    if version == NEWEST:
        run_maven(JAVA5, "compile", COPY_JARS)
    else:
        java5_command(NEWEST)
        run_maven(JAVA5, COPY_JARS, f"-Drocketmq.version={version}")
    classes = f"{JAVA5 / '.build' / 'classes'}:{JAVA5 / '.build' / version}/*"
    return ("java", *JVM_FLAGS, *HURRY_FLAGS, "-cp", classes, "metaq.interop.Driver")


class Sent(NamedTuple):
    """The client's own result of a send."""

    status: str
    id: str
    offset_id: str
    queue: int
    offset: int
    recall_handle: str | None


class Popped(NamedTuple):
    """What the client makes of the answer to a pop."""

    status: str
    messages: list[Received]
    rest: int

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    @property
    def receipts(self) -> list[str]:
        return [receipt_of(message) for message in self.messages]


def receipt_of(message: Received) -> str:
    """Return the receipt that the client made of the answer to a pop."""
    return message.properties["POP_CK"]


class Java5(ClientProcess):
    """A driver. Names of producers and consumers are the test's; each has connections of its own."""

    def publish(self, producer: str, topic: str, body: bytes, **wishes: object) -> Sent:
        """Send a message; ``wishes``: tag, properties, delay_ms, delay_s, deliver_ms, priority."""
        message = {"topic": topic, "body": base64.b64encode(body).decode("ascii"), **wishes}
        return Sent(**self.call("send", producer=producer, message=message))

    def publish_numbers(self, producer: str, topic: str, count: int, first: int = 0) -> None:
        """Send ``count`` numbers from ``first`` on, in batches."""
        self.call("send_numbers", producer=producer, topic=topic, first=first, count=count)

    def recall(self, producer: str, topic: str, handle: str) -> str:
        """Recall a delayed message; return its unique id."""
        recalled: str = self.call("recall", producer=producer, topic=topic, handle=handle)
        return recalled

    def tally(self, consumer: str) -> list[int]:
        """Return the numbers that a counting consumer has been given since the last call."""
        return [int(body) for body in self.call("tally", consumer=consumer)]


class Place:
    """A group that consumes a topic of one broker by pops, with the client's own single calls."""

    def __init__(self, client: Java5, address: str, group: str, topic: str, broker_name: str = "metaq") -> None:
        self.client = client
        self.group = group
        self.topic = topic
        self._names = {"group": group, "topic": topic, "broker": address}
        self._broker_name = broker_name

    def pop(self, most: int = 32, *, invisible_ms: int = 60_000, poll_ms: int = 0, **wishes: object) -> Popped:
        """Pop; ``wishes``: queue, order, expression (of tags), init_mode."""
        names = {**self._names, "broker_name": self._broker_name}
        view = self.client.call("pop", most=most, invisible_ms=invisible_ms, poll_ms=poll_ms, **names, **wishes)
        return Popped(view["status"], [Received.read(message) for message in view["messages"]], view["rest"])

    def ack(self, receipt: str) -> str:
        """Return the client's status: OK or NO_EXIST."""
        status: str = self.client.call("ack", receipt=receipt, **self._names)["status"]
        return status

    def ack_many(self, receipts: Sequence[str]) -> str:
        status: str = self.client.call("ack_many", receipts=receipts, **self._names)["status"]
        return status

    def change(self, receipt: str, invisible_ms: int) -> tuple[str, str | None]:
        """Return the status and the new receipt."""
        view: dict[str, Any] = self.client.call("change", receipt=receipt, invisible_ms=invisible_ms, **self._names)
        return view["status"], view["receipt"]


def set_up(
    registry: str, topic: str, group: str, queues: int = 4, *, group_wishes: GroupView | None = None, **wishes: Any
) -> None:
    """Create a topic, with ``wishes`` as ``metaq.Admin.create_topic`` has them, and a group."""
    with metaq.connect(registry) as client:
        client.admin().create_topic(topic, queues, **wishes)
        client.admin().update_group(group_wishes or GroupView(group))


def set_mode(tool: AdminTool, topic: str, group: str, mode: str = "POP", share: int = ALL_QUEUES) -> None:
    """Let the admin tool choose how the group reads the topic, at all brokers; it takes a second."""
    printed = tool.run("setConsumeMode", "-c", "DefaultCluster", "-t", topic, "-g", group, "-m", mode, "-q", str(share))
    assert "success" in printed, printed


def let_pop(broker: BrokerProcess, topic: str, group: str) -> None:
    """Let the group read the topic by pops of all queues, at one broker."""
    row = {"topic": topic, "consumerGroup": group, "mode": "POP", "popShareQueueNum": ALL_QUEUES}
    with connect(broker) as client:
        ask(client, Request.SET_MESSAGE_REQUEST_MODE, fastjson.encode(row))
