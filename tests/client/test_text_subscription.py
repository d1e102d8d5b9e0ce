"""Subscriptions of ``TextClient`` against a real broker."""

import errno
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq import TextClient
from metaq.errors import ConnectionFailed, DecodeError, LeaseLost, Refused
from metaq.protocol.sysflag import COMPRESSED
from tests.support.broker import BrokerProcess
from tests.support.messages import send, send_header, sent
from tests.support.remoting import RemotingClient

WAIT_S: Final = 30.0
LONG: Final = b"x" * 10_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("pushes") / "data") as broker:
        yield broker


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[TextClient]:
    with TextClient(broker.host, broker.port) as client:
        yield client


def test_messages_are_pushed_and_finished(client: TextClient) -> None:
    """MY-008, MY-031: one at a time, and what is given back comes again."""
    client.create("orders", 1)
    with client.subscribe("orders", "billing") as subscription:
        client.put_many("orders", [b"a", b"b"], partition=0)
        first = subscription.receive(WAIT_S)
        assert first is not None
        assert (first.body, first.attempt, first.partition) == (b"a", 1, 0)
        first.nack()
        again = subscription.receive(WAIT_S)
        assert again is not None
        assert (again.body, again.attempt) == (b"a", 2)
        with pytest.raises(LeaseLost, match="means nothing"):
            first.ack()
        again.extend(60.0)
        again.ack()
        second = subscription.receive(WAIT_S)
        assert second is not None
        assert second.body == b"b"
        second.reject()
        assert subscription.receive(0.05) is None
    assert client.get("%DLQ%billing", 0).messages[0].body == b"b"


def test_compressed_bodies_are_inflated(client: TextClient, broker: BrokerProcess) -> None:
    """SG-098: pushed or popped as from a get; what cannot be inflated comes as it is stored, with the reason."""
    client.create("zipped", 1)
    with RemotingClient(broker.host, broker.port) as producer:
        for body in (zlib.compress(LONG), b"not zlib"):
            sent(producer, send(producer, send_header("zipped", "TAGS\x01zip\x02", sys_flag=COMPRESSED), body))
    with client.subscribe("zipped", "pushed", ready=2) as subscription:
        pushed = [message for message in (subscription.receive(WAIT_S), subscription.receive(WAIT_S)) if message is not None]
    for messages in (pushed, client.pop("zipped", "popped", 2)):
        assert [(message.body, message.attribute) for message in messages] == [(LONG, "zip"), (b"not zlib", "zip")]
        whole, broken = messages
        assert whole.error is None
        assert isinstance(broken.error, DecodeError)


def test_an_iteration_ends_when_another_thread_closes(client: TextClient) -> None:
    client.create("mail", 1)
    subscription = client.subscribe("mail", "senders", ready=5)
    bodies: list[bytes] = []
    got = threading.Event()

    def work() -> None:
        for message in subscription:
            bodies.append(message.body)
            message.ack()
            got.set()

    thread = threading.Thread(target=work)
    thread.start()
    client.put("mail", b"one", attribute="urgent")
    assert got.wait(WAIT_S)
    subscription.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert bodies == [b"one"]


def test_attributes_and_shares(client: TextClient) -> None:
    """MY-027: a partition that is taken over ends the former subscription."""
    client.create("tagged", 1)
    with client.subscribe("tagged", "g", attribute="red") as subscription:
        client.put("tagged", b"blue", attribute="blue")
        client.put("tagged", b"red", attribute="red")
        message = subscription.receive(WAIT_S)
        assert message is not None
        assert (message.body, message.attribute) == (b"red", "red")
    former = client.subscribe("tagged", "own", partition=0, owns=True, from_first=False)
    with client.subscribe("tagged", "own", partition=0, owns=True), pytest.raises(Refused, match="taken over"):
        while former.receive(WAIT_S) is not None:
            pass
    former.close()


def test_a_partition_that_is_added_belongs_to_a_member(client: TextClient) -> None:
    client.create("growing", 1)
    with client.subscribe("growing", "own", owns=True) as subscription:
        client.create("growing", 2)
        client.put("growing", b"first", partition=1)
        message = subscription.receive(WAIT_S)
        assert message is not None
        assert (message.body, message.partition) == (b"first", 1)


def test_refusals(client: TextClient, broker: BrokerProcess) -> None:
    with pytest.raises(Refused, match="does not exist"):
        client.subscribe("nowhere", "g")
    with pytest.raises(Refused, match="ready 20000 is not within 0 … 10000"):
        client.subscribe("mail", "g", ready=20_000)


def test_a_lost_connection_is_an_error(tmp_path: Path) -> None:
    """What was out goes to others; this side hears of the loss."""
    with BrokerProcess(tmp_path / "data") as broker, TextClient(broker.host, broker.port) as client:
        client.create("t", 1)
        subscription = client.subscribe("t", "g")
        broker.kill()
        with pytest.raises(ConnectionFailed):
            subscription.receive(WAIT_S)


class Vanished:
    """The receiving side of a connection whose other host the system has given up."""

    def settimeout(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def recv(self, size: int) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    def shutdown(self, how: int) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def close(self) -> None:
        pass


def test_a_host_that_vanishes_is_an_error(client: TextClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-092: what the system gives up is not taken for a wait in which nothing came."""
    client.create("lonely", 1)
    with client.subscribe("lonely", "g") as subscription:
        received = subscription._connection._incoming
        monkeypatch.setattr(subscription._connection, "_incoming", Vanished())
        with pytest.raises(ConnectionFailed, match="Connection timed out"):
            subscription.receive(WAIT_S)
        received.close()
