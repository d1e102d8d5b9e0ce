"""The persistence of consumer offsets: changes in the log twice a second, and a snapshot every few seconds.

Changes are appended every ``APPEND_S`` to the internal topic ``METAQ_SYS_OFFSETS``, as one message (several when more than
``MOST_CHANGES`` offsets changed), so every replica that has the log has the offsets. The body is JSON: topic and group →
partition → the offset, -1 for one that was removed::

    {"orders@billing":{"0":17,"3":5},"audit@billing":{"0":-1}}

``config/consumerOffset.json`` holds the whole table, and the ordinal of the first such message that it does not cover::

    {"crc32c":"…","log":[1,0,0,81920],"next":204,"offsetTable":{"orders@billing":{"0":17,"3":5}}}

A start takes the snapshot and applies the messages after it. A snapshot is made only while no change is on its way into the
log, so all messages before ``next`` are older than the snapshot, and all others are newer.

Retention removes the offsets of idle groups from the log, so a snapshot that is ahead of the log
(``metaq.store.copies.snapshots``) is not ignored: it counts up to where the log is still the one that it was made with. After
that place other messages may have taken the same queue offsets, and those must not pass for consumed.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from metaq.engine.context import Context
from metaq.engine.tables.topics import FOLDER
from metaq.engine.turn import Turns
from metaq.engine.writing import internal, note, stage
from metaq.errors import DiskFull, MetaqError, Overloaded
from metaq.message import OFFSETS_TOPIC, GroupPartition, TopicPartition
from metaq.protocol.record import decode_record
from metaq.store.copies.snapshots import made_end, moment, ordinal_at, shared_end
from metaq.store.files.documents import read_document, write_document
from metaq.store.files.filecache import Run, read_here
from metaq.store.messagestore import MessageStore

logger = logging.getLogger(__name__)

APPEND_S: Final = 0.5
MOST_BACK_S: Final = 1.0
"""A failover may lose the commits of this many seconds: a master refuses commits while its replicas lack an older one.
Rejected: to answer each commit when the replicas have it, which would take a record in the log for each commit."""
RETRY_MS: Final = round(APPEND_S * 1000)
MOST_CHANGES: Final = 4096
"""The most offsets in one message."""
CHANGE_BYTES: Final = 300
"""The most bytes that one offset takes in a message: topic and group have up to 127 characters each."""
RECORD_BYTES: Final = 1024
"""Bytes allowed for the rest of a message beside its body."""
READ_BYTES: Final = 256 * 1024
OFFSETS: Final = "consumerOffset.json"
SEPARATOR: Final = "@"
"""Stands between topic and group; neither name can contain it."""

_KEY: Final = TopicPartition(OFFSETS_TOPIC, 0)


class OffsetLog:
    """The log and snapshots of one broker's consumer offsets."""

    def __init__(self, context: Context, turns: Turns, run: Run) -> None:
        """Load the offsets from the snapshot and the log."""
        self._context = context
        self._store = context.store
        self._offsets = context.offsets
        self._turns = turns
        self._run = run
        self._path = _path(context)
        self._most = min(MOST_CHANGES, (context.settings.segment_bytes - RECORD_BYTES) // CHANGE_BYTES)
        self._on_their_way = 0  # number of messages that are staged and not yet stored
        self._saved_version = self._offsets.version
        self._load()
        self._taken_at = self._kept_at = self._store.clock.monotonic()  # when the staged, and stored, changes were taken
        self._logged_end = self._store.log.end  # all logged changes are before it, also those of a former master

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        is_ahead = load_offsets(self._context)
        self._take_back()
        if is_ahead:  # other messages will get the ordinals that it covers and the log lacks, but not before it is rewritten
            content = self._content()
            self._store.log.owed.do(lambda: self._put_down(content), self._run)

    def _take_back(self) -> None:
        """Move offsets back that lie after the end of their partition.

        A power cut may take messages that were consumed already. The group must then get the messages that take their places.
        """
        beyond = []
        for group, topic, offsets in self._offsets:
            for partition, offset in offsets.items():
                queue = self._store.queues.get(TopicPartition(topic, partition))
                end = 0 if queue is None else queue.next
                if offset > end:
                    beyond.append((GroupPartition(group, topic, partition), offset, end))
        for place, offset, end in beyond:
            self._offsets.reset(*place, end)
            logger.warning(
                "offset taken back to where its partition ends group=%s topic=%s partition=%d offset=%d end=%d",
                *place,
                offset,
                end,
            )

    # -- appending ----------------------------------------------------------------------------------------------------

    def append(self) -> None:
        """Put the changed offsets into the log, unless the last changes are still on their way; called every ``APPEND_S``.

        They have room at ``refuse_ratio``, too, so that consumers can finish what they have.
        """
        if self._store.appendable and not self._on_their_way:
            with suppress(DiskFull):  # they are given back: the next call tries again
                self._stage()

    def check(self) -> None:
        """Raise ``Overloaded`` when the replicas lack offsets of ``MOST_BACK_S`` ago, and ``DiskFull`` when the log lacks them.

        All offsets committed before ``_kept_at`` are in the log at least. The replicas may lack some of those: changes that a
        new master has found in its log, and changes that waited for the replicas in vain. ``is_copied`` looks for these. Where
        nothing waits for replicas, nothing is refused.
        """
        if not self._turns.is_copied(self._logged_end):
            raise Overloaded("the replicas do not yet have the offsets that are in the log", retry_after_ms=RETRY_MS)
        now = self._store.clock.monotonic()
        if self._turns.copies is None or not (self._on_their_way or self._offsets.changed):
            self._kept_at = now
        elif now - self._kept_at > MOST_BACK_S:
            if (full := self._store.full) is not None:
                raise DiskFull(str(full))
            raise Overloaded("the replicas do not yet have the offsets that were committed before", retry_after_ms=RETRY_MS)

    def _stage(self) -> None:
        self._taken_at = self._store.clock.monotonic()
        waiting = self._offsets.take_changes()
        try:
            while waiting:
                portion = dict(islice(waiting.items(), self._most))
                stage(self._context, internal(self._context, OFFSETS_TOPIC, orjson.dumps(rows_of(portion.items()))))
                self._on_their_way += 1
                note(self._turns, partial(self._stored, portion, self._store.log.staged_end))
                waiting = dict(islice(waiting.items(), self._most, None))
        finally:
            if waiting:
                self._offsets.give_back(waiting)
                self._taken_at = self._kept_at

    def _stored(self, changes: Mapping[GroupPartition, int], end: int, error: MetaqError | None) -> None:
        """Note that changes are in the log before ``end``, even if the replicas were late; or give them back on an error."""
        self._on_their_way -= 1
        if error is not None:
            self._offsets.give_back(changes)
            self._taken_at = self._kept_at
            return
        self._logged_end = end
        if not self._on_their_way:
            self._kept_at = self._taken_at

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a snapshot if an offset has changed since the last one, unless changes are on their way into the log."""
        if self._store.failure is None and not self._on_their_way and self._offsets.version != self._saved_version:
            self._write(self._run)

    def save_last(self) -> None:
        """Put the last changes into the log and write a snapshot, at an orderly stop when nothing else writes any more."""
        if self._store.appendable:
            with suppress(DiskFull):  # the snapshot has them
                self._stage()
                self._store.append()
                self._store.sync(self._run)
        if self._offsets.version != self._saved_version:
            self._write(self._run)

    def _write(self, run: Run) -> None:
        version, content = self._offsets.version, self._content()
        run(lambda: self._put_down(content))
        self._saved_version = version

    def _content(self) -> dict[str, Any]:
        queue = self._store.queues.get(_KEY)
        rows = {_key(topic, group): _numbered(offsets) for group, topic, offsets in self._offsets}
        now = moment(self._context.epochs, self._store.log.end)
        return {**now, "next": 0 if queue is None else queue.next, "offsetTable": rows}

    def _put_down(self, content: dict[str, Any]) -> None:
        self._store.disk.make_directories(self._path.parent)
        write_document(self._store.disk, self._path, content)


def load_offsets(context: Context) -> bool:
    """Apply the snapshot, then the messages after it; return whether the snapshot is ahead of the log."""
    store = context.store
    content, problems = read_document(store.disk, _path(context))
    for problem in problems:
        logger.error("snapshot of consumer offsets damaged, made good from the log problem=%s", problem)
    queue = store.queues.get(_KEY)
    end = 0 if queue is None else queue.next
    covered, is_ahead = 0, False
    if content is not None:
        covered, offsets = content["next"], changes_of(content["offsetTable"])
        shared = shared_end(context.epochs, content)
        is_ahead = covered > end or shared < made_end(content)
        if shared < made_end(content):
            covered = 0 if queue is None else min(covered, ordinal_at(queue, shared))
            offsets = {place: _within(store, place, offset, shared) for place, offset in offsets.items()}
        context.offsets.replay(offsets)
    if queue is not None and covered < end:
        first = max(covered, store.first(queue, read_here)[0])
        for stored in store.records(queue, first, READ_BYTES, read_here):
            if stored is not None:
                record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
                context.offsets.replay(changes_of(orjson.loads(record.body)))
    return is_ahead


def _within(store: MessageStore, place: GroupPartition, offset: int, log_end: int) -> int:
    """Return an offset, but at most the end that its partition had when the log ended at ``log_end``."""
    queue = store.queues.get(TopicPartition(place.topic, place.partition))
    return 0 if queue is None else min(offset, ordinal_at(queue, log_end))


def _path(context: Context) -> Path:
    return context.settings.data / FOLDER / OFFSETS


def rows_of(changes: Iterable[tuple[GroupPartition, int]]) -> dict[str, dict[str, int]]:
    """Return changes in the form that a message holds."""
    rows: dict[str, dict[str, int]] = {}
    for place, offset in changes:
        rows.setdefault(_key(place.topic, place.group), {})[str(place.partition)] = offset
    return rows


def changes_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[GroupPartition, int]:
    """Return the changes that the body of a message, or the table of a snapshot, holds."""
    return dict(_changes(rows))


def _changes(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[GroupPartition, int]]:
    for key, offsets in rows.items():
        topic, _, group = key.partition(SEPARATOR)
        for partition, offset in offsets.items():
            yield GroupPartition(group, topic, int(partition)), offset


def _key(topic: str, group: str) -> str:
    return f"{topic}{SEPARATOR}{group}"


def _numbered(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): offset for partition, offset in offsets.items()}
