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


class Question:
    """A request that is answered from the store."""

    __slots__ = ()

    session: Session

    def look(self, read: Read) -> Any:
        """Return what the store says, found through ``read``."""
        raise NotImplementedError

    def owe(self) -> None:
        """Note that the answer will take a while, since it waits for the disk."""
        raise NotImplementedError

    def found(self, answer: Any) -> None:
        """Send the answer, or hold the request until there is one."""
        raise NotImplementedError

    def fail(self, error: MetaqError) -> None:
        """Answer with an error."""
        raise NotImplementedError


class Looks:
    """Answers questions from the store. The number of those that wait for the disk at once is limited."""

    def __init__(self, settings: Settings, run: Run) -> None:
        self.configure(settings)
        self._run = run
        self._cold = 0
        self.cold_reads = 0
        """Questions that had to wait for the disk, since the start."""

    def configure(self, settings: Settings) -> None:
        """Take over the limit (``max_cold_reads``)."""
        self._limit = settings.max_cold_reads

    @property
    def waiting(self) -> int:
        """The number of questions that wait for the disk now."""
        return self._cold

    def look(self, question: Question) -> None:
        """Answer now, or in a greenlet when the disk must be waited for.

        Never raises for a failed question, so a caller that wakes several held questions can go on: an unexpected error closes
        that session only.
        """
        try:
            self._look(question)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            question.session.break_off()

    def _look(self, question: Question) -> None:
        try:
            answer = question.look(read_cached)
        except ColdRead:
            if self._cold >= self._limit:
                reason = f"{self._limit} reads wait for the disk (max_cold_reads)"
                question.fail(Overloaded(reason, retry_after_ms=COLD_RETRY_MS))
                return
            self._cold += 1
            self.cold_reads += 1
            question.owe()
            gevent.spawn(self._look_on_disk, question)
        except MetaqError as error:
            question.fail(error)
        else:
            question.found(answer)

    def _look_on_disk(self, question: Question) -> None:
        try:
            question.found(question.look(self._read))
        except MetaqError as error:
            question.fail(error)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            question.session.break_off()
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
