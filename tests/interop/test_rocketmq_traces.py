"""The traces of RocketMQ's own Java client, 4.9.8: it writes them into a topic, and the admin tool reads them there."""

import pytest

from tests.interop.clients import ClientProcess, Outgoing
from tests.interop.conftest import Spawn
from tests.interop.mqadmin import AdminTool
from tests.interop.test_rocketmq_admin import eventually
from tests.support.broker import BrokerProcess

pytestmark = [pytest.mark.slow, pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

TRACES = "RMQ_SYS_TRACE_TOPIC"


@pytest.fixture(scope="module")
def program(java_program: tuple[str, ...]) -> tuple[str, ...]:
    return java_program


def test_a_message_is_traced(client: ClientProcess, spawn: Spawn, program: tuple[str, ...], broker: BrokerProcess) -> None:
    """Its producer and its consumer are; the topic of traces comes into being with the first."""
    tool = AdminTool(spawn(program, broker.registry), broker.registry)
    client.start_producer("traced", "traced-producers", traced=True, hurry_ms=1000)
    sent = client.send("traced", Outgoing("traced-orders", b"paid", keys=["2003"]))
    client.start_consumer("traced", "traced-consumers", "traced-orders", traced=True, hurry_ms=1000)
    client.wait_for_bodies("traced", [b"paid"])

    def is_complete(printed: str) -> bool:
        return "traced-producers" in printed and "traced-consumers" in printed

    printed = eventually(tool, is_complete, "queryMsgTraceById", "-i", sent.id, "-t", TRACES)
    assert printed.count("success") == 2
    assert TRACES in tool.run("topicList").split()
