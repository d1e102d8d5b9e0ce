"""Transactions in doubt: those that nobody has decided, one with its messages, and a decision by an operator."""

from typing import Any, Final

from metaq.errors import BadRequest
from metaq.protocol.remoting.undecided import UndecidedState
from metaq.server.console.visit import PAGE_ROWS, GoTo, PageChange, PageView, Route, Visit, link
from metaq.server.services.transactions import (
    DecisionInput,
    TransactionsQuery,
    decide_transaction,
    list_transactions,
    show_transaction,
)

_KEY: Final = "/transactions/{key}"
TITLES: Final = {
    UndecidedState.HALF: "Half messages",
    UndecidedState.PREPARED: "Prepared branches",
    UndecidedState.HEURISTIC: "Decided by an operator",
}
"""By state, in the order of the tabs."""


def _list(visit: Visit) -> dict[str, Any]:
    wanted = visit.query.get("state") or UndecidedState.HALF.value
    query = visit.asked(TransactionsQuery, limit=PAGE_ROWS, state=wanted)
    return {"query": query, "page": list_transactions(visit.call, query), "titles": TITLES}


def _one(visit: Visit) -> dict[str, Any]:
    found = show_transaction(visit.call, visit.path["key"])
    heuristic = found.state is UndecidedState.HEURISTIC
    outcomes = {"forget": "Forget the decision"} if heuristic else {"commit": "Commit", "rollback": "Roll back"}
    return {"found": found, "outcomes": outcomes}


def decide(visit: Visit) -> GoTo:
    """Decide a transaction in place of the program that should."""
    if visit.sent.get("sure") != "true":
        raise BadRequest("nothing was decided: say that you are sure, as the program that should decide may decide otherwise")
    found = show_transaction(visit.call, visit.path["key"])
    decide_transaction(visit.call, found.key, visit.given(DecisionInput))
    return GoTo(link("transactions", state=found.state.value), "decided")


_ONE: Final = PageView(_KEY, "transaction.html", _one)
ROUTES: Final[tuple[Route, ...]] = (
    PageView("/transactions", "transactions.html", _list),
    _ONE,
    PageChange(_ONE.path, decide, _ONE),
)
