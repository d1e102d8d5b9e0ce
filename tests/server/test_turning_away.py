"""Connections to a slave by those that take it for their master."""

from typing import Final

import gevent
import pytest
from gevent import socket

from metaq.replication.feeder import MOST_NAMELESS
from metaq.server.replicas.turningaway import TurningAway

DEADLINE_S: Final = 60.0


def test_silent_connections_stay_few() -> None:
    """F-LORIS: the oldest is closed for one more."""
    away = TurningAway(None)
    pairs = [socket.socketpair() for _ in range(MOST_NAMELESS + 1)]
    for ours, theirs in pairs:
        theirs.settimeout(DEADLINE_S)
        away.serve(ours, 0)
        gevent.sleep(0)  # it waits for a hello from now on
    (_, oldest), (_, second) = pairs[:2]
    assert oldest.recv(1) == b""
    second.setblocking(False)
    with pytest.raises(BlockingIOError):
        second.recv(1)
    second.settimeout(DEADLINE_S)
    away.stop()
    assert second.recv(1) == b""
    for _, theirs in pairs:
        theirs.close()
