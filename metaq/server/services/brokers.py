"""This broker: its state, settings, connections and replicas, and what is wrong with it."""

import enum
import time
from collections.abc import Iterator
from typing import Annotated, Any

import gevent
import orjson
from msgspec import Meta

import metaq
from metaq.address import Address
from metaq.client.admin.views import read_lines
from metaq.config import FIELDS
from metaq.diagnosis.brokerchecks import OF_ALL, OF_MASTERS, BrokerReport
from metaq.diagnosis.findings import Level, some
from metaq.errors import BadRequest, RequestFailed
from metaq.fields import plain
from metaq.message import DEAD_PREFIX, TopicPartition
from metaq.protocol.remoting.adminbodies import encode_settings
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.routes import decode_kv_table
from metaq.server.access.permissions import Action
from metaq.server.remoting.session import RemotingSession
from metaq.server.services.call import Call
from metaq.server.services.rows import Done, Input, NamesQuery, Output, RowPage, UnixMs, page_of
from metaq.server.services.topics import number_of_messages
from metaq.server.wire.session import Session
from metaq.store.figures import StoreFigures

LIVE_S = 0.25
"""The longest that a state is told to those who watch: each watches at a pace of its own, and none sees that it is so old."""
DEFAULT = "default"
CHANGED = "changed while it runs"
AT_ONCE = 200
"""Groups, each in one topic, that are looked at before other greenlets run for"""
REST_S = 0.001
"""seconds; with a sleep of 0, connections would not go on."""


class Averages(Output, frozen=True):
    """Averages per second over the last 10 s, 1 min and 10 min."""

    s10: float
    m1: float
    m10: float


class BrokerFacts(Output, frozen=True):
    """This broker."""

    broker: str
    cluster: str
    role: str
    version: str
    ready: bool
    reasons: Annotated[list[str], Meta(description="Why clients cannot work with it.")]
    address: Annotated[str, Meta(description="Where clients reach it.")]
    now_ms: UnixMs
    up_s: Annotated[int, Meta(description="Seconds since the start.")]
    epoch: int
    topics: int
    groups: int
    connections: int
    log_begin: int
    log_end: int
    log_durable_end: int
    put_messages: Annotated[int, Meta(description="Since the log began.")]
    got_messages: Annotated[int, Meta(description="Since the start.")]
    put_per_second: Averages
    got_per_second: Averages
    gets_waiting: Annotated[int, Meta(description="Gets that wait for messages.")]
    disk_used: Annotated[int, Meta(description="Bytes in use on the file system of the data folder, by whatever it is.")]
    disk_available: Annotated[int, Meta(description="Bytes that are available there.")]
    longest_turn_s: Annotated[float, Meta(description="The longest that one turn of the loop took since the start.")]


class WatchQuery(Input, frozen=True):
    """The pace of a stream of states."""

    interval_ms: Annotated[int, Meta(ge=500, le=10_000)] = 1000


class SettingRow(Output, frozen=True):
    """One setting."""

    name: str
    value: Any
    origin: Annotated[str, Meta(description="`FILE:LINE`, `METAQ_NAME`, `--name`, `default`, or a change while it runs.")]
    live: Annotated[bool, Meta(description="Whether a reload can change it without a restart.")]


class SettingRows(Output, frozen=True):
    """All settings in force but the topics, by name."""

    rows: list[SettingRow]


class SettingsInput(Input, frozen=True):
    """Settings to change until a reload or the end of the process."""

    broker_permission: Annotated[int, Meta(ge=0, le=6, description="The sum of 4 to give and 2 to take messages.")] | None = (
        None
    )
    keep_hours: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    delete_hour: Annotated[int, Meta(ge=0, le=23)] | None = None


class ConnectionRow(Output, frozen=True):
    """One client's connection."""

    address: str
    protocol: str
    user: str
    client_id: Annotated[str | None, Meta(description="As its heartbeats say.")]
    owed: Annotated[int, Meta(description="Requests that wait for their answers.")]
    silent_s: Annotated[float, Meta(description="Seconds since its last byte.")]


class SlaveState(Output, frozen=True):
    """A slave, as its master sees it."""

    replica: int
    address: str
    text: str
    held_end: int
    lag_bytes: int
    lag_ms: Annotated[int, Meta(description="Since it last held the whole log; -1 when it never has.")]
    in_sync: bool


class ReplicaFacts(Output, frozen=True):
    """This replica of the broker."""

    role: str
    replica: int
    epoch: int
    begin: int
    end: int
    durable_end: int
    readable_end: int
    in_sync: list[int]
    min_in_sync: int
    replication: str
    master: str
    master_end: int
    problem: str | None
    suspect: str | None
    slaves: list[SlaveState]


class HandOverInput(Input, frozen=True):
    """The replica that becomes master."""

    replica: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Severity(enum.Enum):
    """The severity of a finding."""

    WARNING = "warning"
    PROBLEM = "problem"


class BrokerFinding(Output, frozen=True):
    """Something that is wrong, and what to do about it."""

    level: Severity
    check: str
    found: str
    advice: str


class BrokerFindings(Output, frozen=True):
    """All that is wrong with this broker now; empty when nothing is."""

    rows: list[BrokerFinding]


def show_broker(call: Call) -> BrokerFacts:
    """Return the state of this broker."""
    call.demand(Action.INSPECT)
    context, interior = call.context, call.interior
    disk = context.store.disk.usage(context.settings.data)
    settings, statistics, figures, reasons = (
        context.settings,
        context.statistics,
        StoreFigures.of(context.store),
        interior.reasons(),
    )
    return BrokerFacts(
        broker=settings.broker_name,
        cluster=settings.cluster_name,
        role="master" if context.replicas.is_master else "slave",
        version=metaq.__version__,
        ready=not reasons,
        reasons=reasons,
        address=str(Address(context.host, context.port)),
        now_ms=context.store.clock.now_ms(),
        up_s=int(time.monotonic() - context.counters.started_s),
        epoch=context.epochs.current.number,
        topics=len(context.topics),
        groups=len(context.groups),
        connections=interior.endpoint.connections,
        log_begin=figures.begin,
        log_end=figures.end,
        log_durable_end=figures.durable_end,
        put_messages=statistics.put_in_all().messages,
        got_messages=statistics.got_in_all().messages,
        put_per_second=Averages(**dict(zip(Averages.__struct_fields__, statistics.put_per_second(), strict=True))),
        got_per_second=Averages(**dict(zip(Averages.__struct_fields__, statistics.transferred_per_second(), strict=True))),
        gets_waiting=interior.holds.of_clients,
        disk_used=disk.used,
        disk_available=disk.available,
        longest_turn_s=round(interior.endpoint.pace.longest_s, 6),
    )


def watch_broker(call: Call, query: WatchQuery) -> Iterator[BrokerFacts | None]:
    """Stream the state of this broker."""
    call.demand(Action.INSPECT)
    return _watch(call, query.interval_ms / 1000)


def _watch(call: Call, pause_s: float) -> Iterator[BrokerFacts | None]:
    while True:
        call.check_goes_on()
        call.demand(Action.INSPECT)  # a user may lose the right meanwhile
        yield call.interior.live.value(lambda: show_broker(call), LIVE_S)
        gevent.sleep(pause_s)


def show_settings(call: Call) -> SettingRows:
    """Return all settings in force but the topics, each with its origin."""
    call.demand(Action.INSPECT)
    origins = call.interior.origins()
    # 10,000 topics would take the loop 0.1 s
    values, at_start = (plain(settings, without=("topics",)) for settings in (call.context.settings, origins.settings))
    rows = [
        SettingRow(
            name=name,
            value=value,
            origin=CHANGED if value != at_start[name] else origins.by_name.get(name, DEFAULT),
            live=FIELDS[name].rules.live,
        )
        for name, value in values.items()
    ]
    return SettingRows(rows=rows)


def change_settings(call: Call, body: SettingsInput) -> SettingRows:
    """Change settings of the running broker: all that are given, or none."""
    names = {"broker_permission": "brokerPermission", "keep_hours": "fileReservedTime", "delete_hour": "deleteWhen"}
    given = {names[name]: value for name in names if (value := getattr(body, name)) is not None}
    if not given:
        raise BadRequest(f"a change names at least one setting: {', '.join(names)}")
    call.ask(Request.UPDATE_BROKER_CONFIG, body=encode_settings(given))
    return show_settings(call)


def list_connections(call: Call, query: NamesQuery) -> RowPage[ConnectionRow]:
    """Return a page of the clients' connections, by address."""
    call.demand(Action.INSPECT)
    ids, now = _client_ids(call), time.monotonic()
    sessions = {_address(session): session for session in call.interior.endpoint.sessions}
    return page_of(
        call, sorted(sessions.items()), query, lambda item: item[0], lambda item: _connection(item[0], item[1], ids, now)
    )


def show_replicas(call: Call) -> ReplicaFacts:
    """Return the state of this replica, and of its slaves or its master."""
    call.demand(Action.INSPECT)
    try:
        answer = call.ask(Request.REPLICA_STATUS)
    except RequestFailed as error:
        if error.code != Response.REQUEST_CODE_NOT_SUPPORTED:
            raise
        raise RequestFailed(Response.QUERY_NOT_FOUND, "this broker accepts no slaves (replication_listen)") from error
    content = orjson.loads(answer.body)
    slaves = [SlaveState(**{name: row[name] for name in SlaveState.__struct_fields__}) for row in content["slaves"]]
    known = {name: content[name] for name in ReplicaFacts.__struct_fields__}
    return ReplicaFacts(**{**known, "slaves": slaves})


def hand_over(call: Call, body: HandOverInput) -> Done:
    """Make another replica in sync the master, without loss of messages."""
    call.ask(Request.HAND_OVER, more={"replica": str(body.replica)})
    return Done()


def find_problems(call: Call) -> BrokerFindings:
    """Return what is wrong with this broker now, the worst first."""
    call.demand(Action.INSPECT)
    found = sorted(_findings(call), key=lambda finding: finding.level is Severity.WARNING)
    return BrokerFindings(rows=found)


def _findings(call: Call) -> Iterator[BrokerFinding]:
    context, found = call.context, list(_reported(call))
    for reason in call.interior.reasons():
        if not any(reason in each.found for each in found):  # the reports have most of them
            yield _problem("ready", reason, "clients cannot work with this broker until this is over")
    yield from found
    suspicion = context.store.suspicion.reason
    if suspicion is not None:
        advice = "compare the replicas; docs/replication.md says what to do then"
        yield _warning("log", f"the log may lack acknowledged messages: {suspicion}", advice)
    stuck = _stuck(call)
    if stuck:
        reason = f"no consumer is connected, and messages wait: {some(stuck)}"
        yield _warning("groups", reason, "check why they do not consume")
    topics = [topic.name for topic in context.topics if topic.name.startswith(DEAD_PREFIX)]
    dead = [name.removeprefix(DEAD_PREFIX) for name in topics if number_of_messages(call, name)]
    if dead:
        advice = "look at them, and send them again or discard them"
        yield _warning("dead letters", f"groups have given up messages: {some(dead)}", advice)
    if context.store.indexing.paused is not None:
        yield _warning("keys", f"no keys are entered: {context.store.indexing.paused}", "messages are not found by key for now")


def _reported(call: Call) -> Iterator[BrokerFinding]:
    """Yield what ``metaq doctor`` finds in the report of this broker."""
    context = call.context
    info = decode_kv_table(bytes(call.ask(Request.GET_BROKER_RUNTIME_INFO).body))
    config = read_lines(bytes(call.ask(Request.GET_BROKER_CONFIG).body))
    report = BrokerReport(call.broker, str(Address(context.host, context.port)), info, config)
    for check in (*OF_ALL, *(OF_MASTERS if context.replicas.is_master else ())):
        for finding in check(report):
            if finding.level is not Level.OK:
                make = _problem if finding.level is Level.PROBLEM else _warning
                yield make(finding.check, finding.found, finding.advice)


def _stuck(call: Call) -> list[str]:
    """Return the groups for which messages wait, and that have no consumer."""
    context, found = call.context, set[str]()
    for number, (group, topic, offsets) in enumerate(list(context.offsets), 1):
        if group not in found and context.clients.consumer_group(group) is None and not context.groups.is_system(group):
            queues = ((context.store.queues.get(TopicPartition(topic, at)), offset) for at, offset in offsets.items())
            waits = any(queue is not None and queue.readable > offset for queue, offset in list(queues))
            if waits and not call.interior.leases.has_consumers(group, topic):
                found.add(group)
        if number % AT_ONCE == 0:
            gevent.sleep(REST_S)
    return sorted(found)


def _warning(check: str, found: str, advice: str) -> BrokerFinding:
    return BrokerFinding(level=Severity.WARNING, check=check, found=found, advice=advice)


def _problem(check: str, found: str, advice: str) -> BrokerFinding:
    return BrokerFinding(level=Severity.PROBLEM, check=check, found=found, advice=advice)


def _address(session: Session) -> str:
    return str(Address(*session.address[:2]))


def _client_ids(call: Call) -> dict[object, str]:
    clients = call.context.clients
    consumers = (member for group in clients.consumer_groups() for member in group.members.values())
    producers = (member for group in clients.producer_groups() for member in clients.producers(group))
    return {member.session: member.client.client_id for members in (consumers, producers) for member in members}


def _connection(address: str, session: Session, ids: dict[object, str], now: float) -> ConnectionRow:
    return ConnectionRow(
        address=address,
        protocol="remoting" if isinstance(session, RemotingSession) else "text",
        user=session.principal.name,
        client_id=ids.get(session),
        owed=session.owed,
        silent_s=round(now - session.last_io, 3),
    )
