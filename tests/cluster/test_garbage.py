"""Garbage on the replication port of a master, and from a false master to a slave."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import pytest

from metaq.client.text.textclient import TextClient
from metaq.errors import StreamLost
from metaq.replication.frames import (
    HELLO_HEAD,
    MAGIC,
    REPORT,
    Control,
    Data,
    Hello,
    ReplicationFrameReader,
    encode_control,
    encode_data,
    hello_length,
)
from tests.cluster.replication_garbage import VALUES, read_to_the_end, run
from tests.cluster.traffic import TOPIC, read_all, try_put
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, check_prefix, compare_logs, log_pieces, wait_caught_up

STANDING: Final[dict[str, Any]] = {"epoch": 2, "readable_end": 0, "begin": 0, "in_sync": [1, 2]}
MEMBERS: Final = ("epoch", "readable_end", "begin", "in_sync", "documents", "follow", "copy", "refused")


@pytest.mark.slow
def test_garbage_moves_nothing() -> None:
    """F-HA-GARBAGE, P07: neither the log nor who is in sync; the slave follows, puts wait for it, no memory is kept."""
    result = run(seed=0, count=800)
    assert result.cases >= 800
    kinds = ("noise", "rocketmq", "mutated", "odd values", "lengths", "claims", "reports", "ends", "hangs up", "stays")
    assert min(result.details[kind] for kind in kinds) > 3


def test_a_rocketmq_slave_is_turned_away(tmp_path: Path) -> None:
    """F-HA-GARBAGE, P07: it begins with the offset from which on it wants to have the log; a log line says what it may be."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master = cluster.add(1)
        assert try_put(master, b"x") == (200, "")
        host, _, port = master.replication.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(REPORT.pack(0) + REPORT.pack(master.status()["end"]))
            read_to_the_end(connection)
        wait_until(lambda: "may be a RocketMQ slave" in master.stderr(), DEADLINE_S, "the master says who that may be")
        assert master.status()["slaves"] == []


def test_what_a_slave_receives_is_a_frame_or_the_end() -> None:
    """F-HA-GARBAGE: frames with bytes changed, in pieces of any size, are refused or have the right kinds of values."""
    rng = random.Random(0)
    for _ in range(3000):
        frames = [encode_control(100, STANDING), encode_data(0, 50) + rng.randbytes(50)]
        frames.append(encode_control(5, {rng.choice(MEMBERS): rng.choice(VALUES)}))
        data = bytearray(b"".join(rng.sample(frames, 3)))
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        reader = ReplicationFrameReader()
        found: list[Data | Control] = []
        with contextlib.suppress(StreamLost):
            while data:
                size = rng.randrange(1, len(data) + 1)
                found += reader.receive(bytes(data[:size]))
                del data[:size]
        for item in found:
            if isinstance(item, Control):
                numbers = [item.content[name] for name in ("epoch", "readable_end", "begin", "follow") if name in item.content]
                assert all(type(number) is int and number >= 0 for number in numbers)
            assert (item.log_end if isinstance(item, Control) else item.log_offset) >= 0


class FakeMaster:
    """Listens where a master would; says to each slave that connects what ``answer`` makes of its hello, then closes."""

    def __init__(self, answer: Callable[[Hello], bytes]) -> None:
        self.answered = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    stream = connection.makefile("rb")
                    head = stream.read(HELLO_HEAD)
                    body = stream.read(hello_length(head)) if len(head) == HELLO_HEAD else b""
                    if not body:  # whoever began to say it was killed
                        continue
                    hello = Hello.decode(body)
                    connection.sendall(self._answer(hello))
                    connection.shutdown(socket.SHUT_WR)
                    stream.read()
                self.answered += 1


def lies(rng: random.Random, data: bytes) -> Iterator[Callable[[Hello], bytes]]:
    """Yield what a false master may send to a slave; ``data`` is what really comes next in the log."""

    def following(*frames: bytes) -> Callable[[Hello], bytes]:
        return lambda hello: encode_control(hello.end, {"follow": hello.end}) + b"".join(frames)

    def sent(part: bytes, shift: int = 0) -> Callable[[Hello], bytes]:
        return lambda hello: following(encode_data(hello.end + shift, len(part)) + part)(hello)

    yield lambda hello: rng.randbytes(300)
    yield lambda hello: MAGIC * 20
    yield lambda hello: encode_control(hello.end, {})
    yield lambda hello: encode_control(hello.end, {"follow": hello.end - 7})
    yield lambda hello: encode_control(hello.end, {"follow": hello.end + 1000})
    yield lambda hello: encode_data(hello.end, len(data)) + data
    yield sent(data, shift=-113)
    yield sent(data, shift=1)
    yield sent(data, shift=1 << 40)
    yield sent(rng.randbytes(1000))
    yield sent(bytes(1000))
    for _ in range(4):
        altered = bytearray(data)
        altered[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield sent(bytes(altered))
    yield sent(data[: len(data) // 2 + 1])  # the rest never comes
    yield following(encode_data(1 << 62, 1 << 30))
    yield following(encode_control(0, {"epoch": rng.choice(VALUES)}))
    yield following(encode_control(0, {**STANDING, "documents": {"topics.json": '{"crc32c":"00000000",}'}}))
    yield following(encode_control(0, {**STANDING, "documents": {"../escaped.json": "{}", "abort": ""}}))
    for number in (-1, 1 << 40, (1 << 63) - 1):
        yield following(encode_control(number, {**STANDING, "in_sync": [number]}))


@pytest.mark.slow
def test_a_slave_takes_nothing_but_the_log(tmp_path: Path) -> None:
    """F-HA-GARBAGE: what is no part of the log ends the connection; the slave lives, and follows its master afterwards."""
    rng = random.Random(1)
    with Cluster(tmp_path, "--min-in-sync", "1", "--segment-bytes", "1048576", "--max-body-bytes", "4096") as cluster:
        master, slave = cluster.pair()
        put_some(master, rng)
        end = wait_caught_up(master, slave)
        slave.kill()
        put_some(master, rng)
        data = b"".join(log_pieces(master.data, end, master.status()["end"]))
        told = list(lies(rng, data))
        turns = iter(told)

        def tell(hello: Hello) -> bytes:
            return next(turns, lambda _: b"")(hello)

        with FakeMaster(tell) as fake:
            slave.follow(fake.address)
            wait_until(lambda: fake.answered > len(told), 3 * DEADLINE_S, "all lies are told")
            status = slave.status()
            assert end <= status["end"] <= master.status()["end"]
            compare_logs(master.data, slave.data, 0, status["end"])
            assert slave.running
            slave.kill()
        assert "Traceback" not in slave.stderr()
        assert not (slave.data / "escaped.json").exists()
        slave.follow(master.replication)
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        assert read_all(slave) == read_all(master)


def put_some(master: ReplicaProcess, rng: random.Random) -> None:
    """A few messages."""
    with TextClient(master.host, master.port) as client:
        client.put_many(TOPIC, [rng.randbytes(rng.randrange(500)) for _ in range(20)], partition=0)
