"""The end of leases: acks (200051, 200151) and other times (200053)."""

from collections.abc import Sequence
from typing import Final

from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.poison import Reason
from metaq.engine.tables.groups import SAFE_ACKS
from metaq.errors import DiskFull, MessageIllegal, MetaqError, ReceiptInvalid, RequestFailed, StoreError, UnknownTopic
from metaq.leases.events import Dead
from metaq.leases.state import ReceiptState
from metaq.leases.tokens import token_of
from metaq.message import GroupPartition
from metaq.protocol.remoting.attributes import LATEST_MS
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.acks import AckRow, decode_batch_ack
from metaq.protocol.remoting.leases.plainacks import PlainAcks, plain_ack
from metaq.protocol.remoting.leases.pop import (
    REJECT_MS,
    AckMessage,
    ChangeAnswer,
    ChangeInvisibleTime,
)
from metaq.protocol.remoting.leases.receipts import OWN, Receipt, decode_receipt
from metaq.protocol.remoting.requests import Received
from metaq.protocol.remoting.sending.plain import PlainSend
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.remoting.owed import OwedAnswer
from metaq.server.remoting.reads import RemotingRead
from metaq.server.remoting.session import DONE, Answer, Kept, RemotingSession, RequestHandler, bare, failure
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read

_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""

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
        self._broker_name = context.settings.broker_name
        self._due: dict[RemotingSession, _Due] = {}  # the answers of this turn

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.ACK_MESSAGE: self.ack,
            Request.BATCH_ACK_MESSAGE: self.ack_many,
            Request.CHANGE_MESSAGE_INVISIBLETIME: self.change,
        }

    def ack(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Finish a message (200051)."""
        header = decode_header(AckMessage, request.fields)
        place, receipt = self._place(
            session.principal, header.consumer_group, header.topic, header.queue_id, header.offset, header.extra_info
        )
        if not self.leases.ack(place, receipt.pop_ms, receipt.offset, 1):
            state = self.leases.receipt_state(place, receipt.offset, receipt.pop_ms)
            if state is not ReceiptState.DONE:
                raise _means_nothing(receipt, state)
        self._answer(session, request, DONE, place)  # one that comes again waits, too: the first may not be safe yet
        return None

    def acks(self, session: RemotingSession, requests: Sequence[Received], at: int) -> int:
        """Take the run of plain acks at ``at``; return where it ends.

        The receipts of messages that one pop gave of one queue differ in the last word only. So what they have in common is
        read and checked once, and they are finished by one event.
        """
        end = at
        while end < len(requests):
            request = requests[end]
            if isinstance(request, PlainSend):
                break
            run = request if isinstance(request, PlainAcks) else plain_ack(request)
            if run is None or not self._take(session, run):
                break
            end += 1
        return end

    def _take(self, session: RemotingSession, run: PlainAcks) -> bool:
        """Finish messages of one pop; return false, with nothing done, when each ack has to be handled by itself."""
        sample, offsets, opaques = run
        fields = sample.fields
        try:
            group, topic, queue, info = fields["consumerGroup"], fields["topic"], fields["queueId"], fields["extraInfo"]
            place, receipt = self._place(session.principal, group, topic, int(queue), int(fields["offset"]), info)
        except (KeyError, ValueError, MetaqError):
            return False  # it is refused when it is handled by itself
        if queue != str(receipt.queue) or receipt.log_offset is not None or self._wants_safe_acks(group):
            return False
        session.owe_opaques(len(offsets))
        due = self._due_of(session)
        if self.leases.ack_all(place, receipt.pop_ms, offsets) == len(offsets):
            due.done.append(run)
        else:
            answers = [self._answer_to(place, receipt._replace(offset=offset)) for offset in offsets]
            due.answers += [(bare(sample, opaque), answer) for opaque, answer in zip(opaques, answers, strict=True)]
        return True

    def _answer_to(self, place: GroupPartition, receipt: Receipt) -> Answer:
        """Return the answer to an ack after it was tried."""
        state = self.leases.receipt_state(place, receipt.offset, receipt.pop_ms)
        return DONE if state is ReceiptState.DONE else failure(_means_nothing(receipt, state))

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
        answer = Answer(fields={"done": str(done)})  # of BatchAckAnswer
        places = {GroupPartition(row.group, row.topic, row.queue) for row in batch.acks}
        self._answer(session, request, answer, *places)  # one that comes again waits, too: the first may not be safe yet
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

        A time over the group's limit is shortened: the pauses of Java's client go up to 2 h, whatever the limit is, and it only
        logs a refusal.
        """
        header = decode_header(ChangeInvisibleTime, request.fields)
        place, receipt = self._place(
            session.principal, header.consumer_group, header.topic, header.queue_id, header.offset, header.extra_info
        )
        group = self._context.groups.ensure(header.consumer_group)
        if header.invisible_time == REJECT_MS:
            self._reads.start(_Rejection(self, session, request, place, receipt))
            return None
        if not 0 <= header.invisible_time <= LATEST_MS:
            reason = f"invisibleTime is {header.invisible_time}, not from 0 to {LATEST_MS} ms, or {REJECT_MS}"
            raise RequestFailed(Response.INVALID_PARAMETER, reason)
        due_ms = self.leases.due_ms(receipt.pop_ms, header.invisible_time, group.max_invisible_ms)
        given_back = header.invisible_time != receipt.invisible_ms
        state = self.leases.change(place, receipt.offset, receipt.pop_ms, due_ms, given_back=given_back)
        if state is not ReceiptState.LEASED:
            raise _means_nothing(receipt, state)
        answer = ChangeAnswer(receipt.pop_ms, due_ms - receipt.pop_ms, Int32(receipt.token))
        self._answer(session, request, Answer(fields=encode_header(answer)), place)
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

    def _place(
        self, principal: Principal, group: str, topic_name: str, queue: int, offset: int, info: str
    ) -> tuple[GroupPartition, Receipt]:
        """Return where the message of a receipt is. Raise why the receipt is none, or why this broker cannot tell."""
        demand(principal, Action.CONSUME, group)
        demand(principal, Action.SUBSCRIBE, topic_name)
        self._context.store.check_master()
        self._context.store.check_healthy()
        topic = self._context.topics.get(topic_name)
        if topic is None:
            raise UnknownTopic(f"the topic {topic_name[:255]} does not exist on this broker")
        receipt = decode_receipt(info)
        if receipt.broker_name != self._broker_name:
            raise ReceiptInvalid(f"the receipt is of the broker {receipt.broker_name}")
        if receipt.queue != queue or receipt.offset != offset:
            raise ReceiptInvalid("queueId and offset are not those of the receipt")
        if not 0 <= receipt.queue < topic.all_partitions:
            raise MessageIllegal(f"the topic {topic.name} has {topic.all_partitions} partitions, not {receipt.queue}")
        if receipt.mark != OWN:
            raise RequestFailed(Response.NO_MESSAGE, "the receipt is of a retry topic, which this broker does not pop from")
        if receipt.token != token_of(self.leases.log.secret, group, topic_name, receipt.pop_ms):
            raise RequestFailed(Response.NO_MESSAGE, "not a receipt of this broker")
        return _new(GroupPartition, (group, topic_name, receipt.queue)), receipt

    def _answer(self, session: RemotingSession, request: RemotingCommand, answer: Answer, *places: GroupPartition) -> None:
        """Answer once the change is in the log; as safe as a message, if one of the groups wants that (``lease_acks``)."""
        kept = session.owe(request)
        if any(map(self._wants_safe_acks, [place.group for place in places])):
            self.leases.staged(OwedAnswer(session, kept, answer, 0), places)
        else:
            self._due_of(session).answers.append((kept, answer))

    def _wants_safe_acks(self, name: str) -> bool:
        group = self._context.groups.get(name)
        return group is not None and group.lease_acks == SAFE_ACKS

    def _due_of(self, session: RemotingSession) -> "_Due":
        """Return the answers that a session gets once the append of this turn is done."""
        if not self._due:
            self.turns.with_answers(self._pay)
        due = self._due.get(session)
        if due is None:
            due = self._due[session] = _Due()
        return due

    def _pay(self, error: StoreError | None) -> None:
        """Answer: only what cannot be stored for lack of room is kept in memory, and so acknowledged."""
        dues, self._due = self._due, {}
        refusal = None if error is None or isinstance(error, DiskFull) else failure(error)
        for session, due in dues.items():
            due.pay(session, refusal)


class _Due:
    """The answers to one session at the end of a turn."""

    def __init__(self) -> None:
        self.done: list[PlainAcks] = []
        self.answers: list[tuple[Kept, Answer]] = []

    def pay(self, session: RemotingSession, refusal: Answer | None) -> None:
        """Give the answers, or ``refusal`` instead of each."""
        answers = self.answers if refusal is None else [(kept, refusal) for kept, _ in self.answers]
        opaques: list[int] = []
        for sample, _, several in self.done:
            if refusal is None and not sample.is_oneway:
                opaques += several
            else:
                answers += [(bare(sample, opaque), refusal or DONE) for opaque in several]
        if opaques:
            session.pay_done(opaques)
        if answers:
            session.pay_all(answers)


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
        self._handler.leases.staged(OwedAnswer(self.session, kept, Answer(fields=encode_header(answer)), 0), [self._place])


def _means_nothing(receipt: Receipt, state: ReceiptState) -> RequestFailed:
    return RequestFailed(Response.NO_MESSAGE, f"the receipt {receipt} means nothing any more: {_WORDS[state]}")
