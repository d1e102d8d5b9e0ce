"""Leases in flight: groups that lease, their partitions, and the messages that are not finished."""

from typing import Any, Final

from metaq.errors import BadRequest
from metaq.server.console.visit import PAGE_ROWS, PageView, Route, Visit
from metaq.server.services.leases import LeasesQuery, OpenQuery, list_leases, list_leasing, list_open
from metaq.server.services.rows import NamesQuery

_TOPIC: Final = "/leases/{group}/{topic}"


def _groups(visit: Visit) -> dict[str, Any]:
    query = visit.asked(NamesQuery, limit=PAGE_ROWS)
    return {"query": query, "page": list_leasing(visit.call, query)}


def _partitions(visit: Visit) -> dict[str, Any]:
    query = visit.asked(LeasesQuery, limit=PAGE_ROWS, topic=visit.path["topic"])
    page = list_leases(visit.call, visit.path["group"], query)
    return {"group": visit.path["group"], "topic": visit.path["topic"], "query": query, "page": page}


def _messages(visit: Visit) -> dict[str, Any]:
    text = visit.path["partition"]
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise BadRequest(f"{text[:20]!r} is no number of a partition")
    query = visit.asked(OpenQuery, limit=PAGE_ROWS)
    page = list_open(visit.call, visit.path["group"], visit.path["topic"], int(text), query)
    return {**visit.path, "query": query, "page": page}


ROUTES: Final[tuple[Route, ...]] = (
    PageView("/leases", "leases.html", _groups),
    PageView(_TOPIC, "lease_partitions.html", _partitions),
    PageView(f"{_TOPIC}/{{partition}}", "lease_messages.html", _messages),
)
