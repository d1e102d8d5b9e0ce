"""Brokers and their replicas, as this one sees them; and changes of this replica's role."""

from itertools import groupby
from typing import Any, Final

from metaq.errors import BadRequest, RequestFailed
from metaq.server.console.visit import GoTo, PageChange, PageView, Route, Visit, link
from metaq.server.services.brokers import HandOverInput, ReplicaFacts, hand_over, show_replicas
from metaq.server.services.operating.cluster import show_cluster
from metaq.server.services.operating.roles import (
    DemoteInput,
    PromoteInput,
    demote_replica,
    elects,
    preview_demotion,
    preview_promotion,
    promote_replica,
)

HANDS_OVER: Final = """\
This master takes no more messages, waits until the other replica has all of them, and becomes a slave. Clients go on with the
new master after a moment; no message is lost."""
NOBODY_TAKES_OVER: Final = "No slave is in sync: none can take over without loss."
NOT_HERE: Final = "This replica is a slave. Hand over on its master."
NOT_ELECTED: Final = """\
This master was not elected: it cannot hand over. Demote it instead, to follow a replica that is in sync, and promote that one;
no message is taken meanwhile."""
IS_MASTER: Final = "This replica is the master already."
IS_SLAVE: Final = "This replica is a slave already."
NOT_DEMOTED: Final = "The master is elected: it cannot be demoted. Hand over instead."
BECOMES_MASTER: Final = """\
This slave becomes the master in a new epoch, and takes messages. Nobody checks that the old master is gone: only you can know.
Slaves that ask registries follow this one by themselves; others have to be told (Demote, or their setting master)."""
MAY_BE_ELECTED: Final = """\
This replica counts as the only one in sync from then on, and is elected. The others follow it, and lose what it does not have.
While another replica is master, this is refused."""
BECOMES_SLAVE: Final = "This master takes no more messages, and follows the other replica as its slave."


def _cluster(visit: Visit) -> dict[str, Any]:
    view, replicas = show_cluster(visit.call), _replicas(visit)
    brokers = {name: list(members) for name, members in groupby(view.members, key=lambda member: member.broker)}
    return {"view": view, "brokers": brokers, "replicas": replicas, "orders": _orders(visit, replicas)}


def _replicas(visit: Visit) -> ReplicaFacts | None:
    try:
        return show_replicas(visit.call)
    except RequestFailed:  # this broker accepts no slaves
        return None


def _orders(visit: Visit, replicas: ReplicaFacts | None) -> dict[str, str]:
    """Return the orders that this replica may take in its role: their words by the last part of their addresses."""
    if replicas is None:
        return {}
    if replicas.role != "master":
        return {"promote": "Promote…"}
    return {"hand-over": "Hand over…"} if elects(visit.call) else {"demote": "Demote…"}


def _form(order: str, question: str, word: str, **values: Any) -> dict[str, Any]:
    """Return the values of ``confirm.html`` for an order to this replica."""
    return {"question": question, "word": word, "action": link("cluster", order), "back": link("cluster"), **values}


# -- orders -----------------------------------------------------------------------------------------------------------


def _hand_over_form(visit: Visit) -> dict[str, Any]:
    replicas = show_replicas(visit.call)
    others = [slave for slave in replicas.slaves if slave.in_sync]
    obstacle = ""
    if replicas.role != "master":
        obstacle = NOT_HERE
    elif not elects(visit.call):
        obstacle = NOT_ELECTED
    elif not others:
        obstacle = NOBODY_TAKES_OVER
    word, consequences = "" if obstacle else "Hand over", [obstacle or HANDS_OVER]
    return _form(
        "hand-over", "Hand over the master's role?", word, consequences=consequences, others=[] if obstacle else others
    )


def hand_over_role(visit: Visit) -> GoTo:
    """Make another replica in sync the master."""
    if not visit.sent.get("replica"):
        raise BadRequest("nothing was handed over: choose the replica that becomes master")
    hand_over(visit.call, visit.given(HandOverInput))
    return GoTo(link("cluster"), "handed-over")


def _promotion(visit: Visit) -> dict[str, Any]:
    question = "Make this replica the master?"
    if show_replicas(visit.call).role == "master":
        return _form("promote", question, "", consequences=[IS_MASTER])
    consequences = [MAY_BE_ELECTED if elects(visit.call) else BECOMES_MASTER]
    return _form("promote", question, "Promote", consequences=consequences, warnings=preview_promotion(visit.call))


def promote_slave(visit: Visit) -> GoTo:
    """Make this slave the master."""
    promote_replica(visit.call, visit.given(PromoteInput))
    return GoTo(link("cluster"), "promoted")


def _demotion(visit: Visit) -> dict[str, Any]:
    question = "Make this replica a slave?"
    if elects(visit.call) or show_replicas(visit.call).role != "master":
        return _form("demote", question, "", consequences=[NOT_DEMOTED if elects(visit.call) else IS_SLAVE])
    facts = preview_demotion(visit.call)
    shown = {"consequences": [BECOMES_SLAVE], "warnings": facts.warnings, "others": facts.others}
    return _form("demote", question, "Demote", **shown)


def demote_master(visit: Visit) -> GoTo:
    """Make this replica a slave of the one that has taken its place."""
    if not visit.sent.get("master"):
        raise BadRequest("nothing was changed: name the master that this replica follows")
    demote_replica(visit.call, visit.given(DemoteInput))
    return GoTo(link("cluster"), "demoted")


_HAND_OVER: Final = PageView("/cluster/hand-over", "hand_over.html", _hand_over_form)
_PROMOTE: Final = PageView("/cluster/promote", "promote.html", _promotion)
_DEMOTE: Final = PageView("/cluster/demote", "demote.html", _demotion)
ROUTES: Final[tuple[Route, ...]] = (
    PageView("/cluster", "cluster.html", _cluster),
    _HAND_OVER,
    PageChange(_HAND_OVER.path, hand_over_role, _HAND_OVER),
    _PROMOTE,
    PageChange(_PROMOTE.path, promote_slave, _PROMOTE),
    _DEMOTE,
    PageChange(_DEMOTE.path, demote_master, _DEMOTE),
)
