"""The brokers that clients are tested with: one in memory, and real processes. A test that fits both runs with both."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import metaq.testing
from metaq.client import Client, connect
from metaq.testing import InMemoryBroker
from tests.support.broker import BrokerProcess

TIMEOUT_S = 60.0


@pytest.fixture
def memory() -> Iterator[InMemoryBroker]:
    with metaq.testing.broker() as broker:
        yield broker


@pytest.fixture
def process(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data") as broker:
        yield broker
    shutil.rmtree(broker.data)  # pytest keeps the folders of failed runs


@pytest.fixture(params=["memory", "process"])
def address(request: pytest.FixtureRequest) -> str:
    """Where the broker is, to be given to ``connect``."""
    if request.param == "memory":
        memory: InMemoryBroker = request.getfixturevalue("memory")
        return memory.address
    process: BrokerProcess = request.getfixturevalue("process")
    return process.registry


Connect = Callable[[], Client]


@pytest.fixture
def new_client(address: str) -> Iterator[Connect]:
    """Makes clients, which are closed in the end."""
    clients: list[Client] = []

    def make() -> Client:
        clients.append(connect(address, timeout_s=TIMEOUT_S))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(new_client: Connect) -> Client:
    return new_client()
