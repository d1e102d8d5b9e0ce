"""The cluster: all brokers with their replicas, as this one sees them now."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from metaq.protocol.remoting.codes import MASTER, Request, Response
from metaq.protocol.remoting.routes import decode_kv_table
from metaq.server.access.permissions import Action
from metaq.server.registering.cluster import ProcessReport, ProcessState, read_replica_state
from metaq.server.services.call import Call
from metaq.server.services.rows import Output, UnixMs


class ClusterMember(Output, frozen=True):
    """A process of a broker: its master, or a slave. What it did not say is null."""

    cluster: str
    broker: str
    replica: int | None
    role: Annotated[str, Meta(description="`master` or `slave`; as it was registered when it does not answer.")]
    address: str
    own: Annotated[bool, Meta(description="Whether it is the one that answers this request.")]
    reachable: bool
    registered: Annotated[bool, Meta(description="False for one that a registry knew in the last hour, and knows no longer.")]
    problem: Annotated[str | None, Meta(description="Why it does not answer, or does not do its part.")]
    reached_ms: Annotated[UnixMs | None, Meta(description="When it last answered this broker.")]
    version: str | None
    put_per_second: float | None
    got_per_second: float | None
    lag: Annotated[int | None, Meta(description="Messages that wait for all groups together.")]
    disk_used_ratio: float | None
    epoch: int | None
    log_end: int | None
    in_sync: Annotated[bool | None, Meta(description="Null where there are no replicas.")]
    lag_bytes: Annotated[int | None, Meta(description="Bytes of its master's log that a slave lacks.")]


class ClusterView(Output, frozen=True):
    """All brokers with their replicas, by name."""

    members: list[ClusterMember]
    without_master: Annotated[list[str], Meta(description="Brokers of which no master answers: they take no messages.")]
    problem: Annotated[
        str | None, Meta(description="Why no registry answers: then `members` are those that were seen in the last hour.")
    ]
    left_out: Annotated[int, Meta(description="SeenProcesses that are too many to be asked.")]


def show_cluster(call: Call) -> ClusterView:
    """Ask all brokers of the cluster and their replicas how they are; within some seconds, whoever does not answer."""
    call.demand(Action.INSPECT)
    cluster, look = call.interior.cluster, call.interior.cluster.look()
    report, now_ms, number = _own_report(call), call.context.store.clock.now_ms(), call.context.settings.replica_number
    own = ProcessState(cluster.own, True, report, None, now_ms, None if report.replica is None else number)
    states = [own, *look.states]
    slaves = _slaves(states)
    members = [_readable_member(state, slaves, is_own=state is own) for state in states]
    names = {member.broker for member in members}
    led = {member.broker for member in members if member.reachable and member.role == "master"}
    return ClusterView(
        members=sorted(members, key=lambda member: (member.cluster, member.broker, member.role, member.address)),
        without_master=sorted(names - led),
        problem=look.problem,
        left_out=look.left_out,
    )


def _own_report(call: Call) -> ProcessReport:
    info = decode_kv_table(bytes(call.ask(Request.GET_BROKER_RUNTIME_INFO).body))
    answer = call.ask(Request.REPLICA_STATUS, also=(Response.REQUEST_CODE_NOT_SUPPORTED,))
    if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED:
        return ProcessReport(info, None)
    return ProcessReport(info, read_replica_state(bytes(answer.body)))


_Slaves = Mapping[tuple[str, int], Mapping[str, Any]]
"""The state of slaves as their masters see them, by broker and replica."""


def _slaves(states: Iterable[ProcessState]) -> _Slaves:
    found = {}
    for state in states:
        replica = None if state.report is None else state.report.replica
        for slave in () if replica is None else replica["slaves"]:
            found[state.process.broker, slave["replica"]] = slave
    return found


def _readable_member(state: ProcessState, slaves: _Slaves, *, is_own: bool) -> ClusterMember:
    """Return a process; what it says in another form than metaq's is its problem, and hides no other one."""
    try:
        return _member(state, slaves, is_own=is_own)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        problem = f"its report cannot be read, as of another version: {error!r}"[:200]
        return _member(state._replace(report=None, problem=problem), slaves, is_own=is_own)


def _member(state: ProcessState, slaves: _Slaves, *, is_own: bool) -> ClusterMember:
    process, report = state.process, state.report
    info: Mapping[str, str] = {} if report is None else report.info
    replica: Mapping[str, Any] = {} if report is None or report.replica is None else report.replica
    number = state.replica or process.number or None
    slave = None if number is None else slaves.get((process.broker, number))
    return ClusterMember(
        cluster=process.cluster,
        broker=process.broker,
        replica=number,
        role=info.get("role", "master" if process.number == MASTER else "slave"),
        address=process.address,
        own=is_own,
        reachable=report is not None,
        registered=state.registered,
        problem=state.problem or replica.get("problem") or replica.get("suspect"),
        reached_ms=state.reached_ms,
        version=info.get("metaqVersion", info.get("brokerVersionDesc")),
        put_per_second=_first(info, "putTps"),
        got_per_second=_first(info, "getTransferredTps"),
        lag=int(info["metaqLag"]) if "metaqLag" in info else None,
        disk_used_ratio=_first(info, "commitLogDiskRatio"),
        epoch=replica.get("epoch"),
        log_end=replica.get("end"),
        in_sync=number in replica["in_sync"] if replica else None,
        lag_bytes=None if slave is None else slave["lag_bytes"],
    )


def _first(info: Mapping[str, str], name: str) -> float | None:
    """Return the first of the numbers under a name."""
    return float(info[name].split()[0]) if info.get(name) else None
