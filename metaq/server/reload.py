"""SIGHUP: the settings are read again, and those that can change in a running process are put in force (``metaq.config.LIVE``).

What is wrong with the file leaves everything as it was, and what needs a restart is told; the log says all of it.
"""

import logging
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

import gevent
from gevent.event import Event

from metaq import logs
from metaq.config import LIVE, Settings
from metaq.errors import MetaqError

logger = logging.getLogger(__name__)


class Configurable(Protocol):
    """What takes over settings while it runs, from a file or from an administrator."""

    @property
    def settings(self) -> Settings:
        """Those in force."""
        ...

    def configure(self, settings: Settings) -> None:
        """Put in force what can change. ``MetaqError`` when something is wrong with it: then nothing has changed."""
        ...


class Reload:
    """Waits for SIGHUP from the first moment of the process on, and reads once it serves."""

    def __init__(self, read: Callable[[], Settings], hung_up: Callable[[], None]) -> None:
        """``read`` reads the sources again; ``hung_up`` is called when the terminal of the process is gone."""
        self._read = read
        self._hung_up = hung_up
        self._in_terminal = _in_terminal()
        self._asked = Event()
        self._greenlet: Any = None
        self._watcher = gevent.signal_handler(signal.SIGHUP, self._asked.set)

    def start(self, server: Configurable) -> None:
        """It serves."""
        self._greenlet = gevent.spawn(self._forever, server)

    def stop(self) -> None:
        """Read no more."""
        self._watcher.cancel()
        gevent.kill(self._greenlet)

    def _forever(self, server: Configurable) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._in_terminal and not _in_terminal():  # closing a window sends the same signal, and means the end
                self._hung_up()
                return
            try:
                self._reload(server)
            except AssertionError:
                raise  # the process's own state is wrong: it ends
            except Exception as error:  # logged with its trace; the next signal is answered all the same
                reason, trace = (error, None) if isinstance(error, MetaqError) else (repr(error), error)
                logger.error("settings not reloaded, those before stay in force reason=%s", reason, exc_info=trace)

    def _reload(self, server: Configurable) -> None:
        before, wanted = server.settings, self._read()
        differing = [name for name in Settings.model_fields if getattr(wanted, name) != getattr(before, name)]
        live = {name: getattr(wanted, name) for name in differing if name in LIVE}
        settings = before.merged(live)
        server.configure(settings)
        logs.configure(settings.log_level, settings.log_format)
        for name in live:
            logger.info("setting changed name=%s from=%s to=%s", name, getattr(before, name), getattr(settings, name))
        for name in differing:
            if name not in live:
                here, there = getattr(before, name), getattr(wanted, name)
                logger.warning("setting needs a restart name=%s in_force=%s wanted=%s", name, here, there)
        logger.info("settings reloaded changed=%d need_restart=%d", len(live), len(differing) - len(live))


def _in_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
