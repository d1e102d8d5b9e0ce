"""Background tasks of a client: one timer thread, and a few worker threads that may block."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

logger = logging.getLogger(__name__)

Task = Callable[[], object]

_WORKERS: Final = 8


class Scheduler:
    """A runner of tasks on at most eight threads: at once, later, or periodically. A task that fails is logged."""

    def __init__(self, name: str) -> None:
        self._sequence = itertools.count()
        self._closed = False
        self.renew(name)

    def renew(self, name: str) -> None:
        """Start empty in a child of a fork: the scheduled tasks are left to the parent."""
        self._name = name
        self._workers = ThreadPoolExecutor(_WORKERS, f"{name}-worker")
        self._changed = threading.Condition()  # guards what follows, and whether it is closed
        self._due: list[tuple[float, int, Task]] = []
        self._timer: threading.Thread | None = None

    def run(self, task: Task) -> bool:
        """Run a task as soon as a thread is free. When the scheduler is closed, drop the task and return false."""
        with self._changed:
            if self._closed:
                return False
            try:
                self._workers.submit(self._guarded, task)
            except RuntimeError as error:  # the interpreter exits, and the client was not closed
                logger.debug("no more tasks client=%s reason=%s", self._name, error)
                self._closed = True
            return not self._closed

    def after(self, seconds: float, task: Task) -> bool:
        """Run a task once, ``seconds`` from now. When the scheduler is closed, drop the task and return false."""
        with self._changed:
            if self._closed:
                return False
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._sequence), task))
            if self._timer is None:
                self._timer = threading.Thread(target=self._keep_time, name=f"{self._name}-timer", daemon=True)
                self._timer.start()
            self._changed.notify_all()
            return True

    def every(self, seconds: float, task: Task, until: Callable[[], bool] = lambda: False) -> None:
        """Run a task ``seconds`` from now, and again ``seconds`` after each run has ended, until ``until`` returns true."""

        def again() -> None:
            if until():
                return
            try:
                task()
            finally:
                self.after(seconds, again)

        self.after(seconds, again)

    def close(self) -> None:
        """Start no more tasks. Those that run are not interrupted and not waited for."""
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
