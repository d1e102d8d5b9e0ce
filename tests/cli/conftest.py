"""The broker that tests of the command line share: one for each file that needs no other one."""

import shutil
from collections.abc import Iterator

import pytest

from metaq.client import Client, connect
from tests.support.broker import BrokerProcess
from tests.support.cli import Cli


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("cli") / "data") as process:
        yield process
    shutil.rmtree(process.data)


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.registry) as client:
        yield client


@pytest.fixture(scope="module")
def cli(broker: BrokerProcess) -> Cli:
    return Cli(broker.registry)
