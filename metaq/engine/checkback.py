"""Checks with producers about undecided transactional messages, request 39 (specs: remoting protocol, section 5.5).

A half message that has been undecided for ``check_after_ms``, or for the time that it names itself, is sent to one live
producer of its group every ``check_interval_ms``; the producer answers with its decision (37). After ``max_checks`` checks, or
when it is older than ``keep_hours``, the message is given up: it is moved to ``TRANS_CHECK_MAX_TIME_TOPIC``, from where an
administrator may bring it back (323).

A check also counts when no producer of the group is connected, as in RocketMQ's broker: otherwise the messages of a group that
never comes back would be checked until they age out. It does not count when producers are connected but none of them reads what
it is sent.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Final, NamedTuple

from metaq.engine.halfmessages import HalfMessages, pairs_of
from metaq.engine.tables.consumergroup import Member
from metaq.engine.writing import again, note, stage
from metaq.errors import MetaqError
from metaq.message import GIVEN_UP_TOPIC, HALF_TOPIC
from metaq.protocol import properties
from metaq.protocol.ids import offset_id_of
from metaq.protocol.record import (
    CHECKSUM_SIZE,
    HEADER_SIZE,
    Record,
    RecordWriter,
    checksum_property,
    constant_middle,
    decode_record,
    record_tail,
)
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import CheckTransaction, encode_header
from metaq.store.files.filecache import Run, read_through
from metaq.store.log.retention import HOUR_MS
from metaq.tx.halves import Fate, Half, Origin, origin_of

logger = logging.getLogger(__name__)

ROUNDS: Final = 4
"""Rounds in a check interval: a check is late by at most a quarter of the interval, and by at most ``LATEST_S``."""
LATEST_S: Final = 1.0
MOST_ASKED: Final = 1000
"""Checks sent in one round. A Java producer queues 2,000 of them and drops the rest."""
MOST_READ: Final = 4 * MOST_ASKED
"""Messages read in one round, most of which may be of groups without producers."""
LOOKED_AT: Final = 4096
"""Undecided messages examined before other greenlets run, about 2 ms of work."""
AT_ONCE: Final = 32
"""Messages read from the log before other greenlets run."""


class _Moving(NamedTuple):
    """Messages that were put into the log again and may not be durable yet."""

    oldest: int
    """The lowest log offset that is needed until they are durable."""
    end: int
    """The log offset up to which the log must be durable first."""


class CheckBack:
    """Checks and gives up half messages that stay undecided, and keeps retention from deleting them."""

    def __init__(self, messages: HalfMessages, rest: Callable[[], None], ending: Callable[[], bool], run: Run) -> None:
        """Create it; ``rest`` lets other greenlets run, ``run`` makes a disk call while they do.

        ``ending`` says whether the broker stops.
        """
        self._messages = messages
        self._context = messages.context
        self._halves = messages.halves
        self._store = messages.context.store
        self._rest = rest
        self._ending = ending
        self._read = read_through(run)
        self._rotation = 0
        self._latest = -1  # the first ordinal of the half message that was to be checked last
        settings = self._context.settings
        self.pause_s = min(LATEST_S, settings.check_interval_ms / 1000 / ROUNDS)
        self._interval_ms = settings.check_interval_ms
        self._moving: _Moving | None = None

    # -- asking -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Do one round of checks, which begins where the last one ended; called as a duty every ``pause_s`` seconds."""
        self._halves.follow(self._read)
        asked = 0
        for number, ordinal in enumerate(islice(self._due(), MOST_READ), 1):
            if self._ending() or not self._takes_decisions():
                return
            self._latest = ordinal  # before: it may have a record that the disk cannot give
            asked += self._check_one(ordinal)
            if asked == MOST_ASKED:
                return
            if number % AT_ONCE == 0:
                self._rest()

    def _due(self) -> Iterator[int]:
        now_ms = self._store.clock.now_ms()
        # however long a message wants nobody to be asked
        too_old_ms = now_ms - max(self._context.settings.keep_hours * HOUR_MS, self._halves.check_after_ms)
        ordinals = sorted(self._halves)
        begin = bisect_right(ordinals, self._latest)
        for number, ordinal in enumerate(chain(islice(ordinals, begin, None), islice(ordinals, begin)), 1):
            half = self._halves.find(ordinal)
            if half is not None and (half.due_ms <= now_ms or half.since_ms < too_old_ms or self._is_from_later(half, now_ms)):
                yield ordinal
            if number % LOOKED_AT == 0:
                self._rest()

    def _is_from_later(self, half: Half, now_ms: int) -> bool:
        """Return whether the clock has been set back since a half was stored, and nobody was asked about it since."""
        return now_ms < half.since_ms and half.due_ms > now_ms + self._interval_ms

    def _check_one(self, ordinal: int) -> bool:
        """Ask about a half message, or give it up; return whether it was sent to a producer."""
        half, record = self._half(ordinal)
        if half is None or record is None or not self._takes_decisions():
            return False
        pairs = pairs_of(record)
        origin = origin_of(record, pairs)
        now_ms = self._store.clock.now_ms()
        settings = self._context.settings
        if half.checks >= settings.max_checks or now_ms - half.since_ms > settings.keep_hours * HOUR_MS:
            self._give_up(record, pairs, origin, half)
            return False
        members = self._context.clients.producers(pairs.get(properties.PRODUCER_GROUP, ""))
        is_sent = self._ask(members, record, pairs, origin)
        if is_sent or not members:
            self._halves.asked(ordinal, half.checks + 1, now_ms + self._interval_ms)
        return is_sent

    def _half(self, ordinal: int) -> tuple[Half | None, Record | None]:
        """Return an undecided half message and its record; ``None`` for both when it was decided in the meantime.

        A message whose record cannot be read is lost: it is given up here, and its record is ``None``.
        """
        half = self._halves.find(ordinal)
        if half is None:
            return None, None
        stored = self._halves.stored(half, self._read)
        if self._halves.find(ordinal) is not half:  # other greenlets ran while it was read
            return None, None
        if stored is not None:
            return half, decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
        if not self._halves.is_visible(half):
            return None, None
        if self._takes_decisions():
            logger.error("transactional message lost, its record is damaged ordinal=%d log_offset=%d", ordinal, half.log_offset)
            self._messages.decide(ordinal, Fate.GIVEN_UP)
        return half, None

    def _takes_decisions(self) -> bool:
        return self._store.writable and not self._messages.turns.overloaded

    def _ask(self, members: Sequence[Member], record: Record, pairs: dict[str, str], origin: Origin) -> bool:
        """Send a check to one producer of the group; return false when none can be sent it."""
        unique = pairs.get(properties.UNIQUE_KEY)
        offset_id = offset_id_of(record.store_host, origin.log_offset)
        fields = encode_header(CheckTransaction(origin.ordinal, origin.log_offset, unique, unique, offset_id))
        shown = as_sent(record, pairs, origin)
        for _ in members:
            self._rotation += 1
            session = members[self._rotation % len(members)].session
            if session.tell(Request.CHECK_TRANSACTION_STATE, fields, shown):
                self._halves.checked += 1
                return True
        return False

    def _give_up(self, record: Record, pairs: dict[str, str], origin: Origin, half: Half) -> None:
        moved = again(record, GIVEN_UP_TOPIC, 0, pairs)
        self._messages.decide(origin.ordinal, Fate.GIVEN_UP, moved, {properties.HALF: str(origin)})
        note(self._messages.turns, partial(_report_given_up, pairs, half.checks))

    # -- keeping ------------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that undecided messages need; one put again counts at its old place until it is durable."""
        if self._moving is not None and self._moving.end <= self._store.durable_end:
            self._moving = None
        moving = None if self._moving is None else self._moving.oldest
        return min((each for each in (moving, self._halves.oldest) if each is not None), default=None)

    def keep(self, before: int) -> None:
        """Put the undecided messages that lie before a log offset into the log again.

        Messages with a decision under way are left to the next call. While the messages of the last call are not durable yet,
        the call does nothing.
        """
        self._halves.follow(self._read)
        oldest = self.oldest
        if oldest is None or oldest >= before or self._moving is not None:
            return
        found = [(ordinal, self._halves.find(ordinal)) for ordinal in self._halves]
        lying = [ordinal for ordinal, half in found if half is not None and half.log_offset < before]
        for start in range(0, len(lying), AT_ONCE):
            self._store.check_appendable()
            self._put_again(lying[start : start + AT_ONCE], oldest)

    def _put_again(self, ordinals: list[int], oldest: int) -> None:
        records = [(ordinal, *self._half(ordinal)) for ordinal in ordinals]
        for ordinal, half, record in records:  # no other greenlet runs from here to the end
            if record is not None and half is not None and self._halves.find(ordinal) is half:
                pairs = pairs_of(record)
                own = {properties.HALF: str(origin_of(record, pairs))}
                stage(self._context, again(record, HALF_TOPIC, 0, pairs), own)
        self._moving = _Moving(oldest, self._store.log.staged_end)
        note(self._messages.turns, self._was_put_again)

    def _was_put_again(self, error: MetaqError | None) -> None:
        if error is not None:
            logger.error("undecided messages not put again, tried again before their segment is deleted reason=%s", error)
            self._moving = None


def _report_given_up(pairs: Mapping[str, str], checks: int, error: MetaqError | None) -> None:
    if error is not None:
        return  # it is undecided again
    logger.warning(
        "transactional message given up group=%s topic=%s id=%s checks=%d moved_to=%s",
        pairs.get(properties.PRODUCER_GROUP, ""),
        pairs[properties.REAL_TOPIC],
        pairs.get(properties.UNIQUE_KEY),
        checks,
        GIVEN_UP_TOPIC,
    )


def as_sent(record: Record, pairs: dict[str, str], origin: Origin) -> bytes:
    """Return a half message as a record of its real topic and partition, at the place where it was first stored."""
    kept = properties.encode(pairs)
    tail = record_tail(pairs[properties.REAL_TOPIC], kept)
    body = bytes(record.body)
    middle = constant_middle(
        sys_flag=record.sys_flag,
        born_ms=record.born_ms,
        born_host=record.born_host,
        store_ms=origin.since_ms,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
    )
    size = HEADER_SIZE + len(body) + len(tail) + CHECKSUM_SIZE
    data = RecordWriter().unchecked(
        size=size,
        crc=record.body_crc,
        partition=int(pairs[properties.REAL_QUEUE]),
        flag=record.flag,
        queue_offset=origin.ordinal,
        log_offset=origin.log_offset,
        middle=middle,
        text_position=0,
        body=body,
        tail=tail,
    )
    return data + checksum_property(data)
