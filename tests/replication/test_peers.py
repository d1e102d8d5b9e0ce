"""Connections from this process to registries and masters."""

import socket
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.replication.peers import Peers
from tests.support.tls import issue

LONG_S: Final = 3600.0
SHORT_S: Final = 0.1
TICKS: Final = 20


def test_a_peer_that_is_silent_in_tls_stops_nobody(tmp_path: Path) -> None:
    """F-LORIS: others go on while it is waited for, and not for longer than the time given."""
    peers = Peers(lambda: None, str(issue(tmp_path).authority))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes the connection, and nobody reads from it
        waiting = gevent.spawn(peers.connect, silent.getsockname(), LONG_S)
        for _ in range(TICKS):
            gevent.sleep(0.001)
            assert not waiting.ready()
        waiting.kill()
        with pytest.raises(OSError, match="timed out"):
            peers.connect(silent.getsockname(), SHORT_S)
