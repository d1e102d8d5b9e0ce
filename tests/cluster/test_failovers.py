"""A sample of the failovers and partitions of ``python -m tests.crash.long``: two lives of a dozen faults."""

import pytest

from tests.cluster.failovers import Failovers
from tests.cluster.life import Life, one_life
from tests.cluster.partitions import Partitions

ROUNDS = 12


@pytest.mark.parametrize(("kind", "name", "seed"), [(Failovers, "failovers", 5), (Partitions, "partitions", 4)])
def test_nothing_acknowledged_is_lost(kind: type[Life], name: str, seed: int) -> None:
    """F-FAIL, F-PART: killed, stopped and separated masters; nothing lost, made up, doubled or reordered, and no old epoch."""
    life = one_life(kind, name, seed, ROUNDS)
    assert life.counts["acknowledged"] > ROUNDS
    assert life.pauses, "a new master was elected"
