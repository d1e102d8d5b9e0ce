"""Brokers and their replicas, as this one sees them; and the hand-over of the master's role."""

from itertools import groupby
from typing import Any, Final

from metaq.errors import BadRequest, RequestFailed
from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link
from metaq.server.services.brokers import HandOverInput, ReplicaFacts, hand_over, show_replicas
from metaq.server.services.operating.cluster import show_cluster


def _cluster(visit: Visit) -> dict[str, Any]:
    view = show_cluster(visit.call)
    brokers = {name: list(members) for name, members in groupby(view.members, key=lambda member: member.broker)}
    return {"view": view, "brokers": brokers, "replicas": _replicas(visit), "own": visit.call.broker}


def _replicas(visit: Visit) -> ReplicaFacts | None:
    try:
        return show_replicas(visit.call)
    except RequestFailed:  # this broker accepts no slaves
        return None


def _hand_over_form(visit: Visit) -> dict[str, Any]:
    replicas = show_replicas(visit.call)
    return {"replicas": replicas, "others": [slave for slave in replicas.slaves if slave.in_sync]}


def hand_over_role(visit: Visit) -> GoTo:
    """Make another replica in sync the master."""
    if not visit.sent.get("replica"):
        raise BadRequest("nothing was handed over: choose the replica that becomes master")
    hand_over(visit.call, visit.given(HandOverInput))
    return GoTo(link("cluster"), "handed-over")


_HAND_OVER: Final = PageView("/cluster/hand-over", "hand_over.html", _hand_over_form)
ROUTES: Final[tuple[Route, ...]] = (
    PageView("/cluster", "cluster.html", _cluster),
    _HAND_OVER,
    PageChange(_HAND_OVER.path, hand_over_role, _HAND_OVER),
)
