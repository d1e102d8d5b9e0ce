"""Recurring messages when the master is lost: each run is delivered once, by the old master or by the new one."""

from pathlib import Path

import pytest

from metaq.store.recovery.verify import verify
from metaq.timers.inspecting import TimerInspection
from tests.cluster.test_roles import ALONE, restart_as_slave
from tests.engine.test_recurring import TOPIC, cron, define, dues, pending
from tests.support.admin import connect
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, check_prefix, wait_caught_up
from tests.support.messages import count, records


def wait_more(replica: ReplicaProcess, number: int) -> None:
    """Wait until so many more runs are delivered."""
    with connect(replica) as client:
        wanted = count(client, TOPIC) + number
        wait_until(lambda: count(client, TOPIC) >= wanted, DEADLINE_S, f"{number} more runs are delivered")


@pytest.mark.slow
def test_each_run_is_delivered_once_over_failovers(tmp_path: Path) -> None:
    """E-13, F-FAIL, T-11: no due time is left out and none comes twice, there and back; the promoted one can end it."""
    with Cluster(tmp_path, *ALONE, "--sweep-interval-ms", "10") as cluster:
        master, slave = cluster.pair()
        with connect(master) as client:
            first_ms = define(client, "beat", "@every 1s", missed="all")
            define(client, "rare", "@daily")
        for _ in range(2):
            wait_more(master, 2)
            master.kill()
            slave.promote()
            wait_more(slave, 2)
            restart_as_slave(master, slave)
            slave.wait_for(in_sync=[1, 2])
            master.wait_for(suspect=None)
            master, slave = slave, master
        with connect(master) as client:
            assert sorted(row["recurring"] for row in pending(client)) == ["beat", "rare"]
            cron(client, "undefine", name="beat")
            found = dues(client)
            assert found == [first_ms + 1000 * number for number in range(len(found))]
            assert len({record.log_offset for record in records(client, TOPIC)}) == len(found) >= 8
            assert [row["recurring"] for row in pending(client)] == ["rare"]
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        for replica in (master, slave):
            assert replica.terminate() == 0
            assert verify(replica.data, inspect=TimerInspection().record).damages == []
