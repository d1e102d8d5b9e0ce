"""The replication benchmark: a master with a slave in sync, the processor time of both, the lag of reads, and the checks."""

import os
import time
from pathlib import Path

import pytest

from benchmarks.figures import Load, MeasurementError, Verdict
from benchmarks.lag import Lag, Prober
from benchmarks.peers import Level, metaq
from benchmarks.programs import LoadPlan
from benchmarks.replicas import Cost, in_sync, measure_cost, processor_seconds, replicas
from benchmarks.suites.replication import (
    ALONE,
    FEW,
    FOLLOWED,
    MANY,
    SAFE,
    Lagging,
    cost_checks,
    cost_table,
    lag_checks,
    lag_table,
    safe_checks,
    safe_table,
)

REPLICA, REPLICA_FEW, DISK_REPLICA = (safe.name for safe in SAFE)


def figures(rate: float) -> Load:
    numbers = dict.fromkeys(Load.model_fields, 1)
    return Load.model_validate({**numbers, "messages_per_second": rate, "protocol": "metaq-put", "first_error": ""})


def test_each_round_is_compared_with_the_broker_alone_right_before() -> None:
    """Speed of replication: the median of the ratios, not the ratio of the medians, and a bound for one shape alone."""
    pairs = [(figures(30.0), figures(100.0)), (figures(50.0), figures(100.0)), (figures(90.0), figures(200.0))]
    check = safe_checks({REPLICA: pairs})[0]
    assert (check.measured, check.must_verdict, check.aim_verdict) == (0.45, Verdict.HELD, Verdict.NOT_REACHED)
    assert [check.must_verdict for check in safe_checks({REPLICA: pairs[:1]})] == [Verdict.MISSED]
    assert [check.must_verdict for check in safe_checks({REPLICA_FEW: pairs})] == [Verdict.NOT_MEASURED]
    rows = {row[0]: row[1:] for row in safe_table({DISK_REPLICA: pairs[:1]}).rows}
    assert rows[DISK_REPLICA][:3] == ["30", "100", "0.30"]
    assert rows[REPLICA][:3] == ["-", "-", "-"]


def test_a_slave_may_cost_its_master_so_much_in_either_shape() -> None:
    """Speed of replication: rounds in which one of the two failed do not count."""
    rounds = [{ALONE: Cost(10.0, 0.0), FOLLOWED: Cost(10.0 + more, 9.0)} for more in (1.0, 4.0, 1.2)]
    lacking = [{FOLLOWED: Cost(90.0, 9.0)}, {ALONE: Cost(1.0, 0.0)}]
    checks = cost_checks({MANY: [*rounds, *lacking], FEW: rounds[1:2]})
    assert [check.measured for check in checks] == [pytest.approx(12.0), pytest.approx(40.0)]
    assert [check.must_verdict for check in checks] == [Verdict.HELD, Verdict.MISSED]
    assert [check.must_verdict for check in cost_checks({MANY: lacking})] == [Verdict.NOT_MEASURED] * 2
    assert len(cost_table({MANY: rounds}).rows) == 6


def test_the_lag_of_a_round_is_its_99th_percentile() -> None:
    """Speed of replication: one late message of a hundred is none that counts, two are."""
    calm, late = ([1.0] * (100 - slow) + [400.0] * slow for slow in (1, 2))
    rounds = [Lagging(1000.0, 500.0, Lag(each, each)) for each in (calm, calm, late)]
    assert [check.must_verdict for check in lag_checks(rounds)] == [Verdict.HELD]
    assert [check.must_verdict for check in lag_checks(rounds[2:])] == [Verdict.MISSED]
    assert [check.must_verdict for check in lag_checks([])] == [Verdict.NOT_MEASURED]
    rows = {row[0]: row[1] for row in lag_table(rounds[:1]).rows}
    assert (rows["p50, ms"], rows["p99, ms"], rows["slowest, ms"]) == ("1.00", "1.00", "400.00")


def test_a_slave_is_in_sync_when_it_lacks_nothing() -> None:
    """SG-081: neither one that is counted but behind, nor one that has all but is not counted yet."""
    slave = {"replica": 2, "lag_bytes": 0}
    assert in_sync({"in_sync": [1, 2], "slaves": [slave]})
    assert not in_sync({"in_sync": [1, 2], "slaves": [slave | {"lag_bytes": 1}]})
    assert not in_sync({"in_sync": [1], "slaves": [slave]})
    assert not in_sync({"in_sync": [1], "slaves": []})


def test_processor_time_is_that_of_the_process() -> None:
    """Speed of replication: as the interpreter itself counts it, to one tick of the clock."""
    until = time.process_time() + 0.2
    before, start = processor_seconds(os.getpid()), time.process_time()
    while time.process_time() < until:
        pass
    spent = processor_seconds(os.getpid()) - before
    assert spent == pytest.approx(time.process_time() - start, abs=0.05)


@pytest.mark.partner("gcc")
def test_what_puts_cost_a_master_and_its_slave(tmp_path: Path) -> None:
    """SG-037: a slave takes part in every put, and nobody does at a broker alone."""
    plan = LoadPlan(4, 16, 128, 60.0, 0.0, 2_000)
    with replicas(Level.REPLICA, tmp_path, with_slave=True) as pair:
        both = measure_cost(pair, plan, 100)
    assert min(both.master_us, both.slave_us) > 0
    (tmp_path / "alone").mkdir()
    with replicas(Level.MEMORY, tmp_path / "alone", with_slave=False) as pair:
        assert pair.slave is None
        alone = measure_cost(pair, plan, 100)
    assert alone.master_us > 0
    assert alone.slave_us == 0


def test_probes_are_read_from_the_slave(tmp_path: Path) -> None:
    """SG-083: each message once and in order, also when the same prober measures again."""
    with replicas(Level.MEMORY, tmp_path, with_slave=True) as pair:
        assert pair.slave is not None
        with Prober(pair.master.port, pair.slave.port) as prober:
            for count in (1, 50):
                lag = prober.measure(count)
                assert len(lag.from_answer_ms) == len(lag.from_put_ms) == count
                assert all(0 <= late <= whole for late, whole in zip(lag.from_answer_ms, lag.from_put_ms, strict=True))


def test_a_put_at_a_slave_is_no_figure(tmp_path: Path) -> None:
    """SG-083: a slave refuses it, which ends the measurement."""
    with replicas(Level.MEMORY, tmp_path, with_slave=True) as pair:
        assert pair.slave is not None
        with (
            Prober(pair.slave.port, pair.master.port) as prober,
            pytest.raises(MeasurementError, match="a put was answered with 503"),
        ):
            prober.measure(1)


def test_a_broker_alone_says_no_port_for_slaves(tmp_path: Path) -> None:
    """SG-036: the ready line names it only where slaves may connect."""
    with metaq(Level.MEMORY).running(tmp_path / "server") as server:
        assert server.replication_port == 0
        assert server.registry_port > 0
