"""Checks of one broker by what it reports about itself: one function for each, which sends no request.

``metaq doctor`` asks for the reports of all brokers; a running broker looks at its own.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from metaq.client.admin.views import permission_text
from metaq.diagnosis.findings import Finding, ok, problem, warning
from metaq.protocol.remoting.codes import READ, WRITE

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


class BrokerReport(NamedTuple):
    """The report of one broker about itself."""

    name: str
    address: str
    info: Mapping[str, str]
    """Statistics by name (28)."""
    config: Mapping[str, str]
    """Settings by name (26)."""


Check = Callable[[BrokerReport], Iterator[Finding]]


def check_writable(report: BrokerReport) -> Iterator[Finding]:
    """Check that a master accepts and delivers messages."""
    name, refusal = report.name, report.info.get("metaqWritable", "yes")
    permission = int(report.config.get("brokerPermission", READ | WRITE))
    if refusal != "yes":
        advice = "free the disk, or check the broker's log and restart it"
        yield problem("writable", f"{name} cannot store messages: {refusal}", advice)
    elif permission & (READ | WRITE) != READ | WRITE:
        found = f"the permission of {name} is only {permission_text(permission)}"
        yield problem("writable", found, "set its brokerPermission to 6 again")
    else:
        yield ok("writable", f"{name} accepts and delivers messages")


def check_client_clocks(report: BrokerReport) -> Iterator[Finding]:
    """Check that no consumer drops what it is given because its clock is too far ahead of the broker's."""
    for client in json.loads(report.info.get("metaqClocksAhead", "[]")):
        invisible_s = client["invisible_ms"] / 1000
        found = (
            f"the clock of {client['client']} ({client['group']}) is {client['ahead_ms'] / 1000:.0f} s ahead of"
            f" {report.name}: its leases of {invisible_s:.0f} s seem over, so it drops every message"
        )
        yield warning("client clock", found, "set both clocks with NTP")


def check_disk(report: BrokerReport) -> Iterator[Finding]:
    """Check that the disk has room."""
    if "commitLogDiskRatio" not in report.info:
        return
    ratio, limits = float(report.info["commitLogDiskRatio"]), report.config
    clean, refuse = float(limits.get("clean_ratio", DISK_WARNING)), float(limits.get("refuse_ratio", DISK_PROBLEM))
    free = _FREE.search(report.info.get("commitLogDirCapacity", ""))
    # a broker with this much free space ignores the ratios
    ample = free is not None and float(free[1]) * GIB >= int(limits.get("ample_free_bytes", 1 << 62))
    used, advice = f"the disk of {report.name} is {ratio:.0%} full", "make room, or keep messages for a shorter time"
    if ratio >= refuse and not ample:
        yield problem("disk", f"{used}: it refuses messages from {refuse:.0%} on", advice)
    elif ratio >= clean and not ample:
        yield warning("disk", f"{used}: it deletes old messages from {clean:.0%} on", advice)
    else:
        yield ok("disk", used)


def check_replicas(report: BrokerReport) -> Iterator[Finding]:
    """Check that enough replicas of a master are in sync, or that a slave follows."""
    name, info = report.name, report.info
    if info.get("role") == "slave":
        if info["following"] != "yes":
            found = f"the slave of {name} at {report.address} does not follow a master: {info['following']}"
            yield problem("replicas", found, f"metaq cluster status {name}; docs/replication.md has a section for each cause")
        return
    if "in_sync" not in info:
        return
    lagging = [number for number in _slaves_of(info) if info[f"slave_{number}_in_sync"] != "yes"]
    for number in lagging:
        found = f"slave {number} of {name} is not in sync, {info[f'slave_{number}_lag_bytes']} bytes behind"
        advice = f"metaq cluster add-slave {name} --replica {number} --wait 600 shows whether it catches up"
        yield warning("replicas", found, advice)
    in_sync, least = int(info["in_sync"]), int(info["min_in_sync"])
    if in_sync < least and "replica" in report.config.get("durability", ""):
        found = f"{in_sync} replicas of {name} are in sync, {least} are needed (min_in_sync): no message is safe"
        yield problem("replicas", found, f"start its slaves; metaq cluster status {name} shows what keeps them")
    elif not lagging:
        yield ok("replicas", f"{in_sync} replicas of {name} are in sync")


def _slaves_of(info: Mapping[str, str]) -> list[int]:
    """Return the numbers of the slaves that a master knows."""
    found = (_SLAVE.fullmatch(name) for name in info)
    return sorted(int(match[1]) for match in found if match is not None)


def check_transactions(report: BrokerReport) -> Iterator[Finding]:
    """Check that no transaction has been undecided on a master for long."""
    if "tx_prepared" not in report.info:
        return
    kinds = (("tx_prepared", "tx_oldest_prepared_s", "branches"), ("half_undecided", "half_oldest_s", "transactional messages"))
    oldest_s = 0
    for count, age, what in kinds:
        age_s = int(report.info[age])
        oldest_s = max(oldest_s, age_s)
        if age_s >= UNDECIDED_WARNING_S:
            found = f"{report.name} has {report.info[count]} undecided {what}, the oldest for {age_s // 60} min"
            advice = "start the program that decides them; metaq tx list shows them, metaq tx decides for it"
            yield (problem if age_s >= UNDECIDED_PROBLEM_S else warning)("transactions", found, advice)
    if oldest_s < UNDECIDED_WARNING_S:
        yield ok("transactions", f"nothing has been undecided on {report.name} for {UNDECIDED_WARNING_S // 60} min")


OF_ALL: Final[tuple[Check, ...]] = (check_client_clocks, check_disk, check_replicas)
OF_MASTERS: Final[tuple[Check, ...]] = (check_writable, check_transactions)
"""Slaves refuse messages, and decide nothing."""
