"""The broker that tests of the server share: one for each file. What needs another one, or one for each test, makes it."""

from collections.abc import Iterator

import pytest

from tests.support.broker import BrokerProcess


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    """The flags of the file's broker, for a file that needs some."""
    return ()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, flags: tuple[str, ...]) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", *flags) as process:
        yield process
