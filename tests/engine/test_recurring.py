"""Recurring messages at a real broker: defined, replaced, ended, listed, over kills, restarts and retention."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import metaq
from metaq.client.admin.timers import TimerAdmin
from metaq.errors import Refused
from metaq.store.recovery.verify import verify
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import pairs_of, records
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
TOPIC: Final = "later"


@contextmanager
def administered(broker: BrokerProcess) -> Iterator[tuple[TimerAdmin, RemotingClient, str]]:
    address = f"{broker.host}:{broker.port}"
    with metaq.connect(address) as client, RemotingClient(broker.host, broker.port) as remoting:
        client.admin().create_topic(TOPIC, 2, broker=address) if False else None
        yield client.admin().timers(), remoting, address
