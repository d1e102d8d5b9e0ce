"""Lost masters, promoted slaves, and replicas that come back with another log or none."""

import time
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient
from metaq.protocol.remoting.codes import Request, Response
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import read_document, write_document
from tests.cluster.traffic import LATER, NEVER_ASKED, TOPIC, put_all_kinds, read_all, try_put
from tests.support import nospace
from tests.support.admin import ask, connect
from tests.support.broker import wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, check_prefix, compare_logs, queue_files, wait_caught_up
from tests.support.consumer import Consumer
from tests.support.halves import COMMIT, Producer
from tests.support.messages import count, send, send_header, sent
from tests.support.talk import Talk

SMALL: Final = ("--segment-bytes", "65536", "--max-body-bytes", "4096", "--max-branch-bytes", "16384")
ALONE: Final = ("--min-in-sync", "1")


def bodies(replica: ReplicaProcess, topic: str = TOPIC) -> list[bytes]:
    """Return the bodies that readers of both protocols see."""
    return [message.body for message in read_all(replica, topic)]


def fill(replica: ReplicaProcess, number: int, size: int = 2000) -> None:
    """So many messages of one size."""
    with TextClient(replica.host, replica.port) as client:
        client.put_many(TOPIC, [b"%06d" % at + bytes(size - 6) for at in range(number)], partition=0)


# -- promotion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["replica", "disk+replica"])
def test_a_promoted_slave_has_all_that_was_acknowledged(tmp_path: Path, durability: str) -> None:
    """ES-009, F-FAIL, P05: ids stay unique, positions go on, and the old master follows with the same log."""
    with Cluster(tmp_path, *SMALL, *ALONE, *NEVER_ASKED, durability=durability) as cluster:
        master, slave = cluster.pair()
        put_all_kinds(master, "first")
        wait_caught_up(master, slave)
        before = read_all(master)
        master.kill()
        slave.promote()
        assert read_all(slave) == before
        put_all_kinds(slave, "second")
        after = read_all(slave)
        assert after[: len(before)] == before
        assert [message.ordinal for message in after] == list(range(len(after)))
        assert len({message.id for message in after}) == len(after)
        assert slave.status()["epoch"] == 3
        restart_as_slave(master, slave)
        wait_caught_up(slave, master)
        check_prefix(slave, master)
        assert read_all(master) == after


def restart_as_slave(replica: ReplicaProcess, master: ReplicaProcess) -> None:
    """Start a replica that was master again, and order it to follow."""
    replica.start()
    replica.demote(master.replication)


def test_offsets_go_back_by_a_second_of_commits_at_most(tmp_path: Path) -> None:
    """P09, F-FAIL: what was in the log counts; the snapshots beside it may be older or newer."""
    with Cluster(tmp_path, *ALONE, "--offset-snapshot-interval-ms", "300") as cluster:
        master, slave = cluster.pair()
        fill(master, 100, 10)
        with Consumer(master, "billing") as consumer:
            for offset in (40, 70):
                assert consumer.commit(TOPIC, offset).code == Response.SUCCESS
                kept = f'"orders@billing":{{"0":{offset}}}'.encode()
                wait_until(lambda: kept in log_of(slave), DEADLINE_S, f"the slave's log has {offset}")  # noqa: B023
            consumer.commit(TOPIC, 71)
        master.kill()
        slave.promote()
        with Consumer(slave, "billing") as consumer:
            assert consumer.offset(TOPIC) in (70, 71)
            assert consumer.commit(TOPIC, 60).code == Response.SUCCESS  # of one that is late
            assert consumer.offset(TOPIC) in (70, 71)
            assert consumer.commit(TOPIC, 90).code == Response.SUCCESS
        restart_as_slave(master, slave)
        wait_caught_up(slave, master)
        wait_until(lambda: offset_on(master) == 90, DEADLINE_S, "the old master knows the new offset")


def log_of(replica: ReplicaProcess) -> bytes:
    """All bytes of its log files."""
    return b"".join(path.read_bytes() for path in sorted((replica.data / "commitlog").iterdir()))


def offset_on(replica: ReplicaProcess) -> int:
    """How far the group ``billing`` is."""
    with Consumer(replica, "billing") as consumer:
        return int(consumer.offset(TOPIC) or 0)


def test_delayed_messages_are_delivered_once(tmp_path: Path) -> None:
    """F-DELAY, F-FAIL: those that are due before, during and after the change of master."""
    with Cluster(tmp_path, *ALONE) as cluster:
        master, slave = cluster.pair()
        with connect(master) as client:
            for number in range(20):
                sent(client, send(client, send_header(LATER, "DELAY\x011\x02"), b"%d" % number))
                if number == 9:
                    wait_until(lambda: count(client, LATER) == 10, DEADLINE_S, "half of them are delivered")
        wait_caught_up(master, slave)
        master.kill()
        slave.promote()
        with connect(slave) as client:
            wait_until(lambda: count(client, LATER) >= 20, DEADLINE_S, "all are delivered")
        restart_as_slave(master, slave)
        wait_caught_up(slave, master)
        for replica in (slave, master):
            assert bodies(replica, LATER) == [b"%d" % number for number in range(20)]


def test_what_was_undecided_is_decided_at_the_promoted_one(tmp_path: Path) -> None:
    """MQ-076, F-TX: half messages and prepared branches; neither is lost nor given twice."""
    keys = [f"XID:3:{number:04x}:01:m" for number in range(3)]
    with Cluster(tmp_path, *ALONE, *NEVER_ASKED) as cluster:
        master, slave = cluster.pair()
        with Talk(master) as talk:
            for key in keys:
                talk.done(key, "BEGIN")
                talk.placed(TOPIC, key.encode(), key)
                assert talk.transaction(key, "PREPARE")[0] == 200
            talk.done(keys[0], "COMMIT_TWO_PHASE")
        with Producer(master) as producer:
            begun = [producer.half(b"half %d" % number) for number in range(3)]
            assert producer.end(begun[0].end(COMMIT)) == Response.SUCCESS
        wait_caught_up(master, slave)
        master.kill()
        slave.promote()
        with Talk(slave) as talk:
            assert talk.recover() == keys[1:]
            talk.done(keys[1], "COMMIT_TWO_PHASE")
            talk.done(keys[2], "ROLLBACK")
        with Producer(slave) as producer:
            assert producer.end(begun[1].end(COMMIT)) == Response.SUCCESS
            producer.end(begun[0].end(COMMIT))  # once more: it changes nothing
        restart_as_slave(master, slave)
        wait_caught_up(slave, master)
        for replica in (slave, master):
            assert bodies(replica) == [keys[0].encode(), b"half 0", keys[1].encode(), b"half 1"]


# -- logs that differ -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_only_the_old_master_had_is_cut(tmp_path: Path) -> None:
    """F-FAIL, P08: its log is cut where the new one's epoch begins, over several segments, and it follows."""
    with Cluster(tmp_path, *SMALL, *ALONE) as cluster:
        master, slave = cluster.pair()
        fill(master, 40)
        wait_caught_up(master, slave)
        slave.kill()
        master.wait_for(in_sync=[1])
        put_all_kinds(master, "never copied")
        fill(master, 100)
        with connect(master) as client:
            sent(client, send(client, send_header("lost", "DELAY\x011\x02"), b"x"))
        master.kill()
        slave.start()
        slave.promote()
        fill(slave, 10, 1000)
        before = slave.status()["end"]
        restart_as_slave(master, slave)
        end = wait_caught_up(slave, master)
        assert end >= before
        check_prefix(slave, master)
        assert "log diverged" in master.stderr()
        assert len(bodies(master)) == 50
        assert bodies(master) == bodies(slave)
        assert bodies(master, "lost") == []
        put_all_kinds(slave, "after")
        with connect(slave) as client:
            wait_until(lambda: count(client, LATER) == 1, DEADLINE_S, "the delayed message is delivered")
        end = wait_caught_up(slave, master)
        for replica in (master, slave):
            assert replica.terminate() == 0
        compare_logs(slave.data, master.data, 0, end)
        ours, theirs = queue_files(slave.data), queue_files(master.data)
        assert {name: data for name, data in theirs.items() if name in ours} == ours


@pytest.mark.slow
def test_what_stood_where_the_new_master_had_no_room_is_cut(tmp_path: Path) -> None:
    """F-FAIL, P08: its epoch began a segment, since the begin of it did not fit; a smaller message of the old one did."""
    with Cluster(tmp_path, *SMALL, *ALONE) as cluster:
        master, slave = cluster.pair()
        before = master.status()["end"]
        fill(master, 1, 1000)
        beside = master.status()["end"] - before - 1000
        while (room := 65536 - 8 - master.status()["end"] - 150) > 3000:
            fill(master, 1)
        fill(master, 1, room - beside)
        end = wait_caught_up(master, slave)
        assert end == 65536 - 8 - 150
        slave.kill()
        for _ in range(2):
            assert try_put(master, b"x")[0] in (200, 500)
        assert master.status()["end"] > 65536
        master.kill()
        slave.start()
        slave.promote()
        fill(slave, 3)
        restart_as_slave(master, slave)
        wait_caught_up(slave, master)
        check_prefix(slave, master)
        assert read_all(master) == read_all(slave)
        assert b"x" not in bodies(master)


@pytest.mark.slow
def test_roles_may_change_again_and_again(tmp_path: Path) -> None:
    """F-FAIL: each master is killed under what it alone has; epochs rise, and the logs are the same in the end."""
    with Cluster(tmp_path, *SMALL, *ALONE) as cluster:
        master, slave = cluster.pair()
        safe: list[bytes] = []
        for number in range(4):
            body = b"safe %d" % number
            assert try_put(master, body) == (200, "")
            safe.append(body)
            wait_caught_up(master, slave)
            slave.pause()
            with connect(master) as client:
                send(client, send_header(TOPIC), b"in doubt %d" % number)
                master.wait_for(in_sync=[master.number])
            master.kill()
            slave.go_on()
            slave.promote()
            restart_as_slave(master, slave)
            wait_caught_up(slave, master)
            check_prefix(slave, master)
            found = bodies(slave)
            assert [body for body in found if body.startswith(b"safe")] == safe
            assert bodies(master) == found
            master, slave = slave, master
        assert master.status()["epoch"] == 6


# -- copied anew ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slave_that_is_empty_or_was_away_too_long_is_copied_anew(tmp_path: Path) -> None:
    """P06: from where the master's log begins now; ordinals and positions are those of the master."""
    few = ("--keep-hours", "0.0001", "--retention-interval-ms", "3600000")
    with Cluster(tmp_path, *SMALL, *ALONE, *few) as cluster:
        master, slave = cluster.pair()
        fill(master, 50)
        wait_caught_up(master, slave)
        slave.kill()
        fill(master, 200)
        master.wait_for(in_sync=[1])

        def expired() -> bool:
            with connect(master) as client:
                ask(client, Request.DELETE_EXPIRED_COMMITLOG)
            return bool(master.status()["begin"] > 3 * 65536)

        wait_until(expired, DEADLINE_S, "what the slave has is deleted")
        slave.start()
        empty = cluster.add(3, master.replication)
        for replica in (slave, empty):
            wait_caught_up(master, replica)
            status = replica.status()
            assert status["begin"] == master.status()["begin"] > 3 * 65536
            check_prefix(master, replica)
            assert places(replica) == places(master)
        assert "log is copied anew" in slave.stderr()
        fill(master, 10)
        for replica in (slave, empty):
            wait_caught_up(master, replica)
            check_prefix(master, replica)
            assert places(replica) == places(master)
        master.kill()
        before = places(empty)
        empty.promote()
        fill(empty, 1)
        assert places(empty)[:-1] == before


def places(replica: ReplicaProcess) -> list[tuple[int, int]]:
    """Id and position of all messages that are still there."""
    with TextClient(replica.host, replica.port) as client:
        begin = client.offset(TOPIC, 0)
        return [(message.id, message.next_position) for message in client.iterate(TOPIC, position=begin)]


# -- slaves that cannot follow ----------------------------------------------------------------------------------------


class Cramped(ReplicaProcess):
    """A replica that a test can take the room from, by a file ``full`` in the folder of the cluster."""

    program = (nospace.__name__,)


@pytest.mark.slow
def test_a_slave_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """P24: it is no longer in sync, puts go on without it, and nothing that was acknowledged is lost."""
    with Cluster(tmp_path, *SMALL, *ALONE) as cluster:
        master = cluster.add(1)
        slave = cluster.add(2, master.replication, kind=Cramped)
        master.wait_for(in_sync=[1, 2])
        fill(master, 10)
        wait_caught_up(master, slave)
        (tmp_path / "full").touch()
        for _ in range(2):  # one segment may have been made ahead
            fill(master, 80)
        slave.wait_problem("no room for")
        master.wait_for(in_sync=[1])
        assert try_put(master, b"without it") == (200, "")
        check_prefix(master, slave)
        (tmp_path / "full").unlink()
        wait_caught_up(master, slave)
        check_prefix(master, slave)
        assert slave.status()["problem"] is None
        assert read_all(slave) == read_all(master)


@pytest.mark.slow
def test_who_does_not_fit_is_told_why(tmp_path: Path) -> None:
    """P08: another broker's slave, one with the master's own number, one with segments of another size."""
    with Cluster(tmp_path, *ALONE) as cluster:
        master = cluster.add(1)
        refused = {
            ("--cluster-name", "other"): "of cluster 'other'",
            ("--broker-name", "b"): "a slave of broker 'b'",
            ("--broker-number", "5"): "number 5",
            ("--segment-bytes", "4194304"): "make them equal",
            ("--replica-number", "1"): "give each replica a replica_number of its own",
        }
        for number, (flags, words) in enumerate(refused.items(), 2):
            cluster.add(number, master.replication, *flags).wait_problem(words)
        assert master.status()["slaves"] == []


def test_a_log_is_not_given_up_as_a_whole(tmp_path: Path) -> None:
    """P08: a master that is made a slave of another one by mistake keeps its log, and says what to do."""
    with Cluster(tmp_path, *ALONE) as cluster:
        first, second = cluster.add(1), cluster.add(2)
        for master in (first, second):
            fill(master, 5)
        end = second.status()["end"]
        second.demote(first.replication)
        second.wait_problem("nothing in common")
        assert second.status()["end"] == end
        second.promote()
        assert len(bodies(second)) == 5


def test_a_replica_that_cannot_open_its_store_again_ends(tmp_path: Path) -> None:
    """F-FAIL: whoever watches its process sees it; one that lives on and does nothing would keep its place in ZooKeeper."""
    with Cluster(tmp_path) as cluster:
        _, slave = cluster.pair()
        path, disk = slave.data / "store.json", RealDisk()
        identity, _ = read_document(disk, path)
        assert identity is not None
        write_document(disk, path, {**identity, "format": 99})
        with connect(slave) as client:
            ask(client, Request.CHANGE_ROLE, role="master")
        wait_until(lambda: not slave.running, DEADLINE_S, f"it ends; see {slave.log}")
        assert "role not changed, this process ends" in slave.stderr()
        assert slave.terminate() == 1


@pytest.mark.slow
def test_a_decision_that_may_be_taken_back_is_not_told_as_known(tmp_path: Path) -> None:
    """MQ-076, F-PART: a manager that asks again must not take a branch for decided that the next master has as prepared."""
    key = "XID:3:0001:01:m"
    with Cluster(tmp_path, *NEVER_ASKED) as cluster:
        master, _, proxy = cluster.proxied_pair()
        with Talk(master) as talk:
            talk.done(key, "BEGIN")
            talk.placed(TOPIC, b"x", key)
            assert talk.transaction(key, "PREPARE")[0] == 200
            proxy.partition()
            master.wait_for(in_sync=[1])
            answers = [talk.transaction(key, "COMMIT_TWO_PHASE")[1] for _ in range(2)]
            assert all("code=-7" in answer for answer in answers), answers
            assert "ask again" in talk.transaction("null", "RECOVER")[1]
            proxy.heal()
            master.wait_for(in_sync=[1, 2])
            wait_until(lambda: "code=-4" in talk.transaction(key, "COMMIT_TWO_PHASE")[1], DEADLINE_S, "it is known")
            assert talk.recover() == []
        assert bodies(master) == [b"x"]


@pytest.mark.slow
def test_an_operators_order_that_may_be_taken_back_is_not_told_as_known(tmp_path: Path) -> None:
    """MQ-076, F-PART: the same for a decision that an operator has forgotten, which the next master may still have."""
    key = "XID:3:0001:01:m"
    with Cluster(tmp_path, *NEVER_ASKED) as cluster:
        master, _, proxy = cluster.proxied_pair()
        with Talk(master) as talk, connect(master) as client:
            talk.done(key, "BEGIN")
            talk.placed(TOPIC, b"x", key)
            assert talk.transaction(key, "PREPARE")[0] == 200
            ask(client, Request.DECIDE_TRANSACTION, key=key, outcome="rollback")
            proxy.partition()
            master.wait_for(in_sync=[1])
            answer = client.call(Request.DECIDE_TRANSACTION, {"key": key, "outcome": "forget"})
            assert "the decision is stored, but not" in (answer.remark or "")
            assert "code=-7" in talk.transaction(key, "ROLLBACK")[1]
            proxy.heal()
            master.wait_for(in_sync=[1, 2])
            wait_until(lambda: "code=-4" in talk.transaction(key, "ROLLBACK")[1], DEADLINE_S, "it is known")


def test_a_half_message_that_waits_for_replicas_is_not_lost(tmp_path: Path) -> None:
    """MQ-076, F-TX, F-FAIL: a new master has it, and may not show it yet; its producer is asked when it may."""
    with Cluster(tmp_path, "--check-after-ms", "100", "--check-interval-ms", "300", "--max-checks", "1000") as cluster:
        master, slave, proxy = cluster.proxied_pair()
        with Producer(master, beats=False) as producer:
            end = slave.status()["end"]
            proxy.drop("up")  # the slave has it, and the master does not know
            producer.start_half(b"half")
            wait_until(lambda: slave.status()["end"] > end, DEADLINE_S, "the slave has the half message")
            master.kill()
        slave.promote()
        alone_until = time.monotonic() + 1.0  # some rounds of questions, by which it was lost
        wait_until(lambda: time.monotonic() > alone_until, DEADLINE_S, "time passes")
        restart_as_slave(master, slave)
        slave.wait_for(in_sync=[1, 2])
        with Producer(slave) as producer:
            assert producer.end(producer.checked().end(COMMIT)) == Response.SUCCESS
        wait_until(lambda: bodies(slave) == [b"half"], DEADLINE_S, "it is committed")
        assert "is damaged" not in slave.stderr()
