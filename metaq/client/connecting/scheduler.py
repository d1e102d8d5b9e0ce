"""What happens later or beside: one thread that knows the time, and a few that may block."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

logger = logging.getLogger(__name__)

Task = Callable[[], None]

_WORKERS: Final = 8


class Scheduler:
    """Runs tasks on a few threads of its own: at once, later, or again and again. A task that fails is logged."""

    def __init__(self, name: str) -> None:
        self._sequence = itertools.count()
        self._closed = False
        self.renew(name)

    def renew(self, name: str) -> None:
        """Begin anew in a child of a fork: what is due is the parent's to do."""
        self._name = name
        self._workers = ThreadPoolExecutor(_WORKERS, f"{name}-worker")
        self._changed = threading.Condition()  # guards what follows, and whether it is closed
        self._due: list[tuple[float, int, Task]] = []
        self._timer: threading.Thread | None = None

    def run(self, task: Task) -> None:
        """Run it soon; dropped when the scheduler is closed."""
        with self._changed:
            if self._closed:
                return
            try:
                self._workers.submit(self._guarded, task)
            except RuntimeError as error:  # the interpreter ends, and nobody has closed the client
                logger.debug("no more tasks client=%s reason=%s", self._name, error)
                self._closed = True

    def after(self, seconds: float, task: Task) -> None:
        """Run it once, so many seconds from now."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._sequence), task))
            if self._timer is None:
                self._timer = threading.Thread(target=self._keep_time, name=f"{self._name}-timer", daemon=True)
                self._timer.start()
            self._changed.notify_all()

    def every(self, seconds: float, task: Task, until: Callable[[], bool] = lambda: False) -> None:
        """Run it again and again: so many seconds from now, then so many seconds after it has ended, until ``until`` holds."""

        def again() -> None:
            if until():
                return
            try:
                task()
            finally:
                self.after(seconds, again)

        self.after(seconds, again)

    def close(self) -> None:
        """Start nothing more. What runs comes to its own end."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    continue
                task = heapq.heappop(self._due)[2]
            self.run(task)

    def _guarded(self, task: Task) -> None:
        try:
            task()
        except Exception:
            logger.exception("background task failed client=%s", self._name)
