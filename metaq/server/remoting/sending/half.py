"""Transactional messages: half sends, 37, 323 (specs: remoting protocol, sections 3.2.8 and 5.5).

A half message is parked in the half topic until its producer decides. A commit must be able to store what it brings about: so
whatever could be wrong with the message is refused when it is sent.
"""

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.topics import GIVEN_UP_TOPIC, HALF_OP_TOPIC, HALF_TOPIC
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, delayed, note, ready, stage
from metaq.errors import BadRequest, MetaqError, RequestFailed, StoreError, UnknownTopic
from metaq.protocol import properties
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.record import TAGS, Record, decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import EndTransaction, ResumeCheck, decode_header
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, TRANSACTION_TYPE
from metaq.protocol.text.messages import Stored
from metaq.server.access.permissions import Action, demand
from metaq.server.front import RequestHandler
from metaq.server.remoting.change import Change
from metaq.server.remoting.session import DONE, Answer, RemotingSession
from metaq.server.wire.look import Looks
from metaq.store.files.filecache import ColdRead, Read, read_cached
from metaq.store.recordgroups import put_together
from metaq.tx.halves import LONGEST_ORIGIN, Fate, Halves, Origin, origin_of

logger = logging.getLogger(__name__)

DECIDED: Final = "d"
"""Tag of an op record."""
UNKNOWN: Final = 0
LONGEST_ORDINAL: Final = str((1 << 63) - 1)


def is_transactional(pairs: Mapping[str, str]) -> bool:
    """Whether a message is one of a transaction, as its properties say."""
    return pairs.get(properties.TRANSACTION, "").lower() == "true"


def is_half(draft: Draft) -> bool:
    """Whether a message is to wait for a decision: a delayed retry of one that was transactional is not."""
    delayed_retry = draft.reconsume_times > 0 and draft.properties.get(properties.DELAY, "0") != "0"
    return is_transactional(draft.properties) and not delayed_retry


def half_of(draft: Draft, producer_group: str) -> Draft:
    """The same message, parked; ``MessageIllegal`` when it could not be stored once it is committed."""
    pairs = draft.properties
    pairs.setdefault(properties.PRODUCER_GROUP, producer_group)  # who is asked; not every client says so
    kept = {**pairs, properties.REAL_TOPIC: draft.topic, properties.REAL_QUEUE: str(draft.partition)}
    properties.encode(kept, {properties.HALF: LONGEST_ORIGIN})
    delayed(Draft(draft.topic, draft.partition, b"", _committed(kept, LONGEST_ORDINAL), 0, 0, 0, draft.born_host))
    return Draft(
        *(HALF_TOPIC, 0, draft.body, kept, draft.flag, draft.sys_flag & ~TRANSACTION_TYPE),
        *(draft.born_ms, draft.born_host, draft.reconsume_times),
    )


def _committed(pairs: dict[str, str], ordinal: str) -> dict[str, str]:
    """Properties of a half message as consumers get them."""
    own = (properties.TRANSACTION, properties.REAL_TOPIC, properties.REAL_QUEUE)
    return {**{name: value for name, value in pairs.items() if name not in own}, properties.PREPARED_OFFSET: ordinal}


def pairs_of(record: Record) -> dict[str, str]:
    """A record's properties."""
    return properties.parse(record.properties.decode(errors="replace"))


def parked(record: Record, pairs: dict[str, str], topic: str) -> Draft:
    """A half message once more: in the half topic, or in the one of those that were given up."""
    return Draft(
        *(topic, 0, record.body, pairs, record.flag, record.sys_flag),
        *(record.born_ms, record.born_host, record.reconsume_times),
    )


class HalfHandler:
    """Takes decisions of transactional messages."""

    def __init__(self, context: Context, turns: Turns, looks: Looks, halves: Halves) -> None:
        self.context = context
        self.turns = turns
        self.halves = halves
        self._looks = looks
        self._noted = -1  # the turn at whose end the table follows

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.END_TRANSACTION: self.end, Request.RESUME_CHECK_HALF_MESSAGE: self.resume}

    def end(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """37: 1 when there is no undecided message that is exactly the one meant, and nothing happens then."""
        header = decode_header(EndTransaction, request.fields)
        demand(session.principal, Action.PUBLISH)
        if header.commit_or_rollback == UNKNOWN:
            return DONE  # the producers are asked again
        if header.commit_or_rollback not in (TRANSACTION_COMMIT, TRANSACTION_ROLLBACK):
            raise BadRequest(f"commitOrRollback is {header.commit_or_rollback}: 8 commits, 12 rolls back, 0 does not know")
        self._looks.look(_End(self, session, request, header))
        return None

    def resume(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """323: producers are asked again about a message that was given up, or with a new count about one that was not."""
        header = decode_header(ResumeCheck, request.fields)
        demand(session.principal, Action.ADMINISTER)
        self._looks.look(_Resume(self, session, request, decode_offset_id(header.msg_id).log_offset))
        return None

    # -- staging ------------------------------------------------------------------------------------------------------

    def staged(self) -> None:
        """A half message was staged in this turn: it is undecided from the moment that readers see it."""
        if self._noted != self.turns.number:
            self._noted = self.turns.number
            note(self.turns, lambda _: self._follow())

    def _follow(self) -> None:
        # what has to be read from the disk, or cannot be, is met again by the next check or decision, which says so
        with contextlib.suppress(ColdRead, StoreError):
            self.halves.follow(read_cached)

    def decide(self, ordinal: int, fate: Fate, message: Draft | None = None, own: Mapping[str, str] = properties.NONE) -> None:
        """Stage the decision of a half message that is undecided, together with the ``message`` that it brings about.

        ``own`` are properties of that one which only the broker may set.
        """
        context = self.context
        now_ms = context.store.clock.now_ms()
        op = Draft(HALF_OP_TOPIC, 0, str(ordinal).encode(), {TAGS: DECIDED}, 0, 0, now_ms, context.store_host)
        members = [] if message is None else [ready(context, message, own)]
        put_together(context.store, ready(context, op), members)
        self.halves.claim(ordinal)
        note(self.turns, partial(self._decided, ordinal, fate))

    def _decided(self, ordinal: int, fate: Fate, error: MetaqError | None) -> None:
        if error is not None:
            self.halves.release(ordinal)
            logger.error("decision not stored, the message is undecided again ordinal=%d reason=%s", ordinal, error)
            return
        self.halves.decided[fate] += 1
        self._follow()

    def committed(self, record: Record, pairs: dict[str, str], ordinal: int) -> Draft:
        """The message that consumers get, delayed when it asks for that; ``UnknownTopic`` when its topic was deleted."""
        name, number = pairs[properties.REAL_TOPIC], int(pairs[properties.REAL_QUEUE])
        topics = self.context.topics
        topic = topics.get(name)
        if topic is None and not any(key.topic == name for key in topics.deleted):
            topic = topics.ensure(name, number + 1)  # a killed broker may forget a topic that holds no message yet
        if topic is None or not topic.all_partitions:
            raise UnknownTopic(f"the topic {name} was deleted: make it again, or the message is given up in the end")
        draft = Draft(
            *(name, number % topic.all_partitions, record.body, _committed(pairs, str(ordinal)), record.flag),  # it may shrink
            *(record.sys_flag | TRANSACTION_COMMIT, record.born_ms, record.born_host, record.reconsume_times),
        )
        return delayed(draft)


class _End(Change):
    """A decision on its way: the half message is read, then what it says is compared."""

    __slots__ = ("_handler", "_header")

    def __init__(
        self, handler: HalfHandler, session: RemotingSession, request: RemotingCommand, header: EndTransaction
    ) -> None:
        super().__init__(handler.context, handler.turns, session, request)
        self._handler = handler
        self._header = header

    def look(self, read: Read) -> Stored | None:
        handler = self._handler
        handler.halves.follow(read)
        half = handler.halves.find(self._header.tran_state_table_offset)
        return None if half is None else handler.context.store.record_at_offset(half.log_offset, read)

    def change(self, stored: Stored | None) -> None:
        handler, header = self._handler, self._header
        ordinal = header.tran_state_table_offset
        if stored is None or handler.halves.find(ordinal) is None:
            raise _nothing(header, "no undecided message has this tranStateTableOffset")
        record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
        pairs = pairs_of(record)
        self._check(record, pairs)
        demand(self.principal, Action.PUBLISH, pairs[properties.REAL_TOPIC])
        self.check_load()
        if header.commit_or_rollback == TRANSACTION_COMMIT:
            handler.decide(ordinal, Fate.COMMITTED, handler.committed(record, pairs, ordinal))
        else:
            handler.decide(ordinal, Fate.ROLLED_BACK)
        self.answer_stored(len(record.body))

    def _check(self, record: Record, pairs: dict[str, str]) -> None:
        """The message must be the one that is meant: after a power cut another one may have its ordinal."""
        header, origin = self._header, origin_of(record, pairs)
        offset_id = f"{record.store_host.hex().upper()}{origin.log_offset:016X}"
        if header.producer_group != pairs[properties.PRODUCER_GROUP]:
            raise _nothing(header, f"the message is of the group {pairs[properties.PRODUCER_GROUP]}")
        if header.commit_log_offset != origin.log_offset:
            raise _nothing(header, f"the message is at the log offset {origin.log_offset}")
        if header.msg_id not in (pairs.get(properties.UNIQUE_KEY, offset_id), offset_id):
            raise _nothing(header, "the message has another id")

    def fail(self, error: MetaqError) -> None:
        logger.info("decision refused group=%s reason=%s", self._header.producer_group, error)  # most are one-way
        super().fail(error)


class _Resume(Change):
    """A message that was given up becomes a half message again, known by its first ordinal as before."""

    __slots__ = ("_handler", "_log_offset")

    def __init__(self, handler: HalfHandler, session: RemotingSession, request: RemotingCommand, log_offset: int) -> None:
        super().__init__(handler.context, handler.turns, session, request)
        self._handler = handler
        self._log_offset = log_offset

    def look(self, read: Read) -> Stored | None:
        self._handler.halves.follow(read)
        return self._handler.context.store.record_at_offset(self._log_offset, read)

    def change(self, stored: Stored | None) -> None:
        handler, store = self._handler, self._handler.context.store
        record = None if stored is None else decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
        if record is None or record.topic not in (HALF_TOPIC, GIVEN_UP_TOPIC):
            reason = f"at the log offset {self._log_offset} there is no message that waits for a decision or was given up"
            raise RequestFailed(Response.SYSTEM_ERROR, reason)
        pairs, now_ms = pairs_of(record), store.clock.now_ms()
        origin = origin_of(record, pairs)
        if handler.halves.find(origin.ordinal) is not None:
            handler.halves.asked(origin.ordinal, 0, now_ms)
            self._finish()
            return
        if record.topic == HALF_TOPIC:
            raise RequestFailed(Response.SYSTEM_ERROR, f"the message at the log offset {self._log_offset} is decided")
        self.check_load()
        again = Origin(origin.ordinal, origin.log_offset, now_ms)
        stage(handler.context, parked(record, pairs, HALF_TOPIC), {properties.HALF: str(again)})
        handler.staged()
        self.answer_stored(len(record.body))

    def _finish(self) -> None:
        self.session.settle(self._request, DONE)


def _nothing(header: EndTransaction, reason: str) -> RequestFailed:
    where = f"transactional message {header.tran_state_table_offset} of the group {header.producer_group}"
    return RequestFailed(Response.SYSTEM_ERROR, f"{where}: {reason}; nothing was done")
