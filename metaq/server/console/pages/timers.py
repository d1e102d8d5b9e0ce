"""Messages that are delayed to a time, and recurring ones."""

from typing import Any, Final

from metaq.errors import BadRequest
from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link, list_page, time_ms
from metaq.server.services.timers import (
    PendingQuery,
    RecurringInput,
    TimersQuery,
    cancel_timer,
    define_recurring,
    end_recurring,
    list_recurring,
    list_timers,
)

MISSED: Final = {
    "last": "the last one is sent when the broker is back",
    "all": "all are sent when the broker is back",
    "none": "none is sent",
}
"""What becomes of times that pass while the broker is down."""


# -- delayed ----------------------------------------------------------------------------------------------------------


def _timers(visit: Visit, query: PendingQuery) -> dict[str, Any]:
    return {"begin": visit.query.get("from", ""), "page": list_timers(visit.call, query)}


def cancel_message(visit: Visit) -> GoTo:
    """Cancel a delayed message."""
    cancel_timer(visit.call, visit.sent.get("handle", ""))
    return GoTo(link("timers", topic=visit.sent.get("topic", "")), "cancelled")


# -- recurring --------------------------------------------------------------------------------------------------------


def _recurring(visit: Visit, query: TimersQuery) -> dict[str, Any]:
    return {"page": list_recurring(visit.call, query), "missed": MISSED}


def _definition(visit: Visit) -> dict[str, Any]:
    return {"missed": MISSED}


def define_message(visit: Visit) -> GoTo:
    """Define a recurring message."""
    name = visit.sent.get("name", "").strip()
    if not name:
        raise BadRequest("a recurring message needs a name")
    body = visit.sent.get("body", "").replace("\r\n", "\n")  # a browser makes two characters of the end of a line
    define_recurring(visit.call, name, visit.given(RecurringInput, body=body))
    return GoTo(link("recurring"), "created")


def _ending(visit: Visit) -> dict[str, Any]:
    name = visit.path["name"]
    return {
        "question": f"End the recurring message {name}?",
        "consequences": ["No further run comes. Messages that were sent stay as they are."],
        "action": link("recurring", name, "end"),
        "word": "End it",
        "name": "",
        "back": link("recurring"),
    }


def end_message(visit: Visit) -> GoTo:
    """End a recurring message."""
    end_recurring(visit.call, visit.path["name"])
    return GoTo(link("recurring"), "ended")


_TIMERS: Final = list_page(
    "/timers", "timers.html", PendingQuery, _timers, from_ms=lambda visit: time_ms(visit.query.get("from", ""))
)
_DEFINITION: Final = PageView("/new-recurring", "recurring_form.html", _definition)
_END: Final = PageView("/recurring/{name}/end", "confirm.html", _ending)
ROUTES: Final[tuple[Route, ...]] = (
    _TIMERS,
    PageChange(_TIMERS.path, cancel_message, _TIMERS),
    list_page("/recurring", "recurring.html", TimersQuery, _recurring),
    _DEFINITION,
    PageChange(_DEFINITION.path, define_message, _DEFINITION),
    _END,
    PageChange(_END.path, end_message, _END),
)
