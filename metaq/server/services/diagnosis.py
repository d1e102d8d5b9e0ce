"""Why a group does not consume: the checks of ``metaq why-not-consuming``, over what this broker knows."""

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import gevent
from msgspec import Meta

from metaq.address import Address
from metaq.client.admin.views import BrokerView, GroupView, LagView, MemberWork, read_leases, read_work
from metaq.diagnosis.groupchecks import diagnose
from metaq.diagnosis.groupfacts import NEWEST, BrokerSide, GroupFacts, LeaseSide, TopicState, consumed_topics, resting
from metaq.errors import MetaqError, RouteProblem
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import MASTER, READ, Request
from metaq.protocol.remoting.headers import RunningInfo, encode_header
from metaq.protocol.remoting.leases.figures import PlaceRow, TopicRow
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.groups import lags_of
from metaq.server.services.messages import PartitionReader
from metaq.server.services.rows import Input, Name, Output
from metaq.server.services.topics import number_of_messages
from metaq.server.services.tracks import members_of

MOST_MEMBERS = 64
"""Members that are asked what they do."""
MOST_TOPICS = 64
"""Topics of a group that are looked at."""
MOST_READ = 16
"""Partitions of a topic whose newest messages are compared with the filters."""
MEMBER_S = 3.0
"""The longest that members have to answer, all together."""
LOOK_S = 0.5


class DiagnosisQuery(Input, frozen=True):
    """The extent of a diagnosis."""

    topic: Annotated[str, Meta(max_length=255, description="By default all topics of the group.")] = ""
    watch_s: Annotated[int, Meta(ge=0, le=15, description="Seconds to watch whether offsets move; ends early if they do.")] = 0


class GroupFinding(Output, frozen=True):
    """The result of one check."""

    level: Annotated[str, Meta(description="`ok`, `warning` or `problem`.")]
    check: str
    found: str
    advice: str


class GroupDiagnosis(Output, frozen=True):
    """The results of all checks of a group."""

    group: str
    watched_s: float
    rows: list[GroupFinding]


def diagnose_group(call: Call, group: Name, query: DiagnosisQuery) -> GroupDiagnosis:
    """Check everything on this broker that can keep a group from consuming, and advise what to do."""
    call.demand(Action.INSPECT, group)
    facts = _watched(call, _facts(call, group, query.topic or None), query.watch_s)
    rows = [GroupFinding(**{**each._asdict(), "level": each.level.name.lower()}) for each in diagnose(facts)]
    return GroupDiagnosis(group=group, watched_s=round(facts.watched_s, 1), rows=rows)


def _watched(call: Call, facts: GroupFacts, watch_s: float) -> GroupFacts:
    """Look again for up to ``watch_s`` seconds, or until every partition with a lag has moved."""
    began = time.monotonic()
    while resting(facts) and (passed := time.monotonic() - began) < watch_s:
        gevent.sleep(min(LOOK_S, watch_s - passed))
        later = {view.queue: view.committed for view in lags_of(call, facts.group, facts.asked_topic or "")}
        facts = facts._replace(later=later, watched_s=time.monotonic() - began)
    return facts


def _facts(call: Call, group: str, topic: str | None) -> GroupFacts:
    facts = GroupFacts(group, (_side(call, group, topic),), asked_topic=topic)
    works = _works(call, group, list(facts.members)[:MOST_MEMBERS])
    names = [topic] if topic is not None else sorted(consumed_topics(facts, works))[:MOST_TOPICS]
    return facts._replace(
        works=works,
        topics=tuple(_topic(call, name) for name in names),
        dead_letters=number_of_messages(call, f"{DEAD_PREFIX}{group}"),
    )


def _side(call: Call, group: str, topic: str | None) -> BrokerSide:
    context = call.context
    broker = BrokerView(context.settings.cluster_name, call.broker, MASTER, str(Address(context.host, context.port)))
    known = context.groups.get(group)
    if known is None:
        return BrokerSide(broker, None, names=tuple(each.name for each in context.groups), members=members_of(call, group))
    lags = [] if topic is not None and context.topics.get(topic) is None else lags_of(call, group, topic or "")
    if context.topics.get(f"{RETRY_PREFIX}{group}") is not None:
        # asked for by name: a broker otherwise leaves out retries without a committed offset
        lags += lags_of(call, group, f"{RETRY_PREFIX}{group}")
    return BrokerSide(
        broker,
        None,
        GroupView(group, known.consume_enable, known.consume_broadcast_enable),
        tuple(each.name for each in context.groups),
        members_of(call, group),
        tuple(sorted(_once(lags), key=lambda lag: lag.queue)),
        _leases(call, group, topic),
    )


def _once(lags: Iterable[LagView]) -> Iterable[LagView]:
    return {lag.queue: lag for lag in lags}.values()


def _leases(call: Call, group: str, topic: str | None) -> tuple[LeaseSide, ...]:
    asked = {"group": group} if topic is None else {"group": group, "topic": topic}
    places = [PlaceRow(*(row[name] for name in PlaceRow._fields)) for row in _rows(call, Request.LIST_LEASES, asked)]
    topics = [TopicRow(*(row[name] for name in TopicRow._fields)) for row in _rows(call, Request.LEASE_STATS, {"group": group})]
    return tuple(
        LeaseSide(row, tuple(place for place in places if place.topic == row.topic))
        for row in topics
        if topic in (None, row.topic)
    )


def _rows(call: Call, code: Request, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the first page of rows: as many as a person reads."""
    rows, _ = read_leases(bytes(call.ask(code, body=fastjson.encode(dict(asked))).body))
    return rows


def _works(call: Call, group: str, clients: list[str]) -> dict[str, MemberWork | None]:
    """Return each member's report on itself; ``None`` for a client that does not know the request, or hangs."""
    requests = [(encode_header(RunningInfo(group, client_id)), b"") for client_id in clients]
    answers = call.ask_each(Request.GET_CONSUMER_RUNNING_INFO, requests, MEMBER_S)
    return {
        client_id: None if isinstance(answer, MetaqError) or answer.code else read_work(bytes(answer.body))
        for client_id, answer in zip(clients, answers, strict=True)
    }


def _topic(call: Call, name: str) -> TopicState:
    known = call.context.topics.get(name)
    if known is None:
        return TopicState(name, RouteProblem.TOPIC_ABSENT, f"the topic {name} does not exist on this broker")
    if not known.permission & READ:
        return TopicState(name, RouteProblem.NO_PERMISSION, f"the topic {name} gives no messages on this broker")
    queues = tuple(MessageQueue(name, call.broker, number) for number in range(known.read_partitions))
    newest: list[Mapping[str, str]] = []
    if call.principal.admin or call.principal.may(Action.SUBSCRIBE, name):
        for number in range(min(known.read_partitions, MOST_READ)):
            reader = PartitionReader(call, name, number)
            newest += [one.properties for one in reader.read(max(0, reader.end - NEWEST), NEWEST, most_body=0).messages]
            call.rest_after(number + 1)
    return TopicState(name, None, "", queues, tuple(newest))
