"""The pace of the loop: how much of the processor each turn takes, and who goes on in the next one.

A turn is what happens between two looks for what has arrived. All connections share it, so what many requests take together
must be bounded as well as what each of them takes: when they have taken ``TURN_S`` of a turn, connections answer no further
requests in it. They go on in the next turns, in the order in which they were stopped, and leave as much to those that were not.
"""

import time
from typing import Any, Final

from metaq.engine.figures.metrics import Histogram
from metaq.server.wire.session import Session

TURN_S: Final = 0.01
"""Of the processor. A turn may take longer by what one request and what was begun otherwise take."""
# not of a fixed length, by its type: the compiled form takes such a tuple of floats for one that was never set
TURN_BOUNDS: Final[tuple[float, ...]] = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HIGHEST: Final = 2
"""Priority of a watcher: the turn begins before anything else is called,"""
NEXT: Final = 1
"""and then those go on that were stopped, before others are heard."""


class Pace:
    """Measures the turns of the loop that it is started in."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._watcher: Any = None
        self._timer: Any = None
        self._put_off: dict[Session, None] = {}
        self._began = 0.0
        self._from = self._from_by_clock = 0.0  # since when the requests of this turn are counted
        self.times = Histogram(TURN_BOUNDS)
        """Of the processor, by turn, in seconds."""
        self.longest_s = 0.0

    def start(self) -> None:
        """Measure from now on."""
        self._began = time.thread_time()
        self._grant()
        self._watcher = self._loop.check(ref=False, priority=HIGHEST)
        self._watcher.start(self._next_turn)
        self._timer = self._loop.timer(0.0, priority=NEXT)

    def stop(self) -> None:
        """Measure no more."""
        if self._watcher is not None:
            self._watcher.close()
            self._timer.close()
            self._watcher = self._timer = None

    def _next_turn(self) -> None:
        now = time.thread_time()
        took, self._began = now - self._began, now
        self._from, self._from_by_clock = now, time.monotonic()
        self.times.observe(took)
        self.longest_s = max(self.longest_s, took)

    def _grant(self) -> None:
        self._from, self._from_by_clock = time.thread_time(), time.monotonic()

    @property
    def spent(self) -> bool:
        """Whether this turn has taken so long that the next requests are for the next one."""
        if time.monotonic() - self._from_by_clock <= TURN_S or self._watcher is None:
            return False  # the usual case, and ten times as fast to know
        return time.thread_time() - self._from > TURN_S

    def put_off(self, session: Session) -> None:
        """The connection goes on in one of the next turns."""
        if not self._put_off:
            self._timer.start(self._go_on)
        self._put_off[session] = None

    def _go_on(self) -> None:
        """The first one answers a request at least: the turn has only begun. Who was not stopped has as much time."""
        waiting, self._put_off = self._put_off, {}
        for session in list(waiting):
            if self.spent:
                break
            del waiting[session]
            session.flush()
        self._grant()
        self._put_off = {**waiting, **self._put_off}
        if self._put_off:
            self._timer.start(self._go_on)
