"""A sample of the garbage run, and what a single bad client may not do to the others."""

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.text.replies import OK
from metaq.protocol.text.writing import write_get, write_put
from tests.crash.attack import hang_up, resident_kb, send_some
from tests.crash.garbage import Control, run
from tests.support.broker import BrokerProcess, wait_until

MIB: Final = 1 << 20


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", "--segment-bytes", str(64 * MIB)) as process:
        yield process


def fill(broker: BrokerProcess, count: int, size: int) -> None:
    """Put so many messages of one size to the topic `load`."""
    body = random.Random(0).randbytes(size)
    with broker.connect() as connection, connection.makefile("rb") as replies:
        for at in range(0, count, 1000):
            here = min(1000, count - at)
            connection.sendall(write_put("load", 0, 0, body, 1) * here)
            for _ in range(here):
                _, code, length, _ = replies.readline().split()
                assert int(code) == OK, replies.read(int(length))
                replies.read(int(length))


def assert_others_are_served(broker: BrokerProcess, seconds: float) -> None:
    """A control connection puts and gets for so long; it fails when an answer is wrong or does not come."""
    control = Control(broker)
    chance = random.Random(0)
    end = time.monotonic() + seconds
    with contextlib.closing(control):
        while time.monotonic() < end:
            control.check(chance)


@pytest.mark.slow
def test_garbage_harms_nobody() -> None:
    """MQ-057, MQ-058, MQ-062: no crash, others are served, each answer is well-formed, no memory is kept."""
    result = run(seed=0, count=8_000)
    assert result.cases >= 8_000
    assert min(result.details[name] for name in ("replies", "reads", "hangs up", "stays")) > 25


@pytest.mark.parametrize(("count", "size"), [(10_000, 1024), (40_000, 128)])
def test_a_client_that_never_reads_harms_nobody(broker: BrokerProcess, count: int, size: int) -> None:
    """MQ-060: gets whose answers nobody takes wait when `max_unsent_bytes` is reached, and take no more memory than that."""
    fill(broker, count, size)
    control = Control(broker)
    before = resident_kb(broker.pid)["RssAnon"]
    with broker.connect() as leech, contextlib.closing(control):
        leech.settimeout(0.1)
        send_some(leech, write_get("load", "g", 0, 0, MIB, 1) * 1000)
        assert_others_are_served(broker, seconds=2)
        grown = resident_kb(broker.pid)["RssAnon"] - before
        # small messages cost the broker several times their size while their answers wait
        assert grown < 64 * 1024
        hang_up(leech)
        wait_until(lambda: control.connections() == 1, 60, "the broker has closed the connection")


def test_half_open_and_idle_connections_harm_nobody(broker: BrokerProcess) -> None:
    """MQ-057: connections that stop in the middle of a frame, or say nothing, are waited for without a cost to others."""
    beginnings = [b"", b"p", b"put load 0 5 0 1\r", b"put load 0 5 0 1\r\nhel", b"put load 0 1000000 0 1\r\nx", b"version"]
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(broker.connect()) for _ in range(60)]
        for number, connection in enumerate(idle):
            connection.sendall(beginnings[number % len(beginnings)])
        assert_others_are_served(broker, seconds=0.5)
        control = Control(broker)
        stack.callback(control.close)
        assert control.connections() == len(idle) + 1
        idle[3].sendall(b"lo")
        assert idle[3].recv(100).startswith(b"result 200 ")
        for connection in idle:
            hang_up(connection)
        wait_until(lambda: control.connections() == 1, 60, "the broker has closed what was hung up")


def test_half_a_put_is_not_stored(broker: BrokerProcess) -> None:
    """MQ-059: a put whose client goes away before its body is complete leaves nothing."""
    control = Control(broker)
    with contextlib.closing(control):
        for tail in (b"", b"hel", b"hell"):
            connection = broker.connect()
            connection.sendall(b"put load 0 5 0 1\r\n" + tail)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
            connection.close()
        with broker.connect() as connection:
            connection.sendall(write_put("load", 0, 0, b"whole", 7))
            reply = connection.recv(100)
        assert reply.startswith(b"result 200 ")
        assert reply.endswith(b" 0 0")
