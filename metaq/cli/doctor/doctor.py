"""``metaq doctor``: checks whether clients can work, seen from where it runs. Each check is a function of facts."""

import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import click

from metaq.address import parse_address
from metaq.cli.common import examples, json_option, registry_option
from metaq.cli.doctor.doctorfacts import BrokerState, DoctorFacts, gather_facts
from metaq.cli.doctor.findings import print_findings
from metaq.client.admin.views import permission_text
from metaq.diagnosis.findings import Finding, Level, ok, problem, some, warning
from metaq.diagnosis.groupchecks import diagnose
from metaq.diagnosis.groupfacts import DEFAULT_WATCH_S
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.remoting.codes import MASTER, READ, WRITE

CLOCK_WARNING_MS: Final = 1_000
CLOCK_PROBLEM_MS: Final = 60_000
"""From here on, searches by time, delays and retention mean something else here than there."""
DISK_WARNING: Final = 0.75
DISK_PROBLEM: Final = 0.90
"""For brokers that do not report their own limits; these are RocketMQ's."""
UNDECIDED_WARNING_S: Final = 10 * 60
"""A transaction manager that restarts recovers within minutes; half messages are decided or given up after two."""
UNDECIDED_PROBLEM_S: Final = 60 * 60
"""By then no one will decide it any more, and such a branch keeps its locks in other participants, for example a database."""
GIB: Final = 1024**3
_SLAVE: Final = re.compile(r"slave_(\d+)_in_sync")
_FREE: Final = re.compile(r"Free : ([\d.]+) GiB")

ANYWHERE: Final = "anywhere"
HERE: Final = "this machine"


def examine(facts: DoctorFacts) -> list[Finding]:
    """Run all checks, from the outside in."""
    return [finding for check in CHECKS for finding in check(facts)]


# -- registries -------------------------------------------------------------------------------------------------------


def check_registries(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that each registry answers, and that all know the same brokers."""
    for state in facts.registries:
        if state.error is None:
            yield ok("registry", f"{state.address} answers")
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
        if state.error is not None:
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


def check_writable(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that masters accept and deliver messages."""
    for state in masters(facts):
        name = state.broker.name
        refusal = state.info.get("metaqWritable", "yes")
        permission = int(state.config.get("brokerPermission", READ | WRITE))
        if refusal != "yes":
            yield problem(
                "writable",
                f"{name} cannot store messages: {refusal}",
                "free the disk, or check the broker's log and restart it",
            )
        elif permission & (READ | WRITE) != READ | WRITE:
            found = f"the permission of {name} is only {permission_text(permission)}"
            yield problem("writable", found, "set its brokerPermission to 6 again")
        else:
            yield ok("writable", f"{name} accepts and delivers messages")


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


def check_client_clocks(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that no consumer drops what it is given because its clock is too far ahead of a broker's."""
    for state in facts.brokers:
        for client in json.loads(state.info.get("metaqClocksAhead", "[]")):
            invisible_s = client["invisible_ms"] / 1000
            found = (
                f"the clock of {client['client']} ({client['group']}) is {client['ahead_ms'] / 1000:.0f} s ahead of"
                f" {state.broker.name}: its leases of {invisible_s:.0f} s seem over, so it drops every message"
            )
            yield warning("client clock", found, "set both clocks with NTP")


def check_disks(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that the brokers' disks have room."""
    for state in facts.brokers:
        if "commitLogDiskRatio" not in state.info:
            continue
        ratio = float(state.info["commitLogDiskRatio"])
        limits = state.config
        clean, refuse = float(limits.get("clean_ratio", DISK_WARNING)), float(limits.get("refuse_ratio", DISK_PROBLEM))
        free = _FREE.search(state.info.get("commitLogDirCapacity", ""))
        # a broker with this much free space ignores the ratios
        ample = free is not None and float(free[1]) * GIB >= int(limits.get("ample_free_bytes", 1 << 62))
        used = f"the disk of {state.broker.name} is {ratio:.0%} full"
        if ratio >= refuse and not ample:
            yield problem(
                "disk", f"{used}: it refuses messages from {refuse:.0%} on", "make room, or keep messages for a shorter time"
            )
        elif ratio >= clean and not ample:
            yield warning(
                "disk", f"{used}: it deletes old messages from {clean:.0%} on", "make room, or keep messages for a shorter time"
            )
        else:
            yield ok("disk", used)


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


def check_replicas(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that enough replicas are in sync, and that every slave follows."""
    for state in facts.brokers:
        name, info = state.broker.name, state.info
        if info.get("role") == "slave":
            if info["following"] != "yes":
                found = f"the slave of {name} at {state.broker.address} does not follow a master: {info['following']}"
                yield problem(
                    "replicas", found, f"metaq cluster status {name}; docs/replication.md has a section for each cause"
                )
            continue
        if "in_sync" not in info:
            continue
        lagging = [number for number in slaves_of(info) if info[f"slave_{number}_in_sync"] != "yes"]
        for number in lagging:
            found = f"slave {number} of {name} is not in sync, {info[f'slave_{number}_lag_bytes']} bytes behind"
            advice = f"metaq cluster add-slave {name} --replica {number} --wait 600 shows whether it catches up"
            yield warning("replicas", found, advice)
        in_sync, least = int(info["in_sync"]), int(info["min_in_sync"])
        if in_sync < least and "replica" in state.config.get("durability", ""):
            found = f"{in_sync} replicas of {name} are in sync, {least} are needed (min_in_sync): no message is safe"
            yield problem("replicas", found, f"start its slaves; metaq cluster status {name} shows what keeps them")
        elif not lagging:
            yield ok("replicas", f"{in_sync} replicas of {name} are in sync")


def slaves_of(info: Mapping[str, str]) -> list[int]:
    """Return the numbers of the slaves that a master knows."""
    found = (_SLAVE.fullmatch(name) for name in info)
    return sorted(int(match[1]) for match in found if match is not None)


def check_transactions(facts: DoctorFacts) -> Iterator[Finding]:
    """Check that no transaction has been undecided for long."""
    kinds = (("tx_prepared", "tx_oldest_prepared_s", "branches"), ("half_undecided", "half_oldest_s", "transactional messages"))
    for state in masters(facts):
        if "tx_prepared" not in state.info:
            continue
        name, oldest_s = state.broker.name, 0
        for count, age, what in kinds:
            age_s = int(state.info[age])
            oldest_s = max(oldest_s, age_s)
            if age_s >= UNDECIDED_WARNING_S:
                found = f"{name} has {state.info[count]} undecided {what}, the oldest for {age_s // 60} min"
                advice = "start the program that decides them; metaq tx list shows them, metaq tx decides for it"
                yield (problem if age_s >= UNDECIDED_PROBLEM_S else warning)("transactions", found, advice)
        if oldest_s < UNDECIDED_WARNING_S:
            yield ok("transactions", f"nothing has been undecided on {name} for {UNDECIDED_WARNING_S // 60} min")


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

CHECKS: Final[tuple[Check, ...]] = (
    check_registries,
    check_registered,
    check_advertised,
    check_reached,
    check_writable,
    check_clocks,
    check_client_clocks,
    check_disks,
    check_masters,
    check_replicas,
    check_transactions,
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
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(0, 600),
    default=DEFAULT_WATCH_S,
    show_default=True,
    metavar="S",
    help="Seconds to watch whether offsets move, for all groups together; ends early if they do.",
)
@registry_option
@json_option
def doctor(topics: tuple[str, ...], groups: tuple[str, ...], watch_s: float, registry: str, as_json: bool) -> int:
    """Check from this machine whether clients can work: registries, brokers, addresses, topics, groups.

    Each check prints one line: ok, warning or problem, what was found, and what to do. Run it where the clients run. It changes
    nothing. The exit code is 0 if all is well, 1 for a warning, 2 for a problem.
    """
    return print_findings(examine(gather_facts(registry, topics, groups, watch_s)), as_json=as_json)
