"""Bodies of routes and registrations: the bytes that brokers and clients agree on, and what is refused."""

import zlib
from typing import Final

import pytest

from metaq.checksum import body_crc
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import VERSION, VERSION_WITH_TOPIC_VERSION
from metaq.protocol.remoting.routes import (
    MAX_INFLATED_BYTES,
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicConfigs,
    TopicRoute,
    decode_cluster_info,
    decode_data_version,
    decode_kv_table,
    decode_member_group,
    decode_registration,
    decode_route,
    decode_topic_list,
    decode_topic_table,
    encode_cluster_info,
    encode_data_version,
    encode_kv_table,
    encode_member_group,
    encode_registration,
    encode_route,
    encode_topic_list,
    encode_topic_table,
)

G32: Final = (
    "000000277b22636f756e746572223a322c2274696d657374616d70223a313739353235373334333432377d0000000100000018"
    "546f706963412034203420362053494e474c455f54414720000000025b5d"
)
"""A compressed registration before it is deflated."""
ROUTE: Final = (
    b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"},"brokerName":"broker-a",'
    b'"cluster":"DefaultCluster"}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
REGISTRATION: Final = (
    b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":3,"timestamp":1795257376315},'
    b'"topicConfigTable":{"TopicA":{"order":false,"perm":6,"readQueueNums":4,"topicFilterType":"SINGLE_TAG",'
    b'"topicName":"TopicA","topicSysFlag":0,"writeQueueNums":4}}}}'
)
CLUSTER: Final = (
    b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{"0":"10.0.0.1:10911"},"brokerName":"broker-a",'
    b'"cluster":"DefaultCluster"}},"clusterAddrTable":{"DefaultCluster":["broker-a"]}}'
)
TWO_PROCESSES: Final = BrokerData("DefaultCluster", "broker-a", {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"})
MASTER_ONLY: Final = BrokerData("DefaultCluster", "broker-a", {0: "10.0.0.1:10911"})
TABLE: Final = TopicConfigs(DataVersion(1795257376315, 3), {"TopicA": TopicConfig("TopicA", 4, 4)})


def test_a_route_is_written_as_clients_expect_it() -> None:
    """SG-108, SG-113: no space, and every key quoted; the table of filter servers is there."""
    route = TopicRoute((QueueData("broker-a", 4, 4, 6),), (TWO_PROCESSES,))
    assert encode_route(route) == ROUTE
    assert decode_route(ROUTE) == route


def test_a_route_may_have_bare_integers_as_keys() -> None:
    """SG-113: older servers write them, and spaces."""
    old = ROUTE.replace(b'{"0":', b"{0:").replace(b',"1":', b", 1 :")
    assert decode_route(old) == decode_route(ROUTE)


def test_a_route_carries_the_order_of_a_topic() -> None:
    """SG-115."""
    route = TopicRoute((QueueData("broker-a", 4, 4, 6),), (MASTER_ONLY,), "broker-a:4")
    assert b'"orderTopicConf":"broker-a:4"' in encode_route(route)
    assert decode_route(encode_route(route)) == route


def test_a_registration_is_written_as_brokers_write_it() -> None:
    """SG-052."""
    assert encode_registration(TABLE) == REGISTRATION
    assert decode_registration(REGISTRATION, VERSION, False) == TABLE


def test_a_registration_of_an_old_broker_is_the_table_alone() -> None:
    """SG-109."""
    assert decode_registration(encode_topic_table(TABLE), VERSION_WITH_TOPIC_VERSION - 1, False) == TABLE
    assert decode_topic_table(encode_topic_table(TABLE)) == TABLE


def test_a_registration_without_a_body_has_no_topics() -> None:
    """SG-109."""
    assert decode_registration(b"", VERSION, False).topics == {}
    assert decode_registration(b"", VERSION, True).topics == {}


def test_a_compressed_registration() -> None:
    """G32, SG-109: both ways; what a 5.x broker adds is passed over."""
    table = TopicConfigs(DataVersion(1795257343427, 2), {"TopicA": TopicConfig("TopicA", 4, 4)})
    deflated = encode_registration(table, compressed=True)
    assert zlib.decompress(deflated).hex() == G32
    assert decode_registration(deflated, VERSION, True) == table
    longer = zlib.compress(bytes.fromhex(G32) + b"\0\0\0\1\0\0\0\2{}")
    assert decode_registration(longer, VERSION, True) == table
    attributes = bytes.fromhex(G32).replace(b"\x18TopicA 4 4 6 SINGLE_TAG ", b'\x23TopicA 4 4 6 SINGLE_TAG {"a": "b"}')
    assert decode_registration(zlib.compress(attributes), VERSION, True) == table


def test_the_checksum_of_a_registration() -> None:
    """G33: CRC-32 without its top bit, over the bytes as sent."""
    assert body_crc(b"hello") == 907060870


def test_a_compressed_registration_that_grows_too_large_is_refused() -> None:
    """SG-109: a few kilobytes that inflate to gigabytes cost no memory."""
    with pytest.raises(BadRequest, match=str(MAX_INFLATED_BYTES)):
        decode_registration(zlib.compress(bytes(MAX_INFLATED_BYTES + 1), 9), VERSION, True)


@pytest.mark.parametrize(
    "body",
    [
        b"not deflated",
        zlib.compress(bytes.fromhex(G32))[:-6],
        zlib.compress(bytes.fromhex(G32)[:60]),
        zlib.compress(b"\xff\xff\xff\xff"),
        zlib.compress(b"\x7f\xff\xff\xff{}"),
        zlib.compress(bytes.fromhex(G32).replace(b"TopicA 4 4", b"TopicA 4 x")),
        zlib.compress(bytes.fromhex(G32).replace(b" SINGLE_TAG", b"_SINGLE_TAG")),
    ],
)
def test_a_damaged_compressed_registration_is_refused(body: bytes) -> None:
    """SG-109."""
    with pytest.raises(BadRequest, match="registration"):
        decode_registration(body, VERSION, True)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b'"perm":6', b'"perm":1e300'),
        (b'"perm":6', b'"perm":99999999999'),
        (b'"perm":6', b'"perm":true'),
        (b'"readQueueNums":4', b'"readQueueNums":"4"'),
        (b'"counter":3', b'"counter":99999999999999999999'),
        (b'"dataVersion"', b'"version"'),
        (b'"topicConfigTable":{', b'"topicConfigTable":7,"x":{'),
        (b'"SINGLE_TAG"', b"7"),
    ],
)
def test_what_a_broker_may_not_register(right: bytes, wrong: bytes) -> None:
    """SG-109: it would be written into the routes of everybody."""
    assert right in REGISTRATION
    with pytest.raises(BadRequest, match="the body is not a registration"):
        decode_registration(REGISTRATION.replace(right, wrong), VERSION, False)


def test_data_versions() -> None:
    """SG-109: a 5.x broker's has a third number, which counts when both have it."""
    version = DataVersion(1795257343427, 2)
    assert encode_data_version(version) == b'{"counter":2,"timestamp":1795257343427}'
    assert decode_data_version(encode_data_version(version)) == version
    newer = decode_data_version(b'{"counter":2,"stateVersion":5,"timestamp":1795257343427}')
    assert newer == DataVersion(1795257343427, 2, 5)
    assert decode_data_version(encode_data_version(newer)) == newer
    assert version.same(newer)
    assert newer.same(version)
    assert not newer.same(newer._replace(state=6))
    assert not version.same(version._replace(counter=3))
    assert not version.same(version._replace(timestamp=1))


def test_cluster_information() -> None:
    """SG-105, SG-106."""
    info = ClusterInfo({"broker-a": MASTER_ONLY}, {"DefaultCluster": ["broker-a"]})
    assert encode_cluster_info(info) == CLUSTER
    assert decode_cluster_info(CLUSTER) == info


def test_small_bodies() -> None:
    """SG-113, SG-115."""
    assert encode_topic_list(["a", "b"]) == b'{"topicList":["a","b"]}'
    assert encode_topic_list(["a"], "10.0.0.1:10911") == b'{"brokerAddr":"10.0.0.1:10911","topicList":["a"]}'
    assert decode_topic_list(b'{"brokerAddr":"x","topicList":["a","b"]}') == ["a", "b"]
    assert encode_kv_table({"TopicX": "broker-a:4"}) == b'{"table":{"TopicX":"broker-a:4"}}'
    assert decode_kv_table(b'{"table":{"TopicX":"broker-a:4"}}') == {"TopicX": "broker-a:4"}
    assert decode_kv_table(b"") == {}
    assert encode_member_group(MASTER_ONLY) == (
        b'{"brokerMemberGroup":{"brokerAddrs":{"0":"10.0.0.1:10911"},"brokerName":"broker-a","cluster":"DefaultCluster"}}'
    )
    assert decode_member_group(encode_member_group(MASTER_ONLY)) == MASTER_ONLY
