"""A process that is slow to start: ``python -m tests.support.slowstart works|sleeps|tells GO``, until there is a file GO."""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import gevent

from metaq.config import Settings, load
from metaq.engine.figures.metrics import Family
from metaq.engine.pool import run_in_pool
from metaq.server.access.authentication import Authentication
from metaq.server.daemon import run
from metaq.store.files.filecache import Rest
from metaq.store.recovery.progress import RecoveryStep, Tell

SLEEPS_S: Final = 5.0
LONG_S: Final = 600.0


class Slow:
    """A server that serves nothing."""

    ready = "slow ready"
    authentication = Authentication("", 1, time.monotonic)

    def __init__(self, settings: Settings, tell: Tell) -> None:
        self.settings = settings
        how, go = sys.argv[1:]
        if how == "sleeps":
            time.sleep(SLEEPS_S)
        if how == "tells":
            run_in_pool(lambda: tell_until(Path(go), tell))
        while not Path(go).exists():
            pass

    @property
    def metrics(self) -> "Slow":
        """Itself."""
        return self

    @property
    def site(self) -> None:
        """Nothing but metrics and health."""

    def reasons(self) -> list[str]:
        return []

    def facts(self) -> Mapping[str, object]:
        return {}

    def families(self, rest: Rest) -> Iterator[Family]:
        return iter(())

    def stalled(self, seconds: float) -> None:
        """Nobody asks."""

    def configure(self, settings: Settings) -> None:
        """Nothing can change."""

    def start(self) -> None:
        """Something that the loop waits for."""
        gevent.spawn(gevent.sleep, LONG_S)

    def stop(self) -> None:
        """Nothing to undo."""


def tell_until(go: Path, tell: Tell) -> None:
    """Report progress until the file ``go`` exists, as the opening of a store does, in a thread."""
    while not go.exists():
        tell(RecoveryStep("waiting", 0, 1, "bytes"))


if __name__ == "__main__":
    sys.exit(run(load(None, {}, {"http_listen": "none"}), Slow))
