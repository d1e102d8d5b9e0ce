"""A reload that meets an unexpected error."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Final

import gevent
import pytest

from metaq import logs
from metaq.config import Settings, load
from metaq.errors import ConfigError
from metaq.server.reload import Reload

DEADLINE_S: Final = 60.0


class Server:
    """Has settings."""

    def __init__(self) -> None:
        self.settings = load(None, {}, {})

    def configure(self, settings: Settings) -> None:
        self.settings = settings


class Source:
    """Where settings are read: each time the next of what is to happen."""

    def __init__(self) -> None:
        self.outcomes: list[Exception | Settings] = []

    def read(self) -> Settings:
        found = self.outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture(autouse=True)
def reload(server: Server, source: Source, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reload]:
    monkeypatch.setattr(logs, "configure", lambda *_: None)  # of this process it is pytest's
    reload = Reload(source.read, lambda: None)
    reload.start(server)
    yield reload
    reload.stop()


def reloaded(source: Source, outcome: Exception | Settings) -> None:
    """Have it read once."""
    source.outcomes.append(outcome)
    os.kill(os.getpid(), signal.SIGHUP)
    deadline = time.monotonic() + DEADLINE_S
    while source.outcomes:
        assert time.monotonic() < deadline
        gevent.sleep(0.001)


def test_an_error_that_nobody_expects_ends_no_reloading(
    server: Server, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    """E-29: it is logged with its trace; one that is expected is logged without."""
    for error, told, traced in (
        (RuntimeError("of all things"), "RuntimeError('of all things')", True),
        (ConfigError("a line is wrong"), "a line is wrong", False),
    ):
        caplog.clear()
        reloaded(source, error)
        [record] = caplog.records
        assert record.getMessage() == f"settings not reloaded, those before stay in force reason={told}"
        assert (record.levelname, bool(record.exc_info)) == ("ERROR", traced)
    reloaded(source, server.settings.merged({"max_topics": 7}))
    assert server.settings.max_topics == 7


def test_a_failed_assertion_is_not_caught(reload: Reload, source: Source, caplog: pytest.LogCaptureFixture) -> None:
    """E-29: gevent ends the process by it (``metaq.server.daemon``)."""
    reloaded(source, AssertionError("the state is wrong"))
    with pytest.raises(AssertionError, match="the state is wrong"):
        reload._greenlet.get(timeout=DEADLINE_S)
    assert not caplog.records
