"""Requests answered later: reads from disk, changes that must become durable, questions to other clients."""

from collections.abc import Callable
from typing import Final

import gevent

from metaq.errors import MetaqError, Overloaded
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.remoting.reads import AnswerRead
from metaq.server.remoting.session import Answer, Kept, RemotingSession, failure
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read

MOST_AT_WORK: Final = 256
"""Requests that wait in ``Later.run`` at once."""
RETRY_MS: Final = 100


class Later:
    """Answers requests once the work that they wait for is done."""

    def __init__(self, reads: StoreReads) -> None:
        self._reads = reads
        self._at_work = 0

    @property
    def waiting_reads(self) -> int:
        """The number of reads that wait for the disk, of all handlers."""
        return self._reads.waiting

    def read(self, session: RemotingSession, request: RemotingCommand, work: Callable[[Read], Answer]) -> None:
        """Answer with what ``work`` finds in the store: at once when it is in memory, otherwise from a greenlet."""
        self._reads.start(AnswerRead(session, request, work))

    def run(self, session: RemotingSession, request: RemotingCommand, work: Callable[[], Answer]) -> None:
        """Run ``work``, which may wait, in a greenlet, and answer with its result; other requests go on meanwhile.

        Raise ``Overloaded`` when ``MOST_AT_WORK`` requests wait already.
        """
        if self._at_work >= MOST_AT_WORK:
            raise Overloaded(f"{MOST_AT_WORK} other requests of administrators are in progress", retry_after_ms=RETRY_MS)
        self._at_work += 1
        gevent.spawn(self._run, session, session.owe(request), work)

    def _run(self, session: RemotingSession, request: Kept, work: Callable[[], Answer]) -> None:
        try:
            try:
                answer = work()
            except MetaqError as error:
                answer = failure(error)
            session.pay(request, answer)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            session.break_off()
        finally:
            self._at_work -= 1
