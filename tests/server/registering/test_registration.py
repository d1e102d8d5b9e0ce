"""The registration of a broker with an external registry, which the test plays."""

from pathlib import Path
from typing import Final

import gevent

from metaq.address import Address
from metaq.clock import SystemClock
from metaq.config import Settings
from metaq.engine.role import Role
from metaq.engine.tables.topics import TopicTable
from metaq.errors import Fenced
from metaq.protocol.remoting.codes import Request
from metaq.replication.peers import STRANGER
from metaq.server.registering.registration import Registration
from metaq.store.fence import Fence
from tests.support.fakeremoting import FakeRemoting, Reply

DEADLINE_S: Final = 60.0


def wait_for(registry: FakeRemoting, code: Request, more: int = 2) -> None:
    """Wait until so many more requests of the code have come."""
    seen = registry.count(code)
    with gevent.Timeout(DEADLINE_S):
        while registry.count(code) < seen + more:
            gevent.sleep(0.01)


def refuse() -> None:
    raise Fenced("another replica may be master by now")


def test_a_fenced_master_does_not_take_its_place_back(tmp_path: Path) -> None:
    """F-PART: cut off from ZooKeeper only; the next master has registered, and readers may still need this one."""
    fence = Fence()
    with FakeRemoting(register_broker=lambda _: Reply(fields={}), broker_heartbeat=lambda _: Reply()) as registry:
        registration = Registration(
            Settings(data=tmp_path, registries=registry.address, registration_interval_ms=100),
            Role(is_master=True),
            Address("127.0.0.1", 1),
            TopicTable(tmp_path, 10),
            "an identity",
            SystemClock(),
            None,
            STRANGER,
            fence.check,
        )
        registration.start()
        try:
            wait_for(registry, Request.REGISTER_BROKER)
            fence.guard(refuse)
            wait_for(registry, Request.BROKER_HEARTBEAT, 1)
            registered = registry.count(Request.REGISTER_BROKER)
            wait_for(registry, Request.BROKER_HEARTBEAT)
            assert registry.count(Request.REGISTER_BROKER) == registered
            fence.guard(lambda: None)
            wait_for(registry, Request.REGISTER_BROKER)
            assert registration.problem is None
        finally:
            registration.stop()
