"""Changes of this replica's role by an operator: what they would do, and the orders."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from metaq.diagnosis.rolechanges import ReplicaStanding, demotion_warnings, promotion_warnings
from metaq.protocol.remoting.codes import Request
from metaq.server.access.permissions import Action
from metaq.server.registering.cluster import ProcessState
from metaq.server.services.brokers import show_replicas
from metaq.server.services.call import Call
from metaq.server.services.rows import Done, Input, Output

ELECTED: Final = "elected"
_MASTER: Final = "master"


class PromoteInput(Input, frozen=True):
    """The terms of a promotion."""

    accept_loss: Annotated[bool, Meta(description="Promote a replica that may lack acknowledged messages, too.")] = False


class DemoteInput(Input, frozen=True):
    """The master to follow."""

    master: Annotated[str, Meta(min_length=1, max_length=255, description="Its `replication_listen`, as HOST:PORT.")]


class OtherReplica(Output, frozen=True):
    """Another replica of this broker that answers."""

    name: str
    role: str
    replication: Annotated[str, Meta(description="Where its slaves connect.")]


class DemotionFacts(Output, frozen=True):
    """The facts that an operator needs before this master becomes a slave."""

    warnings: list[str]
    others: Annotated[list[OtherReplica], Meta(description="Masters first.")]


def elects(call: Call) -> bool:
    """Return whether the replicas of this broker elect their master."""
    return call.context.settings.role == ELECTED


def preview_promotion(call: Call) -> list[str]:
    """Return what may be lost when this slave becomes the master, and which replica would be better, as warnings."""
    own, others = show_replicas(call), _others(call)
    in_sync = own.replica in own.in_sync
    standing = ReplicaStanding("", None, own.role == _MASTER, in_sync, own.suspect, own.epoch, own.end, own.master_end)
    return promotion_warnings(standing, map(_standing, others), elects=elects(call))


def promote_replica(call: Call, body: PromoteInput) -> Done:
    """Make this slave the master; its role changes after the answer.

    Where masters are not elected, nobody checks that the old one is gone.
    """
    call.ask(Request.CHANGE_ROLE, more={"role": _MASTER, **({"acceptLoss": "true"} if body.accept_loss else {})})
    return Done()


def preview_demotion(call: Call) -> DemotionFacts:
    """Return what happens when this master becomes a slave, and the replicas that it may follow."""
    show_replicas(call)
    others = _named(_others(call))
    return DemotionFacts(warnings=demotion_warnings(has_other=any(each.role == _MASTER for each in others)), others=others)


def demote_replica(call: Call, body: DemoteInput) -> Done:
    """Make this replica the slave of another one that has taken its place; its role changes after the answer."""
    call.ask(Request.CHANGE_ROLE, more={"role": "slave", "master": body.master})
    return Done()


def _others(call: Call) -> list[ProcessState]:
    """Return the other replicas of this broker, as far as they take slaves or do not answer."""
    call.demand(Action.INSPECT)
    states = [state for state in call.interior.cluster.look().states if state.process.broker == call.broker]
    return [state for state in states if state.report is None or state.report.replica is not None]


def _replica(state: ProcessState) -> Mapping[str, Any]:
    return {} if state.report is None or state.report.replica is None else state.report.replica


def _name(state: ProcessState) -> str:
    number = "" if state.replica is None else f"replica {state.replica} of "
    return f"{number}{state.process.broker} at {state.process.address}"


def _standing(state: ProcessState) -> ReplicaStanding:
    found = _replica(state)
    if not found:
        return ReplicaStanding(_name(state), state.problem or "it is not known why")
    in_sync, is_master = found["replica"] in found["in_sync"], found["role"] == _MASTER
    log = found["suspect"], found["epoch"], found["end"], found["master_end"]
    return ReplicaStanding(_name(state), None, is_master, in_sync, *log)


def _named(states: Iterable[ProcessState]) -> list[OtherReplica]:
    found = [(_name(state), _replica(state)) for state in states]
    rows = [OtherReplica(name=name, role=one["role"], replication=one["replication"]) for name, one in found if one]
    return sorted(rows, key=lambda row: (row.role != _MASTER, row.name))
