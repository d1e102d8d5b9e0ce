"""Elections among replicas that lose power: a sample of the model's cases."""

from metaq.replication.nodes import Candidate, ReplicaLog
from tests.cluster.suspects import POWER_CUT, run


def test_nothing_is_lost_while_one_in_sync_has_it() -> None:
    """F-FAIL, F-PART: and all follow a master in the end."""
    details = run(0, 100).details
    assert details["acknowledged"] > 10_000
    assert details["lost when all had lost power"] < details["acknowledged"] / 10


def test_a_candidate_is_what_it_says() -> None:
    """F-FAIL: as it stands in ZooKeeper."""
    candidate = Candidate(ReplicaLog(7, 81233, POWER_CUT), 12)
    assert Candidate.decode(candidate.encode()) == candidate
