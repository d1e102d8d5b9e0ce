"""The ways to a file's broker: by the API, by the Python client, and by the command line."""

from collections.abc import Iterator

import pytest

from metaq.client import Client, connect
from metaq.client.admin.admin import Admin
from tests.support.broker import BrokerProcess
from tests.support.cli import Cli
from tests.support.rest import Rest


@pytest.fixture(scope="module")
def rest(broker: BrokerProcess) -> Iterator[Rest]:
    with Rest(broker.http) as rest:
        yield rest


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.registry) as client:
        yield client


@pytest.fixture(scope="module")
def admin(client: Client) -> Admin:
    return client.admin()


@pytest.fixture(scope="module")
def cli(broker: BrokerProcess) -> Cli:
    return Cli(broker.registry)
