"""The gate of a store: whether records may be added to the log now, and why not.

Three things close it: a failure, until the store is reopened; the fence, while another replica is master or may be; and a disk
without room. At ``refuse_ratio`` it is closed to puts only: records of the broker's own have room still.
"""

import contextlib

from metaq.errors import DiskFull, NotWritable, ReadFailed, StoreError, TooManyFiles
from metaq.store.checkpoint import LiveMark
from metaq.store.fence import Fence
from metaq.store.log.commitlog import CommitLog


class Gate:
    """Open at first."""

    def __init__(self, log: CommitLog, fence: Fence, live: LiveMark) -> None:
        self.log = log
        self.fence = fence
        self.live = live
        self.failure: StoreError | None = None
        """The failure that has made the store read-only until it is reopened; ``None`` while it is healthy."""
        self.no_room: str | None = None
        """Why puts are refused for now, from the disk usage that retention last saw; ``None`` when there is room."""
        self.behind: StoreError | None = None
        """The error for which pending units of queues could not be written; ``None`` when there are none such."""

    @property
    def full(self) -> StoreError | None:
        """The error of a write for which the disk had no room, until there is room for it; ``None`` without one."""
        return self.log.shortage or self.behind

    @property
    def shortage(self) -> str | None:
        """The reason why there is no room for messages; ``None`` when there is room."""
        error = self.full
        return self.no_room if error is None else str(error)

    @property
    def appendable(self) -> bool:
        """True while records of the broker's own can be appended: nothing forbids it, and the disk has room for them."""
        return self.failure is None and self.fence.refusal is None and self.full is None

    @property
    def writable(self) -> bool:
        """True while the store accepts puts."""
        return self.appendable and self.no_room is None

    def check_healthy(self) -> None:
        """Raise ``NotWritable`` when a failure has made the store read-only until it is reopened."""
        if self.failure is not None:
            raise NotWritable(f"the broker is read-only until it is restarted: {self.failure}")

    def check_master(self) -> None:
        """Raise ``NotMaster`` or ``Fenced`` when this store may be out of date: another replica writes, or may do so by now."""
        self.fence.check_open()
        self.fence.check()

    def check_appendable(self) -> None:
        """Raise ``NotWritable`` or ``NotMaster`` while nothing may be appended, however much room there is.

        Records of the broker's own need no more than this. At ``refuse_ratio`` they have room still, and without them retention
        could delete nothing. Where the disk is full, their put or append raises ``DiskFull``.
        """
        self.check_healthy()
        self.fence.check_open()

    def check_writable(self) -> None:
        """Raise the error that a put would be refused with now: ``NotWritable``, ``NotMaster`` or ``DiskFull``."""
        self.check_appendable()
        if (shortage := self.shortage) is not None:
            raise DiskFull(shortage)

    def fail(self, error: StoreError) -> None:
        """Make the store read-only, and leave a mark for the next process: the page cache may hold what the disk does not.

        Errors of which nothing is lost are no such failure: what they ended is tried again.
        """
        if self.failure is None and not isinstance(error, (ReadFailed, TooManyFiles)):
            self.failure = error
            with contextlib.suppress(StoreError):  # the first failure is the one to report
                self.live.fail()
