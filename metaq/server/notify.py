"""Messages to systemd: ready, stopping, alive, needs more time (sd_notify(3)).

Each message is one datagram with lines of NAME=VALUE, sent to the socket that ``NOTIFY_SOCKET`` names; a leading ``@`` means an
abstract socket. Without that variable nothing is sent.

=========================  ============================================================================================
READY=1, STOPPING=1        the server is up; the server is shutting down
WATCHDOG=1                 the loop turns. Sent when ``WATCHDOG_USEC`` is set, twice per period, by a timer of the loop itself
EXTEND_TIMEOUT_USEC=30…    while it opens or closes its store, which may take longer than any limit of a unit
STATUS=…                   a line for ``systemctl status``
=========================  ============================================================================================

A process that makes no progress asks for no more time: if it waits for a disk that is gone, systemd kills it at the end of its
timeout.
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
"""Seconds of processor time between two looks that count as progress: this thread alone uses about a hundredth of that."""

# The loop stands still while tables are built from an open store, so a native thread sends the requests for more time.
_start_thread: Final = monkey.get_original("_thread", "start_new_thread")
_sleep: Final = monkey.get_original("time", "sleep")


class Notifier:
    """The connection to systemd, or a stand-in that sends nothing when there is no systemd."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Connect to systemd's socket, if there is one.

        Raise ``ConfigError`` when ``NOTIFY_SOCKET`` names a socket that cannot be reached.
        """
        self._socket = _connect(environment.get("NOTIFY_SOCKET", ""))
        pid = environment.get("WATCHDOG_PID", "")
        asked = not pid or int(pid) == os.getpid()
        self._watchdog_s = int(environment.get("WATCHDOG_USEC", "0")) / 1e6 if asked else 0.0
        self._timer: Any = None

    def tell(self, *lines: str) -> None:
        """Send the lines as one datagram.

        Never waits: a systemd that does not read must not stop the loop. Failures are logged.
        """
        if self._socket is not None:
            try:
                # not socket.send(), which is gevent's: a native thread may call this too
                os.write(self._socket.fileno(), "\n".join(lines).encode())
            except OSError as error:
                logger.warning("systemd not told lines=%s reason=%s", ",".join(lines), error)

    def watch(self, loop: Any) -> None:
        """Begin to send ``WATCHDOG=1`` from a timer of the loop, if systemd asked for it."""
        if self._socket is not None and self._watchdog_s:
            self._timer = loop.timer(0, self._watchdog_s / 2)
            self._timer.start(self.tell, "WATCHDOG=1")

    @contextmanager
    def extending(self, status: str) -> Iterator[None]:
        """Ask for more time again and again during the block, as long as the process makes progress."""
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
        raise ConfigError(
            f"NOTIFY_SOCKET: cannot notify systemd at {name}: {error}; unset it if there is no systemd"
        ) from error
    link.setblocking(False)
    return link


def _extend(descriptor: int, done: list[bool]) -> None:
    """Ask for more time until ``done`` is filled.

    Runs in a native thread: it makes system calls only, and uses no log and no lock.
    """
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
    """Return the processor seconds, and the blocks read from and written to disk, that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_oublock
