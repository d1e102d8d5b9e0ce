"""What systemd is told: it is ready, it stops, it is alive, it needs more time (sd_notify(3)).

One datagram, lines of NAME=VALUE, to the socket that ``NOTIFY_SOCKET`` names; ``@`` begins an abstract one. Without it nothing
is told.

=========================  ============================================================================================
READY=1, STOPPING=1        it serves; it has been told to stop
WATCHDOG=1                 the loop turns. Asked for by ``WATCHDOG_USEC``, sent twice as often, by a timer of the loop itself
EXTEND_TIMEOUT_USEC=30…    while it opens or closes its store, which may take longer than any limit of a unit
STATUS=…                   a line for ``systemctl status``
=========================  ============================================================================================

No time is asked for by a process that does nothing: one that waits for a disk which is gone is killed when its time is over.
"""

import logging
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from gevent import monkey

from metaq.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
EXTEND_USEC: Final = 30_000_000
LEAST_WORK_S: Final = 0.01
"""Of processor time from one look to the next: this thread alone needs a hundredth of it."""

# The loop stands still while tables are made of an open store, so what tells of it is a thread of the system.
_start_thread: Final = monkey.get_original("_thread", "start_new_thread")
_sleep: Final = monkey.get_original("time", "sleep")


class Notifier:
    """The way to systemd, or to nobody."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``ConfigError`` when ``NOTIFY_SOCKET`` names no socket that takes anything."""
        self._socket = _connect(environment.get("NOTIFY_SOCKET", ""))
        pid = environment.get("WATCHDOG_PID", "")
        asked = not pid or int(pid) == os.getpid()
        self._watchdog_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if asked else 0.0
        self._timer: Any = None

    def tell(self, *lines: str) -> None:
        """Send lines, as one. It never waits: a systemd that takes nothing must not stop the loop."""
        if self._socket is not None:
            try:
                # not send(), which would be gevent's: the thread beside the loop tells, too
                os.write(self._socket.fileno(), "\n".join(lines).encode())
            except OSError as error:
                logger.warning("systemd not told lines=%s reason=%s", ",".join(lines), error)

    def watch(self, loop: Any) -> None:
        """From now on say that the loop turns, as long as it does."""
        if self._socket is not None and self._watchdog_s:
            self._timer = loop.timer(0, self._watchdog_s / 2)
            self._timer.start(self.tell, "WATCHDOG=1")

    @contextmanager
    def extending(self, status: str) -> Iterator[None]:
        """Ask for time again and again, as long as the process works."""
        if self._socket is None:
            yield
            return
        self.tell(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={EXTEND_USEC}")
        done: list[bool] = []
        _start_thread(_extend, (self._socket.fileno(), done))
        try:
            yield
        finally:
            done.append(True)


def _connect(name: str) -> socket.socket | None:
    if not name:
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        link.connect("\0" + name[1:] if name.startswith("@") else name)
    except OSError as error:
        link.close()
        raise ConfigError(f"NOTIFY_SOCKET: cannot tell systemd at {name}: {error}; unset it where there is none") from error
    link.setblocking(False)
    return link


def _extend(descriptor: int, done: list[bool]) -> None:
    """In a thread of its own: system calls on what it was given, no log and no lock."""
    before = _work()
    while True:
        _sleep(LOOK_S)
        if done:
            return
        now = _work()
        if now[0] - before[0] > LEAST_WORK_S or now[1] != before[1]:
            try:
                os.write(descriptor, f"EXTEND_TIMEOUT_USEC={EXTEND_USEC}".encode())
            except BlockingIOError:
                continue
            except OSError:
                return
        before = now


def _work() -> tuple[float, int]:
    """Seconds of the processor, and blocks from and to the disk, that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_oublock
