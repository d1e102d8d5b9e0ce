"""The unmodified RocketMQ Java client, 4.9.8, against a real broker."""

import pytest

from tests.interop.clients import ClientProcess
from tests.interop.scenarios import Scenarios
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
