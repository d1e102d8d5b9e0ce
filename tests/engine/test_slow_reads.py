"""Readers whose disk reads are slow do not hold up puts."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from metaq.client import TextClient
from tests.support.broker import wait_until
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk

DEADLINE_S: Final = 60.0
POOL_THREADS: Final = 10
"""Of gevent's pool, at most."""
READERS: Final = 25


def test_a_put_is_acknowledged_while_all_reads_of_the_disk_wait(tmp_path: Path) -> None:
    """RD-011: its sync waits for no reader who is far behind."""
    with Controlled(tmp_path / "data", "--hot-bytes", "0") as broker, ExitStack() as stack:
        with TextClient(broker.host, broker.port) as client:
            client.put("t", b"hello")
        (tmp_path / "cold").touch()
        (tmp_path / "slow").touch()
        readers = [stack.enter_context(Talk(broker)) for _ in range(READERS)]
        for reader in readers:
            reader.send(b"get t me 0 0 1024 1\r\n")
        wait_until(lambda: len(list(tmp_path.glob("reading*"))) == POOL_THREADS, DEADLINE_S, "all of the pool reads")
        with Talk(broker) as talk:
            for number in range(5):
                talk.placed("t", b"later %d" % number)
        (tmp_path / "slow").unlink()
        for reader in readers:
            assert b"hello" in reader.replies(1)[0].body
