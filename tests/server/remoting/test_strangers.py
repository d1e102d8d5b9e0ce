"""A user, or a client without one, gets nothing of another user through the broker: signatures, replies, groups."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import encode_response
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.protocol.remoting.signature import Credentials
from metaq.protocol.text.writing import write_line, write_put
from metaq.server.remoting.admission import ADMITTED
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document, write_document
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.messages import send_header
from tests.support.remoting import RemotingClient
from tests.support.users import ADMIN, GROUP, READER, TOPIC, USERS, WRITER, SigningClient, write_users

CLIENT_ID: Final = "10.0.0.9@1"
OTHER: Final = Credentials("other", "other-secret-1")
BRANCH: Final = "XID:1:0a:0b:app"
INNER: Final = "CLIENT_INNER_PRODUCER"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("strangers")
    users = write_users(folder / "users.yaml")
    with BrokerProcess(folder / "data", "--users-file", str(users)) as process:
        yield process


@pytest.fixture
def admin(broker: BrokerProcess) -> Iterator[SigningClient]:
    with SigningClient(broker.host, broker.port, ADMIN) as client:
        yield client


def heartbeat(group: str = INNER, *, consumes: bool = False) -> bytes:
    content = {"clientID": CLIENT_ID, "producerDataSet": [{"groupName": group}], "consumerDataSet": []}
    if consumes:
        subscriptions = [{"topic": TOPIC, "subString": "*"}]
        content["consumerDataSet"] = [{"groupName": GROUP, "subscriptionDataSet": subscriptions}]
    return json.dumps(content).encode()


def test_a_consumer_sees_no_signature_of_an_administrator(broker: BrokerProcess, admin: SigningClient) -> None:
    """E-05, P21: what is asked of it has neither the name nor the signature of who asks, which it could send again."""
    sent = admin.call(Request.SEND_MESSAGE_V2, with_letters(encode_header(send_header(TOPIC))), b"body")
    assert sent.code == Response.SUCCESS
    fields = {"consumerGroup": GROUP, "clientId": CLIENT_ID}
    with SigningClient(broker.host, broker.port, READER) as consumer:
        assert consumer.call(Request.HEART_BEAT, body=heartbeat(consumes=True)).code == Response.SUCCESS
        for code, asked_for, relayed in (
            (Request.GET_CONSUMER_RUNNING_INFO, {"jstackEnable": "true"}, {"jstackEnable": "true"}),
            (Request.CONSUME_MESSAGE_DIRECTLY, {"msgId": sent.fields["msgId"]}, {"brokerName": "metaq"}),
        ):
            opaque = admin.send(code, ADMIN.signed({**fields, **asked_for}, b""))
            asked = consumer.request(code)
            assert asked.fields == {**fields, **asked_for, **relayed}
            consumer.send_bytes(encode_response(asked, 0, {}, None, 0))
            assert admin.response(opaque).code == Response.SUCCESS


def reply_to(client: SigningClient, requester: RemotingClient) -> str:
    """The body that the requester is sent as the reply."""
    header = send_header("DefaultCluster_REPLY_TOPIC", f"MSG_TYPE\x01reply\x02REPLY_TO_CLIENT\x01{CLIENT_ID}\x02")
    fields = client.who.signed(with_letters(encode_header(header)), b"42") if client.who else None
    opaque = client.send(Request.SEND_REPLY_MESSAGE_V2, fields, b"42")
    push = requester.request(Request.PUSH_REPLY_MESSAGE_TO_CLIENT)
    requester.send_bytes(encode_response(push, 0, {}, None, 0))
    assert client.response(opaque).code == Response.SUCCESS
    return push.body.decode()


def test_replies_go_to_no_stranger(broker: BrokerProcess, admin: SigningClient) -> None:
    """E-05, P21: nobody says who it is without a login, and no user takes the place of another one that is connected."""
    with contextlib.ExitStack() as stack:
        nobody = stack.enter_context(RemotingClient(broker.host, broker.port))
        writer = stack.enter_context(SigningClient(broker.host, broker.port, WRITER))
        reader = stack.enter_context(SigningClient(broker.host, broker.port, READER))
        refused = nobody.call(Request.HEART_BEAT, body=heartbeat())
        assert (refused.code, "anonymous may not" in str(refused.remark)) == (Response.NO_PERMISSION, True)
        assert writer.call(Request.HEART_BEAT, body=heartbeat("asks")).code == Response.SUCCESS
        for _ in range(2):
            assert reader.call(Request.HEART_BEAT, body=heartbeat()).code == Response.SUCCESS
        assert reply_to(admin, writer) == "42"
        assert broker.stderr().count("client id belongs to another user") == 1
        again = stack.enter_context(SigningClient(broker.host, broker.port, WRITER))
        assert again.call(Request.HEART_BEAT, body=heartbeat("asks")).code == Response.SUCCESS  # it has connected anew
        assert reply_to(admin, again) == "42"
        again.close()

        def is_gone() -> bool:
            asked = admin.call(Request.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "asks", "topic": TOPIC})
            return len(json.loads(asked.body)["connectionSet"]) == 1

        wait_until(is_gone, 30, "the broker has seen that it is gone")
        assert reader.call(Request.HEART_BEAT, body=heartbeat()).code == Response.SUCCESS
        assert reply_to(admin, reader) == "42"


@pytest.mark.parametrize("code", [Request.SEND_REPLY_MESSAGE, Request.SEND_REPLY_MESSAGE_V2])
def test_nobody_forges_replies_by_naming_another_topic(broker: BrokerProcess, admin: SigningClient, code: int) -> None:
    """E-05, SG-004: who may publish somewhere has no say in what requesters are told; the reply topic takes no detour."""
    with SigningClient(broker.host, broker.port, WRITER) as writer, contextlib.ExitStack() as stack:
        requester = stack.enter_context(SigningClient(broker.host, broker.port, ADMIN))
        assert requester.call(Request.HEART_BEAT, body=heartbeat("asks")).code == Response.SUCCESS
        for who, topic, refused in (
            (writer, TOPIC, "replies go to the topic DefaultCluster_REPLY_TOPIC"),
            (writer, "DefaultCluster_REPLY_TOPIC", "writer may not publish to DefaultCluster_REPLY_TOPIC"),
            (admin, TOPIC, "replies go to the topic DefaultCluster_REPLY_TOPIC"),
        ):
            header = send_header(topic, f"MSG_TYPE\x01reply\x02CORRELATION_ID\x01c\x02REPLY_TO_CLIENT\x01{CLIENT_ID}\x02")
            fields = encode_header(header) if code == Request.SEND_REPLY_MESSAGE else with_letters(encode_header(header))
            answer = who.call(code, fields, b"forged")
            assert (answer.code, refused in (answer.remark or "")) == (Response.NO_PERMISSION, True)
        assert reply_to(admin, requester) == "42"


def test_who_is_refused_makes_no_group(broker: BrokerProcess, admin: SigningClient) -> None:
    """E-05, P21: by sending to its retry topic."""
    fields = with_letters(encode_header(send_header("%RETRY%made-up")))
    for who in (None, WRITER):
        with SigningClient(broker.host, broker.port, who) as client:
            assert client.call(Request.SEND_MESSAGE_V2, fields, b"x").code == Response.NO_PERMISSION
    groups = json.loads(admin.call(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]
    assert "made-up" not in groups
    assert admin.call(Request.SEND_MESSAGE_V2, fields, b"x").code == Response.SUCCESS
    groups = json.loads(admin.call(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]
    assert "made-up" in groups


def test_nothing_of_a_stranger_is_read(broker: BrokerProcess) -> None:
    """E-05: of no code but the one for everybody; neither fields nor body, which would be refused for what they are."""
    with RemotingClient(broker.host, broker.port) as nobody:
        for code, needs in ADMITTED.items():
            if code in (Request.REPLICA_STATUS, Request.CHANGE_ROLE, Request.HAND_OVER):
                continue  # of brokers that take slaves
            answer = nobody.call(code, {}, b"{" * 100)
            assert (answer.code == Response.NO_PERMISSION) == bool(needs.actions), (code, answer)
            answer = nobody.call(code, {}, bytes(min(needs.most_bytes, 1 << 20) + 1))
            assert answer.code == (Response.NO_PERMISSION if needs.most_bytes > 1 << 20 else Response.SYSTEM_ERROR), (
                code,
                answer,
            )


def test_an_endless_name_is_told_in_part(broker: BrokerProcess) -> None:
    """E-05: who asks for a name of megabytes is not sent them back."""
    fields = with_letters(encode_header(send_header("x" * 60_000)))
    with SigningClient(broker.host, broker.port, WRITER) as client:
        remark = client.call(Request.SEND_MESSAGE_V2, fields, b"x").remark or ""
    assert "may not publish to xxx" in remark
    assert len(remark) < 400
    with RemotingClient(broker.host, broker.port) as nobody:
        remark = nobody.call(Request.SEND_MESSAGE_V2, fields, b"x").remark or ""
    assert remark == "anonymous may not publish to any topic; log in first"


def test_a_registry_refuses_puts_of_transactions(tmp_path: Path) -> None:
    """E-05: and the connection goes on."""
    with RegistryProcess(tmp_path / "registry") as registry, registry.connect() as connection:
        replies = connection.makefile("rb")
        for transaction in ("TX:1:1", None):
            connection.sendall(write_put("t", 0, 0, b"body", 7, transaction=transaction))
            _, status, size, _ = replies.readline().split()
            assert (status, b"this is a registry" in replies.read(int(size))) == (b"400", True)
        assert "Traceback" not in registry.stderr()


def say(broker: BrokerProcess, who: Credentials, *lines: bytes) -> list[tuple[int, str]]:
    """Status and text of the answers to these lines, after a login."""
    answers = []
    with broker.connect() as connection, connection.makefile("rb") as replies:
        for line in (write_line("auth", who.name, who.secret, 1), *lines):
            connection.sendall(line)
            _, status, size, _ = replies.readline().split()
            answers.append((int(status), replies.read(int(size)).decode()))
    return answers[1:]


def step(word: str, key: str = BRANCH) -> bytes:
    return write_line("transaction", key, "s", word, 7)


def refused(broker: BrokerProcess, *words: str) -> bool:
    """Return whether a user that may publish to another topic only is refused these steps, and sees nothing in RECOVER."""
    answers = say(broker, OTHER, *map(step, words), step("RECOVER", "null"))
    return answers == [*[(403, f"other may not publish to {TOPIC}")] * len(words), (200, "")]


def test_a_branch_is_finished_by_those_who_may_publish_what_is_in_it(tmp_path: Path) -> None:
    """E-06, P21: and shown to them alone, open, prepared or decided by an operator, also after restarts."""
    users = write_users(tmp_path / "users.yaml", f"{USERS}  other: {{secret: {OTHER.secret}, topics: {{o: PUB|CREATE}}}}\n")
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        put = write_put(TOPIC, 0, 0, b"body", 7, transaction=BRANCH)
        assert say(broker, WRITER, write_put(TOPIC, 0, 0, b"body", 7), step("BEGIN"), put)[1][0] == 200
        assert refused(broker, "PREPARE", "COMMIT_ONE_PHASE", "ROLLBACK", "FORGET")
        assert say(broker, WRITER, step("PREPARE"), step("RECOVER", "null")) == [(200, "0"), (200, BRANCH)]
        for restart in (broker.kill, broker.terminate):
            assert refused(broker, "COMMIT_TWO_PHASE", "ROLLBACK", "FORGET")
            restart()
            broker.start()
        assert refused(broker, "COMMIT_TWO_PHASE", "ROLLBACK", "FORGET")
        with SigningClient(broker.host, broker.port, ADMIN) as admin:
            assert admin.call(Request.DECIDE_TRANSACTION, {"key": BRANCH, "outcome": "rollback"}).code == Response.SUCCESS
        for restart in (broker.kill, broker.terminate):
            assert refused(broker, "COMMIT_TWO_PHASE", "FORGET")
            restart()
            broker.start()
        assert refused(broker, "COMMIT_TWO_PHASE", "FORGET")
        asked = say(broker, WRITER, step("RECOVER", "null"), step("FORGET"), step("RECOVER", "null"))
        assert asked == [(200, BRANCH), (200, ""), (200, "")]


def test_a_branch_that_an_older_version_prepared_is_not_lost_to_its_manager(tmp_path: Path) -> None:
    """E-06: its topics are found in its messages."""
    users = write_users(tmp_path / "users.yaml", f"{USERS}  other: {{secret: {OTHER.secret}, topics: {{o: PUB|CREATE}}}}\n")
    snapshot = tmp_path / "data" / "config" / "transactions.json"
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        put = write_put(TOPIC, 0, 0, b"body", 7, transaction=BRANCH)
        asked = say(broker, WRITER, write_put(TOPIC, 0, 0, b"body", 7), step("BEGIN"), put, step("PREPARE"))
        assert asked[-1] == (200, "0")
        for first in (WRITER, OTHER, ADMIN):
            broker.terminate()
            content, _ = read_document(RealDisk(), snapshot)
            assert content is not None and content.pop("topics") == {BRANCH: [TOPIC]}
            write_document(RealDisk(), snapshot, content)
            broker.start()
            assert say(broker, first, step("RECOVER", "null")) == [(200, "" if first is OTHER else BRANCH)]
        with SigningClient(broker.host, broker.port, ADMIN) as admin:
            assert admin.call(Request.DECIDE_TRANSACTION, {"key": BRANCH, "outcome": "rollback"}).code == Response.SUCCESS
        assert refused(broker, "COMMIT_TWO_PHASE", "FORGET")
        asked = say(broker, WRITER, step("RECOVER", "null"), step("FORGET"), step("RECOVER", "null"))
        assert asked == [(200, BRANCH), (200, ""), (200, "")]


def test_a_branch_of_an_older_version_is_for_administrators(tmp_path: Path) -> None:
    """E-06: of which nobody knows the topics."""
    users = write_users(tmp_path / "users.yaml")
    (tmp_path / "data" / "config").mkdir(parents=True)
    content = {"next": 0, "ids": 0, "prepared": [], "heuristic": [[BRANCH, "rollback"]]}
    write_document(RealDisk(), tmp_path / "data" / "config" / "transactions.json", content)
    with BrokerProcess(tmp_path / "data", "--users-file", str(users)) as broker:
        (status, text), recovered = say(broker, WRITER, step("FORGET"), step("RECOVER", "null"))
        assert (status, "an older version prepared it" in text, recovered) == (403, True, (200, ""))
        asked = say(broker, ADMIN, step("RECOVER", "null"), step("FORGET"), step("RECOVER", "null"))
        assert asked == [(200, BRANCH), (200, ""), (200, "")]
