"""A broker or a registry as a process: ready line, signals, exit codes."""

import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import gevent
from gevent.event import Event
from gevent.hub import Hub, get_hub

from metaq import logs
from metaq.config import Settings
from metaq.errors import MetaqError
from metaq.server.access.authentication import Authentication
from metaq.server.http.http import Monitor, Monitored, Site
from metaq.server.notify import Notifier
from metaq.server.reload import Configurable, Reload
from metaq.store.recovery.progress import RecoveryStep, Tell

logger = logging.getLogger(__name__)

GC_ALLOCATIONS = 10_000
"""A turn keeps some thousands of small objects until it ends; they are no reason to look for cycles."""
GC_YOUNG = 3
"""Collections of the youngest generation before the middle one is collected. With 20, that collection stopped the loop for 70
ms."""
GC_MIDDLE = 500
"""Collections of the middle generation before all objects are looked at."""

STARTED_NOT = 1
"""Exit code of a process that could not start; the reason is on standard error."""


class _ToldToStop(Exception):
    """Raised while the store is opened, after SIGTERM or SIGINT has arrived."""


class Server(Configurable, Protocol):
    """The broker or registry that a process runs."""

    @property
    def metrics(self) -> Monitored:
        """The source of metrics and readiness, as it is now."""
        ...

    @property
    def authentication(self) -> Authentication:
        """The users and their authentication."""
        ...

    @property
    def site(self) -> Site | None:
        """The answers to HTTP requests beside metrics and health, as they are now; ``None`` when there are none."""
        ...

    @property
    def ready(self) -> str:
        """The line that names the addresses served, known from the start."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run(
    settings: Settings,
    make: Callable[[Settings, Tell], Server],
    read: Callable[[], Settings] | None = None,
    listen: str | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; return the process's exit code. At SIGHUP ``read`` reads the settings again.

    A signal that arrives during recovery of the store ends it; the next start begins the recovery anew.

    Once the server is up, one line goes to standard output: ``metaq ready listen=HOST:PORT … data=DIR pid=N http=HOST:PORT
    console=http://HOST:PORT/``. The last two are missing when there is no HTTP port; a registry has no console. When
    ``http_listen`` is not set, the HTTP port is the one after that of ``listen``.
    """
    logs.configure(settings.log_level, settings.log_format)
    logs.keep_recent()
    _allow_open_files()
    Hub.SYSTEM_ERROR = (*Hub.SYSTEM_ERROR, AssertionError)  # a failed assertion ends the process
    stopping = Event()
    watchers = [gevent.signal_handler(number, stopping.set) for number in (signal.SIGTERM, signal.SIGINT)]
    reload = Reload(read or (lambda: settings), stopping.set)
    try:
        notifier = Notifier(os.environ)
        monitor = Monitor(settings, settings.listen if listen is None else listen)
        with notifier.extending(f"opening {settings.data}"):
            server = make(settings, _tell(monitor, notifier, stopping))
            server.start()
    except MetaqError as error:
        print(f"metaq: {error.told}", file=sys.stderr)
        return STARTED_NOT
    except _ToldToStop:  # the next start recovers what this one has not
        monitor.close()
        logger.info("stopped")
        return 0
    # Objects that are alive now live until the end: a full collection would look at 100,000 of them and stop the loop for 10
    # ms.
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, GC_YOUNG, GC_MIDDLE)
    monitor.serving(lambda: server.metrics, server.authentication, lambda: server.site)
    console = "" if server.site is None or not monitor.page else f" console={monitor.page}"
    where = "" if monitor.address is None else f" http={monitor.address}{console}"
    print(f"{server.ready} pid={os.getpid()}{where}", flush=True)
    notifier.tell("READY=1", f"STATUS={server.ready}")
    notifier.watch(get_hub().loop)
    reload.start(server)
    stopping.wait()
    logger.info("stopping")
    notifier.tell("STOPPING=1")
    reload.stop()
    monitor.stopping()
    with notifier.extending("stopping"):
        server.stop()
    monitor.close()
    for watcher in watchers:
        watcher.cancel()
    logger.info("stopped")
    return 0


def _allow_open_files() -> None:
    """Let this process open as many files as the machine's administrator permits: the hard limit of open files.

    The soft one is often 1,024, for programs that use ``select``; connections and segments need more.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # the kernel's own limit was lowered meanwhile: the soft one stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tell(monitor: Monitor, notifier: Notifier, stopping: Event) -> Tell:
    """Return a callback that reports the progress of opening the store, and ends the opening once a signal has arrived."""

    def tell(step: RecoveryStep) -> None:
        monitor.recovering(step)
        if stopping.is_set():
            logger.info("stopping")
            notifier.tell("STOPPING=1")
            monitor.stopping()
            raise _ToldToStop

    return tell
