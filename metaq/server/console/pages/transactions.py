"""Transactions in doubt: those that nobody has decided, one with its messages, and a decision by an operator."""

from typing import Any, Final

from metaq.errors import BadRequest
from metaq.protocol.remoting.undecided import UndecidedState
from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link, list_page
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


def _list(visit: Visit, query: TransactionsQuery) -> dict[str, Any]:
    return {"page": list_transactions(visit.call, query), "titles": TITLES}


def _state(visit: Visit) -> str:
    return visit.query.get("state") or UndecidedState.HALF.value


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
    list_page("/transactions", "transactions.html", TransactionsQuery, _list, state=_state),
    _ONE,
    PageChange(_ONE.path, decide, _ONE),
)
