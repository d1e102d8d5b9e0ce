"""A part of the runs on snapshots that are ahead of their logs."""

from tests.crash.ahead import run


def test_a_new_master_knows_what_its_own_log_says() -> None:
    """SG-075, RD-105, MQ-071: whatever the snapshots say that came from the master before."""
    result = run(seed=0, count=80)
    assert result.details["snapshots handed on"] > 100
    assert result.details["logs cut"] > 30
