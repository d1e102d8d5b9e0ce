"""The transactions of one broker: the branch table over its store.

All state that must survive is in the log, as groups of records (``metaq.tx.journal``) that are staged here and appended at the
end of the turn like every put. So a step that stores something has two halves: it is staged, and its *outcome* follows when the
append is as durable as promised, or has failed. In between the branch is busy.

``config/transactions.json`` holds the undecided branches, each with the log offset of its mark and the bytes reserved for it,
their topics, and the ordinal of the first mark whose outcome was open when the snapshot was taken::

    {"crc32c":"…","log":[1,0,0,81920],"next":204,"ids":1880000000000000000,"prepared":[["XID:1:0a:0b:app",8123904,1024]],
     "heuristic":[["XID:1:0a:0c:app","commit"]],"topics":{"XID:1:0a:0b:app":["orders"],"XID:1:0a:0c:app":["orders"]}}

A start reads the snapshot and applies the marks from there on; to apply a mark that it covers changes nothing. A snapshot is
written once the log is durable up to its end when the snapshot was taken: ``log``. ``ids`` is beyond any id that is given out
before the next snapshot, unless the clock goes back; the marks also say how far ids were.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.errors import BadRequest, CorruptRecord, MetaqError
from metaq.message import TopicPartition
from metaq.store.copies.epochs import Epochs
from metaq.store.copies.snapshots import moment, read_snapshot
from metaq.store.files.documents import write_document
from metaq.store.files.filecache import Read, Run, read_here, run_here
from metaq.store.messagestore import MessageStore
from metaq.store.recordgroups import put_together
from metaq.tx.branches import Branches, Outcome, Room, Work, XaCode, XaError
from metaq.tx.journal import MARKS, TOPIC, Held, Journal, Prepared, content_of
from metaq.tx.topics import BranchTopics, Topics, topics_of

logger = logging.getLogger(__name__)

SNAPSHOT: Final = "transactions.json"
READ_BYTES: Final = 256 * 1024
KEPT_A_ROUND: Final = 64 << 20
"""About how many bytes of branches one round stores again before retention deletes their segments."""
RECENT_BYTES: Final = 8 * 1024 * 1024
LOOK_S: Final = 0.1
"""The age up to which a measurement of free space serves a vote: a third of ``least_free_bytes`` may be gone since."""
IDS_AHEAD: Final = 1 << 40
_ID_SHIFT: Final = 20
_MARKS: Final = TopicPartition(TOPIC, MARKS)
_SIZE_BITS: Final = 24
_KIB: Final = 1024


class _Staged(NamedTuple):
    """A mark that was staged with its group."""

    number: int
    size: int
    """Bytes of the group."""
    end: Callable[[int], None]
    """To be called with the number once the outcome is known."""


class Step:
    """A step that is staged; the caller calls either ``succeeded`` or ``failed``, once."""

    __slots__ = ("_failed", "_staged", "_succeeded", "refusal", "size")

    def __init__(
        self, staged: _Staged, succeeded: Callable[[], None], failed: Callable[[], None], refusal: XaCode | None
    ) -> None:
        self._staged = staged
        self._succeeded = succeeded
        self._failed = failed
        self.refusal = refusal
        """The code to answer when nothing is stored; ``None`` for a local transaction, which has no codes."""
        self.size = staged.size
        """The bytes in the log that wait for the outcome."""

    def succeeded(self) -> None:
        self._staged.end(self._staged.number)
        self._succeeded()

    def failed(self) -> None:
        self._staged.end(self._staged.number)
        self._failed()


class _Snapshot(NamedTuple):
    content: dict[str, Any]
    log_end: int
    needed_from: int
    """The log offset of the first mark that it does not cover."""
    version: int


class _Recent:
    """Messages that were parked recently: they need not be read again when their branch commits soon, as most do."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[list[Held], int]] = {}  # by place
        self._bytes = 0

    def add(self, place: int, messages: list[Held], size: int) -> None:
        self._messages[place] = messages, size
        self._bytes += size
        while self._bytes > RECENT_BYTES:
            self.take(next(iter(self._messages)))

    def take(self, place: int) -> list[Held]:
        """Remove and return the messages of a branch; empty when they must be read."""
        messages, size = self._messages.pop(place, ([], 0))
        self._bytes -= size
        return messages


class Transactions:
    """All XA branches, and their undecided records in the log. It knows no event loop: the caller appends and waits."""

    def __init__(self, store: MessageStore, room: Room, store_host: bytes, folder: Path) -> None:
        """Find the undecided branches from the snapshot, which is in ``folder``, and the log."""
        self.branches: Branches[Held] = Branches(room)
        self._store, self._epochs = store, Epochs(store)
        self._journal = Journal(store, store_host)
        self._path = folder / SNAPSHOT
        self._version = self._saved_version = 0
        self._begun = 0
        self._open_steps: dict[int, tuple[int, int]] = {}  # number of a step → ordinal and log offset of its mark
        self._uncovered = store.log.end  # log offset of the first mark that the written snapshot may not cover
        self._waiting: _Snapshot | None = None  # until the log is durable up to it
        self._left: deque[tuple[int, int]] = deque()  # log offsets: an end, and a place needed until that is durable
        self._unreadable: set[int] = set()  # places of damaged branches; no segment is kept for them
        self._recent = _Recent()
        self._topics = BranchTopics()
        self._looked_s, self._available = -LOOK_S, 0
        self._next_id = store.clock.now_ms() << _ID_SHIFT
        self._recover()

    # -- opening ------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        content, problems = read_snapshot(self._store.disk, self._path, self._epochs)
        for problem in problems:
            logger.error("snapshot of transactions damaged, made good from the log problem=%s", problem)
        content = content or {"next": 0, "ids": 0, "prepared": [], "heuristic": []}
        following: int = content["next"]
        topics = content.get("topics", {})  # older versions wrote none
        if following > self._next_mark:
            logger.error("the log has lost marks of transactions that the snapshot covers, the other marks count")
            following, content["prepared"] = 0, []
        self._next_id = max(self._next_id, content["ids"])
        for key, outcome in content["heuristic"]:  # before a branch of the same name that was prepared later
            self.branches.restore_heuristic(key, Outcome(outcome))
            self._topics.note(key, topics.get(key))
        for key, place, size in content["prepared"]:
            self._restored(key, _packed(place, size), topics.get(key))
        queue = self._store.queues.get(_MARKS)
        if queue is not None:
            first = max(following, self._store.first(queue, read_here)[0])
            for stored in self._store.records(queue, first, READ_BYTES, read_here):
                if stored is not None:
                    self._version = 1
                    self._uncovered = min(self._uncovered, stored.log_offset)
                    self._apply(content_of(stored), stored.log_offset)
        self._drop_aged()

    @property
    def _next_mark(self) -> int:
        queue = self._store.queues.get(_MARKS)
        return 0 if queue is None else queue.next

    def _drop_aged(self) -> None:
        """Drop branches of an old snapshot whose segments are gone: undecided ones would have been stored again before."""
        begin = self._store.log.begin
        for key in [key for key, value in self.branches.places() if _offset(value) < begin]:
            logger.warning("a branch was decided long ago, or lost with its damaged messages key=%s", key)
            self._release(self.branches.place(key))
            self.branches.restore_decided(key)
            self._forget_topics(key)

    def _apply(self, mark: dict[str, Any], log_offset: int) -> None:
        key = mark["key"]
        self._next_id = max(self._next_id, mark["ids"])
        match mark["do"]:
            case "prepare":
                self._restored(key, _packed(log_offset, mark["bytes"]), mark.get("topics"))
            case "commit" | "rollback":
                self._release(self.branches.place(key))
                self.branches.restore_decided(key)
            case "heuristic":
                self._release(self.branches.place(key))
                self.branches.restore_heuristic(key, Outcome(mark["outcome"]))
                self._topics.note(key, mark.get("topics"))
            case "forget":
                self.branches.restore_forgotten(key)
        self._forget_topics(key)

    def _restored(self, key: str, value: int, topics: Sequence[str] | None) -> None:
        self._release(self.branches.place(key))
        self.branches.restore_prepared(key, value)
        self._topics.restore(key, topics)
        self._store.reserved_bytes += _bytes(value)

    def _release(self, value: int | None) -> None:
        if value is not None:
            self._store.reserved_bytes -= _bytes(value)

    # -- topics -------------------------------------------------------------------------------------------------------

    def topics(self, key: str) -> Topics | None:
        """Return the topics of a branch's messages; ``None`` when they are not known (``learn_topics``)."""
        messages = self.branches.messages(key)
        return self._topics.get(key) if messages is None else topics_of(messages)

    @property
    def lacks_topics(self) -> bool:
        """True while an older version's branches are there whose topics are not known yet (``learn_topics``)."""
        return bool(self._topics.unknown)

    def learn_topics(self, read: Read) -> None:
        """Find missing topics of branches in their messages; those of damaged ones stay unknown. ``ColdRead`` as ``read``."""
        for key in tuple(self._topics.unknown):
            value, topics = self.branches.place(key), None
            try:
                topics = None if value is None else topics_of(self._journal.messages(_offset(value), read))
            except CorruptRecord as error:
                logger.error("topics of a branch not known, only administrators finish it key=%s reason=%s", key, error)
            if self.branches.place(key) == value:  # otherwise it was moved meanwhile, and the move noted them
                self._topics.note(key, topics)

    def _forget_topics(self, key: str) -> None:
        if not self.branches.is_kept(key):
            self._topics.forget(key)

    # -- steps --------------------------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """Return a text id for a message without a place yet: negative, and never given out before."""
        return self.take_ids(1) - 1

    def take_ids(self, count: int) -> int:
        """Reserve ``count`` ids, not all of which need be used; return the number above them: they are it − 1, it − 2 …"""
        first = -self._next_id
        self._next_id += count
        return first

    def prepare(self, key: str) -> Step | None:
        """Stage the vote and the messages; ``None``: the branch was empty, and is gone. ``XaError`` (RBOTHER): rolled back."""
        messages = self.branches.prepare(key)
        if not messages:
            return None
        size, topics = self.branches.size(key), topics_of(messages)
        try:
            self._check_room(size)
            counts = {"messages": len(messages), "bytes": size}
            mark = self._journal.mark({"do": "prepare", "key": key, **counts, "topics": topics}, self._next_id)
            place = put_together(self._store, mark, self._journal.parked(messages))[0]
        except MetaqError as error:
            self.branches.refused(key)
            raise XaError(XaCode.RBOTHER, f"the branch is rolled back, it cannot be prepared: {error}") from error
        value = _packed(place, size)
        self._store.reserved_bytes += _bytes(value)
        succeeded = partial(self._prepared, key, value, messages, size, topics)
        failed = partial(self._refused, key, value)
        return Step(self._staged(place), succeeded, failed, XaCode.RBOTHER)

    def _prepared(self, key: str, value: int, messages: list[Held], size: int, topics: Topics) -> None:
        self._recent.add(value, messages, size)
        self.branches.prepared(key, value)
        self._topics.note(key, topics)

    def _refused(self, key: str, value: int) -> None:
        self._release(value)
        self.branches.refused(key)

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
        return work.messages if work.place is None else self._recent.take(work.place)

    def messages(self, work: Work[Held], read: Read) -> Sequence[Held]:
        """Return the messages to commit. ``CorruptRecord`` when they are damaged; raises ``ColdRead`` as ``read`` does."""
        return work.messages if work.place is None else self._journal.messages(_offset(work.place), read)

    def store_commit(self, key: str, work: Work[Held], messages: Sequence[Held]) -> Step:
        """Stage the messages. ``XaError`` when that fails: a prepared branch stays as it was, an open one is rolled back."""
        return self._decide(key, work, {"do": "commit", "key": key, "messages": len(messages)}, messages)

    def rollback(self, key: str) -> Step | None:
        """Stage the rollback of a prepared branch; ``None`` when the branch was open: it is gone."""
        work = self.branches.rollback(key)
        return None if work.place is None else self._decide(key, work, {"do": "rollback", "key": key}, ())

    def decide(self, key: str, outcome: Outcome) -> Work[Held]:
        """Begin an operator's decision on a prepared branch; ``store_decision`` or ``branches.failed`` must follow."""
        return self.branches.decide(key, outcome)

    def store_decision(self, key: str, work: Work[Held], outcome: Outcome, messages: Sequence[Held]) -> Step:
        """Stage an operator's decision; ``messages`` are those of the branch, which only a commit needs."""
        mark = {"do": "heuristic", "key": key, "outcome": outcome.value, "topics": self._topics.get(key)}
        return self._decide(key, work, mark, messages if outcome is Outcome.COMMIT else ())

    def forget(self, key: str) -> Step | None:
        """Stage that an operator's decision is forgotten; ``None`` when there is none."""
        if not self.branches.forget(key):
            return None
        place = self._stage(key, {"do": "forget", "key": key}, (), XaCode.RMFAIL)
        return Step(self._staged(place), partial(self._forgotten, key), partial(self.branches.failed, key), XaCode.RMFAIL)

    def _forgotten(self, key: str) -> None:
        self.branches.done(key)
        self._forget_topics(key)

    def _decide(self, key: str, work: Work[Held], mark: dict[str, Any], messages: Sequence[Held]) -> Step:
        refusal = XaCode.RBOTHER if work.place is None else XaCode.RMFAIL
        place = self._stage(key, mark, messages, refusal)
        succeeded = partial(self._decided, key, self._store.log.staged_end)
        return Step(self._staged(place), succeeded, partial(self.branches.failed, key), refusal)

    def _stage(self, key: str, mark: dict[str, Any], messages: Sequence[Held], refusal: XaCode) -> int:
        """Stage a mark and its messages; return the log offset of the mark."""
        try:
            if refusal is XaCode.RBOTHER:  # room is reserved only for prepared branches
                self._store.check_writable()
            self._store.check_healthy()
            return put_together(self._store, self._journal.mark(mark, self._next_id), self._journal.real(messages))[0]
        except MetaqError as error:
            self.branches.failed(key)
            state = "is rolled back" if refusal is XaCode.RBOTHER else "stays as it was"
            raise XaError(refusal, f"the branch {state}: {error}") from error

    def store_local(self, key: str, messages: Sequence[Held]) -> Step | None:
        """Stage the messages of a local transaction, which has ended already; ``None`` when there are none."""
        if not messages:
            return None
        self._store.check_writable()
        mark = self._journal.mark({"do": "commit", "key": key, "messages": len(messages)}, self._next_id)
        place = put_together(self._store, mark, self._journal.real(messages))[0]
        return Step(self._staged(place), _nothing, _nothing, None)

    def _decided(self, key: str, end: int) -> None:
        place = self.branches.place(key)  # it may have moved since the decision began
        if place is not None:
            self._release(place)
            self._leave(place, end)
            self._recent.take(place)
        self.branches.done(key)
        self._forget_topics(key)

    def _leave(self, value: int, end: int) -> None:
        """Keep a place until the log is durable up to ``end``: before that a power cut could undo the record that freed it."""
        self._forget_left()
        if end > self._store.durable_end:
            self._left.append((end, _offset(value)))

    def _forget_left(self) -> None:
        while self._left and self._left[0][0] <= self._store.durable_end:
            self._left.popleft()

    def _staged(self, place: int) -> _Staged:
        """Note the mark that was just staged, at the log offset ``place``, as a step whose outcome is open."""
        self._begun += 1
        self._open_steps[self._begun] = self._next_mark - 1, place
        return _Staged(self._begun, self._store.log.staged_end - place, self._end)

    def _end(self, number: int) -> None:
        del self._open_steps[number]
        self._version += 1

    # -- looking ------------------------------------------------------------------------------------------------------

    def prepared(self, value: int, read: Read) -> Prepared:
        """Return the facts of the prepared branch with this place. ``CorruptRecord`` when damaged, ``ColdRead`` as ``read``."""
        return self._journal.prepared(_offset(value), read)

    # -- before retention ---------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that an undecided branch or the next snapshot still needs; ``None`` without one."""
        self._forget_left()
        places = (_offset(value) for _, value in self.branches.places() if value not in self._unreadable)
        covered = self._version == self._saved_version and not self._open_steps
        marks = () if covered else (self._uncovered,)
        return min(chain(places, (place for _, place in self._left), marks), default=None)

    def keep(self, before: int, read: Read) -> Iterator[Step]:
        """Stage branches that lie before a log offset again, up to a limit of bytes: their segments are about to be deleted.

        A damaged branch is not kept: it is lost with its segment, and can only be rolled back until then.
        """
        room = KEPT_A_ROUND
        for key, value in [(key, value) for key, value in self.branches.places() if _offset(value) < before]:
            if room <= 0 or self._store.failure is not None:
                return
            if value in self._unreadable:
                continue
            try:
                step = self._kept(key, value, read)
            except CorruptRecord as error:
                self._unreadable.add(value)
                logger.error("a prepared branch cannot be kept, it can only be rolled back key=%s reason=%s", key, error)
            except BadRequest as error:
                logger.error("a prepared branch cannot be put again, its segment stays key=%s reason=%s", key, error)
            else:
                if step is not None:
                    room -= _bytes(value)
                    yield step

    def _kept(self, key: str, value: int, read: Read) -> Step | None:
        messages = self._journal.messages(_offset(value), read)
        since_ms = self._journal.prepared(_offset(value), read).since_ms
        if self.branches.is_busy(key) or self.branches.place(key) != value:  # decided while this greenlet read
            return None
        counts, topics = {"messages": len(messages), "bytes": _bytes(value)}, topics_of(messages)
        content = {"do": "prepare", "key": key, **counts, "topics": topics, "since_ms": since_ms}
        mark = self._journal.mark(content, self._next_id)
        place = put_together(self._store, mark, self._journal.parked(messages))[0]
        moved = _packed(place, _bytes(value))
        succeeded = partial(self._moved, key, value, moved, self._store.log.staged_end, topics)
        return Step(self._staged(place), succeeded, _nothing, XaCode.RMFAIL)

    def _moved(self, key: str, value: int, moved: int, end: int, topics: Topics) -> None:
        # a decision in progress may still read it at its old place
        if self.branches.place(key) == value and not self.branches.is_busy(key):
            self._leave(value, end)
            self._recent.take(value)
            self.branches.move(key, moved)
            self._topics.note(key, topics)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def save(self, run: Run) -> None:
        """Take a snapshot if something has changed, and write it once the log is durable up to it. Call it at intervals."""
        if self._store.failure is not None:
            return
        if self._waiting is None and self._version != self._saved_version:
            self._waiting = self._taken()
        waiting = self._waiting
        if waiting is not None and self._store.durable_end >= waiting.log_end:
            self._write(waiting, run)
            self._waiting = None

    def save_last(self, run: Run = run_here) -> None:
        """Sync the log and write a snapshot, at an orderly stop, when nothing else writes to the store any more."""
        if self._store.failure is None:
            self._store.sync(run)
            self._write(self._taken(), run)

    def _taken(self) -> _Snapshot:
        end = self._store.log.end
        following, needed_from = min(self._open_steps.values(), default=(self._next_mark, end))
        content = {
            **moment(self._epochs, end),
            "next": following,
            "ids": self._next_id + IDS_AHEAD,
            "prepared": [[key, _offset(value), _bytes(value)] for key, value in self.branches.places()],
            "heuristic": [[key, outcome.value] for key, outcome in self.branches.heuristics()],
            "topics": self._topics.all(),
        }
        return _Snapshot(content, end, needed_from, self._version)

    def _write(self, snapshot: _Snapshot, run: Run) -> None:
        disk = self._store.disk
        run(lambda: disk.make_directories(self._path.parent))
        run(lambda: write_document(disk, self._path, snapshot.content))
        self._saved_version, self._uncovered = snapshot.version, snapshot.needed_from


def _nothing() -> None:
    """Do nothing: the outcome changes no branch."""


def _packed(log_offset: int, size: int) -> int:
    """Return a branch's log offset and its reserved room in KiB as one number, which saves memory for 100,000 branches."""
    return log_offset << _SIZE_BITS | min((size + _KIB - 1) // _KIB, (1 << _SIZE_BITS) - 1)


def _offset(value: int) -> int:
    return value >> _SIZE_BITS


def _bytes(value: int) -> int:
    return (value & (1 << _SIZE_BITS) - 1) * _KIB
