"""Undecided transactions, shown and decided by operators: 30010, 30011, 30012, and the figures for ``stats`` and 28."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Final, NamedTuple, TypeVar

from gevent.event import Event

from metaq.engine.context import Context
from metaq.engine.halfmessages import pairs_of
from metaq.engine.turn import Short, Turns
from metaq.errors import BadRequest, CorruptRecord, MetaqError, RequestFailed
from metaq.message import HALF_TOPIC
from metaq.protocol.ids import decode_offset_id, offset_id_of
from metaq.protocol.properties import PRODUCER_GROUP, REAL_QUEUE, REAL_TOPIC, UNIQUE_KEY
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import decode_header, parse_int
from metaq.protocol.remoting.undecided import (
    FORGET,
    MOST_MESSAGES,
    MOST_ROWS,
    Branch,
    BranchMessage,
    DecideTransaction,
    HalfRow,
    ListTransactions,
    Page,
    TransactionKey,
    UndecidedState,
    encode_branch,
    encode_half,
    encode_page,
)
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.store.files.filecache import Read, Run, read_through
from metaq.tx.branches import Work
from metaq.tx.halves import Fate, Half, Halves, origin_of
from metaq.tx.journal import Held
from metaq.tx.local import LocalBranches
from metaq.tx.manager import Transactions
from metaq.tx.openbranches import Room
from metaq.tx.states import Decision
from metaq.tx.steps import Step
from metaq.tx.xacodes import XaCode, XaError
from metaq.tx.xid import Xid, parse_key

logger = logging.getLogger(__name__)

OUTCOMES: Final = (*(outcome.value for outcome in Decision), FORGET)

PAGE_BYTES: Final = 4 << 20
"""Bytes of half messages that are read for one page, roughly: a body may have megabytes."""

T = TypeVar("T", tuple[int, str], tuple[str, Decision], int)


class Tables(NamedTuple):
    """The transactions of one broker."""

    transactions: Transactions
    local: LocalBranches[Held]
    room: Room
    halves: Halves


class TransactionAdminHandler:
    """Shows undecided transactions, and takes operators' decisions about XA branches; decisions about half messages are 37."""

    def __init__(
        self,
        context: Context,
        turns: Turns,
        later: Later,
        tables: Tables,
        run: Run,
    ) -> None:
        self._context = context
        self._turns = turns
        self._later = later
        self._transactions, self._local, self._room, self._halves = tables
        self._read = read_through(run)
        self._oldest: tuple[tuple[str, int], int] | None = None

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.LIST_TRANSACTIONS: self.list_,
            Request.GET_TRANSACTION: self.get,
            Request.DECIDE_TRANSACTION: self.decide,
        }

    # -- lists --------------------------------------------------------------------------------------------------------

    def list_(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return a page of the transactions in one state (30010)."""
        header = decode_header(ListTransactions, request.fields)
        demand(session.principal, Action.INSPECT)
        if not 1 <= header.limit <= MOST_ROWS:
            raise BadRequest(f"limit is {header.limit}, not a number from 1 to {MOST_ROWS}")
        if header.state == UndecidedState.HEURISTIC:
            return Answer(body=(encode_page(self._heuristic(header.after or "", header.limit)),))
        if header.state not in (UndecidedState.PREPARED, UndecidedState.HALF):
            raise BadRequest(f"state is {header.state[:40]!r}, not one of {', '.join(UndecidedState)}")
        work = self._prepared if header.state == UndecidedState.PREPARED else self._undecided
        self._later.read(session, request, partial(work, parse_int("after", header.after or "-1"), header.limit))
        return None

    def _prepared(self, after: int, limit: int, read: Read) -> Answer:
        """Return a page in the order of the log, in which a branch may move towards the end but never towards the front."""
        places = ((place, key) for key, place in self._transactions.branches.places() if place > after)
        chosen, following = _cut(places, limit)
        rows = [self._branch(key, place, read) for place, key in chosen]
        return Answer(body=(encode_page(Page(rows, str(chosen[-1][0]) if following else None)),))

    def _branch(self, key: str, place: int, read: Read) -> Branch:
        try:
            return Branch(key, UndecidedState.PREPARED, *self._transactions.prepared(place, read))
        except CorruptRecord:  # reading it has counted and logged the damage; the operator needs the key all the same
            return Branch(key, UndecidedState.PREPARED)

    def _heuristic(self, after: str, limit: int) -> Page[Branch]:
        decisions = ((key, outcome) for key, outcome in self._transactions.branches.heuristics() if key > after)
        chosen, following = _cut(decisions, limit)
        rows = [Branch(key, UndecidedState.HEURISTIC, outcome=outcome) for key, outcome in chosen]
        return Page(rows, chosen[-1][0] if following else None)

    def _undecided(self, after: int, limit: int, read: Read) -> Answer:
        self._halves.follow(read)
        chosen, following = _cut((ordinal for ordinal in self._halves if ordinal > after), limit)
        rows, size = [], 0
        for number, ordinal in enumerate(chosen, 1):
            half = self._halves.find(ordinal)
            stored = None if half is None else self._halves.stored(half, read)
            if half is None or stored is None:  # decided meanwhile, not visible yet, or damaged, which a check reports
                continue
            rows.append(_half_row(decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size])), half))
            size += stored.size
            if size >= PAGE_BYTES and number < len(chosen):
                chosen, following = chosen[:number], True
                break
        return Answer(body=(encode_page(Page(rows, str(chosen[-1]) if following else None)),))

    # -- one ----------------------------------------------------------------------------------------------------------

    def get(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return one undecided transaction (30011)."""
        text = decode_header(TransactionKey, request.fields).key
        demand(session.principal, Action.INSPECT)
        if ":" not in text:
            self._later.read(session, request, partial(self._show_half, text, decode_offset_id(text).log_offset))
            return None
        key = _branch_key(text)
        place = self._transactions.branches.place(key)
        if place is not None:
            self._later.read(session, request, partial(self._show, key, place))
            return None
        outcome = next((outcome for name, outcome in self._transactions.branches.heuristics() if name == key), None)
        if outcome is None:
            raise _absent(key)
        return Answer(body=(encode_branch(Branch(key, UndecidedState.HEURISTIC, outcome=outcome), [], None),))

    def _show(self, key: str, place: int, read: Read) -> Answer:
        branch, problem = self._branch(key, place, read), None
        held: Sequence[Held] = ()
        try:
            held = self._transactions.messages(Work([], place), read)
        except CorruptRecord as error:  # it can still be rolled back, so it is shown
            problem = str(error)
        messages = [
            BranchMessage(
                topic=each.queue.topic,
                partition=each.queue.partition,
                message_id=each.message_id,
                attribute=each.attribute,
                size=len(each.payload),
                born_ms=each.born_ms,
            )
            for each in held[:MOST_MESSAGES]
        ]
        return Answer(body=(encode_branch(branch, messages, problem),))

    def _show_half(self, offset_id: str, log_offset: int, read: Read) -> Answer:
        """Return the half message that is, or first was, at a log offset: in both places the record names the half message."""
        self._halves.follow(read)
        stored = self._context.store.record_at_offset(log_offset, read)
        if stored is not None:
            record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
            ours = offset_id.upper() == offset_id_of(record.store_host, log_offset)
            if ours and record.topic == HALF_TOPIC:
                half = self._halves.find(origin_of(record, pairs_of(record)).ordinal)
                if half is not None:
                    return Answer(body=(encode_half(_half_row(record, half)),))
        raise RequestFailed(Response.QUERY_NOT_FOUND, f"no undecided message has the offset id {offset_id}")

    # -- decisions ----------------------------------------------------------------------------------------------------

    def decide(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Commit, roll back or forget a branch by an operator's order (30012).

        Answered when the decision, and the messages that it makes visible, are as durable as promised.
        """
        header = decode_header(DecideTransaction, request.fields)
        demand(session.principal, Action.ADMINISTER)
        key = _branch_key(header.key)
        if header.outcome not in OUTCOMES:
            raise BadRequest(f"outcome is {header.outcome[:40]!r}, not one of {', '.join(OUTCOMES)}")
        logger.warning("an operator decides key=%s outcome=%s peer=%s", key, header.outcome, session.address)
        self._later.run(session, request, partial(self._decide, key, header.outcome))

    def _decide(self, key: str, outcome: str) -> Answer:
        try:
            step = self._forget(key) if outcome == FORGET else self._staged(key, Decision(outcome))
        except XaError as error:
            code = Response.QUERY_NOT_FOUND if error.code is XaCode.NOTA else Response.SYSTEM_ERROR
            raise RequestFailed(code, str(error)) from error
        settled = _Settled(self._transactions, step)
        self._turns.staged(settled)
        return settled.wait()

    def _staged(self, key: str, outcome: Decision) -> Step:
        transactions = self._transactions
        self._turns.check_load()
        transactions.learn_topics(self._read)  # the record of the decision has no messages from which to learn them
        work = transactions.decide(key, outcome)
        try:
            messages = transactions.messages(work, self._read) if outcome is Decision.COMMIT else ()
        except MetaqError:
            transactions.branches.failed(key)
            raise
        return transactions.store_decision(key, work, outcome, messages)

    def _forget(self, key: str) -> Step:
        step = self._transactions.forget(key)
        if step is None:
            raise RequestFailed(
                Response.QUERY_NOT_FOUND, f"no operator has decided the branch {key}, so there is nothing to forget"
            )
        return step

    # -- numbers ------------------------------------------------------------------------------------------------------

    def numbers(self, read: Read) -> Mapping[str, object]:
        """Return the figures of transactions by name. Raise ``ColdRead`` as ``read`` does."""
        xa, local = self._transactions.branches.counts(), self._local.counts()
        return {
            "tx_open": xa.open + local.open,
            "tx_open_bytes": self._room.open_bytes,
            "tx_prepared": xa.prepared,
            "tx_heuristic": xa.heuristic,
            "tx_oldest_prepared_s": self._seconds_since(self._oldest_prepared_ms(read)),
            "half_undecided": len(self._halves),
            "half_oldest_s": self._seconds_since(self._halves.oldest_ms),
            "half_committed": self._halves.decided[Fate.COMMITTED],
            "half_rolled_back": self._halves.decided[Fate.ROLLED_BACK],
            "half_given_up": self._halves.decided[Fate.GIVEN_UP],
            "half_checks": self._halves.checked,
        }

    def _oldest_prepared_ms(self, read: Read) -> int | None:
        oldest = next(self._transactions.branches.places(), None)
        if oldest is None:
            return None
        if self._oldest is None or self._oldest[0] != oldest:
            since_ms = self._branch(*oldest, read).since_ms
            if since_ms is None:
                return None
            self._oldest = oldest, since_ms
        return self._oldest[1]

    def _seconds_since(self, since_ms: int | None) -> int:
        """Return the whole seconds since a time; 0 for ``None``."""
        return 0 if since_ms is None else max(0, self._context.store.clock.now_ms() - since_ms) // 1000


class _Settled:
    """The outcome of a decision, for which a greenlet waits."""

    __slots__ = ("_answer", "_known", "_step", "_transactions", "size")

    def __init__(self, transactions: Transactions, step: Step) -> None:
        self._transactions = transactions
        self._step = step
        self._known = Event()
        self._answer = DONE
        self.size = 0

    def wait(self) -> Answer:
        self._known.wait()
        return self._answer

    def stored(self) -> None:
        self._step.succeeded()
        self._known.set()

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._step.failed()
        self._answer = Answer(error.code, remark=f"the decision {outcome}: {error}")
        self._known.set()

    def late(self, short: Short) -> None:
        self._transactions.stored_late(self._step)
        self._answer = Answer(short.code, remark=f"the decision is stored, but not {short.lacks}")
        self._known.set()


def _cut(rows: Iterable[T], limit: int) -> tuple[list[T], bool]:
    """Return the smallest ``limit`` rows, and whether there are more."""
    chosen: list[T] = nsmallest(limit + 1, rows)
    return chosen[:limit], len(chosen) > limit


def _half_row(record: Record, half: Half) -> HalfRow:
    pairs = pairs_of(record)
    origin = origin_of(record, pairs)
    return HalfRow(
        offset_id=offset_id_of(record.store_host, half.log_offset),
        message_id=pairs.get(UNIQUE_KEY, offset_id_of(record.store_host, origin.log_offset)),
        topic=pairs[REAL_TOPIC],
        partition=int(pairs[REAL_QUEUE]),
        group=pairs.get(PRODUCER_GROUP, ""),
        since_ms=half.since_ms,
        checks=half.checks,
        due_ms=half.due_ms,
        size=len(record.body),
        ordinal=origin.ordinal,
        log_offset=origin.log_offset,
    )


def _branch_key(text: str) -> str:
    """Return the canonical key of a branch. Raise ``BadRequest`` for a local transaction."""
    key = parse_key(text)
    if not isinstance(key, Xid):
        raise BadRequest(f"{text[:80]} is a local transaction, which ends with its connection: there is nothing to decide")
    return str(key)


def _absent(key: str) -> RequestFailed:
    return RequestFailed(Response.QUERY_NOT_FOUND, f"no branch {key} is prepared here, and none was decided by an operator")
