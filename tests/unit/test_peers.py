"""Connections from this process to registries and masters."""

import socket
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.replication.peers import Peers
from tests.support.tls import issue

TIMEOUT_S: Final = 0.5
TICKS: Final = 20


def test_a_peer_that_is_silent_in_tls_stops_nobody(tmp_path: Path) -> None:
    """F-LORIS: others go on while it is waited for, and not for longer than the time given."""
    peers = Peers(lambda: None, str(issue(tmp_path).authority))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes the connection, and nobody reads from it
        waiting = gevent.spawn(peers.connect, silent.getsockname(), TIMEOUT_S)
        ticks = 0
        while not waiting.ready():
            gevent.sleep(TIMEOUT_S / TICKS / 10)
            ticks += 1
        with pytest.raises(OSError, match="timed out"):
            waiting.get()
    assert ticks > TICKS
