"""A sample of the restarts of ``python -m tests.crash.long``."""

import pytest

from tests.spark.restarts import run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_driver_loses_and_repeats_nothing() -> None:
    """P47: ten kills at random moments; every message is in exactly one batch, no committed batch is read again."""
    result = run(seed=1, count=10)
    assert result.cases == 10
    assert result.details["messages"] > 100
    assert result.details["kills while reading"] >= 1
