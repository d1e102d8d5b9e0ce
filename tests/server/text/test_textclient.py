"""The Python text client against a real broker: threads, restarts, and programs that gevent patched."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq import ConnectionFailed, PutManyFailed, PutResult, TextClient
from metaq.protocol.text.commands import END_OF_LOG
from tests.support.broker import BrokerProcess

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("client") / "data", durability="disk") as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[TextClient]:
    with TextClient(broker.host, broker.port, timeout_s=DEADLINE_S) as client:
        yield client


def test_what_is_put_is_read(client: TextClient) -> None:
    """MQ-010, MQ-011, MQ-012, MQ-033: id, position, attribute and body, and where the next message begins."""
    bodies = [b"", b"hello", bytes(range(256)), b"\r\nquit\r\n", b"x" * 500_000]
    sent = [client.put("read", body, attribute=attribute) for body in bodies for attribute in (None, "", "Täg")]
    messages = list(client.iterate("read", max_bytes=1000))
    assert [(message.body, message.attribute) for message in messages] == [
        (body, attribute) for body in bodies for attribute in (None, "", "Täg")
    ]
    assert [PutResult(message.id, 0, message.position) for message in messages] == sent
    assert [message.next_position for message in messages[:-1]] == [result.position for result in sent[1:]]
    assert client.offset("read", END_OF_LOG) == messages[-1].next_position
    assert client.get("read", END_OF_LOG) == ([], messages[-1].next_position)


def test_put_many_keeps_the_order(client: TextClient) -> None:
    """MQ-037, MQ-058: of all bodies, in one partition, with results that say where each is."""
    bodies = [b"%d" % number * (number % 50) for number in range(20_000)]
    results = client.put_many("many", bodies)
    messages = list(client.iterate("many"))
    assert [message.body for message in messages] == bodies
    assert [(message.id, message.position) for message in messages] == [(result.id, result.position) for result in results]


def test_threads_put_through_one_client(client: TextClient) -> None:
    """MQ-037: every result is the one of its own message."""
    found: list[tuple[PutResult, bytes]] = []

    def work(number: int) -> None:
        found.extend((client.put("threads", body), body) for body in [b"%d-%d" % (number, at) for at in range(50)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = [(PutResult(message.id, 0, message.position), message.body) for message in client.iterate("threads")]
    assert sorted(found) == stored
    assert len(stored) == 400


def test_a_held_get_returns_when_a_message_comes(broker: BrokerProcess, client: TextClient) -> None:
    """SG-084, RD-006: long before the time it may wait."""
    first = client.put("held", b"first")
    following = client.get("held", first.position).next_position
    with TextClient(broker.host, broker.port, timeout_s=DEADLINE_S) as waiting:
        bodies: list[list[bytes]] = []
        thread = threading.Thread(
            target=lambda: bodies.append([message.body for message in waiting.get("held", following, wait_ms=30_000).messages])
        )
        thread.start()
        client.put("held", b"second")
        thread.join()
    assert bodies == [[b"second"]]


def test_a_killed_broker_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """MQ-011, MQ-037, RD-005: and the client finds the new one at the old address."""
    with BrokerProcess(tmp_path / "data") as broker, TextClient(broker.host, broker.port, timeout_s=DEADLINE_S) as client:
        killer = threading.Thread(target=broker.kill)

        def bodies() -> Iterator[bytes]:
            for number in range(1_000_000):
                if number == 20_000:
                    killer.start()
                yield b"%d" % number

        with pytest.raises(PutManyFailed) as failure:
            client.put_many("killed", bodies())
        killer.join()
        assert isinstance(failure.value.reason, ConnectionFailed)
        stored = [result for result in failure.value.results if isinstance(result, PutResult)]
        with pytest.raises(ConnectionFailed, match="cannot connect"):
            client.version()

        broker.restart(same_port=True)
        messages = list(client.iterate("killed"))
        assert len(stored) == failure.value.first_failed >= 10_000
        assert [PutResult(message.id, 0, message.position) for message in messages[: len(stored)]] == stored
        assert [message.body for message in messages] == [b"%d" % number for number in range(len(messages))]


PATCHED = """
from gevent import monkey
monkey.patch_all()
import gevent, sys
from metaq import TextClient

host, port = sys.argv[1], int(sys.argv[2])
with TextClient(host, port) as shared, TextClient(host, port) as waiting:
    held = gevent.spawn(lambda: next(waiting.iterate("patched", follow=True)).body)
    gevent.sleep(0)
    puts = [gevent.spawn(shared.put, "patched", b"%d" % number) for number in range(20)]
    gevent.joinall(puts, raise_error=True)
    assert held.get() == b"0", held.value
    assert sorted(put.value.position for put in puts) == [m.position for m in shared.iterate("patched")]
    print("done")
"""


def test_a_program_that_gevent_patched(broker: BrokerProcess) -> None:
    """MQ-057: greenlets share a client as threads do; one that waits stops no other."""
    done = subprocess.run(
        [sys.executable, "-c", PATCHED, broker.host, str(broker.port)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")
