"""Transactional messages: half sends, 37, 323 (specs: remoting protocol, sections 3.2.8 and 5.5).

A half message is parked in the half topic until its producer decides. Its commit must always be able to store the message, so
whatever could be wrong with the message is refused when it is sent.
"""

import logging
from typing import Final

from metaq.engine.halfmessages import HalfMessages, pairs_of
from metaq.engine.writing import again, stage
from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.message import GIVEN_UP_TOPIC, HALF_TOPIC
from metaq.protocol import properties
from metaq.protocol.ids import decode_offset_id, offset_id_of
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import EndTransaction, ResumeCheck, decode_header
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK
from metaq.protocol.text.messages import Stored
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.change import Change
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read
from metaq.tx.halves import Fate, Origin, origin_of

logger = logging.getLogger(__name__)

UNKNOWN: Final = 0


class HalfHandler:
    """Handles decisions about transactional messages."""

    def __init__(self, messages: HalfMessages, reads: StoreReads) -> None:
        self._messages = messages
        self._reads = reads

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.END_TRANSACTION: self.end, Request.RESUME_CHECK_HALF_MESSAGE: self.resume}

    def end(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Commit or roll back a transactional message (37).

        The answer is 1 when no undecided message is exactly the one meant; then nothing is changed.
        """
        header = decode_header(EndTransaction, request.fields)
        demand(session.principal, Action.PUBLISH)
        if header.commit_or_rollback == UNKNOWN:
            return DONE  # the producers will be asked again
        if header.commit_or_rollback not in (TRANSACTION_COMMIT, TRANSACTION_ROLLBACK):
            raise BadRequest(
                f"commitOrRollback is {header.commit_or_rollback}; it must be 8 (commit), 12 (roll back) or 0 (unknown)"
            )
        self._reads.start(_End(self._messages, session, request, header))
        return None

    def resume(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Have producers asked again about a message that was given up, or with a new count about one that is still undecided
        (323)."""
        header = decode_header(ResumeCheck, request.fields)
        demand(session.principal, Action.ADMINISTER)
        self._reads.start(_Resume(self._messages, session, request, decode_offset_id(header.msg_id).log_offset))
        return None


class _End(Change):
    """A decision in progress: the half message is read first, then compared with the request."""

    __slots__ = ("_header", "_messages")

    def __init__(
        self, messages: HalfMessages, session: RemotingSession, request: RemotingCommand, header: EndTransaction
    ) -> None:
        super().__init__(messages.context, messages.turns, session, request)
        self._messages = messages
        self._header = header

    def read(self, read: Read) -> Stored | None:
        messages = self._messages
        messages.halves.follow(read)
        half = messages.halves.find(self._header.tran_state_table_offset)
        return None if half is None else messages.halves.stored(half, read)

    def found(self, stored: Stored | None) -> None:
        messages, header = self._messages, self._header
        ordinal = header.tran_state_table_offset
        if stored is None or messages.halves.find(ordinal) is None:
            raise _nothing(header, "no undecided message has this tranStateTableOffset")
        record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
        pairs = pairs_of(record)
        self._check(record, pairs)
        demand(self.principal, Action.PUBLISH, pairs[properties.REAL_TOPIC])
        self.check_load()
        if header.commit_or_rollback == TRANSACTION_COMMIT:
            messages.decide(ordinal, Fate.COMMITTED, messages.committed(record, pairs, ordinal))
        else:
            messages.roll_back(record, pairs)
        self.answer_stored(len(record.body))

    def _check(self, record: Record, pairs: dict[str, str]) -> None:
        """Raise ``RequestFailed`` when the message is not the one meant: after a power cut another one may have its ordinal."""
        header, origin = self._header, origin_of(record, pairs)
        offset_id = offset_id_of(record.store_host, origin.log_offset)
        group = pairs.get(properties.PRODUCER_GROUP, "")  # one stored by an older broker may have none
        if header.producer_group != group:
            raise _nothing(header, f"the message is of the group {group}")
        if header.commit_log_offset != origin.log_offset:
            raise _nothing(header, f"the message is at the log offset {origin.log_offset}")
        if header.msg_id not in (pairs.get(properties.UNIQUE_KEY, offset_id), offset_id):
            raise _nothing(header, "the message has another id")

    def fail(self, error: MetaqError) -> None:
        logger.info("decision refused group=%s reason=%s", self._header.producer_group, error)  # most are one-way
        super().fail(error)


class _Resume(Change):
    """Turns a message that was given up into a half message again, with its first ordinal as before."""

    __slots__ = ("_log_offset", "_messages")

    def __init__(self, messages: HalfMessages, session: RemotingSession, request: RemotingCommand, log_offset: int) -> None:
        super().__init__(messages.context, messages.turns, session, request)
        self._messages = messages
        self._log_offset = log_offset

    def read(self, read: Read) -> Stored | None:
        self._messages.halves.follow(read)
        return self._messages.context.store.record_at_offset(self._log_offset, read)

    def found(self, stored: Stored | None) -> None:
        messages, store = self._messages, self._messages.context.store
        record = None if stored is None else decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
        if record is None or record.topic not in (HALF_TOPIC, GIVEN_UP_TOPIC):
            reason = f"there is no message at the log offset {self._log_offset} that is undecided or was given up"
            raise RequestFailed(Response.SYSTEM_ERROR, reason)
        pairs, now_ms = pairs_of(record), store.clock.now_ms()
        origin = origin_of(record, pairs)
        if messages.halves.find(origin.ordinal) is not None:
            messages.halves.asked(origin.ordinal, 0, now_ms)
            self._finish()
            return
        if record.topic == HALF_TOPIC or messages.halves.has_returned(origin.ordinal, self._log_offset):
            raise RequestFailed(Response.SYSTEM_ERROR, f"the message at the log offset {self._log_offset} is already decided")
        self.check_load()
        renewed = Origin(origin.ordinal, origin.log_offset, now_ms)
        stage(messages.context, again(record, HALF_TOPIC, 0, pairs), {properties.HALF: str(renewed)})
        messages.staged()
        self.answer_stored(len(record.body))

    def _finish(self) -> None:
        self.session.settle(self._request, DONE)


def _nothing(header: EndTransaction, reason: str) -> RequestFailed:
    where = f"transactional message {header.tran_state_table_offset} of the group {header.producer_group}"
    return RequestFailed(Response.SYSTEM_ERROR, f"{where}: {reason}; nothing was done")
