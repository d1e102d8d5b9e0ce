"""A broker or a registry as a process: ready line, signals, exit codes."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

import gevent
from gevent.event import Event
from gevent.hub import Hub

from metaq import logs
from metaq.config import Settings
from metaq.errors import MetaqError

logger = logging.getLogger(__name__)

GC_ALLOCATIONS = 10_000
"""A turn keeps some thousands of small objects until it ends; they are no reason to look for cycles."""
GC_YOUNG = 3
"""Collections of the youngest objects before those that they left are looked at: after 20 that was a stop of 70 ms."""
GC_MIDDLE = 500
"""Of those, before all objects are looked at."""

STARTED_NOT = 1
"""Exit code: it did not start; the reason is on standard error."""


class Server(Protocol):
    """What a process serves."""

    @property
    def ready(self) -> str:
        """The line that says where it serves, known from the start."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run(settings: Settings, make: Callable[[Settings], Server]) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the process's exit code.

    Once it serves it prints one line to standard output: ``metaq ready listen=HOST:PORT … data=DIR pid=N``.
    """
    logs.configure(settings.log_level)
    Hub.SYSTEM_ERROR = (*Hub.SYSTEM_ERROR, AssertionError)  # a failed assertion ends the process
    stopping = Event()
    watchers = [gevent.signal_handler(number, stopping.set) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        server = make(settings)
        server.start()
    except MetaqError as error:
        print(f"metaq: {error}", file=sys.stderr)
        return STARTED_NOT
    # What lives now lives until the end: a full collection would look at 100,000 objects and stop the loop for 10 ms.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, GC_YOUNG, GC_MIDDLE)
    print(f"{server.ready} pid={os.getpid()}", flush=True)
    stopping.wait()
    logger.info("stopping")
    server.stop()
    for watcher in watchers:
        watcher.cancel()
    logger.info("stopped")
    return 0
