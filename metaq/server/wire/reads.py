"""Reads of the store for sessions: at once from the page cache, else in a greenlet that may wait for the disk."""

from functools import partial
from typing import Any, Final

import gevent

from metaq.config import Settings
from metaq.errors import MetaqError, Overloaded
from metaq.server.wire.session import Session
from metaq.store.files.disk import File
from metaq.store.files.filecache import ColdRead, Read, Run, read_cached

COLD_RETRY_MS: Final = 100


class StoreRead:
    """A request that is answered from the store.

    There is one subclass for each protocol, which knows how to answer now or later; its subclasses know what to read.
    """

    __slots__ = ()

    session: Session

    def read(self, read: Read) -> Any:
        """Return what the store has, found through ``read``, or raise ``MetaqError``."""
        raise NotImplementedError

    def found(self, result: Any) -> None:
        """Answer with the result of ``read``, or hold the request until there is more; ``MetaqError`` becomes the answer."""
        raise NotImplementedError

    def fail(self, error: MetaqError) -> None:
        """Answer with an error."""
        raise NotImplementedError

    def defer(self) -> None:
        """Have the session owe the answer, since it will take a while."""
        raise NotImplementedError


class StoreReads:
    """Runs reads. The number of those that wait for the disk at once is limited."""

    def __init__(self, settings: Settings, run: Run) -> None:
        self.configure(settings)
        self._run = run
        self._cold = 0
        self.cold_reads = 0
        """Requests that had to wait for the disk, since the start."""

    def configure(self, settings: Settings) -> None:
        """Take over the limit (``max_cold_reads``)."""
        self._limit = settings.max_cold_reads

    @property
    def waiting(self) -> int:
        """The number of requests that wait for the disk now."""
        return self._cold

    def start(self, request: StoreRead) -> None:
        """Answer a request now, or in a greenlet when the disk must be waited for.

        Never raises for a failed request, so a caller that wakes several held requests can go on: an unexpected error closes
        that session only.
        """
        self._answer(request, read_cached)

    def _answer(self, request: StoreRead, read: Read) -> None:
        try:
            try:
                request.found(request.read(read))
            except ColdRead:
                self._defer(request)
            except MetaqError as error:
                request.fail(error)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            request.session.break_off()

    def _defer(self, request: StoreRead) -> None:
        if self._cold >= self._limit:
            reason = f"{self._limit} reads wait for the disk (max_cold_reads)"
            request.fail(Overloaded(reason, retry_after_ms=COLD_RETRY_MS))
            return
        self._cold += 1
        self.cold_reads += 1
        request.defer()
        gevent.spawn(self._answer_from_disk, request)

    def _answer_from_disk(self, request: StoreRead) -> None:
        try:
            self._answer(request, self._read)
        finally:
            self._cold -= 1

    def _read(self, file: File, size: int, offset: int) -> bytes:
        """Read from the page cache, or from the disk in a thread.

        The cache is tried first because a thread costs ten times as much; even then other greenlets run before this returns.
        """
        data = file.read_cached(size, offset)
        if data is None:
            return self._run(partial(file.read, size, offset))
        gevent.sleep(0)
        return data
