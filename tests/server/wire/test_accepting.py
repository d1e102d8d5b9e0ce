"""Accepting connections while there are no descriptors for them."""

import socket
from pathlib import Path
from typing import Final

import gevent
import pytest
from gevent.hub import get_hub

from metaq.config import Settings
from metaq.server.endpoint import Endpoint
from metaq.server.wire.accepting import ACCEPT_PAUSE_S
from tests.support.descriptors import no_descriptors

DEADLINE_S: Final = 60.0
LISTEN: Final = "listen"


def wait_connected(endpoint: Endpoint) -> None:
    with gevent.Timeout(DEADLINE_S):
        while not endpoint.connections:
            gevent.sleep(0.001)


@pytest.mark.parametrize("released", [False, True])
def test_accepting_goes_on_after_a_pause(tmp_path: Path, caplog: pytest.LogCaptureFixture, released: bool) -> None:
    """RD-024: by the endpoint that has the address then; the one before it, which has released it, takes none."""
    settings = Settings(data=tmp_path)
    first = Endpoint(settings, get_hub().loop, None)
    address = first.bind(LISTEN, "127.0.0.1:0")
    second = Endpoint(settings, get_hub().loop, None, first.listeners)
    second.bind(LISTEN, "")
    first.start()
    with socket.socket() as client:
        try:
            with no_descriptors(), gevent.Timeout(DEADLINE_S):
                client.connect(address)
                while "cannot accept" not in caplog.text:
                    gevent.sleep(0)
            pause = gevent.spawn_later(2 * ACCEPT_PAUSE_S, lambda: None)
            if released:
                first.release()
                pause.join()
                assert first.connections == 0
                second.start()
                wait_connected(second)
            else:
                wait_connected(first)
        finally:
            for endpoint in (first, second):
                endpoint.close()
                for session in list(endpoint.sessions):
                    session.close()
