"""A sample of the failovers and partitions of ``python -m tests.crash.long``, and some of its power cuts."""

import pytest

from tests.cluster.failovers import Failovers
from tests.cluster.life import Life
from tests.cluster.lives import run_lives
from tests.cluster.partitions import Partitions
from tests.cluster.powercuts import UNIT, PowerCuts

COUNT = 24
ROUNDS = 12
"""At most, in one life: more than a fourth of what is needed."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "name", "unit", "seed"),
    [(Failovers, "failovers", "masters killed", 5), (Partitions, "partitions", "partitions", 4)],
)
def test_nothing_acknowledged_is_lost(kind: type[Life], name: str, unit: str, seed: int) -> None:
    """F-FAIL, F-PART: killed, stopped and separated masters; nothing lost, made up, doubled or reordered, and no old epoch."""
    result = run_lives(kind, name, unit, seed, COUNT, ROUNDS)
    assert result.cases >= COUNT
    assert result.details["acknowledged"] > COUNT
    assert result.details["with transactions"] > COUNT / 8


@pytest.mark.timeout(600)
def test_nothing_is_lost_with_the_power() -> None:
    """F-FAIL, F-HA: of one machine or of several, as far as one is left that held it, or the disks had it."""
    result = run_lives(PowerCuts, "powercuts", UNIT, seed=3, count=4, rounds=2, at_once=2)
    assert result.cases >= 4
    assert result.details["sectors lost"] > 0
    assert result.details["groups at replica"] and result.details["groups at disk+replica"]
