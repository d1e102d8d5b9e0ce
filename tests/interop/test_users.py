"""The unmodified RocketMQ clients as users of a broker, over TLS: with the ACL hooks that they come with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.protocol.remoting.codes import Request, Response
from tests.interop.clients import ClientError, ClientProcess, Outgoing, go_command
from tests.interop.conftest import Spawn
from tests.support.broker import BrokerProcess
from tests.support.tls import issue
from tests.support.users import ADMIN, GROUP, READER, TOPIC, WRITER, SigningClient, write_users

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder: Path = tmp_path_factory.mktemp("users")
    users = write_users(folder / "users.yaml")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", "1000", *issue(folder).flags)
    with BrokerProcess(folder / "data", *flags) as process:
        fields = {"readQueueNums": "1", "writeQueueNums": "1", "perm": "6", "defaultTopic": "TBW102"}
        fields |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}
        with SigningClient(process.host, process.port, ADMIN) as client:
            for topic in (TOPIC, f"%RETRY%{GROUP}", "closed"):
                answer = client.call(Request.UPDATE_AND_CREATE_TOPIC, {**fields, "topic": topic})
                assert answer.code == Response.SUCCESS
        yield process


def refused(client: ClientProcess, producer: str, topic: str = TOPIC) -> ClientError:
    with pytest.raises(ClientError) as caught:
        client.send(producer, Outgoing(topic, b"no"))
    return caught.value


def use(client: ClientProcess, broker: BrokerProcess, language: str) -> None:
    """Right credentials work; a wrong secret, a missing permission and no user at all are refused, and leave nothing."""
    before = stored(broker)
    client.start_producer("writer", f"{language}-writers", user=WRITER.name, secret=WRITER.secret)
    messages = [Outgoing(TOPIC, f"{language} {number}".encode(), keys=["k"]) for number in range(5)]
    for message in messages:
        client.send("writer", message)
    client.start_consumer("reader", GROUP, TOPIC, user=READER.name, secret=READER.secret)
    client.wait_for_bodies("reader", [message.body for message in messages])
    denied = refused(client, "writer", "closed")
    assert "writer may not publish to closed" in str(denied)
    assert denied.code in {Response.NO_PERMISSION, None}  # Go tells none
    client.start_producer("wrong", f"{language}-wrong", user=WRITER.name, secret="another-secret")
    refused(client, "wrong")
    client.start_producer("nobody", f"{language}-nobody")
    refused(client, "nobody")
    assert stored(broker) == before + len(messages)
    client.kill()  # the next one's consumer is of the same group


def stored(broker: BrokerProcess) -> int:
    with SigningClient(broker.host, broker.port, ADMIN) as asker:
        return int(asker.call(Request.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": "0"}).fields["offset"])


@pytest.fixture(scope="module")
def broker_without_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("plain") / "data") as process:
        yield process


def use_tls(client: ClientProcess, broker: BrokerProcess) -> None:
    """A client that speaks TLS comes to nothing where there is none."""
    refusals = broker.stderr().count("TLS refused")
    with pytest.raises(ClientError):
        client.start_producer("sealed", "sealed")
        client.send("sealed", Outgoing(TOPIC, b"no"))
    assert broker.stderr().count("TLS refused") > refusals
    client.kill()


@pytest.mark.slow
@pytest.mark.partner("java", "mvn")
def test_java(spawn: Spawn, java_program: tuple[str, ...], broker: BrokerProcess, broker_without_tls: BrokerProcess) -> None:
    """E-05, E-06, P33: with AclClientRPCHook, and over TLS."""
    java, *rest = java_program
    program = (java, "-Dtls.enable=true", *rest)
    use(spawn(program, broker.registry), broker, "java")
    use_tls(spawn(program, broker_without_tls.registry), broker_without_tls)


@pytest.mark.partner("go")
def test_go(spawn: Spawn, go_program: tuple[str, ...], broker: BrokerProcess) -> None:
    """E-05, P33: with WithCredentials; the release speaks no TLS."""
    use(spawn(go_program, broker.registry), broker, "go")


@pytest.mark.partner("go")
def test_go_over_tls(spawn: Spawn, broker: BrokerProcess, broker_without_tls: BrokerProcess) -> None:
    """E-05, E-06, P33: with WithCredentials and WithTls, which came after the release."""
    program = go_command("driver-tls", ("-tags", "tls", "-modfile=tls.mod"))
    use(spawn(program, broker.registry), broker, "tls")
    use_tls(spawn(program, broker_without_tls.registry), broker_without_tls)
