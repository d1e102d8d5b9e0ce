"""Consumers whose making fails."""

import threading
from collections.abc import Collection
from functools import partial

import pytest

from metaq.client import ConsumeFrom, ReceivedMessage, connect
from metaq.client.connecting.core import Core
from metaq.errors import ClientError, ConfigError
from metaq.message import MessageQueue
from metaq.testing import InMemoryBroker

DEADLINE_S = 60.0


@pytest.mark.parametrize("kind", ["consumer", "listen", "lease_consumer"])
def test_a_consumer_whose_making_is_interrupted_leaves_the_group(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SG-120: as by Ctrl-C while it waits for its heartbeat; nobody else could make it leave."""
    usual = Core.heartbeat

    def interrupted(core: Core, *, wait_s: float = 0.0) -> None:
        usual(core)
        if wait_s:
            raise KeyboardInterrupt

    with connect(memory.address, timeout_s=DEADLINE_S) as client:
        make = partial(client.listen, listener=print) if kind == "listen" else getattr(client, kind)
        with monkeypatch.context() as patched:
            patched.setattr(Core, "heartbeat", interrupted)
            with pytest.raises(KeyboardInterrupt):
                make("orders", "billing")
        assert client._core._consumers == {}
        make("orders", "billing").close()


def test_a_consumer_that_cannot_share_queues_leaves_the_group(memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-120: the client can make another one of the group, which can."""

    def fail(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
        raise ConfigError(f"{client} is in no room")

    memory.create_topic("orders", 1)
    # else another thread may share the queues first, because the broker says that the group has a new member
    monkeypatch.setattr(Core, "_asked", lambda *given: None)
    with connect(memory.address, timeout_s=DEADLINE_S) as client:
        with pytest.raises(ConfigError, match="is in no room"):
            client.consumer("orders", "billing", assign=fail)
        assert client._core._consumers == {}
        client.producer().send("orders", b"x")
        with client.consumer("orders", "billing", consume_from=ConsumeFrom.FIRST) as consumer:
            assert consumer.receive(DEADLINE_S) is not None


def test_a_listener_without_its_threads_is_not_made(memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-089: the error says so, and the threads that were started end."""
    usual, started = threading.Thread.start, list[threading.Thread]()

    def start(self: threading.Thread) -> None:
        if self.name == "metaq-billing-4":
            raise RuntimeError("can't start new thread")
        if self.name.startswith("metaq-billing-"):
            started.append(self)
        usual(self)

    def listener(message: ReceivedMessage) -> None:
        """Accept."""

    monkeypatch.setattr(threading.Thread, "start", start)
    with connect(memory.address) as client:
        with pytest.raises(
            ClientError, match="no thread 5 of 8 for the listener of group billing: can't start new thread; end"
        ):
            client.listen("orders", "billing", listener)
        assert len(started) == 4
        assert not any(thread.is_alive() for thread in started)
        client.listen("orders", "billing", listener, threads=4).close()
