"""Access to every request code and text command: who may send it, and how others are refused."""

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import FrameReader, encode_request
from metaq.protocol.remoting.signature import ACCESS_KEY, SIGNATURE, Credentials
from metaq.protocol.text.writing import write_line, write_put
from metaq.replication.frames import Hello
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess
from tests.support.ports import free_ports
from tests.support.remoting import RemotingClient
from tests.support.tls import issue
from tests.support.users import ADMIN, GROUP, READER, TOPIC, WRITER, SigningClient, write_users

EVERYBODY: Final = "nobody reader writer admin"
USERS: Final = "reader writer admin"
READERS: Final = "reader admin"
WRITERS: Final = "writer admin"
ADMINS: Final = "admin"

ALLOWED: Final[Mapping[str, tuple[Request, ...]]] = {
    EVERYBODY: (Request.IDENTITY,),
    READERS: (
        Request.PULL_MESSAGE,
        Request.LITE_PULL_MESSAGE,
        Request.BULK_FETCH,
        Request.QUERY_MESSAGE,
        Request.VIEW_MESSAGE_BY_ID,
        Request.CONSUMER_SEND_MSG_BACK,
        Request.QUERY_CONSUMER_OFFSET,
        Request.UPDATE_CONSUMER_OFFSET,
        Request.SEARCH_OFFSET_BY_TIMESTAMP,
        Request.GET_MAX_OFFSET,
        Request.GET_MIN_OFFSET,
        Request.GET_EARLIEST_MSG_STORETIME,
        Request.HEART_BEAT,
        Request.UNREGISTER_CLIENT,
        Request.GET_CONSUMER_LIST_BY_GROUP,
        Request.CHECK_CLIENT_CONFIG,
        Request.LOCK_BATCH_MQ,
        Request.UNLOCK_BATCH_MQ,
        Request.QUERY_ASSIGNMENT,
        Request.POP_MESSAGE,
        Request.ACK_MESSAGE,
        Request.BATCH_ACK_MESSAGE,
        Request.CHANGE_MESSAGE_INVISIBLETIME,
        Request.PEEK_MESSAGE,
        Request.NOTIFICATION,
        Request.POLLING_INFO,
    ),
    WRITERS: (
        Request.SEND_MESSAGE,
        Request.SEND_MESSAGE_V2,
        Request.SEND_BATCH_MESSAGE,
        Request.END_TRANSACTION,
        Request.RECALL_MESSAGE,
        Request.SEND_REPLY_MESSAGE,
        Request.SEND_REPLY_MESSAGE_V2,
    ),
    USERS: (
        Request.GET_ROUTEINFO_BY_TOPIC,
        Request.GET_BROKER_CLUSTER_INFO,
        Request.GET_BROKER_MEMBER_GROUP,
        Request.GET_KV_CONFIG,
        Request.GET_KVLIST_BY_NAMESPACE,
        Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        Request.GET_TOPICS_BY_CLUSTER,
        Request.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        Request.GET_UNIT_TOPIC_LIST,
        Request.GET_HAS_UNIT_SUB_TOPIC_LIST,
        Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        Request.GET_NAMESRV_CONFIG,
        Request.GET_ALL_TOPIC_CONFIG,
        Request.GET_TOPIC_CONFIG,
        Request.GET_TOPIC_STATS_INFO,
        Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
        Request.GET_BROKER_CONFIG,
        Request.GET_BROKER_RUNTIME_INFO,
        Request.VIEW_BROKER_STATS_DATA,
        Request.GET_ALL_CONSUMER_OFFSET,
        Request.GET_ALL_DELAY_OFFSET,
        Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        Request.GET_SUBSCRIPTIONGROUP_CONFIG,
        Request.GET_ALL_MESSAGE_REQUEST_MODE,
        Request.GET_CONSUMER_CONNECTION_LIST,
        Request.GET_PRODUCER_CONNECTION_LIST,
        Request.GET_ALL_PRODUCER_INFO,
        Request.QUERY_TOPIC_CONSUME_BY_WHO,
        Request.QUERY_TOPICS_BY_CONSUMER,
        Request.QUERY_SUBSCRIPTION_BY_CONSUMER,
        Request.GET_CONSUME_STATS,
        Request.GET_BROKER_CONSUME_STATS,
        Request.QUERY_CONSUME_TIME_SPAN,
        Request.QUERY_CORRECTION_OFFSET,
        Request.QUERY_CONSUME_QUEUE,
        Request.GET_CONSUMER_RUNNING_INFO,
        Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
        Request.LIST_TRANSACTIONS,
        Request.GET_TRANSACTION,
        Request.REPLICA_STATUS,
        Request.EXPORT_OFFSETS,
        Request.LIST_TIMERS,
        Request.TIMER_STATS,
        Request.LIST_LEASES,
        Request.LIST_OPEN_MESSAGES,
        Request.LEASE_STATS,
        Request.CRON,
    ),
    ADMINS: (
        Request.PUT_KV_CONFIG,
        Request.DELETE_KV_CONFIG,
        Request.REGISTER_BROKER,
        Request.UNREGISTER_BROKER,
        Request.QUERY_DATA_VERSION,
        Request.BROKER_HEARTBEAT,
        Request.WIPE_WRITE_PERM_OF_BROKER,
        Request.ADD_WRITE_PERM_OF_BROKER,
        Request.REGISTER_TOPIC_IN_NAMESRV,
        Request.UPDATE_NAMESRV_CONFIG,
        Request.UPDATE_AND_CREATE_TOPIC,
        Request.UPDATE_BROKER_CONFIG,
        Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        Request.SET_MESSAGE_REQUEST_MODE,
        Request.INVOKE_BROKER_TO_RESET_OFFSET,
        Request.CLONE_GROUP_OFFSET,
        Request.CONSUME_MESSAGE_DIRECTLY,
        Request.CLEAN_EXPIRED_CONSUMEQUEUE,
        Request.CLEAN_UNUSED_TOPIC,
        Request.DELETE_EXPIRED_COMMITLOG,
        Request.RESUME_CHECK_HALF_MESSAGE,
        Request.DECIDE_TRANSACTION,
        Request.CHANGE_ROLE,
        Request.HAND_OVER,
        Request.DELETE_SUBSCRIPTIONGROUP,
        Request.DELETE_TOPIC_IN_NAMESRV,
        Request.DELETE_TOPIC_IN_BROKER,
    ),
}
"""Users → what they, and nobody else, may ask. What removes something comes last."""

TO_CLIENTS: Final = frozenset(
    {
        Request.CHECK_TRANSACTION_STATE,
        Request.NOTIFY_CONSUMER_IDS_CHANGED,
        Request.PUSH_REPLY_MESSAGE_TO_CLIENT,
        Request.RESET_CONSUMER_CLIENT_OFFSET,
        Request.GET_CONSUMER_STATUS_FROM_CLIENT,
    }
)
"""What a broker asks, and is not asked."""

FIELDS: Final = {
    **dict.fromkeys(("topic", "b"), TOPIC),
    **dict.fromkeys(("consumerGroup", "group", "groupName", "compareGroup", "srcGroup", "destGroup"), GROUP),
    **dict.fromkeys(("producerGroup", "a"), "p"),
    **dict.fromkeys(("defaultTopic", "c"), "TBW102"),
    **dict.fromkeys(("queueId", "queueOffset", "commitOffset", "suspendTimeoutMillis", "subVersion", "e", "f", "g", "h"), "0"),
    **dict.fromkeys(("beginTimestamp", "topicSysFlag", "timestamp", "offset", "delayLevel", "tranStateTableOffset"), "0"),
    **dict.fromkeys(("commitLogOffset", "brokerId", "index", "after", "bornTimestamp", "flag"), "0"),
    **dict.fromkeys(("maxMsgNums", "maxNum", "endTimestamp", "readQueueNums", "writeQueueNums", "count", "limit"), "1"),
    **dict.fromkeys(("order", "isForce", "fromTransactionCheck", "isOrder", "offline", "jstackEnable"), "false"),
    **dict.fromkeys(("clientID", "clientId"), "c"),
    **dict.fromkeys(("key", "namespace", "value", "transactionId", "filterGroups", "recallHandle"), "k"),
    **dict.fromkeys(("clusterName", "cluster"), "DefaultCluster"),
    "sysFlag": "4",
    "subscription": "*",
    "expressionType": "TAG",
    "defaultTopicQueueNums": "4",
    "d": "4",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "commitOrRollback": "8",
    "msgId": "7F00000100002A9F0000000000000000",
    "brokerName": "metaq",
    "brokerAddr": "127.0.0.1:1",
    "haServerAddr": "127.0.0.1:2",
    "heartbeatTimeoutMillis": "1000",
    "statsName": "TOPIC_PUT_NUMS",
    "statsKey": TOPIC,
    "state": "prepared",
    "outcome": "commit",
    "replica": "none",
    "role": "none",
    "maxBytes": "1000",
    **dict.fromkeys(("pollTime", "initMode", "bornTime"), "0"),
    "invisibleTime": "1000",
    "extraInfo": "0 0 1000 1000 0 metaq 0 0",
}
"""Of all headers together: each request takes those that it knows."""

_SUBSCRIPTIONS: Final = [{"topic": TOPIC, "subString": "*"}, {"topic": f"%RETRY%{GROUP}", "subString": "*"}]
_QUEUES: Final = {"clientId": "c", "consumerGroup": GROUP, "mqSet": []}
_IN_TOPIC: Final = {"topic": TOPIC, "consumerGroup": GROUP}
BODIES: Final[Mapping[Request, object]] = {
    Request.HEART_BEAT: {
        "clientID": "c",
        "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
        "consumerDataSet": [{"groupName": GROUP, "subscriptionDataSet": _SUBSCRIPTIONS}],
    },
    **dict.fromkeys((Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ), _QUEUES),
    Request.CHECK_CLIENT_CONFIG: {"clientId": "c", "group": GROUP, "subscriptionData": _SUBSCRIPTIONS[0]},
    Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {"groupName": GROUP},
    Request.QUERY_ASSIGNMENT: {**_IN_TOPIC, "clientId": "c", "strategyName": "AVG"},
    Request.BATCH_ACK_MESSAGE: {"acks": [{"c": GROUP, "t": TOPIC, "so": 0, "q": 0, "rq": 1000, "pt": 0, "it": 1000}]},
    Request.SET_MESSAGE_REQUEST_MODE: {**_IN_TOPIC, "mode": "PULL"},
    Request.REGISTER_TOPIC_IN_NAMESRV: {"queueDatas": []},
}
PEOPLE: Final[Mapping[str, Credentials | None]] = {"nobody": None, "reader": READER, "writer": WRITER, "admin": ADMIN}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("access")
    users = write_users(folder / "users.yaml")
    flags = ("--users-file", str(users), "--replication-listen", "127.0.0.1:0", "--failed-logins-per-minute", "1000")
    with BrokerProcess(folder / "data", *flags) as process:
        yield process


def call_all(broker: BrokerProcess, who: str) -> dict[Request, tuple[int, str]]:
    """Code and remark of the answers to all requests, the last ones of ``ALLOWED`` last."""
    answers = {}
    with SigningClient(broker.host, broker.port, ADMIN) as client:  # the topic and a message in it
        placed = client.call(Request.SEND_MESSAGE_V2, FIELDS, b"body")
    place = {"offset": str(int(placed.fields["msgId"][16:], 16))}
    with SigningClient(broker.host, broker.port, PEOPLE[who]) as client:
        for code in (code for codes in ALLOWED.values() for code in codes):
            content = BODIES.get(code)
            body = b"" if content is None else json.dumps(content).encode()
            answer = client.call(code, {**FIELDS, **place}, body)
            answers[code] = (answer.code, answer.remark or "")
    return answers


def test_every_code_of_the_broker_is_in_the_table() -> None:
    """E-05: a new request has to say who may send it."""
    listed = [code for codes in ALLOWED.values() for code in codes]
    assert len(listed) == len(set(listed))
    assert set(listed) | TO_CLIENTS == set(Request)


@pytest.mark.parametrize("who", ["nobody", "reader", "writer", "admin"])
def test_every_code_is_refused_to_all_who_may_not(broker: BrokerProcess, who: str) -> None:
    """E-05, E-06, P21: 16, NO_PERMISSION, and the name of who asked; nothing else is refused like that."""
    for code, (answered, remark) in call_all(broker, who).items():
        may = any(who in names.split() and code in codes for names, codes in ALLOWED.items())
        refused = answered == Response.NO_PERMISSION and " may not " in remark
        assert refused != may, (code.name, who, answered, remark)
        assert answered != Response.REQUEST_CODE_NOT_SUPPORTED, code.name
        if refused:
            assert remark.startswith("anonymous" if who == "nobody" else who)


def test_a_wrong_signature_is_refused(broker: BrokerProcess) -> None:
    """E-05, P33: a wrong secret, a wrong body, an unknown user, a signature that is missing; one-way requests do nothing."""
    right = WRITER.signed(FIELDS, b"body")
    wrong: dict[str, tuple[dict[str, str], bytes]] = {
        "wrong secret": (Credentials("writer", "writer-secret-2").signed(FIELDS, b"body"), b"body"),
        "wrong body": (right, b"BODY"),
        "wrong field": ({**right, "e": "1"}, b"body"),
        "unknown": (Credentials("nobody", "writer-secret-1").signed(FIELDS, b"body"), b"body"),
        "missing": ({name: value for name, value in right.items() if name != SIGNATURE}, b"body"),
        "not ASCII": ({**right, SIGNATURE: "é"}, b"body"),
    }
    with RemotingClient(broker.host, broker.port) as client:
        for what, (fields, body) in wrong.items():
            answer = client.call(Request.SEND_MESSAGE_V2, fields, body)
            assert answer.code == Response.NO_PERMISSION, what
            assert "AccessKey" in str(answer.remark), what
            assert WRITER.secret not in str(answer.remark)
            client.send(Request.SEND_MESSAGE_V2, fields, body, oneway=True)
        before = _count(broker)
        assert client.call(Request.SEND_MESSAGE_V2, right, b"body").code == Response.SUCCESS
        assert client.call(Request.SEND_MESSAGE_V2, FIELDS, b"body").code == Response.NO_PERMISSION  # not signed
        assert client.call(Request.SEND_MESSAGE_V2, {**right, ACCESS_KEY: "admin"}, b"body").code == Response.NO_PERMISSION
        assert _count(broker) == before + 1


def _count(broker: BrokerProcess) -> int:
    with SigningClient(broker.host, broker.port, ADMIN) as client:
        return int(client.call(Request.GET_MAX_OFFSET, FIELDS).fields["offset"])


def test_many_sends_at_once_are_looked_at_one_by_one(broker: BrokerProcess) -> None:
    """E-05: of sends that arrive together those that are signed are stored, and no others."""
    with RemotingClient(broker.host, broker.port) as client:
        before = _count(broker)
        opaques = []
        for number in range(40):
            fields = WRITER.signed(FIELDS, b"m") if number % 2 else {**FIELDS, ACCESS_KEY: "writer", SIGNATURE: "x"}
            opaques.append(client.send(Request.SEND_MESSAGE_V2, fields, b"m"))
        codes = [client.response(opaque).code for opaque in opaques]
        assert codes == [Response.NO_PERMISSION, Response.SUCCESS] * 20
        assert _count(broker) == before + 20


# -- in secret --------------------------------------------------------------------------------------------------------


def test_every_port_speaks_tls_and_asks_who_is_there(tmp_path: Path) -> None:
    """E-05: those of clients, the registry, metrics and replicas show the certificate, and refuse strangers."""
    certificates = issue(tmp_path)
    users = write_users(tmp_path / "users.yaml")
    ports = free_ports(3)
    flags = ["--users-file", str(users), *certificates.flags, "--remoting-listen", f"127.0.0.1:{ports[2]}"]
    flags += ["--replication-listen", "127.0.0.1:0", "--cluster-user", ADMIN.name]
    context = ssl.create_default_context(cafile=str(certificates.authority))
    with BrokerProcess(tmp_path / "data", *flags) as broker:
        http, *others = [int(address.rpartition(":")[2]) for address in (broker.http, broker.replication, broker.registry)]
        found = {}
        for port in (http, *others, broker.port, ports[0], ports[2]):
            plain = socket.create_connection(("127.0.0.1", port), timeout=SOCKET_TIMEOUT_S)
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
                if port == http:
                    secured.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                elif port == others[0]:
                    secured.sendall(Hello("DefaultCluster", "metaq", 0, 2, 1 << 25, 0, 0, [[0, 0, 0]], None, "h:1", 0).encode())
                else:
                    secured.sendall(encode_request(Request.UPDATE_BROKER_CONFIG, 1, {}, b"brokerPermission=4"))
                found[port] = secured.recv(1 << 16)
    assert found[http].startswith(b"HTTP/1.1 401")
    assert b"challenge" in found[others[0]]
    for port in (others[1], broker.port, ports[0], ports[2]):
        (answer,) = FrameReader().receive(found[port])
        assert answer.code == Response.NO_PERMISSION and "anonymous" in str(answer.remark), port


# -- the text protocol ------------------------------------------------------------------------------------------------

COMMANDS: Final[Mapping[str, tuple[bytes, str]]] = {
    "put": (write_put(TOPIC, 0, 0, b"body", 7), WRITERS),
    "put, new topic": (write_put("w-new", 0, 0, b"body", 7), ADMINS),
    "get": (write_line("get", TOPIC, GROUP, 0, 0, 1000, 7), READERS),
    "get for another group": (write_line("get", TOPIC, "other", 0, 0, 1000, 7), ADMINS),
    "get of the broker's own": (write_line("get", "METAQ_SYS_EPOCHS", GROUP, 0, 0, 1000, 7), ADMINS),
    "offset": (write_line("offset", TOPIC, GROUP, 0, 0, 7), READERS),
    "create": (write_line("create", TOPIC, 1, 7), ADMINS),
    "stats": (write_line("stats", 7), USERS),
    "stats config": (write_line("stats", "config", 7), USERS),
    "stats reset": (write_line("stats", "reset", 7), ADMINS),
    "stats stacks": (write_line("stats", "stacks", 7), ADMINS),
    "version": (write_line("version", 7), EVERYBODY),
    "help": (write_line("help", 7), EVERYBODY),
    "transaction": (write_line("transaction", "TX:1:1", "s", "BEGIN", 7), WRITERS),
    "recover": (write_line("transaction", "null", "s", "RECOVER", 7), WRITERS),
}


def converse(broker: BrokerProcess, *lines: bytes) -> list[tuple[int, bytes]]:
    """Status and body of the answers, one connection, one command after the other."""
    answers = []
    with broker.connect() as connection, contextlib.closing(connection.makefile("rb")) as replies:
        for line in lines:
            connection.sendall(line)
            head = replies.readline().split()
            status, size = (200, int(head[1])) if head[0] == b"value" else (int(head[1]), int(head[2]))
            answers.append((status, replies.read(size)))
    return answers


@pytest.mark.parametrize("who", ["nobody", "reader", "writer", "admin"])
def test_every_text_command_is_refused_to_all_who_may_not(broker: BrokerProcess, who: str) -> None:
    """E-05, E-06: 403 and the name of who asked."""
    converse(broker, write_line("auth", ADMIN.name, ADMIN.secret, 1), write_put(TOPIC, 0, 0, b"body", 7))
    person = PEOPLE[who]
    login = [] if person is None else [write_line("auth", person.name, person.secret, 1)]
    for what, (line, names) in COMMANDS.items():
        new = line.replace(b"w-new", b"w-" + who.encode())  # an administrator makes it
        *logged_in, (status, text) = converse(broker, *login, new)
        assert all(answer == (200, who.encode()) for answer in logged_in)
        refused = status == 403 and b" may not " in text
        assert refused != (who in names.split()), (what, who, status, text)


def test_a_wrong_password_is_refused_and_ends_the_login_before(broker: BrokerProcess) -> None:
    """E-05: 403, the same words for a user that is not there, and nothing of the password."""
    ask = write_line("offset", TOPIC, GROUP, 0, 0, 7)
    converse(broker, write_line("auth", ADMIN.name, ADMIN.secret, 1), write_put(TOPIC, 0, 0, b"body", 7))
    right, wrong = write_line("auth", "reader", READER.secret, 1), write_line("auth", "reader", "reader-secret-2", 1)
    unknown = write_line("auth", "nemo", "reader-secret-2", 1)
    answers = converse(broker, right, ask, wrong, ask, unknown)
    assert [status for status, _ in answers] == [200, 200, 403, 403, 403]
    assert answers[2] == answers[4] == (403, b"wrong user or password")
    assert "reader-secret-2" not in broker.stderr()


def test_commands_behind_a_login_wait_for_it(broker: BrokerProcess) -> None:
    """E-05: what is sent in one go is done in order, as the user who logged in."""
    with broker.connect() as connection:
        put = write_put(TOPIC, 0, 0, b"body", 7)
        connection.sendall(put + write_line("auth", "writer", WRITER.secret, 1) + put + put + b"quit\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
    assert re.findall(rb"result (\d+)", received) == [b"403", b"200", b"200", b"200"]


def test_without_users_everybody_may_do_everything(tmp_path: Path) -> None:
    """E-05: signatures are not looked at, and a login is told that there is none."""
    with BrokerProcess(tmp_path / "data") as plain:
        with SigningClient(plain.host, plain.port, Credentials("nemo", "no-such-user")) as client:
            assert client.call(Request.SEND_MESSAGE_V2, FIELDS, b"body").code == Response.SUCCESS
        ((status, text),) = converse(plain, write_line("auth", "a", "b", 1))
        assert status == 400
        assert b"users_file" in text
