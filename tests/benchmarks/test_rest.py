"""The benchmark of REST: what it compares, its checks, and its load against a real broker."""

from pathlib import Path

import pytest

from benchmarks.figures import Load, MeasurementError, Verdict
from benchmarks.restload import TAILED_RATE, TAILED_TOPIC, TAILS, TOPIC, RestFigures, figures_of, loading, run
from benchmarks.suites.rest import FULL_DISK, MUST_US, PLANS, Beside, checks, table
from tests.support.broker import BrokerProcess
from tests.support.rest import Rest

SEEN = RestFigures(published=1, events=1, streams=1, p50_ms=1.0, p99_ms=2.0, processors=0.1)
SECONDS = 2.0
RATE = 25
"""Publishes a second, which a machine that is busy with other tests manages."""


def load(rate: float, p99_us: float) -> Load:
    figures = {"p50_us": 1, "p99_us": p99_us, "p999_us": 1, "max_us": 1, "messages": 1, "messages_per_second": rate}
    figures |= {"seconds": 1, "rate_wanted": 0, "connections": 1, "in_flight": 1, "body_bytes": 1, "block_bytes": 1}
    counts = {"batch": 0, "requests": 1, "bytes": 1, "mb_per_second": 1, "wraps": 0, "errors": 0}
    return Load.model_validate({**figures, **counts, "protocol": "metaq-put", "first_error": ""})


def test_a_load_is_compared_with_that_of_its_round() -> None:
    """E-33: the medians of the ratios decide; what was not measured is not held."""
    rounds = [Beside(load(100, 10), load(rate, p99), load(98, 10), SEEN) for rate, p99 in ((96, 11), (97, 12), (50, 30))]
    held = {check.name: check.must_verdict for check in checks([MUST_US], {FULL_DISK: rounds})}
    assert list(held.values()) == [Verdict.HELD] * 3 + [Verdict.NOT_MEASURED] * 4
    missed = {check.name: check.must_verdict for check in checks([MUST_US + 1], {FULL_DISK: rounds[2:]})}
    assert list(missed.values()) == [Verdict.MISSED] * 3 + [Verdict.NOT_MEASURED] * 4
    made = table({FULL_DISK: rounds})
    assert [len(row) for row in made.rows] == [len(made.columns)] * len(PLANS)
    by_column = dict(zip(made.columns, made.rows[0], strict=True))
    assert by_column["REST elsewhere: rate ×"].startswith("0.98 ")


def test_the_load_by_http(tmp_path: Path) -> None:
    """E-33: each publish is stored and timed, and streams have events; what is refused is no figure."""
    with BrokerProcess(tmp_path / "data") as broker, Rest(broker.http) as rest:
        for topic in (TOPIC, TAILED_TOPIC):
            rest.put(f"/topics/{topic}", {"partitions": 1})
        port = int(broker.http.rpartition(":")[2])
        with loading(port, SECONDS, RATE, TAILS) as process:
            seen = figures_of(process, SECONDS)
        stored = [rest.get(f"/topics/{topic}/partitions/0/messages")["end"] for topic in (TOPIC, TAILED_TOPIC)]
        assert (seen.published, stored) == (SECONDS * RATE, [SECONDS * (RATE - TAILED_RATE), SECONDS * TAILED_RATE])
        assert seen.events > TAILS  # each live stream has one at once, and the tail has one
        assert 0 < seen.p50_ms <= seen.p99_ms
        assert 0 < seen.processors < 2
        rest.put(f"/topics/{TOPIC}", {"writable": False})
        with loading(port, 0.2, RATE, 0) as process, pytest.raises(MeasurementError, match="were errors"):
            figures_of(process, 0.2)


def test_a_stream_that_is_refused_is_no_figure(tmp_path: Path) -> None:
    """E-33: here the tail of a topic that is not there."""
    with BrokerProcess(tmp_path / "data") as broker, pytest.raises(MeasurementError, match="was refused"):
        run(int(broker.http.rpartition(":")[2]), 0.2, 0, TAILS)
