"""A sample of the run with mutated frames, and what a single bad client of the remoting protocol may not do to the others."""

import contextlib
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import encode_request
from metaq.protocol.remoting.headers import Int32, PullMessage, encode_header
from tests.crash import strangers
from tests.crash.attack import hang_up, resident_kb, send_some
from tests.crash.frames import RemotingControl, run
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import send, send_header, sent
from tests.support.remoting import RemotingClient

MIB = 1 << 20


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.mark.slow
def test_mutated_frames_harm_nobody() -> None:
    """SG-096, SG-097: no crash, others are served and keep their messages, each request has its response, no memory is kept."""
    result = run(seed=0, count=8_000)
    assert result.cases >= 8_000
    assert min(result.details[name] for name in ("responses", "lost", "reads", "hangs up", "stays", "other protocols")) > 5


def test_strangers_and_users_harm_nobody() -> None:
    """SG-096, E-05: the same of strangers, subscribers and publishers, with bodies of all shapes; no turn takes long."""
    result = strangers.run(seed=0, count=1500)
    assert result.cases >= 1500
    assert min(result.details[name] for name in ("responses", "lost", "reads", "hangs up", "stays", "longest_turn_ms")) > 0


def test_a_client_that_never_reads_its_pulls_harms_nobody(broker: BrokerProcess) -> None:
    """SG-097: pulls whose answers nobody takes wait when `max_unsent_bytes` is reached, and take no more memory than that."""
    control = RemotingControl(broker)
    chance = random.Random(0)
    with contextlib.closing(control), RemotingClient(broker.host, broker.port) as producer:
        for opaque in [send(producer, send_header("load"), chance.randbytes(1024)) for _ in range(5000)]:
            sent(producer, opaque)
        numbers = (Int32(0), 0, Int32(1000), Int32(4), 0, 0, 0)
        fields = encode_header(PullMessage("g", "load", *numbers, "*", "TAG"))
        before = resident_kb(broker.pid)["RssAnon"]
        with broker.connect() as leech:
            leech.settimeout(0.1)
            send_some(leech, b"".join(encode_request(Request.PULL_MESSAGE, opaque, fields) for opaque in range(1000)))
            for _ in range(200):
                control.check(chance)
            assert resident_kb(broker.pid)["RssAnon"] - before < 64 * 1024
            hang_up(leech)
        control.check_all()


def test_half_a_frame_is_waited_for_and_then_forgotten(broker: BrokerProcess) -> None:
    """SG-097: connections that stop in the middle of a large frame cost what they have sent, and that is given back."""
    control = RemotingControl(broker)
    chance = random.Random(0)
    with contextlib.closing(control), contextlib.ExitStack() as stack:
        control.check(chance)
        before = resident_kb(broker.pid)["RssAnon"]
        for _ in range(20):
            connection = stack.enter_context(broker.connect())
            connection.sendall(struct.pack(">iI", 15 * MIB, 100) + bytes(MIB))
        control.check(chance)
        for _ in range(20):
            control.check(chance)
        stack.pop_all().close()
        wait_until(lambda: resident_kb(broker.pid)["RssAnon"] - before < 16 * 1024, 60, "the memory is given back")
        control.check_all()
