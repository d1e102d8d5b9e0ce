"""One ZooKeeper for all tests that do not stop or change the server."""

from collections.abc import Iterator

import pytest

from tests.support.zookeeper import ZooKeeperProcess


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperProcess]:
    with ZooKeeperProcess(tmp_path_factory.mktemp("zookeeper") / "data") as process:
        yield process
