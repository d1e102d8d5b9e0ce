"""Transactions of the unmodified Java MetaQ client, 1.4.6.2: local ones, and XA branches of its XA session factory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.metaq_java.driver import JavaClient, JavaError, Outgoing, Sent, build
from tests.interop.metaq_java.relay import Relay
from tests.support.broker import BrokerProcess
from tests.support.talk import Talk

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

PARTITIONS = 2
XA_OK, XA_RDONLY = 0, 3
XAER_NOTA, XAER_PROTO = -4, -6
BODIES = [b"first", b"second", "数据".encode(), b"\r\nquit\r\n"]


@pytest.fixture(scope="module")
def class_path() -> str:
    return build()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", "--default-partitions", str(PARTITIONS)) as process:
        yield process


@pytest.fixture
def relay(broker: BrokerProcess) -> Iterator[Relay]:
    with Relay(broker.host, broker.port) as relay:
        yield relay


@pytest.fixture
def client(class_path: str, relay: Relay, tmp_path: Path) -> Iterator[JavaClient]:
    with JavaClient(class_path, "127.0.0.1", relay.port, tmp_path / "home") as client:
        yield client


@pytest.fixture
def talk(broker: BrokerProcess) -> Iterator[Talk]:
    with Talk(broker) as talk:
        yield talk


def stored(talk: Talk, topic: str) -> list[tuple[int, str | None, bytes]]:
    """Ids, attributes and payloads of all partitions, the youngest put last."""
    found = [message for partition in range(PARTITIONS) for message in talk.messages(topic, partition)]
    return [(message.id, message.attribute, message.body) for message in sorted(found, key=lambda message: -message.id)]


def expected(sent: list[Sent], attribute: str | None) -> list[tuple[int, str | None, bytes]]:
    return [(result.id, attribute, body) for result, body in zip(sent, BODIES, strict=True)]


def check(sent: list[Sent]) -> None:
    """Each was taken, in turn in another partition, with an id of its own and no position yet."""
    assert [(result.success, result.error, result.offset) for result in sent] == [(True, None, -1)] * len(sent)
    assert {result.partition for result in sent} == set(range(PARTITIONS))
    ids = [result.id for result in sent]
    assert ids == sorted(set(ids), reverse=True)
    assert ids[0] < 0


def put_locally(client: JavaClient, topic: str) -> list[Sent]:
    return [client.put_in_transaction(Outgoing(topic, body, "tag")) for body in BODIES]


def put_in_branch(client: JavaClient, topic: str) -> list[Sent]:
    return [client.put_in_branch(Outgoing(topic, body)) for body in BODIES]


def refusal(client: JavaClient, step: str, number: int = 1) -> tuple[str, int | None]:
    with pytest.raises(JavaError) as refused:
        client.xa(step, number)
    return refused.value.chain[0][0], refused.value.code


def restart(client: JavaClient, relay: Relay, broker: BrokerProcess) -> None:
    """Kill the broker, start it again, and wait until the client is back."""
    broker.restart(same_port=True)
    relay.wait_for_connections(2)
    client.step("await_connected")


def test_local_transactions(client: JavaClient, relay: Relay, talk: Talk) -> None:
    """MQ-108, MQ-109: what is committed is stored together, what is rolled back never; one connection, one after the other."""
    client.publish("java-local", PARTITIONS)
    client.begin(timeout_s=70)
    sent = put_locally(client, "java-local")
    check(sent)
    assert stored(talk, "java-local") == []
    client.step("commit")
    committed = expected(sent, "tag")
    assert stored(talk, "java-local") == committed

    client.begin()
    check(put_locally(client, "java-local"))
    client.step("rollback")
    assert stored(talk, "java-local") == committed

    client.begin()
    sent = put_locally(client, "java-local")
    client.step("commit")
    assert stored(talk, "java-local") == [*committed, *expected(sent, "tag")]
    kinds = re.findall(rb"transaction TX:\S+ \S+ (\w+)(?: 70)? -\d+\r\n", relay.requests)
    assert kinds == [b"BEGIN", b"COMMIT_ONE_PHASE", b"BEGIN", b"ROLLBACK", b"BEGIN", b"COMMIT_ONE_PHASE"]
    assert relay.connections == 1


@pytest.mark.slow
def test_a_local_transaction_whose_broker_was_killed(client: JavaClient, relay: Relay, broker: BrokerProcess) -> None:
    """MQ-108: the client returns to a broker that does not know it: the commit raises its text, and nothing is stored."""
    client.publish("java-late", PARTITIONS)
    client.begin()
    put_locally(client, "java-late")
    restart(client, relay, broker)
    with pytest.raises(JavaError, match=r"Local transaction 'TX:\S+' has not been started"):
        client.step("commit")
    with Talk(broker) as again:
        assert stored(again, "java-late") == []


def test_two_phases(client: JavaClient, relay: Relay, talk: Talk) -> None:
    """MQ-071, MQ-072, MQ-074, MQ-075, MQ-076, MQ-077: start, put, end, prepare, commit; END has no answer."""
    client.publish("java-xa", PARTITIONS)
    assert client.xa("timeout", 20) is True
    client.xa("start")
    assert client.xa("is_same") is True
    sent = put_in_branch(client, "java-xa")
    check(sent)
    client.xa("end")
    assert client.xa("prepare") == XA_OK
    assert stored(talk, "java-xa") == []
    assert client.xa("recover") == [{"format_id": 4660, "gtrid": "0aff", "bqual": "01"}]
    client.xa("commit")
    assert stored(talk, "java-xa") == expected(sent, None)
    assert client.xa("recover") == []
    assert re.search(rb"transaction XID:4660:0aff:01:metaq-driver \S+ BEGIN 20 metaq-driver -\d+\r\n", relay.requests)
    assert re.search(rb"put java-xa [01] 5 0 \d+ XID:4660:0aff:01:metaq-driver -\d+\r\nfirst", relay.requests)
    for end in re.findall(rb"transaction XID:\S+ \S+ END \S+ (-\d+)\r\n", relay.requests):
        assert b" %s\r\n" % end not in relay.answers
    assert relay.connections == 1


def test_one_phase_and_rollback(client: JavaClient, talk: Talk) -> None:
    """MQ-072, MQ-076: one phase, rollback before and after the vote, a branch without work, and XA's codes for the rest."""
    client.publish("java-more", PARTITIONS)
    client.xa("start", 1)
    sent = put_in_branch(client, "java-more")
    client.xa("end", 1)
    client.xa("commit_one_phase", 1)
    committed = expected(sent, None)
    assert stored(talk, "java-more") == committed

    for number, vote in ((2, False), (3, True)):
        client.xa("start", number)
        put_in_branch(client, "java-more")
        client.xa("end", number)
        if vote:
            assert client.xa("prepare", number) == XA_OK
            assert refusal(client, "prepare", number) == ("XAException", XAER_PROTO)
        else:
            assert refusal(client, "commit", number) == ("XAException", XAER_PROTO)
            client.xa("start", number)  # a commit that fails ends the client's context, not the branch
            client.xa("end", number)
        client.xa("rollback", number)
    client.xa("start", 4)
    client.xa("end", 4)
    assert client.xa("prepare", 4) == XA_RDONLY
    for step in ("prepare", "commit", "commit_one_phase", "rollback"):
        assert refusal(client, step, 4) == ("XAException", XAER_NOTA)
    client.xa("forget", 4)
    assert stored(talk, "java-more") == committed


@pytest.mark.slow
def test_recovery_after_the_broker_was_killed(client: JavaClient, relay: Relay, broker: BrokerProcess) -> None:
    """MQ-071, MQ-076, MQ-107: what has voted is listed and committed, once; what has not is unknown."""
    client.publish("java-killed", PARTITIONS)
    client.xa("start", 1)
    sent = put_in_branch(client, "java-killed")
    client.xa("end", 1)
    assert client.xa("prepare", 1) == XA_OK
    client.xa("start", 2)
    check(put_in_branch(client, "java-killed"))
    client.xa("end", 2)
    restart(client, relay, broker)
    assert refusal(client, "prepare", 2) == ("XAException", XAER_NOTA)
    assert [found["bqual"] for found in client.xa("recover")] == ["01"]
    client.xa("commit_recovered")
    assert client.xa("recover") == []
    with Talk(broker) as again:
        assert stored(again, "java-killed") == expected(sent, None)
