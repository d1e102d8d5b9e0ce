"""The benchmark of the cost of metrics: rounds, what is always counted, and the check."""

import pytest

from benchmarks.figures import Verdict
from benchmarks.suites.metrics import NONE, PORT, SCRAPED, SHAPES, Cost, checks, measure_observation, more_percent, table

SHAPE = SHAPES[0]


def test_each_round_is_compared_with_what_is_left_when_nothing_is_counted() -> None:
    """E-01: the cost of counting is in all ways, so it is taken out of the one that is compared with."""
    alone = Cost(10.2, 0.0, 0.0)
    rounds = [{NONE: alone, PORT: Cost(10.25, 0.5, 0.2), SCRAPED: Cost(scraped, 0.5, 0.2)} for scraped in (10.2, 10.4, 11.0)]
    lacking = [{SCRAPED: Cost(90.0, 0.5, 0.2)}, {NONE: alone}]
    costs = {SHAPE: [*rounds, *lacking]}
    assert more_percent(costs, SHAPE, SCRAPED) == [pytest.approx(2.0), pytest.approx(4.0), pytest.approx(10.0)]
    verdicts = {check.name: check.must_verdict for check in checks(costs)}
    assert list(verdicts.values()) == [Verdict.MISSED, Verdict.NOT_MEASURED, Verdict.NOT_MEASURED]
    assert next(check.must_verdict for check in checks({SHAPE: rounds[:1]})) is Verdict.HELD
    assert len(table(costs).rows) == 3 * len(SHAPES)


def test_an_observation_costs_something() -> None:
    """E-01: what is always counted is measured where the broker is."""
    assert measure_observation() > 0
