"""Steps: marks that are staged with the messages of their group, until their outcome is known.

A step that stores something has two halves: it is staged, and its outcome follows when the append is as durable as promised, or
has failed. Every mark also says how far text ids were given out, so that none is given out twice, whatever the clock says.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from metaq.message import TRANSACTIONS_TOPIC, TopicPartition
from metaq.store.messagestore import MessageStore
from metaq.store.newrecord import Fields
from metaq.store.recordgroups import put_record_group
from metaq.tx.journal import MARKS, Journal
from metaq.tx.xacodes import XaCode

MARK_QUEUE: Final = TopicPartition(TRANSACTIONS_TOPIC, MARKS)
_ID_SHIFT: Final = 20


class Step:
    """A step that is staged; the caller calls either ``succeeded`` or ``failed``, once."""

    __slots__ = ("_ended", "_failed", "_succeeded", "end", "refusal", "size")

    def __init__(
        self,
        begin: int,
        end: int,
        ended: Callable[[], None],
        succeeded: Callable[[], None],
        failed: Callable[[], None],
        refusal: XaCode | None,
    ) -> None:
        self._ended = ended
        self._succeeded = succeeded
        self._failed = failed
        self.refusal = refusal
        """The code to answer when nothing is stored; ``None`` for a local transaction, which has no codes."""
        self.end = end
        """The log offset after its records."""
        self.size = end - begin
        """The bytes in the log that wait for the outcome."""

    def succeeded(self) -> None:
        self._ended()
        self._succeeded()

    def failed(self) -> None:
        self._ended()
        self._failed()


class Steps:
    """The steps of one store, and the text ids that its marks keep."""

    def __init__(self, store: MessageStore, journal: Journal) -> None:
        self._store = store
        self._journal = journal
        self._begun = 0
        self._open: dict[int, tuple[int, int]] = {}  # number of a step → ordinal and log offset of its mark
        self.ended = 0
        """How many steps have had their outcome."""
        self.ids = store.clock.now_ms() << _ID_SHIFT
        """How far ids have been given out."""

    def next_id(self) -> int:
        """Return a text id for a message without a place yet: negative, and never given out before."""
        return self.take_ids(1) - 1

    def take_ids(self, count: int) -> int:
        """Reserve ``count`` ids, not all of which need be used; return the number above them: they are it − 1, it − 2 …"""
        first = -self.ids
        self.ids += count
        return first

    @property
    def next_mark(self) -> int:
        """The ordinal of the next mark."""
        queue = self._store.queues.get(MARK_QUEUE)
        return 0 if queue is None else queue.next

    @property
    def first_open(self) -> tuple[int, int] | None:
        """The ordinal and the log offset of the first mark whose outcome is open; ``None`` without one."""
        return min(self._open.values(), default=None)

    def stage(self, mark: dict[str, Any], messages: list[Fields]) -> int:
        """Stage a mark and the messages of its group; return the log offset of the mark. ``begun`` must follow."""
        return put_record_group(self._store, self._journal.mark(mark, self.ids), messages)[0]

    def begun(self, log_offset: int, succeeded: Callable[[], None], failed: Callable[[], None], refusal: XaCode | None) -> Step:
        """Return the step whose mark was just staged at ``log_offset``; its outcome is open."""
        self._begun += 1
        self._open[self._begun] = self.next_mark - 1, log_offset
        ended = partial(self._end, self._begun)
        return Step(log_offset, self._store.log.staged_end, ended, succeeded, failed, refusal)

    def _end(self, number: int) -> None:
        del self._open[number]
        self.ended += 1


def nothing() -> None:
    """Do nothing: the outcome changes no branch."""
