"""Samples of the runs of ``python -m tests.crash.long`` in which ZooKeeper is away, and sessions expire."""

import pytest

from tests.cluster import expiries, zookeeper
from tests.support.group import SESSION_MS

pytestmark = pytest.mark.partner("java")


@pytest.mark.slow
def test_sessions_of_brokers_expire() -> None:
    """F-ZK, MQ-022, MY-016: each time they stand there again within two session times, and no send fails meanwhile."""
    assert expiries.run(seed=1, count=8).cases >= 8


@pytest.mark.slow
def test_zookeeper_is_away() -> None:
    """F-ZK, MQ-022, MY-006, MY-007: known brokers take messages all the time, an elected master none without a lease; all
    register again, and one is elected."""
    details = zookeeper.run(seed=3, count=1, away_s=3 * SESSION_MS / 1000).details
    assert details["acknowledged"] > 0
    assert details["sends acknowledged"] > 0
