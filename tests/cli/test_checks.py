"""Checks of the doctor on facts that no test can plant in a real broker: other machines, clocks, disks."""

from typing import Any

import pytest

from metaq.cli.doctor.doctor import (
    check_advertised,
    check_clocks,
    check_reached,
    check_registered,
    of_all,
    of_masters,
    reach_of,
)
from metaq.cli.doctor.doctorfacts import BrokerState, DoctorFacts, RegistryState, difference
from metaq.client.admin.views import BrokerIdentity, BrokerView
from metaq.diagnosis.brokerchecks import check_disk, check_replicas, check_transactions
from metaq.diagnosis.findings import Finding, Level, some

GIB = 1 << 30


def facts(
    registry: str = "127.0.0.1:9876", *, address: str = "127.0.0.1:10911", broker_id: int = 0, **state: Any
) -> DoctorFacts:
    """One registry and one broker."""
    broker = BrokerView("c", "broker-a", broker_id, address)
    return DoctorFacts((RegistryState(registry, None, (broker,)),), (BrokerState(broker, **state),))


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]


@pytest.mark.parametrize(
    ("registry", "address", "found"),
    [
        ("127.0.0.1:9876", "127.0.0.1:10911", []),
        ("localhost:9876", "[::1]:10911", []),
        ("10.0.0.1:9876", "10.0.0.2:10911", []),
        ("10.0.0.1:9876", "broker.example:10911", []),
        ("10.0.0.1:9876", "127.0.0.1:10911", [Level.PROBLEM]),
        ("registry.example:9876", "localhost:10911", [Level.PROBLEM]),
        ("10.0.0.1:9876", "[::1]:10911", [Level.PROBLEM]),
        ("127.0.0.1:9876", "0.0.0.0:10911", [Level.PROBLEM]),
        ("10.0.0.1:9876", "[::]:10911", [Level.PROBLEM]),
    ],
)
def test_addresses_that_mean_nothing_elsewhere(registry: str, address: str, found: list[Level]) -> None:
    """P13, E-20: loopback while the registry is remote, and wildcards."""
    assert levels(list(check_advertised(facts(registry, address=address)))) == found


def test_for_whom_a_host_means_something() -> None:
    """P13: everybody, unless it says otherwise."""
    assert [reach_of(host) for host in ("10.1.2.3", "a.example", "127.9.9.9", "0.0.0.0")] == [
        None,
        None,
        "this machine",
        "anywhere",
    ]


@pytest.mark.parametrize(
    ("ahead_ms", "found"),
    [
        (None, []),
        (0, [Level.OK]),
        (-999, [Level.OK]),
        (1_000, [Level.WARNING]),
        (-59_999, [Level.WARNING]),
        (60_000, [Level.PROBLEM]),
    ],
)
def test_clocks(ahead_ms: int | None, found: list[Level]) -> None:
    """P23: what is off by a second is told, and by a minute is a problem."""
    findings = list(check_clocks(facts(ahead_ms=ahead_ms)))
    assert levels(findings) == found
    if ahead_ms is not None and abs(ahead_ms) >= 1_000:
        assert ("ahead of" if ahead_ms > 0 else "behind") in findings[0].found


def test_a_slow_answer_is_no_difference() -> None:
    """P23: the other clock may have been read at any time between question and answer."""
    assert [difference(there, 1000, 1500) for there in (999, 1000, 1250, 1500, 1501)] == [-1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("ratio", "free_gib", "config", "found"),
    [
        ("0.5", 1, {}, Level.OK),
        ("0.8", 1, {}, Level.WARNING),
        ("0.95", 1, {}, Level.PROBLEM),
        ("0.95", 1, {"clean_ratio": "0.96", "refuse_ratio": "0.97"}, Level.OK),
        ("0.95", 50, {"ample_free_bytes": str(10 * GIB)}, Level.OK),
        ("0.95", 5, {"ample_free_bytes": str(10 * GIB)}, Level.PROBLEM),
    ],
)
def test_disks(ratio: str, free_gib: float, config: dict[str, str], found: Level) -> None:
    """E-04: by the broker's own limits where it tells them, and not at all where much is free."""
    info = {"commitLogDiskRatio": ratio, "commitLogDirCapacity": f"Total : 100.0 GiB, Free : {free_gib:.1f} GiB."}
    (finding,) = of_all(check_disk)(facts(info=info, config=config))
    assert finding.level is found


@pytest.mark.parametrize(
    ("prepared_s", "half_s", "found"),
    [
        (0, 0, [Level.OK]),
        (599, 599, [Level.OK]),
        (600, 0, [Level.WARNING]),
        (0, 3599, [Level.WARNING]),
        (3600, 0, [Level.PROBLEM]),
        (600, 3600, [Level.WARNING, Level.PROBLEM]),
    ],
)
def test_old_transactions(prepared_s: int, half_s: int, found: list[Level]) -> None:
    """MQ-107: nobody decides what has been undecided for ten minutes, and after an hour that is a problem."""
    ages = {"tx_oldest_prepared_s": str(prepared_s), "half_oldest_s": str(half_s)}
    assert (
        levels(list(of_masters(check_transactions)(facts(info={"tx_prepared": "3", "half_undecided": "2", **ages})))) == found
    )
    assert list(of_masters(check_transactions)(facts(info={}))) == []  # another kind of broker


def test_a_process_that_is_registered_twice() -> None:
    """P13: the registration before an address was corrected."""
    one = facts(identity=BrokerIdentity("broker-a", "x")).brokers[0]
    other = one._replace(broker=one.broker._replace(address="10.0.0.1:10911"))
    twice = DoctorFacts((), (one, other))
    assert levels(list(check_reached(twice))) == [Level.WARNING, Level.WARNING]


def test_a_broker_that_is_no_metaq() -> None:
    """E-04: it answers, which is all that can be asked."""
    assert levels(list(check_reached(facts(identity=None)))) == [Level.OK]


def test_replicas_without_their_master() -> None:
    """E-04: nobody takes messages under that name."""
    assert levels(list(check_registered(facts(broker_id=1)))) == [Level.OK, Level.PROBLEM]


def test_long_lists_stay_short() -> None:
    """E-04: five names, and how many more."""
    assert some(range(3)) == "0, 1, 2"
    assert some("gfedcba") == "a, b, c, d, e and 2 more"


@pytest.mark.parametrize(
    ("in_sync", "second", "durability", "found"),
    [
        ("2", "yes", "replica", [Level.OK]),
        ("1", "no", "replica", [Level.WARNING, Level.PROBLEM]),
        ("1", "no", "disk+replica", [Level.WARNING, Level.PROBLEM]),
        ("1", "no", "disk", [Level.WARNING]),
    ],
)
def test_slaves_that_lag(in_sync: str, second: str, durability: str, found: list[Level]) -> None:
    """SG-140, E-04: each is named; too few are a problem where messages wait for them."""
    info = {"role": "master", "in_sync": in_sync, "min_in_sync": "2", "slave_2_in_sync": second, "slave_2_lag_bytes": "77"}
    findings = list(of_all(check_replicas)(facts(info=info, config={"durability": durability})))
    assert levels(findings) == found
    assert (second == "no") == ("slave 2 of broker-a is not in sync, 77 bytes behind" in findings[0].found)
