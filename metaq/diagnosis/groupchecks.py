"""Causes why a group does not consume: one check for each, as a function of facts that sends no request."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from metaq.client import Model
from metaq.client.admin.views import LagView
from metaq.diagnosis.findings import Finding, ok, problem, some, warning
from metaq.diagnosis.groupfacts import GroupFacts, TopicState, pulled_lags, resting
from metaq.diagnosis.leasechecks import check_leases, check_mode
from metaq.errors import RouteProblem
from metaq.message import RETRY_PREFIX, MessageQueue
from metaq.protocol.record import TAGS
from metaq.protocol.sql92 import compile_expression
from metaq.protocol.subscription import ExpressionKind, Subscription, parse_subscription

_TOPIC_ADVICE: Final = {
    RouteProblem.REGISTRY_UNREACHABLE: "start a registry, or name another one with --registry",
    RouteProblem.TOPIC_ABSENT: "create it: metaq topic create {topic}; is the name right?",
    RouteProblem.NO_LIVE_MASTER: "start the broker that has it; metaq cluster brokers lists those that live",
    RouteProblem.NO_PERMISSION: "metaq topic create {topic} --permission rw, or make the broker readable again",
}


def diagnose(facts: GroupFacts) -> list[Finding]:
    """Run all checks, in the order in which a person would ask."""
    return [finding for check in CHECKS for finding in check(facts)]


def check_brokers(facts: GroupFacts) -> Iterator[Finding]:
    """Check that this machine reaches all brokers: if it does not, consumers may not, either."""
    for side in facts.brokers:
        if side.error is not None:
            found = f"{side.broker.name} at {side.broker.address} cannot be asked: {side.error}"
            yield problem("broker", found, "metaq doctor checks the addresses that brokers are registered under")
    if not facts.brokers:
        yield problem("broker", "no broker is registered", "start one, or name another registry with --registry")


def check_known(facts: GroupFacts) -> Iterator[Finding]:
    """Check that the group exists."""
    if facts.settings is not None:
        yield ok("group", f"{facts.group} is known")
    elif facts.brokers:
        names = {name for side in facts.brokers for name in side.names}
        alike = difflib.get_close_matches(facts.group, sorted(names))
        found = f"no broker knows the group {facts.group}" + (f"; alike: {', '.join(alike)}" if alike else "")
        yield problem("group", found, "check the name; its first consumer makes a group")


def check_members(facts: GroupFacts) -> Iterator[Finding]:
    """Check that the group has consumers, and that they answer."""
    members = facts.members
    waiting = sum(leased.topic.waiting_consumers for leased in facts.leases)
    in_flight = sum(row.in_flight for leased in facts.leases for row in leased.places)
    if not members and (waiting or in_flight):  # clients of the text protocol lease without being members
        yield ok("consumers", f"{waiting} wait for messages, and {in_flight} messages are leased")
        return
    if not members:
        advice = (
            "start one; one that runs has another group name, uses another registry, or waits for a topic that is not there"
        )
        yield problem("consumers", "no consumer is connected", advice)
        return
    yield ok("consumers", f"{len(members)} connected: {some(members)}")
    silent = [client_id for client_id, work in facts.works.items() if work is None]
    if silent:
        yield warning("consumers", f"no answer from {some(silent)}", "it hangs, or its version cannot report its state")


def check_settings(facts: GroupFacts) -> Iterator[Finding]:
    """Check that brokers let the group consume."""
    for side in facts.brokers:
        settings, name = side.settings, side.broker.name
        if settings is None:
            continue
        if not settings.consume_enable:
            advice = f"metaq group update {facts.group} --consume"
            yield problem("enabled", f"consuming is disabled for the group on {name}", advice)
        elif facts.model == Model.BROADCASTING.value and not settings.consume_broadcast_enable:
            advice = f"metaq group update {facts.group} --broadcast"
            yield problem("enabled", f"broadcast consuming is disabled for the group on {name}", advice)
        else:
            yield ok("enabled", f"{name} lets the group consume")


def check_topics(facts: GroupFacts) -> Iterator[Finding]:
    """Check that the topics it subscribes to exist and can be read."""
    if facts.members and not facts.topics:
        yield problem("topic", "the group subscribes to no topic", "call subscribe() in the consumers")
    for topic in facts.topics:
        if topic.problem is not None:
            yield problem("topic", topic.details, _TOPIC_ADVICE[topic.problem].format(topic=topic.name))
        elif facts.members and topic.name == facts.asked_topic and not _is_subscribed(facts, topic.name):
            yield problem("topic", f"no member subscribes to {topic.name}", "subscribe to it, or ask about another group")
        else:
            yield ok("topic", f"{topic.name} can be read, {len(topic.queues)} partitions")


def _is_subscribed(facts: GroupFacts, topic: str) -> bool:
    known = [work.subscriptions for work in facts.works.values() if work is not None]
    return any(topic in subscriptions for subscriptions in known) or len(known) < len(facts.works)


def check_reach(facts: GroupFacts) -> Iterator[Finding]:
    """Check that consumers are connected to every broker with partitions of their topics.

    Those that are not consume from the other brokers alone.
    """
    holding = {queue.broker_name for topic in facts.topics for queue in topic.queues}
    for side in facts.brokers:
        if side.broker.name not in holding or side.error is not None or not facts.members:
            continue
        here = set() if side.members is None else {member.client_id for member in side.members.members}
        missing = facts.members.keys() - here
        if missing:
            found = f"{some(missing)} not connected to {side.broker.name} at {side.broker.address}"
            yield problem("reach", found, "check that this address can be reached from their machines: run metaq doctor there")
        else:
            yield ok("reach", f"all consumers are connected to {side.broker.name}")


def check_subscriptions(facts: GroupFacts) -> Iterator[Finding]:
    """Check that all members have the same subscription.

    Messages that the owner of a partition filters out reach no other member.
    """
    works = {client_id: work for client_id, work in facts.works.items() if work is not None}
    if len(works) < 2:
        return
    differing = False
    for topic in facts.topics:
        wanted: dict[str, list[str]] = {}
        for client_id, work in works.items():
            subscription = work.subscriptions.get(topic.name)
            text = "not subscribed" if subscription is None else f"{subscription.kind} {subscription.expression}"
            wanted.setdefault(text, []).append(client_id)
        if len(wanted) > 1:
            differing = True
            found = "; ".join(f"{text} by {some(clients)}" for text, clients in sorted(wanted.items()))
            advice = "give all members the same subscription, or different groups: messages are being missed"
            yield problem("subscriptions", f"members have different subscriptions to {topic.name}: {found}", advice)
    if not differing:
        yield ok("subscriptions", f"all {len(works)} members have the same subscriptions")


def check_owners(facts: GroupFacts) -> Iterator[Finding]:
    """Check that every partition belongs to exactly one member."""
    works = {client_id: work for client_id, work in facts.works.items() if work is not None}
    if not works or len(works) < len(facts.works) or facts.model == Model.BROADCASTING.value:
        return
    owners: dict[MessageQueue, list[str]] = {}
    for client_id, work in works.items():
        for queue in work.queues:
            owners.setdefault(queue, []).append(client_id)
    for topic in facts.topics:
        if topic.problem is not None or topic.name in facts.popped or not _is_subscribed(facts, topic.name):
            continue
        orphans = [queue for queue in topic.queues if queue not in owners]
        shared = [queue for queue in topic.queues if len(owners.get(queue, ())) > 1]
        if orphans:
            advice = "check that all members have the same subscription and allocation strategy; restart one to rebalance"
            yield problem("owners", f"nobody consumes {places(orphans)}", advice)
        if shared:
            advice = "members rebalance within 20 s; if this remains, check that all use the same allocation strategy"
            yield warning("owners", f"several members consume {places(shared)}", advice)
        if not orphans and not shared:
            yield ok("owners", f"every partition of {topic.name} has one owner")


def check_progress(facts: GroupFacts) -> Iterator[Finding]:
    """Check that offsets move where messages are left to consume."""
    if not facts.members or facts.model == Model.BROADCASTING.value:
        return
    lagging = [lag for lag in pulled_lags(facts) if lag.lag]
    if not lagging and any(lag.leased is not None and lag.lag for lag in facts.lags):
        return  # the checks of leases say how far it is
    if not lagging:
        yield ok("progress", "everything is consumed: there is nothing left to deliver")
        return
    still = resting(facts)
    stuck = [lag for lag in lagging if lag.queue in still]
    behind = sum(lag.lag for lag in lagging)
    if not facts.watched_s:
        yield ok("progress", f"{behind} messages behind; offsets were not watched (--watch)")
    elif stuck:
        found = f"offsets did not move in {facts.watched_s:.0f} s: {', '.join(map(_told, stuck[:3]))}{_in_hand(facts, stuck)}"
        yield problem("progress", found, "check what the listener does: stack traces and logs of the consumer")
    else:
        yield ok("progress", f"{behind} messages behind, and offsets move")


def _told(lag: LagView) -> str:
    return f"{place(lag.queue)} at {lag.committed} of {lag.end}"


def _in_hand(facts: GroupFacts, stuck: list[LagView]) -> str:
    """Return a note on the messages that members say they hold of partitions that do not move."""
    works = [work for work in facts.works.values() if work is not None]
    buffered = sum(work.queues[lag.queue].buffered for work in works for lag in stuck if lag.queue in work.queues)
    return f"; the consumer holds {buffered} of these messages and has not finished them" if buffered else ""


def check_offsets(facts: GroupFacts) -> Iterator[Finding]:
    """Check that no offset is after its partition's end: messages would come only once the partition has grown that far."""
    ahead = [lag for lag in facts.lags if lag.committed > lag.end]
    if ahead:
        found = f"committed offsets lie beyond the end: {', '.join(map(_told, ahead[:3]))}"
        topic = ahead[0].queue.topic
        numbers = sorted({lag.queue.partition for lag in ahead if lag.queue.topic == topic})
        reset = f"metaq group reset-offset {facts.group} {topic} --to-begin{''.join(f' --partition {n}' for n in numbers)}"
        yield problem("offsets", found, f"the topic is a new one, or data was lost; {reset} shows what would change")
    elif facts.lags:
        yield ok("offsets", "no offset lies beyond the end of its partition")


def check_filter(facts: GroupFacts) -> Iterator[Finding]:
    """Check that the members' subscriptions let some of the newest messages pass."""
    for topic in facts.topics:
        for subscription in _wanted(facts, topic):
            if not topic.newest:
                continue
            if any(_passes(subscription, properties) for properties in topic.newest):
                yield ok("filter", f"{subscription.expression} lets messages of {topic.name} pass")
            else:
                tags = sorted({properties.get(TAGS, "none") for properties in topic.newest})
                found = f"{subscription.expression} lets none of the newest {len(topic.newest)} messages of {topic.name} pass"
                yield warning("filter", f"{found}; their tags: {some(tags)}", "check the expression; case matters")


def _wanted(facts: GroupFacts, topic: TopicState) -> set[Subscription]:
    """Return the different subscriptions of all members."""
    found: dict[tuple[str, str], Subscription] = {}
    for work in facts.works.values():
        if work is not None and topic.name in work.subscriptions:
            one = work.subscriptions[topic.name]
            found[one.kind, one.expression] = one
    if not found:
        for side in facts.brokers:
            if side.members is not None and topic.name in side.members.subscriptions:
                kind, expression = side.members.kinds[topic.name], side.members.subscriptions[topic.name]
                found[kind, expression] = parse_subscription(topic.name, expression, 0, kind)
    return set(found.values())


def _passes(subscription: Subscription, properties: Mapping[str, str]) -> bool:
    if subscription.kind is ExpressionKind.SQL92:
        return compile_expression(subscription.expression)(properties)
    return subscription.matches_tag(properties.get(TAGS))


def check_retries(facts: GroupFacts) -> Iterator[Finding]:
    """Check that failed messages do not pile up."""
    waiting = sum(lag.lag for lag in facts.lags if lag.queue.topic.startswith(RETRY_PREFIX))
    if waiting:
        found = f"{waiting} messages that failed wait to be delivered again"
        yield warning("retries", found, "the listener fails: check the consumer's log")
    if facts.dead_letters:
        found = f"{facts.dead_letters} messages became dead letters"
        yield warning("dead letters", found, f"metaq dlq show {facts.group}; then metaq dlq replay {facts.group}")
    if not waiting and not facts.dead_letters:
        yield ok("retries", "no message waits to be delivered again, and there are no dead letters")


def place(queue: MessageQueue) -> str:
    """Return a partition as people read it."""
    return f"{queue.topic}-{queue.partition} of {queue.broker_name}"


def places(queues: list[MessageQueue]) -> str:
    """Return several partitions, in short."""
    return some(map(place, queues))


Check = Callable[[GroupFacts], Iterator[Finding]]

CHECKS: Final[tuple[Check, ...]] = (
    check_brokers,
    check_known,
    check_settings,
    check_topics,
    check_members,
    check_reach,
    check_subscriptions,
    check_owners,
    check_offsets,
    check_filter,
    check_retries,
    check_leases,
    check_mode,
    check_progress,
)
