"""A master and its slaves as real processes: the slave's data, its answers, and the puts that wait for it."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient
from metaq.protocol.remoting.codes import Request, Response
from metaq.store.log.segments import segment_name
from metaq.store.messagestore import LOG
from tests.cluster.traffic import LATER, NEVER_ASKED, TOPIC, put_all_kinds, read_all, try_put, try_send
from tests.support.admin import ask, ask_body, connect, create_topic
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cluster import (
    DEADLINE_S,
    PATIENT,
    Cluster,
    ReplicaProcess,
    check_prefix,
    compare_logs,
    queue_files,
    wait_caught_up,
)
from tests.support.consumer import Consumer
from tests.support.messages import count, records
from tests.support.remoting import RemotingClient

SMALL: Final = ("--segment-bytes", "65536", "--max-body-bytes", "4096", "--max-branch-bytes", "16384")
TOPICS: Final = 5
SOONER: Final = ("--replica-lag-ms", "8000", "--replica-timeout-ms", "2000")
"""A put is answered before the slave that it waits for is out of sync."""


def bodies(broker: BrokerProcess, topic: str = TOPIC) -> list[bytes]:
    """Return the bodies that readers of both protocols see."""
    return [message.body for message in read_all(broker, topic)]


@pytest.mark.parametrize("durability", ["memory", "disk", "replica", "disk+replica"])
def test_a_slave_has_the_same_log_and_gives_the_same_messages(tmp_path: Path, durability: str) -> None:
    """F-PART, MQ-065: every kind of message, over many segments; part of it was there before the slave was."""
    with Cluster(tmp_path, *SMALL, *NEVER_ASKED, "--min-in-sync", "1", durability=durability) as cluster:
        master = cluster.add(1)
        put_all_kinds(master, "before")
        slave = cluster.add(2, master.replication)
        master.wait_for(in_sync=[1, 2])
        put_all_kinds(master, "after")
        with connect(master) as client:
            wait_until(lambda: count(client, LATER) == 2, DEADLINE_S, "both delayed messages are delivered")
        end = wait_caught_up(master, slave)
        assert end > 2 * 65536
        check_prefix(master, slave)
        for topic in (TOPIC, LATER):
            assert read_all(slave, topic) == read_all(master, topic)
        for replica in (slave, master):
            assert replica.terminate() == 0
        compare_logs(master.data, slave.data, 0, end)
        ours, theirs = queue_files(master.data), queue_files(slave.data)
        assert theirs == ours


def test_a_slave_takes_no_messages(tmp_path: Path) -> None:
    """SG-083, MQ-065: it says why, over both protocols, and its log does not change."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master, slave = cluster.pair()
        assert try_put(master, b"x") == (200, "")
        end = wait_caught_up(master, slave)
        code, text = try_put(slave, b"y")
        assert (code, "this replica is a slave" in text) == (503, True), text
        with connect(slave) as client:
            answer = try_send(client, b"y")
            assert answer.code == Response.SERVICE_NOT_AVAILABLE
            assert "send them to its master" in (answer.remark or "")
        assert slave.status()["end"] == end
        assert bodies(slave) == [b"x"]


def test_tables_are_in_force_on_the_slave(tmp_path: Path) -> None:
    """MQ-065, P09: topics, groups and consumer offsets follow those of the master, deletions too."""
    with Cluster(tmp_path, "--offset-snapshot-interval-ms", "500") as cluster:
        master, slave = cluster.pair()
        with connect(master) as client:
            create_topic(client, TOPIC, write=3, read=3)
            create_topic(client, "gone")
        with TextClient(master.host, master.port) as text:
            text.put_many(TOPIC, [b"x"] * 10, partition=2)
        with Consumer(master, "billing") as consumer:
            for offset in (4, 7):
                assert consumer.commit(TOPIC, offset, 2).code == Response.SUCCESS
                wait_until(lambda: offset_on(slave, 2) == offset, DEADLINE_S, f"the slave knows the offset {offset}")  # noqa: B023
        names = {b'"gone"': Request.GET_ALL_TOPIC_CONFIG, b'"billing"': Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG}
        with connect(slave) as client:

            def known() -> list[bytes]:
                return [name for name, code in names.items() if name in client.call(code).body]

            wait_until(lambda: known() == list(names), DEADLINE_S, "the slave knows topic and group")
            assert len(records(client, TOPIC, 2)) == 10
            assert b"METAQ_SYS_EPOCHS" in client.call(Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER).body
            with connect(master) as admin:
                ask(admin, Request.DELETE_TOPIC_IN_BROKER, topic="gone")
                ask(admin, Request.DELETE_SUBSCRIPTIONGROUP, groupName="billing")
            wait_until(lambda: known() == [], DEADLINE_S, "the slave has forgotten both")


def test_what_was_told_of_a_topic_before_a_message_is_known_to_the_next_master(tmp_path: Path) -> None:
    """A message that is acknowledged at ``replica`` is never there without the topics that were made, or changed, before it."""
    made = [f"topic-{number}" for number in range(TOPICS)]
    with Cluster(tmp_path) as cluster:
        master, slave = cluster.pair()
        with connect(master) as client:
            for topic in made:
                create_topic(client, topic, write=3, read=3, attributes="+dedupe.window.ms=60000")
            assert try_send(client, b"x").code == Response.SUCCESS
        master.kill()
        slave.promote()
        with connect(slave) as client:
            known = ask_body(client, Request.GET_ALL_TOPIC_CONFIG)["topicConfigTable"]
        assert [topic for topic in made if topic not in known] == []
        assert {known[topic]["attributes"]["dedupe.window.ms"] for topic in made} == {"60000"}


def offset_on(replica: ReplicaProcess, partition: int) -> int | None:
    """How far the group ``billing`` is, by what a replica says."""
    with connect(replica) as client:
        fields = {"consumerGroup": "billing", "topic": TOPIC, "queueId": str(partition)}
        answer = client.call(Request.QUERY_CONSUMER_OFFSET, fields)
        return int(answer.fields["offset"]) if answer.code == Response.SUCCESS else None


@pytest.mark.slow
def test_a_put_waits_for_a_slave_that_is_stopped(tmp_path: Path) -> None:
    """MQ-065, P08: 12 while it is in sync, 11 when it is no longer; what was hidden is readable when it is back."""
    with Cluster(tmp_path, *SOONER) as cluster:
        master, slave = cluster.pair()
        assert try_put(master, b"safe") == (200, "")
        wait_caught_up(master, slave)
        slave.pause()
        with connect(master) as client:
            late = try_send(client, b"late")
            assert late.code == Response.FLUSH_SLAVE_TIMEOUT, late.remark
            assert bodies(master) == [b"safe"]
            master.wait_for(in_sync=[1])
            lonely = try_send(client, b"lonely")
            assert lonely.code == Response.SLAVE_NOT_AVAILABLE, lonely.remark
        code, text = try_put(master, b"text")
        assert (code, text.startswith("stored at"), "min_in_sync" in text) == (500, True, True), text
        assert bodies(master) == [b"safe"]
        slave.go_on()
        wait_caught_up(master, slave)
        for replica in (master, slave):
            assert bodies(replica) == [b"safe", b"late", b"lonely", b"text"]
        assert try_put(master, b"again") == (200, "")
        check_prefix(master, slave)


@pytest.mark.slow
def test_one_replica_may_be_enough(tmp_path: Path) -> None:
    """MQ-065: at min_in_sync 1 puts wait for a slave as long as it is in sync, and no longer."""
    with Cluster(tmp_path, *SOONER, "--min-in-sync", "1") as cluster:
        master, slave = cluster.pair()
        slave.pause()
        with connect(master) as client:
            assert try_send(client, b"late").code == Response.FLUSH_SLAVE_TIMEOUT
            assert bodies(master) == []
            master.wait_for(in_sync=[1])
            assert try_send(client, b"alone").code == Response.SUCCESS
        assert bodies(master) == [b"late", b"alone"]
        slave.go_on()
        wait_caught_up(master, slave)
        assert bodies(slave) == [b"late", b"alone"]


@pytest.mark.slow
def test_readers_of_no_replica_see_what_another_one_lacks(tmp_path: Path) -> None:
    """MQ-065: a message that one of three replicas in sync lacks is shown by none of them, although two have it."""
    with Cluster(tmp_path, *SOONER) as cluster:
        master, slave = cluster.pair()
        third = cluster.add(3, master.replication)
        master.wait_for(in_sync=[1, 2, 3])
        assert try_put(master, b"safe") == (200, "")
        wait_caught_up(master, third)
        third.pause()
        with connect(master) as client:
            assert try_send(client, b"late").code == Response.FLUSH_SLAVE_TIMEOUT
        end = master.status()["end"]
        slave.wait_for(end=end)
        assert [bodies(replica) for replica in (master, slave)] == [[b"safe"], [b"safe"]]
        assert master.status()["in_sync"] == [1, 2, 3], "too slow a machine for this test's lag"
        master.wait_for(in_sync=[1, 2])
        wait_caught_up(master, slave)
        assert [bodies(replica) for replica in (master, slave)] == [[b"safe", b"late"]] * 2
        third.go_on()
        wait_caught_up(master, third)
        assert bodies(third) == [b"safe", b"late"]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["replica", "disk+replica"])
def test_a_slave_that_is_killed_or_stopped_comes_back(tmp_path: Path, durability: str) -> None:
    """F-PART: with what it missed, and nothing twice; the master is restarted, too, and goes on with all that was safe."""
    with Cluster(tmp_path, *SMALL, *NEVER_ASKED, "--min-in-sync", "1", durability=durability) as cluster:
        master, slave = cluster.pair()
        for number, end in enumerate((slave.kill, slave.terminate, slave.kill)):
            put_all_kinds(master, f"{number}")
            end()
            put_all_kinds(master, f"{number} without")
            slave.start()
            wait_caught_up(master, slave)
            check_prefix(master, slave)
        before = read_all(master)
        master.kill()
        slave.wait_problem("refused")
        master.start()
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        assert read_all(master) == read_all(slave) == before


def test_a_master_that_is_restarted_alone_shows_what_was_safe(tmp_path: Path) -> None:
    """MQ-065: readers go on seeing what they saw, although too few replicas are in sync for anything new."""
    with Cluster(tmp_path, *SOONER) as cluster:
        master, slave = cluster.pair()
        assert try_put(master, b"safe") == (200, "")
        wait_caught_up(master, slave)
        slave.kill()
        assert master.terminate() == 0
        master.start()
        assert bodies(master) == [b"safe"]
        assert try_put(master, b"in doubt")[0] == 500
        master.restart(same_port=True)
        assert bodies(master) == [b"safe"]
        slave.start()
        wait_caught_up(master, slave)
        assert bodies(slave) == [b"safe", b"in doubt"]


def test_a_slave_knows_why_it_gets_no_further(tmp_path: Path) -> None:
    """SG-018: its master has a damaged record; the slave has what comes before, and its operator is told."""
    with Cluster(tmp_path, "--min-in-sync", "1") as cluster:
        master = cluster.add(1)
        for body in (b"before", b"damaged", b"after"):
            assert try_put(master, body) == (200, "")
        assert master.terminate() == 0
        log = master.data / LOG / segment_name(0)
        content = log.read_bytes()
        log.write_bytes(content.replace(b"damaged", b"Damaged", 1))
        master.start()
        slave = cluster.add(2, master.replication)
        slave.wait_problem("is damaged, and nothing after it can be copied")
        assert bodies(slave) == [b"before"]
        assert "not following" in slave.stderr()


def send(master: ReplicaProcess) -> tuple[int, str]:
    """Code and remark of the answer to a message."""
    with RemotingClient(master.host, master.port, timeout_s=DEADLINE_S) as client:
        answer = try_send(client, b"x")
        return answer.code, answer.remark or ""


def send_waiting(master: ReplicaProcess, pool: ThreadPoolExecutor) -> Future[tuple[int, str]]:
    """Send a message; return its answer, which is there, or waits for a slave."""
    end = master.status()["end"]
    sent = pool.submit(send, master)
    wait_until(lambda: sent.done() or master.status()["end"] > end, DEADLINE_S, "the send is answered, or in the log")
    return sent


def test_a_put_that_waits_when_its_master_stops_is_safe(tmp_path: Path) -> None:
    """F-FAIL, MQ-065: its slave still gets it and reports; later puts are refused."""
    with Cluster(tmp_path, "--drain-timeout-ms", "60000", *PATIENT) as cluster, ThreadPoolExecutor(64) as pool:
        master, slave = cluster.pair()
        slave.pause()
        sent = [send_waiting(master, pool)]
        stop = pool.submit(master.terminate)
        while not sent[-1].done():
            sent.append(send_waiting(master, pool))
        code, remark = sent.pop().result()
        assert code == Response.SERVICE_NOT_AVAILABLE and "this broker stops; try again" in remark, remark
        slave.go_on()
        assert [put.result(DEADLINE_S)[0] for put in sent] == [Response.SUCCESS] * len(sent)
        assert stop.result(DEADLINE_S) == 0
        assert "stopped without closing the store" not in master.stderr()


def test_a_put_whose_slave_stays_away_when_its_master_stops_is_in_doubt(tmp_path: Path) -> None:
    """F-FAIL, MQ-065: it is answered all the same."""
    with Cluster(tmp_path, "--drain-timeout-ms", "300") as cluster, ThreadPoolExecutor() as pool:
        master, slave = cluster.pair()
        slave.pause()
        sent = send_waiting(master, pool)
        stop = pool.submit(master.terminate)
        code, remark = sent.result(DEADLINE_S)
        assert code == Response.SERVICE_NOT_AVAILABLE, remark
        assert "may be stored or not" in remark and "this broker stops; try again" in remark
        assert stop.result(DEADLINE_S) == 0
