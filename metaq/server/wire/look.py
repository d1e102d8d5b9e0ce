"""Reading the store for sessions: what is in the page cache at once, what is not in a greenlet that may wait for the disk."""

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
    """Something that is answered from the store."""

    __slots__ = ()

    session: Session

    def look(self, read: Read) -> Any:
        """What the store says, found through ``read``."""
        raise NotImplementedError

    def owe(self) -> None:
        """The answer will take a while."""
        raise NotImplementedError

    def found(self, answer: Any) -> None:
        """Answer, or hold."""
        raise NotImplementedError

    def fail(self, error: MetaqError) -> None:
        """Answer with an error."""
        raise NotImplementedError


class Looks:
    """Answers questions. How many wait for the disk at once is limited."""

    def __init__(self, settings: Settings, run: Run) -> None:
        self.configure(settings)
        self._run = run
        self._cold = 0
        self.cold_reads = 0
        """Questions that had to wait for the disk, since the start."""

    def configure(self, settings: Settings) -> None:
        """Take over the limit."""
        self._limit = settings.max_cold_reads

    @property
    def waiting(self) -> int:
        """Questions that wait for the disk."""
        return self._cold

    def look(self, question: Question) -> None:
        """Answer now, or in a greenlet when the disk must be waited for. Whoever wakes a held question goes on in any case."""
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
        """Others go on meanwhile, also when the bytes are in the page cache after all: a thread costs ten times as much."""
        data = file.read_cached(size, offset)
        if data is None:
            return self._run(partial(file.read, size, offset))
        gevent.sleep(0)
        return data
