"""Administration: undecided transactions, and decisions by an operator (docs/transactions.md)."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from metaq.client.admin.views import BranchView, read_branch, read_branches, read_half, read_halves
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask, successful
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.remoting.undecided import (
    FORGET,
    Branch,
    DecideTransaction,
    HalfRow,
    ListTransactions,
    Page,
    TransactionKey,
    UndecidedState,
)
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK
from metaq.tx.states import Decision

R = TypeVar("R", Branch, HalfRow)
T = TypeVar("T")


class TransactionAdmin:
    """The administration of one broker's transactions at a time; made by ``Admin.transactions``. Threads may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def branches(self, address: str) -> Iterator[Branch]:
        """Yield the prepared XA branches, the oldest first, then those that operators have decided.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        for state in (UndecidedState.PREPARED, UndecidedState.HEURISTIC):
            yield from self._pages(address, state, read_branches)

    def halves(self, address: str) -> Iterator[HalfRow]:
        """Yield RocketMQ's undecided transactional messages, the oldest first.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._pages(address, UndecidedState.HALF, read_halves)

    def branch(self, address: str, key: str) -> BranchView | None:
        """Return one branch with its messages; ``None`` when it is neither prepared nor decided by an operator.

        Args:
            address: the broker's address, ``host:port``.
            key: the branch's key, as ``branches`` yields it.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._one(address, key, read_branch)

    def half(self, address: str, offset_id: str) -> HalfRow | None:
        """Return one undecided transactional message; ``None`` when there is none with this id.

        Args:
            address: the broker's address, ``host:port``.
            offset_id: the message's ``offset_id``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._one(address, offset_id, read_half)

    def decide(self, address: str, key: str, outcome: Decision) -> None:
        """Decide a prepared branch in place of its transaction manager, a *heuristic* decision in the terms of XA.

        The other participants do not follow it. The transaction manager gets HEURCOM or HEURRB for its own decision, until it
        forgets the branch.

        Args:
            address: the broker's address, ``host:port``.
            key: the branch's key.
            outcome: commit or roll back.

        Raises:
            Refused: the branch is no longer prepared.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        self._decide(address, DecideTransaction(key, outcome))

    def forget(self, address: str, key: str) -> None:
        """Forget an operator's decision about a branch, in place of the transaction manager.

        Args:
            address: the broker's address, ``host:port``.
            key: the branch's key.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        self._decide(address, DecideTransaction(key, FORGET))

    def decide_half(self, address: str, half: HalfRow, *, commit: bool) -> None:
        """Commit or roll back a transactional message in place of its producers.

        Args:
            address: the broker's address, ``host:port``.
            half: one of ``halves``.
            commit: ``True`` to commit it, ``False`` to roll it back.

        Raises:
            Refused: it is already decided.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        kind = Int32(TRANSACTION_COMMIT if commit else TRANSACTION_ROLLBACK)
        header = headers.EndTransaction(half.group, half.ordinal, half.log_offset, kind, half.message_id)
        ask(self._core.transport, address, RemotingRequest.of(Request.END_TRANSACTION, header), self._core.deadline())

    def _pages(self, address: str, state: UndecidedState, read: Callable[[bytes], Page[R]]) -> Iterator[R]:
        after: str | None = None
        while True:
            request = RemotingRequest.of(Request.LIST_TRANSACTIONS, ListTransactions(state, after=after))
            page = read(ask(self._core.transport, address, request, self._core.deadline()).body)
            yield from page.rows
            after = page.next
            if after is None:
                return

    def _one(self, address: str, key: str, read: Callable[[bytes], T]) -> T | None:
        request = RemotingRequest.of(Request.GET_TRANSACTION, TransactionKey(key))
        response = self._core.transport.call(address, request, self._core.deadline())
        return None if response.code == Response.QUERY_NOT_FOUND else read(successful(response).body)

    def _decide(self, address: str, header: DecideTransaction) -> None:
        request = RemotingRequest.of(Request.DECIDE_TRANSACTION, header)
        ask(self._core.transport, address, request, self._core.deadline())
