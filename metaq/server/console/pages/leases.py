"""Leases in flight: groups that lease, their partitions, and the messages that are not finished."""

from typing import Any, Final

from metaq.errors import BadRequest
from metaq.server.console.visit import Route, Visit, list_page, rows_page
from metaq.server.services.leases import LeasesQuery, OpenQuery, list_leases, list_leasing, list_open
from metaq.server.services.rows import NamesQuery

_TOPIC: Final = "/leases/{group}/{topic}"


def _partitions(visit: Visit, query: LeasesQuery) -> dict[str, Any]:
    return {"page": list_leases(visit.call, visit.path["group"], query)}


def _messages(visit: Visit, query: OpenQuery) -> dict[str, Any]:
    group, topic, partition = visit.path["group"], visit.path["topic"], visit.path["partition"]
    if not (partition.isascii() and partition.isdecimal() and len(partition) < 6):
        raise BadRequest(f"{partition[:20]!r} is no number of a partition")
    return {"page": list_open(visit.call, group, topic, int(partition), query)}


ROUTES: Final[tuple[Route, ...]] = (
    rows_page("/leases", "leases.html", NamesQuery, list_leasing),
    list_page(_TOPIC, "lease_partitions.html", LeasesQuery, _partitions, topic=lambda visit: visit.path["topic"]),
    list_page(f"{_TOPIC}/{{partition}}", "lease_messages.html", OpenQuery, _messages),
)
