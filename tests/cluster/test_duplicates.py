"""Messages with ids when the master is lost: what is sent again to the new one is not stored again."""

from pathlib import Path

from metaq.protocol.remoting.codes import Request, Response
from tests.cluster.test_roles import ALONE, restart_as_slave
from tests.engine.test_dedupe import TOPIC, create, put
from tests.engine.test_timers import recall
from tests.support.admin import connect
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, wait_caught_up
from tests.support.messages import count


def has_window(replica: ReplicaProcess) -> bool:
    """Return whether its table of topics, which follows apart from the log, knows the window."""
    with connect(replica) as client:
        return b"dedupe.window.ms" in bytes(client.call(Request.GET_TOPIC_CONFIG, {"topic": TOPIC}).body)


def places(replica: ReplicaProcess, idents: list[str], partition: int) -> list[tuple[str, str]]:
    """Send messages with these ids; where the answers say that they are."""
    with connect(replica) as client:
        answers = [put(client, ident, partition=partition) for ident in idents]
        return [(fields["queueId"], fields["queueOffset"]) for fields in answers]


def test_an_id_is_stored_once_over_failovers(tmp_path: Path) -> None:
    """E-07, D-1, F-FAIL: of ids in the slave's index and of those that are still in its memory, there and back.

    The new master also knows that a message was cancelled: the next one with its id is stored.
    """
    with Cluster(tmp_path, *ALONE, "--sweep-interval-ms", "10", "--checkpoint-interval-ms", "50") as cluster:
        master, slave = cluster.pair()
        with connect(master) as client:
            create(client)
        wait_until(lambda: has_window(slave), DEADLINE_S, "the slave has the table of topics")
        idents = ["a", "b"]
        first = places(master, idents, 2)
        for partition in (1, 3):
            idents.append(f"new {partition}")
            first += places(master, idents[-1:], partition)
            cancelled = f"cancelled-{partition}"
            with connect(master) as client:
                handle = put(client, cancelled, more="TIMER_DELAY_MS\x01600000\x02")["recallHandle"]
                assert recall(client, handle, TOPIC) == (Response.SUCCESS, cancelled)
            wait_caught_up(master, slave)
            master.kill()
            slave.promote()
            assert places(slave, idents, 0) == first
            idents.append(cancelled)
            first += places(slave, idents[-1:], partition)
            restart_as_slave(master, slave)
            slave.wait_for(in_sync=[1, 2])
            master.wait_for(suspect=None)
            master, slave = slave, master
        with connect(master) as client:
            wait_until(lambda: sum(count(client, TOPIC, n) for n in range(4)) == len(idents), DEADLINE_S, "each is there once")
