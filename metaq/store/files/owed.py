"""Owed writes: those that the opening of a store could not make because the disk was full.

Until they are made up for, only readers are served: nothing is appended and no checkpoint is made. So the folder stays as it
was found, for the next opening too.
"""

from collections import deque
from collections.abc import Callable

from metaq.errors import DiskFull
from metaq.store.files.filecache import Run, run_here


class OwedCalls:
    """A queue of calls, in the order in which they have to be made."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self.reason: DiskFull | None = None
        """The error of the first call that failed; ``None`` when none is owed."""

    def do(self, call: Callable[[], object], run: Run = run_here) -> None:
        """Make a call now, or later when there is room for it and for all calls before it. The call must be idempotent."""
        if self.reason is None:
            try:
                run(call)
            except DiskFull as error:
                self.reason = error
            else:
                return
        self._calls.append(call)

    def settle(self, run: Run) -> None:
        """Make the owed calls. Raises ``DiskFull`` when there is still no room for all of them."""
        while self._calls:
            run(self._calls[0])
            self._calls.popleft()
        self.reason = None

    def check(self) -> None:
        """Raise a ``DiskFull`` with the reason of the first owed call, if any call is owed."""
        if self.reason is not None:
            raise DiskFull(str(self.reason))  # a new one: an error keeps all that it was raised in
