"""The parts that the tests of integrations share: a broker, names of their own, and what holds for all tests of the project."""

import re
import shutil
from collections.abc import Iterator

import pytest

from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport, pytest_runtest_setup
from tests.support.broker import BrokerProcess

__all__ = ("pytest_make_collect_report", "pytest_runtest_makereport", "pytest_runtest_setup")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests of a module, which use names of their own."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker
    shutil.rmtree(broker.data)


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    """A name that no other test of the module has, for a queue or what holds queues."""
    return re.sub(r"\W", "_", request.node.name)[:90]
