"""Undecided transactions: XA branches and half messages, and decisions of operators."""

import enum
from typing import Annotated, Any

from msgspec import Meta

from metaq.client.admin.views import read_branch, read_branches, read_half, read_halves
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import EndTransaction, Int32
from metaq.protocol.remoting.undecided import (
    Branch,
    BranchMessage,
    DecideTransaction,
    HalfRow,
    ListTransactions,
    TransactionKey,
    UndecidedState,
)
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK
from metaq.server.services.call import Call
from metaq.server.services.rows import After, Done, Input, Output, RowPage, UnixMs

MOST_PAGE = 100
XA_PREFIX = "XID:"
Key = Annotated[str, Meta(min_length=1, max_length=512, description="Of a branch, or the offset id of a half message.")]


class TransactionsQuery(Input, frozen=True):
    """The transactions that are wanted."""

    state: Annotated[
        UndecidedState, Meta(description="XA branches that are `prepared`, those an operator decided, or `half` messages.")
    ] = UndecidedState.PREPARED
    after: After = ""
    limit: Annotated[int, Meta(ge=1, le=MOST_PAGE)] = MOST_PAGE


class TransactionInDoubt(Output, frozen=True):
    """A transaction that is not decided, or not forgotten."""

    key: str
    state: UndecidedState
    since_ms: UnixMs | None
    size: Annotated[int | None, Meta(description="Bytes of its messages.")]
    messages: int | None
    outcome: Annotated[str | None, Meta(description="What an operator decided.")]
    topic: Annotated[str | None, Meta(description="Of a half message, as the next five.")]
    partition: int | None
    message_id: str | None
    group: Annotated[str | None, Meta(description="The group of its producers.")]
    checks: Annotated[int | None, Meta(description="How often its producers were asked.")]
    due_ms: Annotated[UnixMs | None, Meta(description="When they are asked next.")]


class MessageInDoubt(Output, frozen=True):
    """A message of an undecided branch."""

    topic: str
    partition: int
    message_id: int
    tag: str | None
    size: int
    born_ms: UnixMs


class TransactionDetail(TransactionInDoubt, frozen=True):
    """A transaction with its messages."""

    contents: Annotated[list[MessageInDoubt], Meta(description="Messages of a branch, the first 1,000.")]
    problem: Annotated[str | None, Meta(description="Why it cannot be committed.")]


class Decided(enum.Enum):
    """The decisions of an operator."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    COMPLETE = "complete"
    FORGET = "forget"


class DecisionInput(Input, frozen=True):
    """A decision in place of the program that should make it."""

    outcome: Decided


def list_transactions(call: Call, query: TransactionsQuery) -> RowPage[TransactionInDoubt]:
    """Return a page of the transactions in a state, the oldest first."""
    header = ListTransactions(query.state, Int32(query.limit), query.after or None)
    body = bytes(call.ask(Request.LIST_TRANSACTIONS, header).body)
    if query.state is UndecidedState.HALF:
        halves = read_halves(body)
        return RowPage(rows=[TransactionInDoubt(**_half(half)) for half in halves.rows], next=halves.next)
    branches = read_branches(body)
    return RowPage(rows=[TransactionInDoubt(**_branch(branch)) for branch in branches.rows], next=branches.next)


def show_transaction(call: Call, key: Key) -> TransactionDetail:
    """Return one transaction with its messages."""
    body = bytes(call.ask(Request.GET_TRANSACTION, TransactionKey(key)).body)
    if not key.startswith(XA_PREFIX):
        return TransactionDetail(**_half(read_half(body)), contents=[], problem=None)
    found = read_branch(body)
    return TransactionDetail(
        **_branch(found.branch), contents=[_message(each) for each in found.messages], problem=found.problem
    )


def decide_transaction(call: Call, key: Key, body: DecisionInput) -> Done:
    """Decide a transaction in place of the program that should, or forget such a decision."""
    if key.startswith(XA_PREFIX):
        call.ask(Request.DECIDE_TRANSACTION, DecideTransaction(key, body.outcome.value))
        return Done()
    if body.outcome not in (Decided.COMMIT, Decided.ROLLBACK):
        raise BadRequest(f"a half message cannot {body.outcome.value}: commit it, or roll it back")
    half = read_half(bytes(call.ask(Request.GET_TRANSACTION, TransactionKey(key)).body))
    kind = Int32(TRANSACTION_COMMIT if body.outcome is Decided.COMMIT else TRANSACTION_ROLLBACK)
    call.ask(Request.END_TRANSACTION, EndTransaction(half.group, half.ordinal, half.log_offset, kind, half.message_id))
    return Done()


def _branch(branch: Branch) -> dict[str, Any]:
    return {
        "key": branch.key,
        "state": UndecidedState(branch.state),
        "since_ms": branch.since_ms,
        "size": branch.size,
        "messages": branch.messages,
        "outcome": branch.outcome,
        **dict.fromkeys(("topic", "partition", "message_id", "group", "checks", "due_ms")),
    }


def _half(half: HalfRow) -> dict[str, Any]:
    names = ("since_ms", "size", "topic", "partition", "message_id", "group", "checks", "due_ms")
    shared = {name: getattr(half, name) for name in names}
    return {"key": half.offset_id, "state": UndecidedState.HALF, "messages": 1, "outcome": None, **shared}


def _message(message: BranchMessage) -> MessageInDoubt:
    values = message._asdict()
    return MessageInDoubt(tag=values.pop("attribute"), **values)
