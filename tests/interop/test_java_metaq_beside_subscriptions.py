"""The unmodified Java MetaQ client while messages of its topic are pushed to others: its conversation stays as it was."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.client.text.subscription import TextSubscription
from tests.interop.metaq_java.driver import GROUP, JavaClient, Outgoing, Sent, build
from tests.interop.metaq_java.relay import Relay
from tests.support.broker import BrokerProcess

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(600)]

TOPIC: Final = "java-beside"
BODIES: Final[list[tuple[bytes, str | None]]] = [
    (b"hello", None),
    (b"", "TagA"),
    (bytes(range(256)) + b"\r\nmessage 5 1 0-0-aaaaaa java-beside 0 0 1 0\r\n", "binary"),
    (b"x" * 100_000, None),
]
PIPELINED: Final = 50
PUTS: Final = len(BODIES) + PIPELINED
MOST_OUT: Final = 1000
WAIT_S: Final = 30.0
ID_BYTES: Final = 8


def play(client: JavaClient) -> list[Sent]:
    """Put, get and ask for positions, step by step; return the results of the puts."""
    sent = [client.put(Outgoing(TOPIC, payload, attribute)) for payload, attribute in BODIES]
    client.read_all(TOPIC, max_size=1_000)
    sent += client.put_pipelined([Outgoing(TOPIC, b"message %d" % number) for number in range(PIPELINED)])
    client.read_all(TOPIC, max_size=1_000_000)
    end = client.offset(TOPIC, sent[-1].offset + 1_000)
    assert client.offset(TOPIC, 1) == 0
    assert client.get(TOPIC, end, 1_024) is None
    assert client.get(TOPIC, 2**63 - 1, 1_024) is None
    assert client.get(TOPIC, 0, 1_024, partition=9) is None
    return sent


def take(subscription: TextSubscription, count: int, *, is_acked: bool) -> None:
    """Receive so many messages."""
    for _ in range(count):
        message = subscription.receive(WAIT_S)
        assert message is not None
        if is_acked:
            message.ack()


def neutral(said: bytes, names: dict[bytes, bytes]) -> bytes:
    """Return what was said, with other names for what differs from one session to the next."""
    for name, other in names.items():
        said = said.replace(name, other)
    return said


def converse(class_path: str, folder: Path, *, is_beside: bool) -> tuple[bytes, bytes]:
    """Return the requests and the answers of one session; opaques and ids of messages are numbers in their order."""
    folder.mkdir()
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(folder / "data"))
        other = stack.enter_context(TextClient(broker.host, broker.port))
        other.create(TOPIC, 1)
        subscriptions = [
            stack.enter_context(other.subscribe(TOPIC, group, ready=ready))
            for group, ready in ((GROUP, 1), ("acks", MOST_OUT), ("never-acks", MOST_OUT))
            if is_beside
        ]
        relay = stack.enter_context(Relay(broker.host, broker.port))
        client = stack.enter_context(JavaClient(class_path, "127.0.0.1", relay.port, folder / "home"))
        pool = stack.enter_context(ThreadPoolExecutor())
        others = [pool.submit(take, each, 2 * PUTS, is_acked=each is not subscriptions[-1]) for each in subscriptions]
        sent = [*play(client), *play(client)]
        said, told = bytes(relay.requests), bytes(relay.answers)
        for each in others:
            each.result()
        opaques = dict.fromkeys(re.findall(rb" (-?\d{5,})\r\n", said))
        names = {b" %b\r\n" % opaque: b" opaque %d\r\n" % number for number, opaque in enumerate(opaques)}
        for number, result in enumerate(sent):
            names[b"%d" % result.id] = names[result.id.to_bytes(ID_BYTES, "big")] = b"id %d" % number
        return neutral(said, names), neutral(told, names)


@pytest.mark.slow
def test_no_byte_differs_beside_subscriptions(tmp_path: Path) -> None:
    """A-20: what the client says and is told is the same, byte for byte, when others have subscribed to the topic: one in its
    own group, one that acks, one that never does."""
    class_path = build()
    alone = converse(class_path, tmp_path / "alone", is_beside=False)
    beside = converse(class_path, tmp_path / "beside", is_beside=True)
    for said, told in (alone, beside):
        assert said.count(b"put " + TOPIC.encode()) == 2 * PUTS
        assert len(re.findall(rb"value \d+ opaque", told)) > len(BODIES)
    assert beside == alone
