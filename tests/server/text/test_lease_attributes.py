"""Leases of messages with an attribute, also where another one has the same hash, in the process of the test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.reading.collecting import MOST_EXAMINED_BYTES, collect_messages
from metaq.engine.reading.filters import tag_filter
from metaq.message import TopicPartition
from metaq.protocol.record import java_hash
from metaq.protocol.text.messages import join_attribute
from metaq.protocol.text.writing import write_put
from metaq.store.files.filecache import read_here
from tests.server.text.test_leases import Broker, Client

WANTED, OTHER = "Aa", "BB"
SIZE: Final = 1 << 20


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    assert java_hash(WANTED) == java_hash(OTHER)
    broker = Broker(tmp_path / "data", max_body_bytes=2 * SIZE)
    yield broker
    broker.parts.close()


def put(broker: Broker, attribute: str, body: bytes = b"a") -> None:
    flag, data = join_attribute(attribute, body)
    broker._producer.send(write_put("orders", 0, flag, data, 1))
    broker.settle()


@pytest.mark.parametrize(
    ("attribute", "other"), [(WANTED, OTHER), ("*", "x"), ("a||b", "a"), ("grün", "gelb"), ("f5a5a608", "g5a5a608")]
)
@pytest.mark.parametrize("line", ["pop orders billing 9 attribute={} 1", "subscribe orders billing ready=9 attribute={} 1"])
def test_only_messages_with_this_attribute_are_leased(broker: Broker, line: str, attribute: str, other: str) -> None:
    """The word itself counts, not its hash, and nothing in it has a meaning."""
    for each in (other, attribute, other):
        put(broker, each)
    broker.put("without")
    client = Client(broker)
    said = client.text.send((line.format(attribute) + "\r\n").encode())
    broker.settle()
    frames = b"".join((said, client.text.answers()))
    assert frames.count(b"message ") == 1
    assert attribute.encode() in frames
    assert broker.parts.context.offsets.get("billing", "orders", 0) == 1
    assert broker.leasing.leases.of("billing", "orders")[0].next == 4, "the group has passed the others"


def test_what_has_another_attribute_is_read_in_portions(broker: Broker) -> None:
    """One read of many large ones would stop the loop."""
    count = MOST_EXAMINED_BYTES // SIZE + 2
    for _ in range(count):
        put(broker, OTHER, bytes(SIZE))
    queue = broker.parts.store.queues[TopicPartition("orders", 0)]
    found = collect_messages(broker.parts.store, queue, 0, 1, tag_filter(WANTED), read_here)
    assert (found.ordinals, found.following) == ([], MOST_EXAMINED_BYTES // SIZE)
