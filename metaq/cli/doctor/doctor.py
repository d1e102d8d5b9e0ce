"""``metaq doctor``: checks whether clients can work, seen from where it runs. Each check is a function of facts."""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import click

from metaq.address import parse_address
from metaq.cli.common import examples, json_option, registry_option
from metaq.cli.doctor.doctorfacts import BrokerState, DoctorFacts, gather_facts
from metaq.cli.doctor.findings import print_findings
from metaq.cli.doctor.groupfacts import watch_option
from metaq.diagnosis import brokerchecks
from metaq.diagnosis.brokerchecks import BrokerReport
from metaq.diagnosis.findings import Finding, Level, ok, problem, some, warning
from metaq.diagnosis.groupchecks import diagnose
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.remoting.codes import MASTER, READ, WRITE

CLOCK_WARNING_MS: Final = 1_000
CLOCK_PROBLEM_MS: Final = 60_000
"""From here on, searches by time, delays and retention mean something else here than there."""
ANYWHERE: Final = "anywhere"
HERE: Final = "this machine"
LOGIN: Final = "metaq --user NAME doctor, as a user with admin"


def examine(facts: DoctorFacts) -> list[Finding]:
    """Run all checks, from the outside in."""
    return [finding for check in CHECKS for finding in check(facts)]


# -- registries -------------------------------------------------------------------------------------------------------


def check_registries(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that registries are known, that each answers, and that all know the same brokers."""
    if facts.unnamed is not None:
        advice = "check the address of ZooKeeper, and that brokers have it as their setting zookeeper"
        yield problem("registry", facts.unnamed, advice)
    for state in facts.registries:
        if state.error is None:
            yield ok("registry", f"{state.address} answers")
        elif state.refuses:
            yield problem("registry", f"{state.address} answers, and refuses: {state.error}", f"log in: {LOGIN}")
        else:
            advice = "check that it runs there, that the address is right, and that no firewall blocks it"
            yield problem("registry", f"{state.address} does not answer: {state.error}", advice)
    answering = [state for state in facts.registries if state.error is None]
    if len({state.brokers for state in answering}) > 1:
        told = "; ".join(f"{state.address}: {some(broker.name for broker in state.brokers) or 'none'}" for state in answering)
        yield warning("registry", f"registries know different brokers: {told}", "set registries to all of them on every broker")


def check_registered(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that there are brokers, and that every name has a master."""
    if facts.brokers:
        names = {state.broker.name for state in facts.brokers}
        yield ok("brokers", f"{len(facts.brokers)} registered: {some(names)}")
        for name in sorted(names - {state.broker.name for state in facts.brokers if state.broker.broker_id == MASTER}):
            yield problem("brokers", f"{name} has replicas but no master: it accepts no messages", "start its master")
    elif any(state.error is None for state in facts.registries):
        advice = "start one whose setting registries names this registry, or choose another registry with --registry"
        yield problem("brokers", "no broker is registered", advice)


# -- brokers ----------------------------------------------------------------------------------------------------------


def reach_of(host: str) -> str | None:
    """Return why an address is of no use elsewhere: ``ANYWHERE`` (0.0.0.0) or ``HERE`` (loopback); ``None`` if it is of use."""
    if host == "localhost":
        return HERE
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_unspecified:
        return ANYWHERE
    return HERE if address.is_loopback else None


def check_advertised(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that the addresses brokers advertise to clients work from other machines, too."""
    remote = [state.address for state in facts.registries if reach_of(parse_address(state.address)[0]) is None]
    for state in facts.brokers:
        reach = reach_of(parse_address(state.broker.address)[0])
        what = f"{state.broker.name} tells clients to connect to {state.broker.address}"
        advice = "set advertise to HOST:PORT under which clients reach the broker"
        if reach == ANYWHERE:
            yield problem("advertised", f"{what}, which is not an address to connect to", advice)
        elif reach == HERE and remote:
            yield problem("advertised", f"{what}, while the registry {remote[0]} is on another machine", advice)


def check_reached(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that each broker answers at its address, and is the one that it should be."""
    places = {(state.identity.identity, state.broker.address) for state in facts.brokers if state.identity is not None}
    processes = Counter(identity for identity, _ in places)
    for state in facts.brokers:
        name, address = state.broker.name, state.broker.address
        if state.refuses:
            advice = f"log in: {LOGIN}; if other brokers let you in, give {name} their users file"
            yield problem("reached", f"{name} answers at {address}, and refuses: {state.error}", advice)
        elif state.error is not None:
            advice = "set advertise to an address that can be reached from here, or open the firewall"
            yield problem("reached", f"{name} cannot be reached at {address}: {state.error}", advice)
        elif state.identity is None:
            yield ok("reached", f"{name} answers at {address}; it does not report its name")
        elif state.identity.name != name:
            found = f"{state.identity.name or 'a registry'} answers at {address}, where clients look for {name}"
            yield problem("reached", found, f"set advertise of {name} to its own address")
        elif processes[state.identity.identity] > 1:
            found = f"the process at {address} is registered under several addresses"
            yield warning("reached", found, "the older registration expires after two minutes; if not, correct advertise")
        else:
            yield ok("reached", f"{name} answers at {address}")


def masters(facts: DoctorFacts) -> list[BrokerState]:
    """Return the masters that answered."""
    return [state for state in facts.brokers if state.error is None and state.broker.broker_id == MASTER]


def check_clocks(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that the clocks here and there agree."""
    for state in facts.brokers:
        if state.ahead_ms is None:
            continue
        off_ms = abs(state.ahead_ms)
        way = "ahead of" if state.ahead_ms > 0 else "behind"
        found = f"the clock of {state.broker.name} is {off_ms / 1000:.1f} s {way} this one"
        advice = "set both clocks with NTP: searches by time and delays are off by this much"
        if off_ms >= CLOCK_WARNING_MS:
            yield (problem if off_ms >= CLOCK_PROBLEM_MS else warning)("clock", found, advice)
        else:
            yield ok("clock", f"the clock of {state.broker.name} agrees with this one")


def check_masters(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that only one process takes messages under each name."""
    masters_of = Counter(state.broker.name for state in facts.brokers if is_master(state))
    for name in sorted(name for name, count in masters_of.items() if count > 1):
        where = some(state.broker.address for state in facts.brokers if state.broker.name == name and is_master(state))
        found = f"{name} has {masters_of[name]} masters: {where}"
        yield problem("replicas", found, f"metaq cluster status {name}; then metaq cluster demote the one of the older epoch")


def is_master(state: BrokerState) -> bool:
    """Return whether a broker says that it is a master."""
    return state.info.get("role") == "master"


# -- topics and groups ------------------------------------------------------------------------------------------------


def check_gathering(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that topics and groups could be asked about."""
    if facts.gathering is not None:
        yield warning("topics", f"topics and groups were not checked: {facts.gathering}", "see above")


def check_topics(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that topics can be written and read."""
    own = [view for view in facts.topics if not view.topic.startswith((RETRY_PREFIX, DEAD_PREFIX))]
    shut = sorted(
        {f"{view.topic} ({view.permission_text})" for view in own if view.permission & (READ | WRITE) != READ | WRITE}
    )
    if shut:
        yield warning(
            "topics",
            f"clients cannot both send and consume: {some(shut)}",
            "if not meant: metaq topic create TOPIC --permission rw",
        )
    if facts.topics:
        yield ok("topics", f"{len({view.topic for view in own})} topics")


def check_routes(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that the topics asked about lead to live brokers that take messages."""
    live = {state.broker.name for state in masters(facts)}
    for look in facts.looks:
        if look.error is not None:
            yield problem("route", look.error, "metaq topic list shows what there is")
            continue
        dead = sorted({view.broker_name for view in look.views} - live)
        if dead:
            yield problem(
                "route",
                f"{look.topic} leads to {some(dead)}, which does not answer",
                "start it, or let its registration expire",
            )
        where = ", ".join(f"{view.broker_name} ({view.permission_text}, {view.write_partitions})" for view in look.views)
        closed = [view.broker_name for view in look.views if not view.permission & WRITE]
        if closed:
            advice = f"metaq topic create {look.topic} --permission rw"
            yield warning("route", f"{look.topic} accepts no messages on {some(closed)}", advice)
        elif not dead:
            yield ok("route", f"{look.topic} is on {where}")


def check_groups(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that no group is kept from consuming; a group without problems gets one line."""
    for group in facts.groups:
        findings = diagnose(group)
        bad = [finding for finding in findings if finding.level is not Level.OK]
        if bad:
            yield from (
                finding._replace(check=f"group {group.group}", found=f"{finding.check}: {finding.found}") for finding in bad
            )
        else:
            yield ok(f"group {group.group}", f"{len(findings)} checks passed")
    if facts.brokers and not facts.groups and facts.gathering is None:
        yield ok("groups", "no group consumes now")


Check = Callable[[DoctorFacts], Iterator[Finding]]


def of_all(check: brokerchecks.Check) -> Check:
    """Return the check of all brokers that is one of each."""
    return lambda facts: _each(check, facts.brokers)


def of_masters(check: brokerchecks.Check) -> Check:
    """Return the check of all masters that is one of each."""
    return lambda facts: _each(check, masters(facts))


def _each(check: brokerchecks.Check, states: Iterable[BrokerState]) -> Iterator[Finding]:
    for state in states:
        yield from check(BrokerReport(state.broker.name, state.broker.address, state.info, state.config))


CHECKS: Final[tuple[Check, ...]] = (
    check_registries,
    check_registered,
    check_advertised,
    check_reached,
    of_masters(brokerchecks.check_writable),
    check_clocks,
    of_all(brokerchecks.check_client_clocks),
    of_all(brokerchecks.check_disk),
    check_masters,
    of_all(brokerchecks.check_replicas),
    of_masters(brokerchecks.check_transactions),
    check_gathering,
    check_topics,
    check_routes,
    check_groups,
)


@click.command(
    epilog=examples(
        "metaq doctor", "metaq doctor --registry 10.0.0.1:9876 --topic orders --group billing", "metaq doctor --json"
    )
)
@click.option("--topic", "topics", multiple=True, metavar="TOPIC", help="Also check this topic's route; may be repeated.")
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="Check this group; may be repeated.  [default: all that have members or leases now]",
)
@watch_option(", for all groups together")
@registry_option
@json_option
def doctor(topics: tuple[str, ...], groups: tuple[str, ...], watch_s: float, registry: str, as_json: bool) -> int:
    """Check from this machine whether clients can work: registries, brokers, addresses, topics, groups.

    Each check prints one line: ok, warning or problem, what was found, and what to do. Run it where the clients run. It changes
    nothing. The exit code is 0 if all is well, 1 for a warning, 2 for a problem.
    """
    return print_findings(examine(gather_facts(registry, topics, groups, watch_s)), as_json=as_json)
