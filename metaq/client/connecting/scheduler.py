"""Background tasks of a client: one timer thread, and a few worker threads that may block."""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

logger = logging.getLogger(__name__)

Task = Callable[[], object]

_WORKERS: Final = 8

_EXITS: Final = "interpreter shutdown"
"""What Python says when it starts no thread because it exits; otherwise the system has no room for one, perhaps only now."""


class _Due(NamedTuple):
    """A task for later."""

    at: float
    number: int
    task: Task
    dropped: Task | None

    def drop(self) -> None:
        if self.dropped is not None:
            self.dropped()


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
        self._due: list[_Due] = []
        self._timer: threading.Thread | None = None

    def run(self, task: Task) -> bool:
        """Run a task as soon as a thread is free. When the scheduler is closed, drop the task and return false."""
        with self._changed:
            if not self._closed:
                self._started(lambda: self._workers.submit(self._guarded, task))
            return not self._closed

    def after(self, seconds: float, task: Task, dropped: Task | None = None) -> None:
        """Run a task once, ``seconds`` from now. When the scheduler is closed before that, drop it and call ``dropped``."""
        due = _Due(time.monotonic() + seconds, next(self._sequence), task, dropped)
        with self._changed:
            if not self._closed:
                heapq.heappush(self._due, due)
                if self._timer is None:
                    timer = threading.Thread(target=self._keep_time, name=f"{self._name}-timer", daemon=True)
                    self._timer = timer if self._started(timer.start) else None
                self._changed.notify_all()
                return
        due.drop()

    def _started(self, start: Task) -> bool:
        """Return whether a thread could be started. Else what is to be done waits for the next task, which starts one."""
        try:
            start()
        except RuntimeError as error:
            self._closed = _EXITS in str(error)  # and the client was not closed
            if self._closed:
                logger.debug("no more tasks client=%s reason=%s", self._name, error)
            else:
                logger.error("no thread for a task client=%s reason=%s", self._name, error)
            return False
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
        """Drop the tasks for later. Those that wait for a thread still run; nothing is interrupted or waited for."""
        with self._changed:
            self._closed = True
            due, self._due = self._due, []
            self._changed.notify_all()
        self._workers.shutdown(wait=False)
        for one in due:
            one.drop()

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                if not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    continue
                due = heapq.heappop(self._due)
            if not self.run(due.task):
                due.drop()

    def _guarded(self, task: Task) -> None:
        try:
            task()
        except Exception:
            logger.exception("background task failed client=%s", self._name)
