"""The layout of MetaQ's nodes, against the table of the specification."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.address import Address
from metaq.errors import BadRequest
from metaq.protocol.remoting.routes import DataVersion
from metaq.registry.paths import (
    TOPICS,
    TOPICS_TO_PUBLISH,
    TOPICS_TO_SUBSCRIBE,
    BrokerNode,
    Layout,
    RegisteredReplica,
    Replica,
    decode_broker_node,
    decode_offset,
    encode_address,
    encode_partitions,
    parse_member,
    parse_partition,
    parse_replica,
)

LAYOUT = Layout()
MASTER, SLAVE = Replica(3, None), Replica(3, 1)


def test_brokers() -> None:
    """MQ-044, MQ-045, MQ-079: a slave has its master's number and one of its own, under a name that begins with slave."""
    assert LAYOUT.broker(3) == "/meta/brokers/ids/3"
    assert LAYOUT.replica(MASTER) == "/meta/brokers/ids/3/master"
    assert LAYOUT.replica(SLAVE) == "/meta/brokers/ids/3/slave1"
    assert LAYOUT.checksum(3) == "/meta/brokers/ids/3/master_config_checksum"
    assert Layout("/else").broker(0) == "/else/brokers/ids/0"
    assert encode_address(Address("10.0.0.1", 8123)) == b"meta://10.0.0.1:8123"
    assert encode_address(Address("::1", 8123)) == b"meta://[::1]:8123"


def test_topics() -> None:
    """MQ-046, MQ-047, MQ-048, MQ-081: three trees; the Java client takes no other keys than these two."""
    assert LAYOUT.topic(TOPICS, "orders", MASTER) == "/meta/brokers/topics/orders/3-m"
    assert LAYOUT.topic(TOPICS_TO_PUBLISH, "orders", SLAVE) == "/meta/brokers/topics-pub/orders/3-s1"
    assert LAYOUT.topic(TOPICS_TO_SUBSCRIBE, "orders", MASTER) == "/meta/brokers/topics-sub/orders/3-m"
    assert encode_partitions(4, MASTER) == b'{"numParts":4,"broker":"3-m"}'
    assert json.loads(encode_partitions(1, SLAVE)) == {"numParts": 1, "broker": "3-s1"}


def test_consumers() -> None:
    """MQ-049, MQ-052, MQ-053."""
    assert LAYOUT.consumers("readers") == "/meta/consumers/readers/ids"
    assert LAYOUT.offset("readers", "orders", 3, 7) == "/meta/consumers/readers/offsets/orders/3-7"
    assert LAYOUT.owners("readers", "orders") == "/meta/consumers/readers/owners/orders"
    assert parse_partition("3-7") == (3, 7)


@pytest.mark.parametrize(
    ("data", "parts"),
    [(b"42-76", (42, 76)), (b"-1-76", (-1, 76)), (b"76", (None, 76)), (b"0-9223372036854775807", (0, 2**63 - 1))],
)
def test_offsets(data: bytes, parts: tuple[int | None, int]) -> None:
    """MQ-052: split at the last sign; ids can be negative, old clients write none."""
    assert decode_offset(data) == parts


@given(st.integers(0, 1023), st.none() | st.integers(0, 1022))
def test_what_is_built_is_parsed(broker: int, slave: int | None) -> None:
    """MQ-079: names of replicas."""
    replica = Replica(broker, slave)
    assert parse_replica(replica.name) == replica


@given(st.text(alphabet="0123456789-msabc/", max_size=8))
def test_what_is_parsed_is_built(name: str) -> None:
    """MQ-079: and nothing else is a name."""
    try:
        replica = parse_replica(name)
    except BadRequest:
        return
    assert replica.name.replace("0", "") == name.replace("0", "")


def test_our_own_node() -> None:
    """MY-016: what a broker says of itself; a later version may say more."""
    member = RegisteredReplica("DefaultCluster", "metaq", 1)
    assert member.path == "/metaq/brokers/DefaultCluster/metaq/1"
    assert parse_member(member.path) == member
    node = BrokerNode("10.0.0.1:10911", None, "10.0.0.1:8123", "10.0.0.1:10912", 0, 6, DataVersion(1_400_000_000_000, 7))
    assert json.loads(node.encode()) == {
        "remoting": "10.0.0.1:10911",
        "registry": None,
        "text": "10.0.0.1:8123",
        "replication": "10.0.0.1:10912",
        "number": 0,
        "permission": 6,
        "version": [1_400_000_000_000, 7],
    }
    assert decode_broker_node(node.encode()) == node
    assert decode_broker_node(json.dumps({**json.loads(node.encode()), "more": 1}).encode()) == node


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"version":[1]}', b'{"version":5}'])
def test_garbage_is_refused(data: bytes) -> None:
    """MY-016: with an error of ours, whoever wrote it."""
    with pytest.raises(BadRequest):
        decode_broker_node(data)
    with pytest.raises(BadRequest):
        decode_offset(data)
    with pytest.raises(BadRequest):
        parse_member(data.decode(errors="replace"))
    with pytest.raises(BadRequest):
        parse_partition(data.decode(errors="replace"))
