"""What the opening of a store could not write because the disk was full. Until it is made up for, only readers are served.

Nothing is appended and no checkpoint is made meanwhile, so the folder stays as it was found, for the next opening too.
"""

from collections import deque
from collections.abc import Callable

from metaq.errors import DiskFull
from metaq.store.files.filecache import Run, run_here


class Owed:
    """Calls in the order in which they have to be made."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self.reason: DiskFull | None = None
        """Why the first of them failed; ``None`` when none is owed."""

    def do(self, call: Callable[[], object], run: Run = run_here) -> None:
        """Make a call, now or when there is room for it and all before it. Made twice, it changes nothing more."""
        if self.reason is None:
            try:
                run(call)
            except DiskFull as error:
                self.reason = error
            else:
                return
        self._calls.append(call)

    def settle(self, run: Run) -> None:
        """Make up for what is owed; ``DiskFull`` when there is still no room for all of it."""
        while self._calls:
            run(self._calls[0])
            self._calls.popleft()
        self.reason = None

    def check(self) -> None:
        """``DiskFull`` while something is owed."""
        if self.reason is not None:
            raise self.reason
