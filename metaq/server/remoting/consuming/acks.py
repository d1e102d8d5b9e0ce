"""The end of leases: acks (200051, 200151) and other times (200053)."""

from typing import Final

from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.poison import Reason
from metaq.engine.tables.groups import SAFE_ACKS
from metaq.errors import DiskFull, MessageIllegal, ReceiptInvalid, RequestFailed, StoreError, UnknownTopic
from metaq.leases.events import Dead
from metaq.leases.state import ReceiptState
from metaq.leases.tokens import token_of
from metaq.message import GroupPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.acks import AckRow, BatchAckAnswer, decode_batch_ack
from metaq.protocol.remoting.leases.pop import OWN, AckMessage, ChangeAnswer, ChangeInvisibleTime, Receipt, decode_receipt
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.remoting.owed import owe
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import DONE, Answer, Kept, RemotingSession, RequestHandler, failure
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read

REJECT: Final = -1
"""The invisible time of a message that should go to the dead letters at once."""

_WORDS: Final = {
    ReceiptState.OVER: "the lease is over",
    ReceiptState.AGAIN: "the message was given again",
    ReceiptState.DONE: "the message is done",
    ReceiptState.UNKNOWN: "the message was never given to this group",
}


class AckHandler:
    """Ends leases. An answer says that the change is in the log."""

    def __init__(self, context: Context, leasing: Leasing, reads: StoreReads) -> None:
        self._context = context
        self.leases = leasing.leases
        self.turns = leasing.leases.turns
        self._poison = leasing.poison
        self._reads = reads
        self._due: dict[RemotingSession, list[tuple[Kept, Answer]]] = {}  # the answers of this turn

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.ACK_MESSAGE: self.ack,
            Request.BATCH_ACK_MESSAGE: self.ack_many,
            Request.CHANGE_MESSAGE_INVISIBLETIME: self.change,
        }

    def ack(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Finish a message (200051)."""
        header = decode_header(AckMessage, request.fields)
        place, receipt = self._place(session.principal, header)
        if not self.leases.ack(place, receipt.pop_ms, receipt.offset, 1):
            state = self.leases.receipt_state(place, receipt.offset, receipt.pop_ms)
            if state is not ReceiptState.DONE:
                raise _means_nothing(receipt, state)
            return DONE
        self._answer(session, request, DONE, place.group)
        return None

    def ack_many(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Finish messages of one or more pops (200151).

        The answer is success if the body can be read, and says how many messages were finished by it: receipts that mean
        nothing any more are passed.
        """
        batch = decode_batch_ack(request.body)
        for row in batch.acks:
            demand(session.principal, Action.CONSUME, row.group)
            demand(session.principal, Action.SUBSCRIBE, row.topic)
        self._context.store.check_master()
        self._context.store.check_healthy()
        if not batch.acks:
            raise RequestFailed(Response.NO_MESSAGE, "the request has no acks")
        done = sum([self._ack_row(row) for row in batch.acks])
        answer = Answer(fields=encode_header(BatchAckAnswer(done)))
        if not done:
            return answer
        self._answer(session, request, answer, *{row.group for row in batch.acks})
        return None

    def _ack_row(self, row: AckRow) -> int:
        """Finish the messages of a row; return how many."""
        place = GroupPartition(row.group, row.topic, row.queue)
        if row.mark != OWN or row.token != token_of(self.leases.log.secret, row.group, row.topic, row.pop_ms):
            return 0
        return self.leases.ack(place, row.pop_ms, row.start_offset, int.from_bytes(row.bits, "little"))

    def change(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Let a lease end at another time, counted from now (200053).

        0 gives the message back at once, and -1 rejects it: then it goes to the dead letters. A time as long as that of the pop
        extends the lease, and any other gives the message back: the request says no more, and only figures differ.
        """
        header = decode_header(ChangeInvisibleTime, request.fields)
        place, receipt = self._place(session.principal, header)
        group = self._context.groups.ensure(header.consumer_group)
        if header.invisible_time == REJECT:
            self._reads.start(_Rejection(self, session, request, place, receipt))
            return None
        if not 0 <= header.invisible_time <= group.max_invisible_ms:
            reason = f"invisibleTime is {header.invisible_time}, not from 0 to {group.max_invisible_ms} ms, or {REJECT}"
            raise RequestFailed(Response.INVALID_PARAMETER, f"{reason} (max_invisible_ms of the group)")
        due_ms = self.leases.due_ms(receipt.pop_ms, header.invisible_time, group.max_invisible_ms)
        given_back = header.invisible_time != receipt.invisible_ms
        state = self.leases.change(place, receipt.offset, receipt.pop_ms, due_ms, given_back=given_back)
        if state is not ReceiptState.LEASED:
            raise _means_nothing(receipt, state)
        answer = ChangeAnswer(receipt.pop_ms, due_ms - receipt.pop_ms, Int32(receipt.token))
        self._answer(session, request, Answer(fields=encode_header(answer)), place.group)
        return None

    def reject(self, place: GroupPartition, receipt: Receipt, record: bytes | None) -> None:
        """Give up a leased message; ``record`` is ``None`` when it is lost.

        Raise ``RequestFailed`` when the receipt means nothing any more.
        """
        state = self.leases.receipt_state(place, receipt.offset, receipt.pop_ms)
        if state is not ReceiptState.LEASED:
            raise _means_nothing(receipt, state)
        if record is None:
            self.leases.record(place, Dead(receipt.offset))
            return
        self._poison.stage(place, receipt.offset, record, Reason.REJECTED)

    def _place(self, principal: Principal, header: AckMessage | ChangeInvisibleTime) -> tuple[GroupPartition, Receipt]:
        """Return where the message of a receipt is. Raise why the receipt is none, or why this broker cannot tell."""
        demand(principal, Action.CONSUME, header.consumer_group)
        demand(principal, Action.SUBSCRIBE, header.topic)
        self._context.store.check_master()
        self._context.store.check_healthy()
        topic = self._context.topics.get(header.topic)
        if topic is None:
            raise UnknownTopic(f"the topic {header.topic[:255]} does not exist on this broker")
        receipt = decode_receipt(header.extra_info)
        if receipt.broker_name != self._context.settings.broker_name:
            raise ReceiptInvalid(f"the receipt is of the broker {receipt.broker_name}")
        if receipt.queue != header.queue_id or receipt.offset != header.offset:
            raise ReceiptInvalid("queueId and offset are not those of the receipt")
        if not 0 <= receipt.queue < topic.all_partitions:
            raise MessageIllegal(f"the topic {topic.name} has {topic.all_partitions} partitions, not {receipt.queue}")
        if receipt.mark != OWN:
            raise RequestFailed(Response.NO_MESSAGE, "the receipt is of a retry topic, which this broker does not pop from")
        if receipt.token != token_of(self.leases.log.secret, header.consumer_group, header.topic, receipt.pop_ms):
            raise RequestFailed(Response.NO_MESSAGE, "not a receipt of this broker")
        return GroupPartition(header.consumer_group, header.topic, receipt.queue), receipt

    def _answer(self, session: RemotingSession, request: RemotingCommand, answer: Answer, *groups: str) -> None:
        """Answer once the change is in the log; as safe as a message, if one of the groups wants that (``lease_acks``)."""
        kept = session.owe(request)
        known = [self._context.groups.get(name) for name in groups]
        if any(group is not None and group.lease_acks == SAFE_ACKS for group in known):
            owe(self.turns, session, kept, answer, 0)
            return
        if not self._due:
            self.turns.after_append(self._pay)
        self._due.setdefault(session, []).append((kept, answer))

    def _pay(self, error: StoreError | None) -> None:
        """Answer: only what cannot be stored for lack of room is kept in memory, and so acknowledged."""
        due, self._due = self._due, {}
        refusal = None if error is None or isinstance(error, DiskFull) else failure(error)
        for session, answers in due.items():
            session.pay_all(answers if refusal is None else [(kept, refusal) for kept, _ in answers])


class _Rejection(RemotingRead):
    """A message on its way to the dead letters, whose record must be read first."""

    def __init__(
        self, handler: AckHandler, session: RemotingSession, request: RemotingCommand, place: GroupPartition, receipt: Receipt
    ) -> None:
        super().__init__(session, request)
        self._handler = handler
        self._place = place
        self._receipt = receipt

    def read(self, read: Read) -> bytes | None:
        return self._handler.leases.message(self._place, self._receipt.offset, read)

    def found(self, record: bytes | None) -> None:
        """Answer when the dead letter is as safe as promised."""
        self._handler.reject(self._place, self._receipt, record)
        kept = self._request = self.session.owe(self._request)
        answer = ChangeAnswer(self._receipt.pop_ms, 0, Int32(self._receipt.token))
        owe(self._handler.turns, self.session, kept, Answer(fields=encode_header(answer)), 0)


def _means_nothing(receipt: Receipt, state: ReceiptState) -> RequestFailed:
    return RequestFailed(Response.NO_MESSAGE, f"the receipt {receipt} means nothing any more: {_WORDS[state]}")
