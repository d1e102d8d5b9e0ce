"""The pace of the loop: the processor time that requests may take in one turn, and the order in which the rest go on.

A turn is what happens between two polls for input. All connections share it, so the time that many requests take together must
be bounded as well as the time that each of them takes. Once requests have taken ``TURN_S`` of a turn, connections begin no
further requests in it. They go on in the next turns, in the order in which they were stopped, and the connections that were not
stopped get as much time as they do.
"""

import time
from typing import Any, Final, Protocol

from metaq.engine.figures.metrics import Histogram

TURN_S: Final = 0.01
"""Seconds of processor time. A turn may exceed it by one request and by work begun in other ways."""
# not a tuple of fixed length: the compiled code would take a tuple of floats of that type for one that was never set
TURN_BOUNDS: Final[tuple[float, ...]] = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HIGHEST: Final = 2
"""Watcher priority of the callback that begins a turn: it runs before any other callback."""
NEXT: Final = 1
"""Watcher priority for connections that were stopped: they go on right after the turn begins, before new input is read."""


class Stopped(Protocol):
    """A connection that was stopped."""

    def flush(self) -> None:
        """Go on."""
        ...


class Pace:
    """Measures the turns of the loop in which it is started."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._watcher: Any = None
        self._timer: Any = None
        self._put_off: dict[Stopped, None] = {}
        self._began = 0.0
        self._from = self._from_by_clock = 0.0  # start of the time that counts against this turn's requests
        self.times = Histogram(TURN_BOUNDS)
        """Processor seconds per turn."""
        self.longest_s = 0.0

    def start(self) -> None:
        """Begin to measure."""
        self._began = time.thread_time()
        self._grant()
        self._watcher = self._loop.check(ref=False, priority=HIGHEST)
        self._watcher.start(self._next_turn)
        self._timer = self._loop.timer(0.0, priority=NEXT)

    def stop(self) -> None:
        """Stop measuring; whoever was put off goes on at once, as no turn is spent from now on."""
        if self._watcher is not None:
            self._watcher.close()
            self._timer.close()
            self._watcher = self._timer = None
        waiting, self._put_off = self._put_off, {}
        for session in waiting:
            session.flush()

    def _next_turn(self) -> None:
        now = time.thread_time()
        took, self._began = now - self._began, now
        self._from, self._from_by_clock = now, time.monotonic()
        self.times.observe(took)
        self.longest_s = max(self.longest_s, took)

    def _grant(self) -> None:
        self._from, self._from_by_clock = time.thread_time(), time.monotonic()

    @property
    def measures(self) -> bool:
        """True from ``start`` to ``stop``; at other times no turn is ever spent."""
        return self._watcher is not None

    @property
    def spent(self) -> bool:
        """True when this turn has taken so long that further requests have to wait for the next one."""
        if time.monotonic() - self._from_by_clock <= TURN_S or self._watcher is None:
            return False  # the usual case; the monotonic clock is ten times as fast to read as the processor time
        return time.thread_time() - self._from > TURN_S

    def put_off(self, session: Stopped) -> None:
        """Have the session go on in one of the next turns."""
        if not self._put_off:
            self._timer.start(self._go_on)
        self._put_off[session] = None

    def _go_on(self) -> None:
        """Let stopped connections go on, in order.

        At least the first answers a request, since the turn has only begun. Connections that were not stopped then get as much
        time of their own. A session that closes may stop the pace: then no turn is spent, and all of them go on.
        """
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
