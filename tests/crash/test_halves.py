"""A part of the runs on half messages."""

from tests.crash.halves import run


def test_the_table_is_what_the_log_says() -> None:
    """RD-105, F-TX: at any moment and after any end of the process, with lost snapshots too."""
    result = run(seed=0, count=600)
    assert result.cases >= 600
    assert result.details["decided"] > 300
    assert result.details["lost snapshots"] > 30
