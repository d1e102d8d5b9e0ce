"""Requests to a replica that is not the master, and so does not know the current state."""

from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.talk import Talk

KEY = "XID:1:0a:01:m"


def test_a_slave_does_not_say_that_a_branch_was_never_started(tmp_path: Path) -> None:
    """MQ-075, F-FAIL: a transaction manager that asks the wrong replica asks again; "not started" would mean: done."""
    with Cluster(tmp_path) as cluster:
        master, slave = cluster.pair()
        with Talk(master) as talk, Talk(slave) as other:
            talk.done(KEY, "BEGIN")
            talk.placed("t", b"prepared", KEY)
            talk.done(KEY, "PREPARE")
            for kind in ("BEGIN", "PREPARE", "COMMIT_TWO_PHASE", "COMMIT_ONE_PHASE", "ROLLBACK", "FORGET", "RECOVER"):
                code, text = other.transaction(KEY, kind)
                assert code == 500, kind
                assert text.startswith("XAException:code=-7,"), (kind, text)
            assert talk.recover() == [KEY]
            talk.done(KEY, "COMMIT_TWO_PHASE")
            assert talk.bodies("t") == [b"prepared"]
