"""A registry over the wire: recorded frames, and every request that it answers, in both serializations."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.checksum import body_crc
from metaq.protocol.remoting.codes import COMPACT, JSON, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import (
    BrokerBeat,
    BrokerGroup,
    BrokerNameOnly,
    BrokerOnly,
    ClusterOnly,
    DeleteTopicInRegistry,
    KvKey,
    KvPair,
    Namespace,
    RegisterBroker,
    TopicOnly,
    encode_header,
)
from metaq.protocol.remoting.routes import (
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
    decode_route,
    decode_topic_list,
    encode_data_version,
    encode_registration,
    encode_route,
)
from tests.support.broker import RegistryProcess
from tests.support.remoting import RemotingClient

G1: Final = (
    "00000084000000807b22636f6465223a3130352c226578744669656c6473223a7b22746f706963223a22544257313032227d2c22666c6167223a302c"
    "226c616e6775616765223a224a415641222c226f7061717565223a302c2273657269616c697a655479706543757272656e74525043223a224a534f4e"
    "222c2276657273696f6e223a3430397d"
)
"""Route of TBW102, as a Java client asks for it."""
G3: Final = "0000002a010000260069000199000000000000000000000000000000110005746f70696300000006546f70696341"
"""Route of TopicA with a compact header."""

VERSION: Final = DataVersion(1795257376315, 3)
TOPICS: Final = {
    "TBW102": TopicConfig("TBW102", 8, 8, 7),
    "TopicA": TopicConfig("TopicA", 4, 4),
    "Unit": TopicConfig("Unit", 1, 1, 6, 1),
    "Subscribed": TopicConfig("Subscribed", 1, 1, 6, 2),
}
TABLE: Final = TopicConfigs(VERSION, TOPICS)
MASTER: Final = RegisterBroker("broker-a", "10.0.0.1:10911", "c1", "10.0.0.1:10912", 0)
REPLICA: Final = RegisterBroker("broker-a", "10.0.0.2:10911", "c1", "10.0.0.2:10912", 1)
BROKER: Final = BrokerData("c1", "broker-a", {0: "10.0.0.1:10911"})


class Asker(RemotingClient):
    """A client that speaks typed headers, in one of the two serializations."""

    serialization = JSON

    def ask(self, code: int, header: tuple[object, ...] | None = None, body: bytes = b"") -> RemotingCommand:
        fields = None if header is None else encode_header(header)
        answer = self.call(code, fields, body, serialization=self.serialization)
        assert answer.serialization == self.serialization
        return answer

    def done(self, code: int, header: tuple[object, ...] | None = None, body: bytes = b"") -> RemotingCommand:
        answer = self.ask(code, header, body)
        assert (answer.code, answer.remark) == (Response.SUCCESS, None)
        return answer

    def register(self, header: RegisterBroker = MASTER, table: TopicConfigs = TABLE) -> RemotingCommand:
        return self.done(Request.REGISTER_BROKER, header, encode_registration(table))

    def topics(self, code: int, header: tuple[object, ...] | None = None) -> list[str]:
        return decode_topic_list(self.done(code, header).body)

    def queues(self, topic: str) -> tuple[QueueData, ...]:
        return decode_route(self.done(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly(topic)).body).queues


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryProcess]:
    with RegistryProcess(tmp_path_factory.mktemp("registry") / "data", "--order-message-enable") as registry:
        yield registry


@pytest.fixture(params=[JSON, COMPACT], ids=["json", "compact"])
def asker(registry: RegistryProcess, request: pytest.FixtureRequest) -> Iterator[Asker]:
    """A connection over which broker-a registered; when it closes the registry is empty again."""
    with Asker(registry.host, registry.port) as asker:
        asker.serialization = request.param
        asker.register()
        yield asker
        asker.done(Request.UNREGISTER_BROKER, BrokerOnly("broker-a", MASTER.broker_addr, "c1", 0))


# -- recorded frames --------------------------------------------------------------------------------------------------


def test_a_recorded_question_for_a_route(asker: Asker) -> None:
    """G1, SG-054, SG-101, SG-113: as a Java client asks; the answer is in JSON too."""
    asker.send_bytes(bytes.fromhex(G1))
    answer = asker.response(0)
    assert (answer.code, answer.serialization) == (Response.SUCCESS, JSON)
    assert decode_route(answer.body) == TopicRoute((QueueData("broker-a", 8, 8, 7),), (BROKER,))


def test_a_recorded_question_with_a_compact_header(asker: Asker) -> None:
    """G3, SG-113."""
    asker.send_bytes(bytes.fromhex(G3))
    answer = asker.response(0)
    assert (answer.code, answer.serialization) == (Response.SUCCESS, COMPACT)
    assert decode_route(answer.body).queues == (QueueData("broker-a", 4, 4, 6),)


# -- registration -----------------------------------------------------------------------------------------------------


def test_a_registration_is_answered_with_the_master_and_the_ordered_topics(asker: Asker) -> None:
    """SG-082, SG-109, SG-115: a replica is told its master, a master none; a typed header is there even when it is empty."""
    assert asker.register().fields == {}
    replica = asker.register(REPLICA)
    assert replica.fields == {"masterAddr": "10.0.0.1:10911", "haServerAddr": "10.0.0.1:10912"}
    asker.done(Request.PUT_KV_CONFIG, KvPair("ORDER_TOPIC_CONFIG", "TopicA", "broker-a:4"))
    assert decode_kv_table(asker.register().body) == {"TopicA": "broker-a:4"}
    route = decode_route(asker.done(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly("TopicA")).body)
    assert route.order_conf == "broker-a:4"
    assert route.brokers == (BROKER._replace(addresses={0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}),)
    asker.done(Request.DELETE_KV_CONFIG, KvKey("ORDER_TOPIC_CONFIG", "TopicA"))
    asker.done(Request.UNREGISTER_BROKER, BrokerOnly("broker-a", REPLICA.broker_addr, "c1", 1))


def test_a_compressed_registration_with_its_checksum(asker: Asker) -> None:
    """G32, SG-109: a wrong checksum is refused, and changes nothing."""
    table = TopicConfigs(DataVersion(1, 9), {"Deflated": TopicConfig("Deflated", 2, 2)})
    body = encode_registration(table, compressed=True)
    header = MASTER._replace(compressed=True, body_crc32=body_crc(body))
    refused = asker.ask(Request.REGISTER_BROKER, header._replace(body_crc32=1), body)
    assert (refused.code, refused.remark) == (
        Response.SYSTEM_ERROR,
        f"the body's checksum is {body_crc(body)}, not 1 as announced",
    )
    assert "Deflated" not in asker.topics(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    asker.done(Request.REGISTER_BROKER, header, body)
    assert asker.queues("Deflated") == (QueueData("broker-a", 2, 2, 6),)


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        (encode_header(MASTER), b"{", "JSON"),
        (encode_header(MASTER._replace(compressed=True)), b"{", "registration"),
        (encode_header(MASTER._replace(compressed=True)), zlib.compress(bytes(20_000_000)), "longer than"),
        (encode_header(MASTER) | {"brokerId": "none"}, b"", "brokerId"),
        ({"brokerName": "broker-a"}, b"", "brokerAddr is missing"),
    ],
)
def test_a_registration_that_is_refused(asker: Asker, header: dict[str, str], body: bytes, reason: str) -> None:
    """SG-109: the remark says why, and the connection goes on."""
    answer = asker.call(Request.REGISTER_BROKER, header, body)
    assert answer.code == Response.SYSTEM_ERROR
    assert reason in str(answer.remark)
    assert asker.queues("TopicA")


def test_a_question_whether_anything_changed(asker: Asker) -> None:
    """SG-052: 322."""
    identity = BrokerOnly("broker-a", MASTER.broker_addr, "c1", 0)
    same = asker.done(Request.QUERY_DATA_VERSION, identity, encode_data_version(VERSION))
    assert (same.fields, decode_data_version(same.body)) == ({"changed": "false"}, VERSION)
    other = asker.done(Request.QUERY_DATA_VERSION, identity, encode_data_version(DataVersion(1, 1)))
    assert (other.fields, decode_data_version(other.body)) == ({"changed": "true"}, VERSION)
    unknown = identity._replace(broker_addr="10.0.0.9:10911")
    nothing = asker.done(Request.QUERY_DATA_VERSION, unknown, encode_data_version(VERSION))
    assert (nothing.fields, nothing.body) == ({"changed": "true"}, b"")


def test_heartbeats_and_one_way_registrations(asker: Asker) -> None:
    """SG-052, SG-066: a heartbeat is answered; a registration that is one-way is not, and counts."""
    asker.done(Request.BROKER_HEARTBEAT, BrokerBeat("c1", MASTER.broker_addr, "broker-a"))
    table = TopicConfigs(DataVersion(1, 10), {"Oneway": TopicConfig("Oneway", 1, 1)})
    fields = encode_header(MASTER)
    opaque = asker.send(Request.REGISTER_BROKER, fields, encode_registration(table), oneway=True)
    assert asker.queues("Oneway") == (QueueData("broker-a", 1, 1, 6),)
    assert not asker.answered(opaque)


# -- questions and administration -------------------------------------------------------------------------------------


def test_where_brokers_and_topics_are(asker: Asker) -> None:
    """SG-100, SG-104, SG-105, SG-106: 106, 206, 224, 304, 311 to 313, 901."""
    assert decode_cluster_info(asker.done(Request.GET_BROKER_CLUSTER_INFO).body) == ClusterInfo(
        {"broker-a": BROKER}, {"c1": ["broker-a"]}
    )
    assert asker.topics(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == sorted(TOPICS)
    assert asker.topics(Request.GET_TOPICS_BY_CLUSTER, ClusterOnly("c1")) == sorted(TOPICS)
    assert asker.topics(Request.GET_TOPICS_BY_CLUSTER, ClusterOnly("c2")) == []
    system = asker.done(Request.GET_SYSTEM_TOPIC_LIST_FROM_NS).body
    assert system == b'{"brokerAddr":"10.0.0.1:10911","topicList":["c1","broker-a"]}'
    assert asker.topics(Request.GET_UNIT_TOPIC_LIST) == ["Unit"]
    assert asker.topics(Request.GET_HAS_UNIT_SUB_TOPIC_LIST) == ["Subscribed"]
    assert asker.topics(Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == ["Subscribed"]
    members = asker.done(Request.GET_BROKER_MEMBER_GROUP, BrokerGroup("c1", "broker-a")).body
    assert decode_member_group(members) == BROKER


def test_a_missing_route_says_why(asker: Asker) -> None:
    """SG-113: code 17, and the cause in the remark."""
    answer = asker.ask(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly("Missing"))
    assert answer.code == Response.TOPIC_NOT_EXIST
    assert str(answer.remark).startswith("no route for topic Missing: none of the 1 live brokers has such a topic")
    asker.done(Request.UNREGISTER_BROKER, BrokerOnly("broker-a", MASTER.broker_addr, "c1", 0))
    answer = asker.ask(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly("TopicA"))
    assert answer.code == Response.TOPIC_NOT_EXIST
    assert "no live broker has it; broker broker-a, which had it, was removed" in str(answer.remark)


def test_write_permissions_of_a_broker(asker: Asker) -> None:
    """SG-104: 205 and 327 count the topics they change."""
    assert asker.done(Request.WIPE_WRITE_PERM_OF_BROKER, BrokerNameOnly("broker-a")).fields == {"wipeTopicCount": "4"}
    assert asker.queues("TopicA")[0].permission == 4
    assert asker.done(Request.ADD_WRITE_PERM_OF_BROKER, BrokerNameOnly("broker-a")).fields == {"addTopicCount": "4"}
    assert asker.queues("TopicA")[0].permission == 6


def test_topics_entered_and_deleted_by_hand(asker: Asker) -> None:
    """SG-104: 216 and 217."""
    queue = QueueData("broker-a", 2, 2, 6)
    asker.done(Request.REGISTER_TOPIC_IN_NAMESRV, TopicOnly("Entered"), encode_route(TopicRoute((queue,), ())))
    assert asker.queues("Entered") == (queue,)
    asker.done(Request.DELETE_TOPIC_IN_NAMESRV, DeleteTopicInRegistry("Entered", "c2"))
    assert asker.queues("Entered") == (queue,)
    asker.done(Request.DELETE_TOPIC_IN_NAMESRV, DeleteTopicInRegistry("Entered"))
    assert asker.ask(Request.GET_ROUTEINFO_BY_TOPIC, TopicOnly("Entered")).code == Response.TOPIC_NOT_EXIST
    stray = encode_route(TopicRoute((queue._replace(broker_name="broker-x"),), ()))
    refused = asker.ask(Request.REGISTER_TOPIC_IN_NAMESRV, TopicOnly("Entered"), stray)
    assert (refused.code, refused.remark) == (
        Response.SYSTEM_ERROR,
        "there is no live broker broker-x; nothing was changed for topic Entered",
    )


def test_keys(asker: Asker) -> None:
    """SG-103, SG-115: 100, 101, 102 and 219."""
    assert asker.ask(Request.GET_KVLIST_BY_NAMESPACE, Namespace("N-absent")).code == Response.QUERY_NOT_FOUND
    asker.done(Request.PUT_KV_CONFIG, KvPair("N", "k", "v"))
    asker.done(Request.PUT_KV_CONFIG, KvPair("N", "k2", "v2"))
    assert asker.done(Request.GET_KV_CONFIG, KvKey("N", "k")).fields == {"value": "v"}
    asker.done(Request.DELETE_KV_CONFIG, KvKey("N", "k"))
    gone = asker.ask(Request.GET_KV_CONFIG, KvKey("N", "k"))
    assert (gone.code, gone.remark) == (Response.QUERY_NOT_FOUND, "there is no key k in namespace N")
    assert decode_kv_table(asker.done(Request.GET_KVLIST_BY_NAMESPACE, Namespace("N")).body) == {"k2": "v2"}


def test_settings(asker: Asker) -> None:
    """SG-103: 318 and 319; what cannot be changed is refused with the reason."""

    def shown() -> str:
        return asker.done(Request.GET_NAMESRV_CONFIG).body.decode()

    assert "orderMessageEnable=true\n" in shown()
    asker.done(Request.UPDATE_NAMESRV_CONFIG, None, b"# comment\n\n orderMessageEnable = false\n")
    assert "orderMessageEnable=false\n" in shown()
    asker.done(Request.UPDATE_NAMESRV_CONFIG, None, b"orderMessageEnable=true")
    for body, code in (
        (b"kvConfigPath=/elsewhere", Response.NO_PERMISSION),
        (b"orderMessageEnable=maybe", Response.SYSTEM_ERROR),
        (b"orderMessageEnable=false\nunknown=1", Response.SYSTEM_ERROR),
        (b"no line of this kind", Response.SYSTEM_ERROR),
        (b"\xff=\xff", Response.SYSTEM_ERROR),
    ):
        refused = asker.ask(Request.UPDATE_NAMESRV_CONFIG, None, body)
        assert (refused.code, bool(refused.remark)) == (code, True), body
    assert "orderMessageEnable=true\n" in shown()


def test_codes_of_a_broker_are_not_supported(asker: Asker) -> None:
    """SG-100: a registry stores nothing, and says so instead of being silent."""
    answer = asker.ask(Request.SEND_MESSAGE_V2, None, b"body")
    assert answer.code == Response.REQUEST_CODE_NOT_SUPPORTED
    assert str(Request.SEND_MESSAGE_V2.value) in str(answer.remark)


def test_the_text_protocol_of_a_registry(registry: RegistryProcess, asker: Asker) -> None:
    """SG-100: for people with telnet; what only a broker can do is refused, and the connection goes on."""
    assert asker.queues("TopicA")
    with registry.connect() as connection, connection.makefile("rb") as replies:
        connection.sendall(b"stats 1\r\nput t 0 5 0 2\r\nhelloget t g 0 0 100 3\r\nversion 4\r\nhelp 5\r\nquit\r\n")
        text = replies.read().decode()
    assert "topics 4\r\nbrokers 1\r\nbroker broker-a cluster c1 0=10.0.0.1:10911\r\n" in text
    refusal = "this is a registry, which stores no messages; connect to a broker"
    assert f"result 400 {len(refusal)} 2\r\n{refusal}" in text
    assert f"result 400 {len(refusal)} 3\r\n{refusal}" in text
    assert "This is a registry" in text


def test_two_registries_do_not_share_a_folder(registry: RegistryProcess, tmp_path: Path) -> None:
    """SG-103."""
    second = RegistryProcess(registry.data)
    second.log = tmp_path / "stderr"
    second.launch()
    with pytest.raises(AssertionError, match="in use by another process"):
        second.wait_ready()
