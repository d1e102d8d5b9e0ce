"""Metrics over HTTP: each one changes when its event happens, and no HTTP request does harm."""

import errno
import math
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from metaq.client import TextClient
from metaq.engine.figures.metrics import Histogram, Metric, MetricKind, write
from metaq.engine.tables.topics import FOLDER
from metaq.protocol.remoting.codes import PULL_SUSPENDS, Request, Response
from metaq.protocol.text.replies import ERROR, NOT_FOUND, OK, UNAVAILABLE
from metaq.protocol.text.writing import write_get
from metaq.server.http.port import MOST_CONNECTIONS
from metaq.server.replicas.replica import KEPT
from tests.server.remoting.test_sendback import send_back
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cluster import Cluster
from tests.support.consumer import Consumer, subscription
from tests.support.halves import COMMIT, ROLLBACK, Producer
from tests.support.messages import records, send, send_header, sent
from tests.support.metrics import Values, fetch, readiness, value
from tests.support.ports import free_ports
from tests.support.remoting import RemotingClient
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk

DEADLINE_S: Final = 60.0
HOLD_MS: Final = 300_000
GROUP: Final = "workers"
MANY_TOPICS: Final = 2000
CHECKS: Final = ("--check-after-ms", "0", "--check-interval-ms", "50", "--max-checks", "1000000")
PATIENT: Final = ("--max-hold-ms", str(HOLD_MS))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", *CHECKS, *PATIENT) as process:
        yield process


# -- the format -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.text(), st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)), unique_by=lambda pair: pair[0])
)
def test_what_is_written_is_read_again(samples: list[tuple[str, float]]) -> None:
    """E-01: whatever stands in a label, and whatever the number."""
    metric = Metric("m_total", MetricKind.GAUGE, "1", 'Back\\slash,\nline and "quote".', ("name",))
    text = "".join(write([(metric, [((name,), number) for name, number in samples])], lambda: None))
    (family,) = text_string_to_metric_families(text)
    assert family.documentation == metric.help
    assert [(sample.labels["name"], sample.value) for sample in family.samples] == samples


@given(st.lists(st.floats(0, 10)))
def test_a_histogram_counts_each_once(seconds: list[float]) -> None:
    """E-01: in every bucket what did not exceed its bound, and all in the last one."""
    histogram = Histogram((0.5, 1.0, 2.0))
    for each in seconds:
        histogram.observe(each)
    metric = Metric("m_seconds", MetricKind.HISTOGRAM, "seconds", "m")
    (family,) = text_string_to_metric_families("".join(write([(metric, [((), histogram)])], lambda: None)))
    found = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    for bound in (0.5, 1.0, 2.0, math.inf):
        named = "+Inf" if bound == math.inf else str(bound)
        assert found["m_seconds_bucket", named] == sum(each <= bound for each in seconds)
    assert found["m_seconds_count", None] == len(seconds)
    assert found["m_seconds_sum", None] == pytest.approx(sum(seconds))


# -- what moves -------------------------------------------------------------------------------------------------------


def test_puts_and_gets(broker: BrokerProcess) -> None:
    """E-01: messages, bytes, pulls, refusals by reason, times, and what the store holds."""
    before = Values(broker)
    with TextClient(broker.host, broker.port) as client:
        client.put("t", b"hello")
        client.put("t", b"again")
    with Talk(broker) as talk:
        talk.send(write_get("t", GROUP, 0, 0, 1000, 1))
        (got,) = talk.replies(1)
        assert talk.put("t", b"nowhere", partition=7)[0] == ERROR
        talk.send(write_get("t", GROUP, 0, len(got.body), 1000, 2))
        assert talk.replies(1)[0].code == NOT_FOUND
        now = Values(broker)
        assert now.get("metaq_connections", {"protocol": "text"}) == 1
    assert now.get("metaq_messages_in_total", {"topic": "t"}) == 2
    assert now.get("metaq_in_bytes_total", {"topic": "t"}) == 10
    assert now.get("metaq_messages_out_total", {"topic": "t", "group": GROUP}) == 2
    assert now.get("metaq_out_bytes_total", {"topic": "t", "group": GROUP}) >= 10
    assert now.get("metaq_pulls_total") == 2
    assert now.get("metaq_pulls_empty_total") == 1
    assert now.get("metaq_puts_refused_total", {"reason": "wrong_partition"}) == 1
    assert now.get("metaq_reader_lag_bytes", {"group": GROUP, "topic": "t"}) == 0
    for name in ("metaq_send_seconds_count", "metaq_send_seconds_sum", "metaq_log_bytes", "metaq_log_written_bytes_total"):
        assert now.get(name) > before.get(name), name
    for name in ("metaq_partitions", "metaq_topics", "metaq_registry_topics"):
        assert now.get(name) == before.get(name) + 1, name
    assert (before.get("metaq_oldest_message_seconds"), now.get("metaq_oldest_message_seconds") > 0) == (0, True)
    for name in ("metaq_writable", "metaq_registered", "metaq_ready", "metaq_is_master", "metaq_registry_brokers"):
        assert now.get(name) == 1, name
    for name in ("metaq_disk_free_bytes", "metaq_disk_used_ratio", "process_resident_memory_bytes", "process_open_fds"):
        assert now.get(name) > 0, name
    assert now.get("process_cpu_seconds_total") > before.get("process_cpu_seconds_total")


def test_consumers(broker: BrokerProcess) -> None:
    """E-01: a group's lag in messages and seconds, its members, what it waits for, and what is given up."""
    with Consumer(broker, GROUP) as consumer, RemotingClient(broker.host, broker.port) as client:
        consumer.beat(subscription("work"))
        for body in (b"one", b"two", b"three"):
            sent(client, send(client, send_header("work"), body))
        fields = {"consumerGroup": GROUP, "topic": "work", "queueId": "0", "commitOffset": "1"}
        assert client.call(Request.UPDATE_CONSUMER_OFFSET, fields).code == Response.SUCCESS
        found = Values(broker)
        names = {"group": GROUP, "topic": "work"}
        assert found.get("metaq_consumer_lag_messages", names) == 2
        assert 0 < found.get("metaq_consumer_lag_seconds", names) < DEADLINE_S
        assert found.get("metaq_consumer_members", {"group": GROUP}) == 1
        assert found.get("metaq_groups") >= 1
        ours = "only these two connections: the broker's own, by which it looks at its address, is closed"
        wait_until(lambda: value(broker, "metaq_connections", protocol="remoting") == 2, DEADLINE_S, ours)
        record = records(client, "work")[-1]
        for most in ("1", "0"):
            assert send_back(client, record, delayLevel="18", maxReconsumeTimes=most) == Response.SUCCESS
        found = Values(broker)
        assert found.get("metaq_messages_sent_back_total") == 2
        assert found.get("metaq_dead_letters_total") == 1
        assert found.get("metaq_delayed_messages", {"level": "18"}) == 1
        assert client.call(Request.UPDATE_CONSUMER_OFFSET, fields | {"commitOffset": "3"}).code == Response.SUCCESS
        assert Values(broker).get("metaq_consumer_lag_messages", names) == 0


@pytest.mark.parametrize("bye", ["hang up", "end of input"])
def test_gets_are_held_until_their_clients_go(broker: BrokerProcess, bye: str) -> None:
    """E-01, SG-085: and no longer, in both protocols; a client that sends no more is answered, since it may still read."""
    with Consumer(broker, GROUP) as consumer, Talk(broker) as talk:
        talk.placed("work", b"one")
        consumer.beat(subscription("work"))
        consumer.wire.send(Request.PULL_MESSAGE, consumer.pull_fields("work", 1, flags=PULL_SUSPENDS, wait_ms=HOLD_MS))
        talk.send(write_get("work", GROUP, 0, 1_000_000, 1000, 1, wait_ms=HOLD_MS))
        wait_until(lambda: value(broker, "metaq_held_pulls") == 2, DEADLINE_S, "both are held")
        if bye == "end of input":
            talk.socket.shutdown(socket.SHUT_WR)
            assert talk.replies(1)[0].code == NOT_FOUND
            assert not talk.socket.recv(1)
    wait_until(lambda: value(broker, "metaq_held_pulls") == 0, DEADLINE_S, "whoever waited is gone")


def test_transactions(broker: BrokerProcess) -> None:
    """E-01: half messages and branches, open, decided and asked about."""
    with Talk(broker) as talk:
        for key in ("XID:1:0a:01:a", "XID:1:0a:02:a"):
            talk.done(key, "BEGIN")
            talk.placed("t", b"hello", key)
        found = Values(broker)
        assert found.get("metaq_branches_open") == 2
        assert found.get("metaq_branches_open_bytes") > 0
        talk.done("XID:1:0a:01:a", "PREPARE")
        found = Values(broker)
        assert (found.get("metaq_branches_open"), found.get("metaq_branches_prepared")) == (1, 1)
        talk.done("XID:1:0a:02:a", "COMMIT_ONE_PHASE")
        assert talk.transaction("XID:1:0a:01:a", "COMMIT_TWO_PHASE") == (OK, "")
        found = Values(broker)
        assert (found.get("metaq_branches_open"), found.get("metaq_branches_prepared")) == (0, 0)
    with Producer(broker) as producer:
        begun = [producer.half(b"%d" % number) for number in range(3)]
        found = Values(broker)
        assert found.get("metaq_half_messages") == 3
        assert producer.end(begun[0].end(COMMIT)) == Response.SUCCESS
        assert producer.end(begun[1].end(ROLLBACK)) == Response.SUCCESS
        producer.checked()
        found = Values(broker)
        assert found.get("metaq_half_messages") == 1
        assert found.get("metaq_half_committed_total") == found.get("metaq_half_rolled_back_total") == 1
        assert found.get("metaq_half_checks_total") >= 1


def test_a_disk_that_stands_still_and_then_fails(tmp_path: Path) -> None:
    """E-01: syncs and their times, what waits for them, what was late; a failed one makes the broker not ready."""
    with Controlled(tmp_path / "data", "--sync-timeout-ms", "5000") as broker, Talk(broker) as talk:
        talk.placed("t", b"hello")
        found = Values(broker)
        assert found.get("metaq_fsync_seconds_count") >= 1
        assert found.get("metaq_log_unsynced_bytes") == 0
        broker.stall()
        talk.send(talk.put_of("t", b"later", None))
        wait_until(lambda: value(broker, "metaq_waiting_bytes") > 0, DEADLINE_S, "the put waits")
        assert talk.replies(1)[0].code == ERROR
        found = Values(broker)
        assert found.get("metaq_puts_late_total", {"lacks": "disk"}) == 1
        assert found.get("metaq_log_unsynced_bytes") > 0
        assert readiness(broker)["ready"]
        broker.go_on(failing=True)
        wait_until(lambda: not readiness(broker)["ready"], DEADLINE_S, "the sync has failed")
        assert "read-only until it is restarted" in readiness(broker)["reasons"][0]
        assert (value(broker, "metaq_ready"), value(broker, "metaq_writable")) == (0, 0)
        assert fetch(broker, "/healthz")[0] == 200
        assert talk.put("t", b"never")[0] == UNAVAILABLE
        assert value(broker, "metaq_puts_refused_total", reason="not_writable") == 1


@pytest.mark.slow
def test_replicas(tmp_path: Path) -> None:
    """E-01, E-02: both say how they stand, and are ready while they do their part."""
    with Cluster(tmp_path) as cluster:
        master = cluster.add(1)
        assert "1 of at least 2 replicas" in readiness(master)["reasons"][0]
        slave = cluster.add(2, master.replication)
        for replica, role in ((master, "master"), (slave, "slave")):
            wait_until(lambda replica=replica: readiness(replica)["ready"], DEADLINE_S, f"{role} is ready")  # type: ignore[misc]
            assert readiness(replica)["role"] == role
        with TextClient(master.host, master.port) as client:
            client.put("t", b"hello")
        ours, theirs = Values(master), Values(slave)
        assert (ours.get("metaq_is_master"), theirs.get("metaq_is_master")) == (1, 0)
        assert ours.get("metaq_epoch") == theirs.get("metaq_epoch") > 0
        assert ours.get("metaq_in_sync_replicas") == theirs.get("metaq_in_sync_replicas") == 2
        assert ours.get("metaq_min_in_sync_replicas") == 2
        assert ours.get("metaq_replica_in_sync", {"replica": "2"}) == 1
        assert theirs.get("metaq_writable") == 0
        slave.pause()
        with Talk(master) as talk:
            talk.send(talk.put_of("t", b"alone", None))
            lags = "the slave that stands still lags"
            wait_until(lambda: value(master, "metaq_replica_lag_bytes", replica="2") > 0, DEADLINE_S, lags)
            wait_until(lambda: value(master, "metaq_replica_lag_seconds", replica="2") > 0, DEADLINE_S, lags)
            wait_until(lambda: not readiness(master)["ready"], DEADLINE_S, "the master has too few")
            assert value(master, "metaq_in_sync_replicas") == 1
        slave.go_on()
        wait_until(lambda: readiness(master)["ready"], DEADLINE_S, "it has caught up")
        master.kill()
        wait_until(lambda: not readiness(slave)["ready"], DEADLINE_S, "the slave has lost its master")
        assert "follows no master" in readiness(slave)["reasons"][0]
        slave.promote()
        assert readiness(slave)["role"] == "master"
    for folder in tmp_path.glob("replica?"):
        shutil.rmtree(folder)


def test_counters_of_a_master_that_waits_for_its_slaves(tmp_path: Path) -> None:
    """E-01: what readers do not see again yet is not counted as less than nothing, and what was written before not at all."""
    with Cluster(tmp_path) as cluster:
        master, slave = cluster.pair()
        with TextClient(master.host, master.port) as client:
            client.put_many("t", [b"x"] * 10)
        slave.kill()
        master.kill()
        (master.data / FOLDER / KEPT).unlink(missing_ok=True)  # it does not know how far readers could see
        master.start()
        found = Values(master)
        assert found.get("metaq_messages_in_total", {"topic": "t"}) == found.get("metaq_in_bytes_total", {"topic": "t"}) == 0
        assert found.get("metaq_log_bytes") > 0
        assert found.get("metaq_log_written_bytes_total") == 0
    for folder in tmp_path.glob("replica?"):
        shutil.rmtree(folder)


def test_a_registry(tmp_path: Path) -> None:
    """E-01, E-02: its tables; and a broker is ready once some registry knows it."""
    with RegistryProcess(tmp_path / "registry") as registry:
        assert readiness(registry) == {"ready": True, "state": "serving", "reasons": [], "role": "registry"}
        assert value(registry, "metaq_registry_brokers") == 0
        with BrokerProcess(tmp_path / "data", "--registries", registry.address, "--registration-interval-ms", "200") as broker:
            wait_until(lambda: readiness(broker)["ready"], DEADLINE_S, "the broker is registered")
            found = Values(registry)
            assert (found.get("metaq_registry_brokers"), found.get("metaq_registry_topics") > 0) == (1, True)
            registry.kill()
            wait_until(lambda: not readiness(broker)["ready"], DEADLINE_S, "its registry is gone")
            assert "not registered with any of 1 registries" in readiness(broker)["reasons"][0]
            assert value(broker, "metaq_registered") == 0


# -- the port ---------------------------------------------------------------------------------------------------------


NONSENSE: Final = (
    b"",
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00\x00\x00\x10" + bytes(16),
    b"\x16\x03\x01\x02\x00\x01" + bytes(600),
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"put t 0 5 0 1\r\nhello",
)


ENOUGH_READ: Final = {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}
"""What its end shows as, where it closes before all has come."""


def test_nonsense_harms_nothing(broker: BrokerProcess) -> None:
    """E-01: whatever is sent ends its own connection only, and the log has no line of it."""
    host, _, port = broker.http.rpartition(":")
    before = broker.stderr()
    for data in NONSENSE:
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError as error:
                assert error.errno in ENOUGH_READ, error
    assert fetch(broker, "/nothing")[0] == 404
    assert fetch(broker, "/metrics", "POST")[0] == 405
    assert fetch(broker, "/metrics?name[]=up")[0] == 200
    assert fetch(broker, "/metrics", "HEAD") == (200, b"")
    assert broker.stderr().removeprefix(before) == ""
    assert broker.running


@pytest.mark.slow
def test_silent_clients_keep_nobody_out(broker: BrokerProcess) -> None:
    """E-01, E-02: with more connections than there may be the oldest ends that has not asked; the broker serves."""
    host, _, port = broker.http.rpartition(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE_S))
            for _ in range(MOST_CONNECTIONS)
        ]
        for connection in silent[1:]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert fetch(broker, "/healthz")[0] == 200
        assert silent[0].recv(1) == b""
        with TextClient(broker.host, broker.port) as client:
            client.put("t", b"hello")
        assert value(broker, "metaq_messages_in_total", topic="t") == 1
        assert silent[1].recv(1) == b""
    assert "http connection dropped reason=256 others are open, too" in broker.stderr()


@pytest.mark.slow
def test_a_connection_ends_after_its_time(broker: BrokerProcess) -> None:
    """E-01: a client that never ends its request is cut off."""
    host, _, port = broker.http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert connection.recv(1) == b""


@pytest.mark.slow
def test_a_scrape_of_ten_thousand_partitions_does_not_stop_the_loop(tmp_path: Path) -> None:
    """E-01: it works for some milliseconds at a time, and others are answered in between, again and again."""
    with (
        BrokerProcess(tmp_path / "data", "--default-partitions", "5") as broker,
        TextClient(broker.host, broker.port) as client,
    ):
        for topic in range(MANY_TOPICS):
            client.put_many(f"t{topic}", [b"x"] * 5)
        with ThreadPoolExecutor(1) as threads:

            def answered_while_it_is_scraped() -> int:
                scrape = threads.submit(Values, broker)
                answered = 0
                while not scrape.done():
                    client.version()
                    answered += 1
                assert scrape.result().get("metaq_partitions") >= 5 * MANY_TOPICS
                return answered

            wait_until(lambda: answered_while_it_is_scraped() > 10, DEADLINE_S, "others are answered during a scrape")


# -- start-up ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_whoever_asks_while_a_store_is_recovered_hears_how_far_it_is(tmp_path: Path) -> None:
    """E-02, P40: alive, not ready, and on its way."""
    (port,) = free_ports(1)
    with Controlled(tmp_path / "data", "--http-listen", f"127.0.0.1:{port}") as broker:
        with TextClient(broker.host, broker.port) as client:
            client.put_many("t", [b"x"] * 200_000)
        broker.kill()
        for file in broker.data.glob("checkpoint*"):
            file.unlink()
        hold = tmp_path / "hold"
        hold.touch()
        broker.launch()
        seen: list[dict[str, object]] = []

        def recovering() -> bool:
            try:
                seen.append(readiness(broker))
            except OSError:
                return False
            return "recovery" in seen[-1]

        wait_until(recovering, DEADLINE_S, "the store is being recovered")
        assert seen[-1]["state"] == "recovering"
        assert seen[-1]["reasons"] == ["the store is being recovered"]
        assert fetch(broker, "/healthz")[0] == 200
        assert value(broker, "metaq_ready") == 0
        hold.unlink()
        broker.wait_ready()
        assert readiness(broker)["ready"]
