"""The browser that tests of the console share, and the ways to a file's broker: by pages, and by REST."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.broker import BrokerProcess
from tests.support.chromium import chromium
from tests.support.console import Visits
from tests.support.rest import Rest


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    assert executable is not None
    with chromium(executable) as browser:
        yield browser


@pytest.fixture
def visits(broker: BrokerProcess) -> Iterator[Visits]:
    with Visits(broker.http) as visits:
        yield visits


@pytest.fixture
def rest(broker: BrokerProcess) -> Iterator[Rest]:
    with Rest(broker.http) as rest:
        yield rest
