"""A sample of the failovers, partitions and new slaves of ``python -m tests.crash.long``, and some of its power cuts."""

import pytest

from tests.cluster import newslaves
from tests.cluster.failovers import Failovers
from tests.cluster.life import Life
from tests.cluster.lives import run_lives
from tests.cluster.partitions import Partitions
from tests.cluster.powercuts import UNIT, PowerCuts
from tests.crash.command import Result

COUNT = 24
ROUNDS = 12
"""At most, in one life: half of what is needed."""
AT_ONCE = 2
"""Other tests run beside these lives. With as many as in a long run they would all wait for a processor."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kind", "name", "unit", "seed"),
    [(Failovers, "failovers", "masters killed", 5), (Partitions, "partitions", "partitions", 4)],
)
def test_nothing_acknowledged_is_lost(kind: type[Life], name: str, unit: str, seed: int) -> None:
    """F-FAIL, F-PART: killed, stopped and separated masters; nothing lost, made up, doubled or reordered, and no old epoch.

    T-1, T-3, L-2, D-1: nor is a delayed or leased message lost, a cancel undone or an id stored twice.
    """
    result = run_lives(kind, name, unit, seed, COUNT, ROUNDS, AT_ONCE)
    assert result.cases >= COUNT
    assert result.details["acknowledged"] > COUNT
    assert result.details["with transactions"] > COUNT / 8
    check_promises(result)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_new_slave_takes_over_all_that_is_promised() -> None:
    """F-FAIL, F-HA: it copies while all goes on, is promoted, and the others are killed; nothing is lost."""
    result = newslaves.run(seed=0, count=4)
    assert result.cases >= 4
    assert result.details["acknowledged"] > 4
    check_promises(result)


def check_promises(result: Result) -> None:
    """Timers were delivered and cancelled, leases acked and given again, ids sent again."""
    assert all(result.details[name] for name in ("delivered", "cancelled", "acked", "leased again", "ids answered again"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_with_the_power() -> None:
    """F-FAIL, F-HA: of one machine or of several, as far as one is left that held it, or the disks had it."""
    result = run_lives(PowerCuts, "powercuts", UNIT, seed=3, count=4, rounds=2, at_once=AT_ONCE)
    assert result.cases >= 4
    assert result.details["sectors lost"] > 0
    assert result.details["groups at replica"] and result.details["groups at disk+replica"]
