"""A broker whose process may open few files: run as a program with the flags of ``metaq serve``."""

import resource
from typing import Final

from metaq.config import Settings
from metaq.server.broker import Broker
from metaq.store.recovery.progress import Tell
from tests.support.program import serve

SOFT: Final = 64
HARD: Final = 160


def make(settings: Settings, tell: Tell) -> Broker:
    return Broker.alone(settings, tell=tell)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
    serve(make)
