"""The unmodified RocketMQ Java client, 4.9.8, against a real broker."""

from pathlib import Path

import pytest
import trustme

from tests.interop.clients import ClientProcess, Outgoing
from tests.interop.conftest import Spawn
from tests.interop.scenarios import Scenarios, bodies, create_topic, numbered
from tests.support.broker import BrokerProcess

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

UNKNOWN_CODE = 29_999
NOT_SUPPORTED = 3


@pytest.fixture(scope="module")
def program(java_program: tuple[str, ...]) -> tuple[str, ...]:
    return java_program


@pytest.fixture(scope="module")
def admin(client: ClientProcess) -> ClientProcess:
    return client


class TestJava(Scenarios):
    """All of them."""

    def test_unknown_code(self, client: ClientProcess, broker: BrokerProcess) -> None:
        """RD-019, RD-025: a request code that nobody knows is answered with 3 and a remark, by broker and registry."""
        for address in (f"{broker.host}:{broker.port}", broker.registry):
            answer = client.call("invoke", address=address, code=UNKNOWN_CODE)
            assert answer["code"] == NOT_SUPPORTED
            assert str(UNKNOWN_CODE) in answer["remark"]

    def test_compact_headers(self, spawn: Spawn, program: tuple[str, ...], broker: BrokerProcess) -> None:
        """RD-021: a client that was told to write ROCKETMQ headers sends, consumes, fails and pulls."""
        java, *rest = program
        client = spawn((java, "-Drocketmq.serialize.type=ROCKETMQ", *rest), broker.registry)
        topic = create_topic(client, broker, "compact")
        create_topic(client, broker, "%RETRY%compact-consumers", queues=1)
        client.start_producer("compact", "compact-producers")
        client.start_consumer("compact", "compact-consumers", topic, failing=True, max_reconsume_times=1)
        messages = [Outgoing(topic, "数据".encode(), "标签", properties={"颜色": "红"}), *numbered(topic, 3)]
        for message in messages:
            client.send("compact", message)
        client.wait(lambda: len(client.messages("compact")) >= 2 * len(messages), "each message twice")
        assert sorted(client.bodies("compact")) == sorted([*bodies(messages), *bodies(messages)])
        first = next(got for got in client.messages("compact") if got.body == messages[0].body)
        assert (first.tag, first.properties["颜色"]) == ("标签", "红")
        assert bodies(client.pull("compact-pullers", topic)) == bodies(messages)
        client.kill()

    @pytest.mark.slow
    def test_encrypted_connections(self, spawn: Spawn, program: tuple[str, ...], tmp_path: Path) -> None:
        """RD-024: a client that is told to speak TLS reaches registry and broker on their usual ports."""
        certificate = trustme.CA().issue_cert("127.0.0.1")
        chain = tmp_path / "chain.pem"
        certificate.private_key_and_cert_chain_pem.write_to_path(str(chain))
        java, *rest = program
        with BrokerProcess(tmp_path / "data", "--tls-certificate", str(chain)) as broker:
            client = spawn((java, "-Dtls.enable=true", *rest), broker.registry)
            topic = create_topic(client, broker, "encrypted")
            client.start_producer("encrypted", "encrypted-producers")
            client.start_consumer("encrypted", "encrypted-consumers", topic)
            messages = [*numbered(topic, 3), Outgoing(topic, b"large " * 100_000)]
            for message in messages:
                client.send("encrypted", message)
            client.wait_for_bodies("encrypted", bodies(messages))
            client.kill()
