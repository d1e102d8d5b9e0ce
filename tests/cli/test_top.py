"""`metaq top`: what a broker does now, on a terminal and for scripts."""

import contextlib
import math
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from metaq.address import Address
from metaq.cli import commands
from metaq.cli.cluster import samples
from metaq.cli.cluster.samples import MetricsSample, parse
from metaq.cli.cluster.traffic import broker_traffic, topic_traffic
from metaq.client import Client, ConsumeFrom, TextClient, connect
from metaq.errors import ConnectionFailed
from tests.support.broker import BrokerProcess
from tests.support.cli import Cli
from tests.support.terminal import Terminal
from tests.support.tls import issue
from tests.support.users import ADMIN, write_users

RED, GREEN = "\x1b[31m", "\x1b[32m"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A group has consumed 4 of 10 messages."""
    with BrokerProcess(tmp_path_factory.mktemp("top") / "data") as process:
        with connect(process.registry) as client:
            consume_some(client)
        yield process
    shutil.rmtree(process.data)


def consume_some(client: Client) -> None:
    client.admin().create_topic("orders", partitions=1)
    with client.producer() as producer:
        for number in range(10):
            producer.send("orders", b"%d" % number)
    with client.consumer("orders", "billing", consume_from=ConsumeFrom.FIRST) as consumer:
        for _, _ in zip(range(4), consumer, strict=False):
            consumer.commit()


def metrics(at_s: float, text: str) -> MetricsSample:
    return MetricsSample(at_s, parse(text))


@contextmanager
def traffic(broker: BrokerProcess) -> Iterator[None]:
    """Messages that go in and out all the time."""
    done = threading.Event()

    def work() -> None:
        with TextClient(broker.host, broker.port) as client:
            while not done.is_set():
                position = client.put("busy", b"x").position
                list(client.iterate("busy", position=position))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()


def test_rates_are_those_between_two_samples() -> None:
    """19.1: a counter that began again is a restart; the busiest topic is first, each followed by its groups."""
    before = metrics(
        10.0,
        'metaq_messages_in_total{topic="a"} 100\nmetaq_messages_in_total{topic="b"} 50\n'
        'metaq_messages_out_total{topic="a",group="g"} 10\n# HELP nothing\n'
        'metaq_loop_stall_seconds_bucket{le="0.5"} 3\nmetaq_loop_stall_seconds_bucket{le="1.0"} 3\n',
    )
    now = metrics(
        12.0,
        'metaq_messages_in_total{topic="a"} 104\nmetaq_messages_in_total{topic="b"} 20\n'
        'metaq_messages_out_total{topic="a",group="g"} 13\nmetaq_messages_out_total{topic="a",group="say \\"hi\\""} 2\n'
        'metaq_consumer_lag_messages{group="g",topic="a"} 7\nmetaq_consumer_lag_seconds{group="g",topic="a"} 1.5\n'
        'metaq_loop_stall_seconds_bucket{le="0.5"} 4\nmetaq_loop_stall_seconds_bucket{le="1.0"} 5\n'
        "metaq_held_pulls 2\nmetaq_held_pops 1\nmetaq_is_master 1\nmetaq_writable 1\n"
        'metaq_connections{protocol="text"} 4\nmetaq_connections{protocol="remoting"} 5\n'
        'metaq_replica_lag_bytes{replica="2"} 5\nmetaq_replica_lag_bytes{replica="3"} 9\n',
    )
    rows = [tuple(row) for row in topic_traffic(before, now)]
    assert rows == [
        ("b", "", 10.0, 0, None, None, None),
        ("a", "", 2.0, 2.5, None, None, None),
        ("a", "g", None, 1.5, 7, 1.5, None),
        ("a", 'say "hi"', None, 1.0, None, None, None),
    ]
    whole = broker_traffic(before, now)
    assert (whole.role, whole.in_per_s, whole.out_per_s, whole.held_pulls, whole.connections) == ("master", 12.0, 2.5, 3, 9)
    assert (whole.longest_stall_s, whole.replica_lag_bytes) == (1.0, 9)
    above = metrics(13.0, 'metaq_loop_stall_seconds_bucket{le="0.5"} 4\nmetaq_loop_stall_seconds_bucket{le="+Inf"} 6\n')
    assert broker_traffic(now, above).longest_stall_s == math.inf
    assert broker_traffic(above, above._replace(at_s=14.0)).longest_stall_s == 0


def test_one_table_for_scripts(broker: BrokerProcess) -> None:
    """19.1: the same figures as lines of JSON."""
    cli = Cli(broker.registry)
    at = ("--broker", broker.address, "--http", broker.http, "--interval", "0.5")
    with traffic(broker):
        whole, *rows = cli.rows("top", "--once", *at)
        shown = cli.run("top", "--once", *at)
    assert whole["role"] == "master" and whole["writable"] and whole["in_per_s"] > 0 and whole["connections"] >= 1
    by_place = {(row["topic"], row["group"]): row for row in rows}
    assert by_place["busy", ""]["in_per_s"] > 0 and by_place["busy", ""]["out_per_s"] > 0
    assert by_place["orders", "billing"]["lag"] == 6
    assert by_place["orders", "billing"]["behind_s"] > 0
    assert [(row["topic"], row["group"]) for row in rows].index(("busy", "")) == 0
    heading, first, *_ = shown.stdout.splitlines()
    assert heading.split()[:2] == ["TOPIC", "GROUP"] and first.startswith("busy")
    assert "held pulls" in shown.stderr and "\x1b" not in shown.output


@pytest.mark.parametrize("way", ["q", "Ctrl-C"])
def test_it_is_drawn_again_until_it_is_ended(broker: BrokerProcess, way: str) -> None:
    """19.1: on a terminal; with exit code 0 either way, and the terminal as it was."""
    with Terminal("top", "--broker", broker.address, "--http", broker.http, "--interval", "0.2") as terminal:
        terminal.wait_for("billing")
        terminal.type("x")
        with TextClient(broker.host, broker.port) as client:
            client.put(f"late-{way[0]}", b"x")
        terminal.wait_for(f"late-{way[0]}")
        if way == "q":
            terminal.type("q")
        else:
            terminal.interrupt()
        assert terminal.end() == 0
        assert terminal.drawn.endswith("\x1b[?25h\x1b[?1049l")  # the cursor and the screen are back
        assert f"{GREEN}writable" in terminal.drawn
        assert "Traceback" not in terminal.drawn


def test_what_cannot_be_shown(broker: BrokerProcess) -> None:
    """19.1: each with what to do."""
    cli = Cli(broker.registry)
    assert "--once prints one table" in cli.run("top", "--broker", broker.address, code=2).stderr
    wrong = cli.run("top", "--once", "--http", broker.address, code=3).stderr
    assert "is no HTTP port of a broker" in wrong and "--http" in wrong
    assert "cannot connect to 127.0.0.1:1" in cli.run("top", "--once", "--http", "127.0.0.1:1", code=3).stderr


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """19.1: whatever listens at that port."""
    monkeypatch.setattr(samples, "MOST_BYTES", 100_000)

    def talk() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the other side hangs up
            while True:
                connection.sendall(bytes(65536))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(ConnectionFailed, match="sends more than 100000 bytes"):
            samples.scrape(Address(*listener.getsockname()), {})
        thread.join()


def test_a_broker_with_users_wants_a_login(tmp_path: Path) -> None:
    """19.1: and TLS, if it has a certificate."""
    users, certificates = write_users(tmp_path / "users.yaml"), issue(tmp_path)
    with BrokerProcess(tmp_path / "data", "--users-file", str(users), *certificates.flags) as process:
        known = CliRunner(env={"METAQ_USER": ADMIN.name, "METAQ_PASSWORD": ADMIN.secret})
        arguments = [
            "--tls-ca",
            str(certificates.authority),
            "top",
            "--once",
            "--json",
            "--interval",
            "0.1",
            "--http",
            process.http,
        ]
        done = known.invoke(commands, arguments)
        assert done.exit_code == 0 and '"role": "master"' in done.stdout, done.output
        refused = CliRunner(env={"METAQ_USER": None}).invoke(commands, arguments)
        assert refused.exit_code == 4 and "log in with --user" in refused.stderr


def test_a_broker_that_goes_is_asked_again(broker: BrokerProcess) -> None:
    """19.1: and the person sees why there is nothing."""
    with Terminal("top", "--http", "127.0.0.1:1", "--interval", "0.1") as terminal:
        terminal.wait_for("cannot connect to 127.0.0.1:1")
        terminal.wait_for(RED)
        terminal.type("q")
        assert terminal.end() == 0


def test_problems_are_red(broker: BrokerProcess) -> None:
    """19.1: on a terminal, unless it is not wanted; the same in all commands."""
    command = ("why-not-consuming", "nobody", "--registry", broker.registry)
    with Terminal(*command) as terminal:
        terminal.end()
        assert f"{RED}problem" in terminal.drawn
    with Terminal(*command, NO_COLOR="1") as terminal:
        terminal.end()
        assert "problem" in terminal.drawn and RED not in terminal.drawn
    done = Cli(broker.registry).run_any(*command)
    assert "problem" in done.stdout and "\x1b" not in done.output
