"""The first page: what this broker does now, what is wrong with it, and what to do."""

from typing import Any, Final

from metaq.server.console.pages.charts import CHARTS, DEFAULT_SPAN, drawn
from metaq.server.console.visit import PageView, Route, Visit, link
from metaq.server.services.brokers import find_problems, show_broker

PAGES_OF_CHECKS: Final = {
    "groups": (link("groups"), "the groups"),
    "dead letters": (link("dead-letters"), "the dead letters"),
    "log": (link("cluster"), "the replicas"),
    "replicas": (link("cluster"), "the replicas"),
    "transactions": (link("transactions"), "the transactions"),
    "writable": (link("settings"), "the settings"),
}
"""The address and the name of the page that shows more about a finding."""
MOST_CHARTS: Final = 4
"""The first of all charts, which say most."""


def _overview(visit: Visit) -> dict[str, Any]:
    facts, found = show_broker(visit.call), find_problems(visit.call).rows
    rows = [{"level": row.level.value, "check": row.check, "found": row.found, "advice": row.advice} for row in found]
    return {"facts": facts, "findings": rows, "pages": PAGES_OF_CHECKS, **drawn(visit, CHARTS[:MOST_CHARTS], DEFAULT_SPAN)}


ROUTES: Final[tuple[Route, ...]] = (PageView("", "overview.html", _overview),)
