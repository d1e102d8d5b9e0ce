"""The transactions of one broker: the commands that decide about branches, over the store.

All state that must survive is in the log, as groups of records (``metaq.tx.journal``) that are staged here and appended at the
end of the turn like every put. So a command that stores something only begins a step (``metaq.tx.steps``). In between the
branch is busy.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from metaq.errors import CorruptRecord, MetaqError
from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.tx.branches import Work
from metaq.tx.journal import Held, Journal, Prepared
from metaq.tx.keeping import Keeping
from metaq.tx.openbranches import Room
from metaq.tx.places import offset_of, packed
from metaq.tx.snapshot import Snapshots
from metaq.tx.states import Decision
from metaq.tx.steps import Step, Steps, nothing
from metaq.tx.topics import Topics, topics_of
from metaq.tx.undecided import Undecided
from metaq.tx.xacodes import XaCode, XaError

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1
"""The age up to which a measurement of free space serves a vote: a third of ``least_free_bytes`` may be gone since."""
NEVER_SAFE: Final = (1 << 63) - 1
"""A log offset after all that this process can make safe."""


class Transactions:
    """All XA branches, and their undecided records in the log. It knows no event loop: the caller appends and waits."""

    def __init__(self, store: MessageStore, room: Room, store_host: bytes, folder: Path) -> None:
        """Find the undecided branches from the snapshot, which is in ``folder``, and the log."""
        self._store = store
        self._journal = Journal(store, store_host)
        self._undecided = Undecided(store, room)
        self.branches = self._undecided.branches
        self.steps = Steps(store, self._journal)
        self.snapshots = Snapshots(store, self.steps, self._undecided, folder)
        self.keeping = Keeping(store, self._journal, self.steps, self._undecided, self.snapshots)
        self.doubtful_end = store.log.end
        """The log offset before which steps were stored late, or may be stored or not: a power cut or a new master may still
        drop them."""
        self.returning_end = self.doubtful_end
        """The same of steps that ended a prepared branch or an operator's decision, which would be there again then."""
        self._looked_s, self._available = -LOOK_S, 0

    # -- commands -----------------------------------------------------------------------------------------------------

    def prepare(self, key: str) -> Step | None:
        """Stage the vote and the messages; ``None``: the branch was empty, and is gone. ``XaError`` (RBOTHER): rolled back."""
        messages = self.branches.prepare(key)
        if not messages:
            return None
        size, topics = self.branches.size(key), topics_of(messages)
        try:
            self._check_room(size)
            mark = {"do": "prepare", "key": key, "messages": len(messages), "bytes": size, "topics": topics}
            log_offset = self.steps.stage(mark, self._journal.parked(messages))
        except MetaqError as error:
            self.branches.failed(key)
            raise XaError(XaCode.RBOTHER, f"the branch is rolled back, it cannot be prepared: {error}") from error
        place = packed(log_offset, size)
        self._undecided.reserve(place)
        succeeded = partial(self._undecided.prepared, key, place, messages, size, topics)
        return self.steps.begun(log_offset, succeeded, partial(self._undecided.refused, key, place), XaCode.RBOTHER)

    def _check_room(self, size: int) -> None:
        """Raise unless the disk has room for the parked and later the real messages, beside the room reserved for others."""
        store, now_s = self._store, self._store.clock.monotonic()
        store.check_writable()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s, self._available = now_s, store.disk.usage(store.directory).available
        needed = 2 * size + store.reserved_bytes + store.settings.retention.least_free_bytes
        if self._available < needed:
            raise XaError(XaCode.RBOTHER, f"{self._available} bytes are free on the disk, {needed} are needed")

    def commit(self, key: str, *, one_phase: bool) -> Work[Held]:
        """Begin to commit. The caller gets the messages, then calls ``store_commit`` or ``branches.failed``."""
        return self.branches.commit(key, one_phase=one_phase)

    def at_hand(self, work: Work[Held]) -> Sequence[Held]:
        """Return the messages to commit that are in memory; empty when they must be read (``messages``), or there are none."""
        return work.messages if work.place is None else self._undecided.recent.take(work.place)

    def messages(self, work: Work[Held], read: Read) -> Sequence[Held]:
        """Return the messages to commit. ``CorruptRecord`` when they are damaged; raises ``ColdRead`` as ``read`` does."""
        return work.messages if work.place is None else self._journal.messages(offset_of(work.place), read)

    def store_commit(self, key: str, work: Work[Held], messages: Sequence[Held]) -> Step:
        """Stage the messages. ``XaError`` when that fails: a prepared branch stays as it was, an open one is rolled back."""
        return self._decide(key, work, {"do": "commit", "key": key, "messages": len(messages)}, messages)

    def rollback(self, key: str) -> Step | None:
        """Stage the rollback of a prepared branch; ``None`` when the branch was open: it is gone."""
        work = self.branches.rollback(key)
        return None if work.place is None else self._decide(key, work, {"do": "rollback", "key": key}, ())

    def decide(self, key: str, outcome: Decision) -> Work[Held]:
        """Begin an operator's decision on a prepared branch; ``store_decision`` or ``branches.failed`` must follow."""
        return self.branches.decide(key, outcome)

    def store_decision(self, key: str, work: Work[Held], outcome: Decision, messages: Sequence[Held]) -> Step:
        """Stage an operator's decision; ``messages`` are those of the branch, which only a commit needs."""
        mark = {"do": "heuristic", "key": key, "outcome": outcome.value, "topics": self._undecided.topics.get(key)}
        return self._decide(key, work, mark, messages if outcome is Decision.COMMIT else ())

    def forget(self, key: str) -> Step | None:
        """Stage that an operator's decision is forgotten; ``None`` when there is none."""
        if not self.branches.forget(key):
            return None
        log_offset = self._stage(key, {"do": "forget", "key": key}, (), XaCode.RMFAIL)
        succeeded = partial(self._undecided.forgotten, key)
        return self.steps.begun(log_offset, succeeded, partial(self.branches.failed, key), XaCode.RMFAIL)

    def _decide(self, key: str, work: Work[Held], mark: dict[str, Any], messages: Sequence[Held]) -> Step:
        refusal = XaCode.RBOTHER if work.place is None else XaCode.RMFAIL
        log_offset = self._stage(key, mark, messages, refusal)
        succeeded = partial(self._decided, key, self._store.log.staged_end)
        return self.steps.begun(log_offset, succeeded, partial(self.branches.failed, key), refusal)

    def _stage(self, key: str, mark: dict[str, Any], messages: Sequence[Held], refusal: XaCode) -> int:
        """Stage a mark and its messages; return the log offset of the mark."""
        try:
            if refusal is XaCode.RBOTHER:  # room is reserved only for prepared branches
                self._store.check_writable()
            self._store.check_appendable()
            return self.steps.stage(mark, self._journal.real(messages))
        except MetaqError as error:
            self.branches.failed(key)
            state = "is rolled back" if refusal is XaCode.RBOTHER else "stays as it was"
            raise XaError(refusal, f"the branch {state}: {error}") from error

    def _decided(self, key: str, end: int) -> None:
        place = self.branches.place(key)  # it may have moved since the decision began
        if place is not None:
            self.keeping.leave(place, end)
        self._undecided.decided(key)

    def store_local(self, key: str, messages: Sequence[Held]) -> Step | None:
        """Stage the messages of a local transaction, which has ended already; ``None`` when there are none."""
        if not messages:
            return None
        self._store.check_writable()
        mark = {"do": "commit", "key": key, "messages": len(messages)}
        log_offset = self.steps.stage(mark, self._journal.real(messages))
        return self.steps.begun(log_offset, nothing, nothing, None)

    def stored_late(self, step: Step) -> None:
        """Take a step as succeeded that is in the log, but not as safe as promised: a power cut or a new master may drop it."""
        step.succeeded()
        self.doubtful_end = max(self.doubtful_end, step.end)
        if step.refusal is XaCode.RMFAIL:  # it decides about a branch that the log has
            self.returning_end = max(self.returning_end, step.end)

    def in_doubt(self, step: Step) -> None:
        """Take a step as failed that may be in the log all the same: only the next start finds out."""
        step.failed()
        self.doubtful_end = NEVER_SAFE

    # -- looking ------------------------------------------------------------------------------------------------------

    def prepared(self, place: int, read: Read) -> Prepared:
        """Return the facts of the prepared branch with this place. ``CorruptRecord`` when damaged, ``ColdRead`` as ``read``."""
        return self._journal.prepared(offset_of(place), read)

    def topics(self, key: str) -> Topics | None:
        """Return the topics of a branch's messages; ``None`` when they are not known (``learn_topics``)."""
        messages = self.branches.messages(key)
        return self._undecided.topics.get(key) if messages is None else topics_of(messages)

    @property
    def lacks_topics(self) -> bool:
        """True while an older version's branches are there whose topics are not known yet (``learn_topics``)."""
        return bool(self._undecided.topics.unknown)

    def learn_topics(self, read: Read) -> None:
        """Find missing topics of branches in their messages; those of damaged ones stay unknown. ``ColdRead`` as ``read``."""
        for key in tuple(self._undecided.topics.unknown):
            place, topics = self.branches.place(key), None
            try:
                topics = None if place is None else topics_of(self._journal.messages(offset_of(place), read))
            except CorruptRecord as error:
                logger.error("topics of a branch not known, only administrators finish it key=%s reason=%s", key, error)
            if self.branches.place(key) == place:  # otherwise it was moved meanwhile, and the move noted them
                self._undecided.topics.note(key, topics)
