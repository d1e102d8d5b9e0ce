"""SIGHUP: read the settings again and put in force those that can change in a running process (``metaq.config.LIVE``).

If the file has an error, everything stays as it was. Settings that need a restart are not changed. The log reports all of it.
"""

import logging
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import gevent
from gevent.event import Event

from metaq import logs
from metaq.config import FIELDS, LIVE, Settings
from metaq.errors import MetaqError
from metaq.server.lasting import Lasting

logger = logging.getLogger(__name__)


class Configurable(Protocol):
    """A server that takes over new settings while it runs, from the file or from an administrator."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        ...

    def configure(self, settings: Settings) -> None:
        """Put in force the settings that can change.

        Raise ``MetaqError`` when one of them is wrong: then nothing has changed.
        """
        ...


class Origins(NamedTuple):
    """The settings at the start of the process, and where they came from."""

    settings: Settings
    by_name: Mapping[str, str]
    """Those that were not the defaults, each as ``FILE:LINE``, ``METAQ_NAME`` or ``--name``."""


class Owner(Configurable, Protocol):
    """The owner of what goes on across roles: the settings in force, and what is kept."""

    @property
    def origins(self) -> Origins:
        """The origins of the settings."""
        ...

    @property
    def lasting(self) -> Lasting:
        """The state that outlives a role."""
        ...


class Reload:
    """Catches SIGHUP from the start of the process on, and reloads the settings once the server runs."""

    def __init__(self, read: Callable[[], Settings], hung_up: Callable[[], None]) -> None:
        """Install the signal handler.

        ``read`` reads the settings again; ``hung_up`` is called when the process has lost its terminal.
        """
        self._read = read
        self._hung_up = hung_up
        self._in_terminal = _in_terminal()
        self._asked = Event()
        self._greenlet: Any = None
        self._watcher = gevent.signal_handler(signal.SIGHUP, self._asked.set)

    def start(self, server: Configurable) -> None:
        """Begin to reload settings into the server; a SIGHUP that came earlier counts."""
        self._greenlet = gevent.spawn(self._forever, server)

    def stop(self) -> None:
        """Stop reacting to SIGHUP."""
        self._watcher.cancel()
        gevent.kill(self._greenlet)

    def _forever(self, server: Configurable) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._in_terminal and not _in_terminal():  # a closed terminal window sends SIGHUP too
                self._hung_up()
                return
            try:
                self._reload(server)
            except AssertionError:
                raise  # the process's own state is wrong: it ends
            except Exception as error:  # logged with its trace; the next signal is handled as usual
                reason, trace = (error, None) if isinstance(error, MetaqError) else (repr(error), error)
                logger.error("settings not reloaded, those before stay in force reason=%s", reason, exc_info=trace)

    def _reload(self, server: Configurable) -> None:
        before, wanted = server.settings, self._read()
        differing = [name for name in FIELDS if getattr(wanted, name) != getattr(before, name)]
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
