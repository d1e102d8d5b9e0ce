"""``transaction``, and ``put`` with a transaction key (specs: text protocol, section 5)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from metaq.checksum import crc32
from metaq.engine.context import Context
from metaq.engine.turn import NOT_STORED, Short, Turns
from metaq.engine.writing import note
from metaq.errors import AccessDenied, BadRequest, BrokerError, MetaqError, WrongPartition
from metaq.protocol.text.commands import BROKER_CHOOSES, NO_CHECKSUM, NO_KEY, Command, Put, Transaction
from metaq.protocol.text.messages import split_attribute
from metaq.protocol.text.replies import ERROR, OK, write_result
from metaq.server.access.permissions import Action, Principal, allowed, demand, denied
from metaq.server.text.put import PutHandler, checksum_mismatch
from metaq.server.text.reads import TextRead
from metaq.server.text.session import TextSession, result
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read, Run, read_through
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.tx.branches import Work
from metaq.tx.journal import PARKED_GROWTH, Held
from metaq.tx.local import LocalBranches
from metaq.tx.manager import Transactions
from metaq.tx.openbranches import OpenBranch
from metaq.tx.steps import Step
from metaq.tx.xacodes import XaCode, XaError
from metaq.tx.xid import read_key

ACKNOWLEDGED: Final = ""
READ_ONLY: Final = str(int(XaCode.RDONLY))
PREPARED: Final = str(int(XaCode.OK))
LOCAL: Final = "TX:"
"""Prefix of the key of a local transaction, which ends with its connection and does not need the topics of XA branches."""
_new: Final = tuple.__new__
"""Costs a third of the named tuple's own constructor."""


class TransactionHandler:
    """Handles the commands of local transactions and XA branches."""

    def __init__(
        self,
        context: Context,
        turns: Turns,
        reads: StoreReads,
        puts: PutHandler,
        transactions: Transactions,
        local: LocalBranches[Held],
        run: Run,
    ) -> None:
        self.turns = turns
        self.transactions = transactions
        self._context = context
        self._reads = reads
        self._puts = puts
        self._local = local
        self._run = run
        self._clock = context.store.clock
        self._xa_steps: dict[str, Callable[[TextSession, Transaction, str], None]] = {
            "BEGIN": self._begin,
            "PREPARE": self._prepare,
            "COMMIT_ONE_PHASE": partial(self._commit, one_phase=True),
            "COMMIT_TWO_PHASE": partial(self._commit, one_phase=False),
            "ROLLBACK": self._rollback,
            "FORGET": self._forget,
        }
        self._local_steps: dict[str, Callable[[TextSession, Transaction, str], None]] = {
            "BEGIN": self._begin_local,
            "PREPARE": self._prepare_local,
            "COMMIT_ONE_PHASE": self._commit_local,
            "COMMIT_TWO_PHASE": self._commit_local,
            "ROLLBACK": self._rollback_local,
            "FORGET": self._forget_local,
        }

    # -- commands -----------------------------------------------------------------------------------------------------

    def transaction(self, session: TextSession, command: Transaction) -> None:
        """Handle one command of a transaction. END is never answered (section 1.6), and has no effect."""
        if command.type == "END":
            return
        if self.transactions.lacks_topics and not session.principal.admin and not command.key.startswith(LOCAL):
            self._reads.start(_TopicsRead(self, session, command))
        else:
            self.step(session, command)

    def step(self, session: TextSession, command: Transaction) -> None:
        """Handle one command, once the topics of all branches are known as far as possible."""
        try:
            demand(session.principal, Action.PUBLISH)
            self._check_master()
            if command.type == "RECOVER":
                self._check_safe(self.transactions.returning_end)
                found = self.transactions.branches.recover(command.qualifier or None)
                keys = [key for key in found if self._may_finish(session.principal, key)]
                session.reply(write_result(OK, "\r\n".join(keys), command.opaque))
                return
            if command.key == NO_KEY:
                raise XaError(XaCode.INVAL, f"{command.type} needs the key of a transaction")
            key, is_local = read_key(command.key)
            self._context.counters.count_step(command.type, local=is_local)
            if not is_local and command.type != "BEGIN":
                self._check_topics(session.principal, key)
            steps = self._local_steps if is_local else self._xa_steps
            try:
                steps[command.type](session, command, key)
            except XaError as error:
                if error.code is XaCode.NOTA and not is_local:
                    self._check_safe(self.transactions.doubtful_end)
                raise
        except MetaqError as error:
            session.reply(refusal(error, command.opaque))

    def _check_topics(self, principal: Principal, key: str) -> None:
        """Raise ``AccessDenied`` when the principal may not publish to a topic of the branch: then it may not decide about it
        either."""
        if principal.admin or key not in self.transactions.branches:
            return
        topics = self.transactions.topics(key)
        if topics is None:
            raise denied(principal, Action.ADMINISTER, f"{key}, whose topics are unknown because an older version prepared it")
        for topic in topics:
            demand(principal, Action.PUBLISH, topic)

    def _may_finish(self, principal: Principal, key: str) -> bool:
        topics = self.transactions.topics(key)
        known = topics is not None and all(allowed(principal, Action.PUBLISH, topic) for topic in topics)
        return known or principal.admin

    def _check_master(self) -> None:
        """Raise ``XaError`` (RMFAIL) unless this replica is master: a branch that is unknown here may be known to the master,
        and only the master can report that a branch does not exist."""
        try:
            self._context.store.check_master()
        except MetaqError as error:
            raise XaError(XaCode.RMFAIL, str(error)) from error

    def _check_safe(self, end: int) -> None:
        """Raise ``XaError`` (RMFAIL) while recent decisions, which are before a log offset, are not as safe as promised.

        A transaction manager may forget a branch that is reported as unknown, so no power cut and no failover may be able to
        bring it back.
        """
        if not self.turns.is_safe(end):
            raise XaError(XaCode.RMFAIL, "recent decisions are not as safe as promised yet; ask again")

    def puts(self, session: TextSession, commands: Sequence[Command], at: int) -> int:
        """Keep the run of puts at ``at`` with their branches; return where it ends.

        Each gets an id at once, and a position when its branch is committed.
        """
        replies, size = [], 0
        now_ms, born_host = self._clock.now_ms(), session.born_host
        message_id = self.transactions.steps.take_ids(len(commands) - at)
        queue: ConsumeQueue | None = None  # of the previous put, as the next four: consecutive puts often share them
        branch: OpenBranch[Held] | None = None
        topic, partition, transaction = "", -1, ""
        for put in commands[at:] if at else commands:
            if type(put) is not Put or put.transaction is None:
                break
            put_topic, number, flag, checksum, key, opaque, body = put
            size += len(body)
            try:
                if put_topic != topic or number != partition or queue is None:
                    queue = self._partition(session, put)
                    topic, partition = put_topic, number
                crc = crc32(body) & 0x7FFFFFFF
                if crc != checksum != NO_CHECKSUM:
                    raise checksum_mismatch()
                if branch is None or key != transaction:
                    branch = self._open(session, put.transaction)
                    transaction = put.transaction
                message_id -= 1
                if flag & 1:
                    attribute, payload = split_attribute(flag, body)
                    crc = crc32(payload) & 0x7FFFFFFF
                    held = Held(queue, flag, payload, crc, attribute, message_id, now_ms, born_host)
                    branch.put(held, held.size)
                else:
                    held = _new(Held, (queue, flag, body, crc, None, message_id, now_ms, born_host))
                    branch.put(held, len(body) + PARKED_GROWTH)
            except MetaqError as error:
                self._context.counters.refuse(error, 1)
                self._context.topic_counters(put.topic).put_failed.add(1)
                text = error.wire if isinstance(error, XaError) else str(error)
                replies.append(result(error.status, text, opaque))
            else:
                text = f"{message_id} {partition} -1"
                replies.append(f"result 200 {len(text)} {opaque}\r\n{text}")
        self._context.counters.put.add(len(replies), size)
        session.reply("".join(replies).encode())
        return at + len(replies)

    def _partition(self, session: TextSession, put: Put) -> ConsumeQueue:
        if put.partition == BROKER_CHOOSES:
            raise WrongPartition(f"Invalid partition for transaction command:{put.partition}")
        return self._puts.partition(session, put)

    def _open(self, session: TextSession, transaction: str) -> OpenBranch[Held]:
        key, is_local = read_key(transaction)
        return self._local.open(session, key) if is_local else self.transactions.branches.open(key)

    # -- XA branches --------------------------------------------------------------------------------------------------

    def _begin(self, session: TextSession, command: Transaction, key: str) -> None:
        self.transactions.branches.begin(key, self._clock.monotonic(), command.timeout_s)
        self._acknowledge(session, command)

    def _prepare(self, session: TextSession, command: Transaction, key: str) -> None:
        step = self.transactions.prepare(key)
        if step is None:
            session.reply(write_result(OK, READ_ONLY, command.opaque))
        else:
            self.owe(session, command.opaque, step, PREPARED)

    def _commit(self, session: TextSession, command: Transaction, key: str, *, one_phase: bool) -> None:
        work = self.transactions.commit(key, one_phase=one_phase)
        messages = self.transactions.at_hand(work)
        if messages:
            self.owe(session, command.opaque, self.transactions.store_commit(key, work, messages))
        elif work.place is not None:
            self._reads.start(_CommitRead(self, session, command.opaque, key, work))
        else:
            self.transactions.branches.done(key)
            self._acknowledge(session, command)

    def _rollback(self, session: TextSession, command: Transaction, key: str) -> None:
        self._after(session, command, self.transactions.rollback(key))

    def _forget(self, session: TextSession, command: Transaction, key: str) -> None:
        step = self.transactions.forget(key)
        if step is None:  # a power cut may bring a decision back that seems forgotten
            self._check_safe(self.transactions.returning_end)
        self._after(session, command, step)

    def _after(self, session: TextSession, command: Transaction, step: Step | None) -> None:
        if step is None:
            self._acknowledge(session, command)
        else:
            self.owe(session, command.opaque, step)

    # -- local transactions -------------------------------------------------------------------------------------------

    def _begin_local(self, session: TextSession, command: Transaction, key: str) -> None:
        self._local.begin(session, key, self._clock.monotonic(), command.timeout_s)
        if session.roll_back is None:
            session.roll_back = partial(self._local.close, session)
        self._acknowledge(session, command)

    def _prepare_local(self, session: TextSession, command: Transaction, key: str) -> None:
        self._local.prepare(session, key)

    def _commit_local(self, session: TextSession, command: Transaction, key: str) -> None:
        messages = self._local.commit(session, key)
        try:
            step = self.transactions.store_local(key, messages)
        except MetaqError as error:
            raise BrokerError(f"the transaction is rolled back: {error}") from error
        self._after(session, command, step)

    def _rollback_local(self, session: TextSession, command: Transaction, key: str) -> None:
        self._local.rollback(session, key)
        self._acknowledge(session, command)

    def _forget_local(self, session: TextSession, command: Transaction, key: str) -> None:
        self._local.forget(key)

    # -- answering ----------------------------------------------------------------------------------------------------

    def _acknowledge(self, session: TextSession, command: Transaction) -> None:
        session.reply(write_result(OK, ACKNOWLEDGED, command.opaque))

    def owe(self, session: TextSession, opaque: str, step: Step, text: str = ACKNOWLEDGED) -> None:
        """Answer when a step is as durable as promised."""
        session.owed += 1
        session.due = not self.turns.waits
        self.turns.staged(_StepOutcome(self, session, opaque, step, text))
        self.turns.waiting_bytes += step.size

    # -- duties -------------------------------------------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that undecided branches need, or ``None``."""
        return self.transactions.keeping.oldest

    def keep(self, before: int) -> None:
        """Append again the records before a log offset that undecided branches need."""
        for step in self.transactions.keeping.keep(before, read_through(self._run)):
            note(self.turns, partial(_settle, step))

    def expire(self) -> None:
        """Roll back branches and transactions that have been open for too long."""
        now_s = self._clock.monotonic()
        self.transactions.branches.expire(now_s)
        self._local.expire(now_s)


def _settle(step: Step, error: MetaqError | None) -> None:
    if error is None:
        step.succeeded()
    else:
        step.failed()


class _StepOutcome:
    """The outcome of one step that stored something."""

    __slots__ = ("_handler", "_opaque", "_session", "_step", "_text", "size")

    def __init__(self, handler: TransactionHandler, session: TextSession, opaque: str, step: Step, text: str) -> None:
        self._handler = handler
        self._session = session
        self._opaque = opaque
        self._step = step
        self._text = text
        self.size = step.size

    def stored(self) -> None:
        self._step.succeeded()
        self._session.answer(1, 0, write_result(OK, self._text, self._opaque))

    def refused(self, error: MetaqError, outcome: str) -> None:
        code = self._step.refusal
        if outcome == NOT_STORED:
            self._step.failed()
        else:
            self._handler.transactions.in_doubt(self._step)
            code = XaCode.RMFAIL
        self._fail(f"the transaction {outcome}: {error}", code)

    def late(self, short: Short) -> None:
        """Report that the step is stored but may still be lost: it cannot be taken back, but a power cut or a new master may
        drop it."""
        self._handler.transactions.stored_late(self._step)
        self._fail(f"stored, but not {short.lacks}; ask again, or let recover tell", XaCode.RMFAIL)

    def _fail(self, reason: str, code: XaCode | None) -> None:
        error = BrokerError(reason) if code is None or self._step.refusal is None else XaError(code, reason)
        self._session.answer(1, 0, refusal(error, self._opaque))


class _TopicsRead(TextRead):
    """A command that needs the topics of branches prepared by an older version: their messages are read first."""

    __slots__ = ("_command", "_handler")

    def __init__(self, handler: TransactionHandler, session: TextSession, command: Transaction) -> None:
        super().__init__(session, command.opaque)
        self._handler = handler
        self._command = command

    def read(self, read: Read) -> None:
        self._handler.transactions.learn_topics(read)

    def found(self, result: None) -> None:
        self._handler.step(self.session, self._command)
        self.settle()

    def fail(self, error: MetaqError) -> None:
        self.settle(refusal(XaError(XaCode.RMFAIL, str(error)), self._opaque))


class _CommitRead(TextRead):
    """The commit of a prepared branch: its messages are read, then stored."""

    __slots__ = ("_handler", "_key", "_work")

    def __init__(self, handler: TransactionHandler, session: TextSession, opaque: str, key: str, work: Work[Held]) -> None:
        super().__init__(session, opaque)
        self._handler = handler
        self._key = key
        self._work = work

    def read(self, read: Read) -> Sequence[Held]:
        return self._handler.transactions.messages(self._work, read)

    def found(self, result: Sequence[Held]) -> None:
        handler = self._handler
        try:
            step = handler.transactions.store_commit(self._key, self._work, result)
        except XaError as error:
            self.settle(refusal(error, self._opaque))
            return
        self.session.owed -= self._owed
        handler.owe(self.session, self._opaque, step)

    def fail(self, error: MetaqError) -> None:
        self._handler.transactions.branches.failed(self._key)
        self.settle(refusal(XaError(XaCode.RMFAIL, f"the branch stays prepared: {error}"), self._opaque))


def refusal(error: MetaqError, opaque: str) -> bytes:
    """Return the reply that reports an error; the text contains the code of an XA error."""
    if isinstance(error, XaError):
        return write_result(ERROR, error.wire, opaque)
    return write_result(error.status if isinstance(error, BadRequest | AccessDenied) else ERROR, str(error), opaque)
