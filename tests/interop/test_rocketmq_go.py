"""The unmodified RocketMQ Go client, v2.1.2, against a real broker.

It cannot query messages, reset the offsets of a group or send a request with a code of one's choice. The Java client
does the first two, on what Go sent and for a group of Go consumers; the third is left to the Java client's own tests.
"""

import pytest

from tests.interop.clients import ClientProcess
from tests.interop.conftest import Spawn
from tests.interop.scenarios import Scenarios
from tests.support.broker import BrokerProcess

pytestmark = [pytest.mark.partner("go", "java", "mvn"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def program(go_program: tuple[str, ...]) -> tuple[str, ...]:
    return go_program


@pytest.fixture(scope="module")
def admin(spawn: Spawn, java_program: tuple[str, ...], broker: BrokerProcess) -> ClientProcess:
    return spawn(java_program, broker.registry)


class TestGo(Scenarios):
    """All of them."""
