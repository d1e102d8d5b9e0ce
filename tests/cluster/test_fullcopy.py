"""A sample of the full copies of ``python -m tests.crash.long``."""

from tests.cluster.fullcopy import run


def test_an_empty_slave_copies_everything() -> None:
    """F-PART, P06, SG-040: with puts meanwhile and a SIGKILL halfway; in sync it has all, and is promoted with it."""
    result = run(seed=0, count=200)
    assert result.details["MB in the log"] >= 200
    assert result.details["looks at the progress"] > 2
    assert result.details["acknowledged meanwhile"] > 0
