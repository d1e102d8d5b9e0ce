"""Messages on the command line: sent, found, followed, and who has consumed them."""

import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

from metaq.client import Client, ConsumeFrom, ReceivedMessage
from metaq.client import connect as connect_clients
from metaq.protocol.remoting.codes import Request
from tests.support.admin import ask, connect, fields_of
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli
from tests.support.ports import free_ports

DEADLINE_S = 60.0
FIRST = ConsumeFrom.FIRST


def test_what_is_sent_is_found_by_key_and_by_both_ids(cli: Cli) -> None:
    """E-04, SG-132: with all that it was given."""
    cli.run("topic", "create", "orders", "4")
    flags = ("--tag", "paid", "--key", "order-1", "--key", "eu", "--property", "amount=7", "--ordering-key", "1")
    sent = cli.row("message", "send", "orders", "é", *flags)
    cli.run("message", "send", "orders", "other", "--key", "order-2")
    (found,) = cli.rows("message", "query", "orders", "--key", "order-1")
    assert (found["body"], found["tag"], found["keys"]) == ("é", "paid", ["order-1", "eu"])
    assert found["properties"]["amount"] == "7"
    assert (found["partition"], found["offset"]) == (sent["partition"], sent["offset"])
    for message_id in (sent["id"], sent["offset_id"]):
        assert cli.rows("message", "query", "orders", "--id", message_id) == [found]
    assert sent["id"] in cli.text("message", "query", "orders", "--key", "eu")
    nothing = cli.run("message", "query", "orders", "--key", "eu", "--tag", "refunded", code=1)
    assert "0 found; searched orders on " in nothing.stderr
    assert "by key 'eu' and tag 'refunded'; its oldest" in nothing.stderr
    wrong = cli.run("message", "send", "orders", "x", "--property", "region=eu", "--property", "bad", code=2)
    assert "--property 'bad' is not NAME=VALUE" in wrong.stderr


def test_the_id_of_a_broker_that_advertises_a_name(tmp_path: Path) -> None:
    """E-04, SG-132: it has no address in it, so every broker that may have made it is asked."""
    (port,) = free_ports(1)
    address = f"localhost:{port}"
    with BrokerProcess(tmp_path / "data", "--advertise", address, listen=f"127.0.0.1:{port}") as broker:
        cli = Cli(broker.registry)
        cli.run("topic", "create", "orders")
        sent = cli.row("message", "send", "orders", "x")
        assert sent["offset_id"].startswith("00000000")
        (found,) = cli.rows("message", "query", "orders", "--id", sent["offset_id"])
        assert (found["body"], found["id"]) == ("x", sent["id"])
        assert cli.row("message", "show", sent["offset_id"].lower())["id"] == sent["id"]
        cli.run("message", "show", f"{sent['offset_id'][:-1]}1", code=1)
        with connect_clients(broker.registry) as client:
            admin = client.admin()
            message = admin.query_by_offset_id(sent["offset_id"], address=address)
            assert message is not None and message.id == sent["id"]
            assert admin.query_by_offset_id(f"7F000001{sent['offset_id'][8:]}", address=address) is None

        # One at an address where nobody answers may have made such an id, too.
        unreachable = ("--broker-name", "other", "--registries", broker.registry, "--advertise", f"[::1]:{port}")
        with BrokerProcess(tmp_path / "other", *unreachable):
            wait_until(lambda: len(cli.rows("cluster", "brokers")) == 2, DEADLINE_S, "both are registered")
            assert cli.rows("message", "query", "orders", "--id", sent["offset_id"]) == [found]
            absent = cli.run("message", "show", f"{sent['offset_id'][:-1]}1", code=3)
            assert f"[::1]:{port}" in absent.stderr


def test_a_time_that_no_calendar_has_is_shown_as_a_number(cli: Cli, broker: BrokerProcess) -> None:
    """E-04: programs may give any number as the time at which a message was born, as one in microseconds."""
    born_ms = 1_700_000_000_000_000
    with connect(broker) as sender:
        fields = fields_of(a="pg", b="born", c="TBW102", d=4, e=0, f=0, g=born_ms, h=0, i="KEYS\1odd\2", j=0, k=False)
        sent = ask(sender, Request.SEND_MESSAGE_V2, b"x", **fields)
    assert str(born_ms) in cli.text("message", "show", sent.fields["msgId"])


def test_a_message_is_delayed_and_cancelled(cli: Cli, broker: BrokerProcess) -> None:
    """E-12: by its handle, which both protocols print."""
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    for flags in (("--delay", "3h"), ("--delay", "2d"), ("--at", later)):
        sent = cli.row("message", "send", "delays", "x", *flags)
        assert cli.row("timer", "cancel", sent["handle"]) == {"handle": sent["handle"], "cancelled": True}
        assert ", handle " in cli.text("message", "send", "delays", "x", *flags)
        by_text = ("--broker", f"{broker.host}:{broker.port}")
        put = cli.row("put", "delays", "x", *flags, *by_text)
        assert cli.text("timer", "cancel", put["handle"], *by_text).startswith("cancelled")
        assert ", handle " in cli.text("put", "delays", "x", *flags, *by_text)
        forged = f"{put['handle'][:-1]}{'0' if put['handle'][-1] != '0' else '1'}"
        assert "not of this broker" in cli.run("timer", "cancel", forged, *by_text, code=1).stderr
    passed = cli.row("message", "send", "delays", "x", "--at", "2026-01-31T12:00")
    assert "handle" not in passed
    assert "not a handle" in cli.run("timer", "cancel", "nonsense", code=2).stderr
    assert "max_delay_ms" in cli.run("message", "send", "delays", "x", "--delay", "999999999d", code=4).stderr
    for wrong in (("--delay", "soon"), ("--at", "90m"), ("--delay", "1h", "--at", later)):
        cli.run("message", "send", "delays", "x", *wrong, code=2)
    assert "lines cannot be delayed" in cli.run("put", "delays", "--lines", "-", "--delay", "1h", *by_text, code=2).stderr


def test_how_late_delayed_messages_are_is_a_length_of_time(cli: Cli) -> None:
    """E-12: in seconds; the point of time that a key in _ms is would be one in 1970."""
    row = cli.row("timer", "stats")
    assert 0 <= row["timers_late_s"] < DEADLINE_S and "timers_late_ms" not in row
    assert "TIMERS LATE S" in cli.text("timer", "stats")


def test_bodies_that_are_no_text(cli: Cli) -> None:
    """MQ-011: in from a file, out as base64, and as they are."""
    cli.run("topic", "create", "bytes")
    assert cli.run("message", "send", "bytes", "--file", "-", given=b"\xff\x00\n").stdout.startswith("sent ")
    assert cli.row("message", "tail", "bytes")["body_base64"] == "/wAK"
    assert cli.run("message", "tail", "bytes").stdout_bytes == b"\xff\x00\n\n"
    assert "\x1b" not in cli.text("message", "query", "bytes", "--from", "1h")


def test_query_by_time_tells_what_was_searched(cli: Cli, client: Client) -> None:
    """P23, SG-132: no window that nobody asked for; the zone is the local one."""
    cli.run("topic", "create", "timed", "3")
    for number in range(7):
        client.producer().send("timed", b"%d" % number, tag="even" if number % 2 == 0 else "odd")
    stored = [row["stored_ms"] for row in cli.rows("message", "query", "timed", "--from", "1h")]
    assert len(stored) == 7 and stored == sorted(stored)
    assert len(cli.rows("message", "query", "timed", "--from", "1h", "--tag", "odd")) == 3
    assert len(cli.rows("message", "query", "timed", "--from", "1h", "--count", "2")) == 2
    local = datetime.fromtimestamp(stored[-1] / 1000 + 1).strftime("%Y-%m-%dT%H:%M:%S")
    assert len(cli.rows("message", "query", "timed", "--from", "2000-01-01", "--to", local)) <= 7
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    nothing = cli.run("message", "query", "timed", "--from", later, code=1)
    assert "0 found; searched timed on metaq by time, stored from " in nothing.stderr
    assert "its oldest message was stored " in nothing.stderr


def test_query_finds_nothing(cli: Cli) -> None:
    """P23: exit code 1, and where it was looked for."""
    cli.run("topic", "create", "empty")
    assert "by key 'k'; it has no messages" in cli.run("message", "query", "empty", "--key", "k", code=1).stderr
    assert "searched topic empty" in cli.run("message", "show", "00" * 16, "--topic", "empty", code=1).stderr
    assert "there is no topic absent" in cli.run("message", "query", "absent", "--key", "k", code=1).stderr
    assert "give one of" in cli.run("message", "query", "empty", code=2).stderr
    assert "is no time" in cli.run("message", "query", "empty", "--from", "yesterday", code=2).stderr


def groups_of(cli: Cli, message_id: str) -> dict[str, str]:
    row = cli.rows("message", "show", message_id)[-1]
    return {group["group"]: group["state"] for group in row["groups"]}


def test_who_has_consumed_a_message(cli: Cli, client: Client) -> None:
    """SG-132, SG-088: by group, as far as offsets and tags tell."""
    cli.run("topic", "create", "tracked")
    sent = [client.producer().send("tracked", body, tag="a").id for body in (b"1", b"2")]
    with (
        client.consumer("tracked", "slow", consume_from=FIRST) as slow,
        client.listen("tracked", "picky", lambda message: None, tags="b", consume_from=FIRST),
    ):
        next(iter(slow))
        slow.commit()
        wait_until(
            lambda: groups_of(cli, sent[1]).get("picky", "").startswith("passed over"), DEADLINE_S, "picky is at the end"
        )
        first, second = groups_of(cli, sent[0]), groups_of(cli, sent[1])
    assert first["slow"] == "consumed"
    assert second["slow"] == "not yet"
    assert groups_of(cli, sent[1])["slow"] == "not yet: no consumer is connected"


def test_a_message_that_failed_for_good(cli: Cli, client: Client) -> None:
    """SG-074, SG-132: shown as a dead letter of its group."""
    cli.run("topic", "create", "failing")

    def fail(message: ReceivedMessage) -> None:
        raise ValueError("no")

    sent = client.producer().send("failing", b"x")
    with client.listen("failing", "hopeless", fail, max_reconsume_times=0, consume_from=FIRST):
        wait_until(lambda: groups_of(cli, sent.id).get("hopeless", "").startswith("failed for good"), DEADLINE_S, "it is dead")


def test_tail_with_tag_and_condition(cli: Cli, client: Client) -> None:
    """E-04, SG-131: the newest that match, from all partitions."""
    cli.run("topic", "create", "mixed", "2")
    for number in range(40):
        tag = "rare" if number in (3, 20) else "common"
        client.producer().send("mixed", b"%d" % number, tag=tag, properties={"n": str(number)})
    assert cli.text("message", "tail", "mixed", "-n", "3").split() == ["37", "38", "39"]
    assert cli.text("message", "tail", "mixed", "--tag", "rare", "-n", "2").split() == ["3", "20"]
    assert cli.text("message", "tail", "mixed", "--sql", "n < 2").split() == ["0", "1"]
    assert "nothing in mixed that matches" in cli.run("message", "tail", "mixed", "--tag", "x", code=1).stderr
    assert "give either --tag or --sql" in cli.run("message", "tail", "mixed", "--tag", "x", "--sql", "n = 1", code=2).stderr


def test_tail_follows(cli: Cli, client: Client, broker: BrokerProcess) -> None:
    """E-04: what comes, once each, until interrupted."""
    cli.run("topic", "create", "followed", "3")
    client.producer().send("followed", b"before", tag="a")
    command = [sys.executable, "-m", "metaq", "message", "tail", "followed", "-f", "--tag", "a", "--registry", broker.registry]
    lines: list[bytes] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            reader = threading.Thread(target=lambda out=process.stdout: lines.extend(out), daemon=True)
            reader.start()
            wait_until(lambda: lines == [b"before\n"], DEADLINE_S, "the newest message")
            for number in range(6):
                client.producer().send("followed", b"%d" % number, tag="a" if number % 2 else "b")
            wait_until(lambda: len(lines) == 4, DEADLINE_S, "those that follow")
            client.admin().create_topic("followed", 4)
            for _ in range(4):
                client.producer().send("followed", b"later", tag="a")
            wait_until(lambda: len(lines) == 8, DEADLINE_S, "those in a partition that was added")
            process.send_signal(2)
            assert process.wait(DEADLINE_S) == 130
        finally:
            process.kill()
        reader.join(DEADLINE_S)
    assert sorted(lines[1:]) == [b"1\n", b"3\n", b"5\n", *[b"later\n"] * 4]
