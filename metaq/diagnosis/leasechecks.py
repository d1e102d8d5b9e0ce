"""Causes why a group that leases messages does not get on: one check for each, as a function of facts that sends no request."""

from collections.abc import Iterator
from typing import Final

from metaq.diagnosis.findings import Finding, ok, problem, some, warning
from metaq.diagnosis.groupfacts import GroupFacts, LeaseSide
from metaq.protocol.remoting.leases.figures import PlaceRow

MANY: Final = 0.1
"""The share of messages that may be given again, or given up, before there is a warning; and"""
FEW: Final = 10
"""how many may be so in any case."""


def check_leases(facts: GroupFacts) -> Iterator[Finding]:
    """Check the leases of the group in each topic; nothing is said of a group that has none."""
    for side in facts.brokers:
        for leased in side.leases:
            found = [
                *_nobody(side.broker.name, leased),
                *_failing(facts, leased),
                *_full(facts, leased),
                *_unkept(side.broker.name, leased),
            ]
            yield from found
            if not found:
                figures = f"{_sum(leased.places, 'in_flight')} in flight, {_sum(leased.places, 'ready')} ready"
                yield ok("leases", f"{leased.topic.topic} on {side.broker.name}: {figures}")


def _sum(places: tuple[PlaceRow, ...], name: str) -> int:
    return sum(getattr(row, name) for row in places)


def _nobody(broker: str, leased: LeaseSide) -> Iterator[Finding]:
    """Check that somebody takes messages that are ready."""
    ready, in_flight = _sum(leased.places, "ready"), _sum(leased.places, "in_flight")
    if ready and not in_flight and not leased.topic.waiting_consumers:
        found = f"{ready} messages of {leased.topic.topic} are ready on {broker}, and no consumer waits for them or has any"
        yield problem("leases", found, "start a consumer; one that runs is not connected to this broker, or asks for others")


def _failing(facts: GroupFacts, leased: LeaseSide) -> Iterator[Finding]:
    """Check that few messages are given again, or given up."""
    topic = leased.topic
    if topic.again > max(FEW, MANY * topic.given):
        found = f"{topic.again} messages of {topic.topic} were given again, of {topic.given} since the broker started"
        yield warning(
            "leases", found, "the consumer fails, or takes longer than its leases: check its log and its invisible time"
        )
    if topic.dead > max(FEW, MANY * topic.given):
        found = f"{topic.dead} messages of {topic.topic} were given up, of {topic.given} since the broker started"
        yield warning("leases", found, f"metaq dlq show {facts.group}; then metaq dlq replay {facts.group}")


def _full(facts: GroupFacts, leased: LeaseSide) -> Iterator[Finding]:
    """Check that no partition has as many messages out as it may: it gives nothing new then."""
    topic = leased.topic
    out = [row.partition for row in leased.places if row.in_flight + row.delayed >= topic.max_in_flight]
    if out:
        found = (
            f"{topic.max_in_flight} messages (max_in_flight) are in flight or delayed in {topic.topic}-{some(map(str, out))}"
        )
        yield problem("leases", found, f"metaq lease show {facts.group} {topic.topic} {out[0]} shows them; finish some")
    opened = [row.partition for row in leased.places if _open(row) >= topic.max_open]
    if opened:
        found = f"{topic.max_open} messages (max_open) are not finished in {topic.topic}-{some(map(str, opened))}"
        yield problem("leases", found, f"metaq lease show {facts.group} {topic.topic} {opened[0]} shows them; finish some")


def _open(row: PlaceRow) -> int:
    return row.in_flight + row.waiting + row.delayed + row.lined


def _unkept(broker: str, leased: LeaseSide) -> Iterator[Finding]:
    """Check that leases are in the log."""
    if leased.topic.unkept:
        found = f"the leases of {leased.topic.unkept} partitions of {broker} are in memory only: a restart gives messages again"
        yield problem("leases", found, "make room on its disk; its log says why (leases are not kept)")


def check_mode(facts: GroupFacts) -> Iterator[Finding]:
    """Check that nobody pulls for a group whose mode is POP: its commits are ignored."""
    for topic in sorted(facts.popped):
        works = [(client_id, work) for client_id, work in facts.works.items() if work is not None]
        pulling = [client_id for client_id, work in works if any(queue.topic == topic for queue in work.queues)]
        if pulling:
            found = f"{some(pulling)} pull {topic}, but the mode of the group is POP: what they commit is ignored"
            yield warning("mode", found, "have them lease (clientRebalance=false), or set the mode to PULL")
