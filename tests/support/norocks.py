"""A broker on a machine without the package rocksdict: run as a program with the flags of ``metaq serve``."""

import sys

from metaq.config import Settings
from metaq.server.broker import Broker
from metaq.store.recovery.progress import Tell
from tests.support.program import serve


def make(settings: Settings, tell: Tell) -> Broker:
    sys.modules["rocksdict"] = None  # type: ignore[assignment] # as Python marks a module that cannot be imported
    return Broker.alone(settings, tell=tell)


if __name__ == "__main__":
    serve(make)
