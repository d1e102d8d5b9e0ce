"""Settings change while brokers and registries run, at SIGHUP."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import metaq
from metaq import TextClient
from metaq.cli.admin import parse_config
from metaq.client import parse_stats
from metaq.config import FIELDS, LIVE
from metaq.errors import MetaqError, RouteNotFound
from metaq.message import DEFAULT_TOPIC
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request
from tests.support.admin import Refused, ask, ask_body, connect, create_topic
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cluster import ReplicaProcess
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
# Of every setting that can change another value than the default's.
OTHERS: Final[dict[str, Any]] = {
    **dict.fromkeys(("auto_create_topics", "store_replies", "auto_create_groups", "sql_filter"), False),
    "log_format": "json",
    "log_level": "DEBUG",
    "broker_permission": 4,
    "keep_hours": 5.5,
    "delete_hour": 9,
    "clean_ratio": 0.5,
    "force_ratio": 0.6,
    "refuse_ratio": 0.7,
    "max_body_bytes": 5000,
    "default_partitions": 3,
    "topics": {"reloaded": {"partitions": 3}},
}


def create_group(client: RemotingClient, name: str) -> None:
    ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode({"groupName": name}))


class Unset(BrokerProcess):
    """A broker without a flag for any setting that can change: flags win over the file."""

    ignored_disk = ()


class Reloaded:
    """A broker, and the file it was started with."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.file = broker.data.with_name("broker.yaml")
        self.file.write_text("")
        self.broker = broker
        broker.flags = (*broker.flags, "--config", str(self.file))

    def reload(self, text: str, outcome: str = "settings reloaded") -> str:
        """Write the file, have it read, and wait for the line that ends a reload; what the log said meanwhile."""
        before = len(self.broker.stderr())
        self.file.write_text(text)
        os.kill(self.broker.pid, signal.SIGHUP)
        wait_until(lambda: outcome in self.broker.stderr()[before:], DEADLINE_S, outcome)
        return self.broker.stderr()[before:]

    @property
    def address(self) -> tuple[str, int]:
        return self.broker.host, self.broker.port

    def in_force(self) -> dict[str, Any]:
        with TextClient(*self.address) as client:
            return parse_config(client.stats("config"))


@pytest.fixture
def reloaded(tmp_path: Path) -> Iterator[Reloaded]:
    made = Reloaded(Unset(tmp_path / "data"))
    with made.broker:
        yield made


def test_every_live_setting_is_put_in_force(reloaded: Reloaded) -> None:
    """E-29: all of them at once, by the same process; and taken back."""
    numbers = {name: FIELDS[name].default + 1 for name in LIVE - OTHERS.keys()}
    others = {**numbers, **OTHERS}
    assert others.keys() == LIVE
    before, pid = reloaded.in_force(), reloaded.broker.pid
    text = "".join(f"{name}: {value}\n" for name, value in others.items())
    log = reloaded.reload(text, '"event": "settings reloaded", "changed"')
    assert f'"changed": {len(LIVE)}, "need_restart": 0' in log
    after = reloaded.in_force()
    assert {name: after["metaq"][name] for name in numbers} == numbers
    assert (after["metaq"]["keep_hours"], after["metaq"]["sql_filter"]) == ("5.5", "False")
    assert after["topic=reloaded"]["numPartitions"] == 3
    assert "need_restart=0" in reloaded.reload("")
    assert reloaded.in_force()["metaq"] == before["metaq"]
    assert reloaded.broker.running and reloaded.broker.pid == pid


def test_limits_hold_as_soon_as_they_are_in_force(reloaded: Reloaded) -> None:
    """E-29: what was refused before is taken after, and the other way round."""
    address = reloaded.address
    with TextClient(*address) as client:
        client.put("first", b"x" * 6000)
    reloaded.reload("max_body_bytes: 5000\nmax_topics: 1\ndefault_partitions: 4\n")
    with TextClient(*address) as client:
        client.put("first", b"x" * 5000)
        with pytest.raises(MetaqError, match="5000"):
            client.put("first", b"x" * 6000)
        with pytest.raises(MetaqError, match="max_topics"):
            client.put("second", b"x")
    reloaded.reload("default_partitions: 4\nbroker_permission: 4\n")
    with TextClient(*address) as client, pytest.raises(MetaqError, match="broker_permission 4"):
        client.put("first", b"x")
    reloaded.reload("default_partitions: 4\n")
    with TextClient(*address) as client:
        client.put("first", b"x" * 6000)
        client.put("second", b"x")
    assert reloaded.in_force()["topic=second"]["numPartitions"] == 4


def test_a_connection_that_is_open_stays(reloaded: Reloaded) -> None:
    """E-29: nobody notices a reload."""
    with TextClient(*reloaded.address) as client:
        client.put("stays", b"before")
        reloaded.reload("max_connections: 1\nidle_timeout_ms: 200000\n")
        client.put("stays", b"after")
        with reloaded.broker.connect() as second:
            assert b"max_connections" in second.recv(1000)
        client.put("stays", b"at last")


def test_what_needs_a_restart_is_told(reloaded: Reloaded) -> None:
    """E-29: and the rest of the file is put in force."""
    log = reloaded.reload("checkpoint_interval_ms: 7777\nmax_groups: 7\n")
    assert "setting needs a restart name=checkpoint_interval_ms in_force=5000 wanted=7777" in log
    assert "setting changed name=max_groups from=16000 to=7" in log
    assert "settings reloaded changed=1 need_restart=1" in log
    found = reloaded.in_force()["metaq"]
    assert (found["checkpoint_interval_ms"], found["max_groups"]) == (5000, 7)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_groups: 7\nmax_topcs: 1\n", "unknown setting 'max_topcs'"),
        ("max_groups: 7\nmax_topics: many\n", "max_topics: must be a whole number"),
        ("max_groups: [\n", "cannot read the configuration file"),
        ("max_groups: 7\ntopics: {made: {}, 'a b': {}}\n", "characters other than"),
        ("max_groups: 7\nkeep_hours: 2024-99-99\n", "keep_hours: '2024-99-99' cannot be read as timestamp ("),
        (
            "max_groups: 7\nkeep_hours: .inf\n",
            "keep_hours: inf is no length of time; write a number of hours, or 90m, 12h, 3d (",
        ),
        # right as a file, but not with the segments of the process that runs
        ("max_groups: 7\nmax_body_bytes: 40000000\nsegment_bytes: 80000000\n", "segment_bytes must be at least"),
    ],
)
def test_a_bad_file_leaves_everything_as_it_was(tmp_path: Path, text: str, reason: str) -> None:
    """E-29: and says why, in one line."""
    made = Reloaded(Unset(tmp_path / "data"))
    # the file is to speak of segment_bytes
    made.broker.own_flags = lambda: ["--remoting-listen", "none", "--registry-listen", "127.0.0.1:0"]  # type: ignore[method-assign]
    made.file.write_text("max_groups: 8\nsegment_bytes: 33554432\n")
    with made.broker, connect(made.broker) as asker:
        before = made.in_force()
        for number in range(7):
            create_group(asker, f"group-{number}")
        log = made.reload(text, "settings not reloaded, those before stay in force reason=")
        assert reason in log
        assert len([line for line in log.splitlines() if "settings not reloaded" in line]) == 1
        assert made.in_force() == before
        create_group(asker, "the-eighth")
        with pytest.raises(Refused, match="there are already 8 groups"):
            create_group(asker, "the-ninth")
        with TextClient(*made.address) as client:
            client.put("second", b"x")
        assert "setting changed name=max_groups from=8 to=9" in made.reload("max_groups: 9\n")
        create_group(asker, "the-ninth")


def test_topics_of_a_file_are_made_all_or_none(reloaded: Reloaded) -> None:
    """E-29: they count with those that there are, and one more than the limit leaves everything as it was."""
    with TextClient(*reloaded.address) as client:
        client.create("there", 1)
    log = reloaded.reload("max_topics: 2\ntopics: {there: {}, one: {}, two: {}}\n", "settings not reloaded")
    assert "topics: 3 topics would be more than 2 (max_topics); the new ones are one, two" in log
    found = reloaded.in_force()
    assert found["metaq"]["max_topics"] == FIELDS["max_topics"].default
    assert "topic=one" not in found
    reloaded.reload("max_topics: 3\ntopics: {there: {partitions: 2}, one: {}, two: {}}\n")
    assert {"topic=there", "topic=one", "topic=two"} <= reloaded.in_force().keys()
    reloaded.reload("max_topics: 2\nauto_create_topics: false\n")
    reloaded.reload("max_topics: 2\n")  # the template is no user's topic, so it fits


def test_the_template_goes_with_the_creation_of_topics(reloaded: Reloaded) -> None:
    """E-29, SG-061: it is nobody's topic then, routes lead nowhere, and with the setting it comes back; so after a restart."""
    without = "auto_create_topics: false\n"

    def check_gone() -> None:
        assert f"topic={DEFAULT_TOPIC}" not in reloaded.in_force()
        with metaq.connect(reloaded.broker.registry) as client, connect(reloaded.broker) as asker:
            with pytest.raises(RouteNotFound, match="create it, or set auto_create_topics"):
                client.producer().send("new", b"x")
            [queues] = ask_body(asker, Request.GET_ROUTEINFO_BY_TOPIC, topic=DEFAULT_TOPIC)["queueDatas"]
            assert queues["perm"] == 0
            with pytest.raises(Refused, match="belongs to the broker"):
                create_topic(asker, DEFAULT_TOPIC)
        with TextClient(*reloaded.address) as client:
            assert parse_stats(client.stats())["topics"] == "0"

    with TextClient(*reloaded.address) as client:
        assert parse_stats(client.stats())["topics"] == "0"
    reloaded.reload(without)
    check_gone()
    assert reloaded.broker.terminate() == 0
    reloaded.broker.restart()
    check_gone()
    reloaded.reload("")
    with metaq.connect(reloaded.broker.registry) as sender:
        sender.producer().send("new", b"x")


def test_a_file_takes_back_what_an_administrator_has_changed(reloaded: Reloaded) -> None:
    """E-29, SG-088: and says so; the file has not changed, but what is in force has."""
    reloaded.reload("keep_hours: 12\n")
    with connect(reloaded.broker) as asker:
        ask(asker, Request.UPDATE_BROKER_CONFIG, b"fileReservedTime=48\ndeleteWhen=07")
    assert "setting changed name=keep_hours from=12.0 to=48" in reloaded.broker.stderr()
    found = reloaded.in_force()["metaq"]
    assert (found["keep_hours"], found["delete_hour"]) == ("48.0", 7)
    log = reloaded.reload("keep_hours: 12\n")
    assert "setting changed name=keep_hours from=48.0 to=12.0" in log and "name=delete_hour from=7 to=4" in log
    assert "settings reloaded changed=2 need_restart=0" in log
    found = reloaded.in_force()["metaq"]
    assert (found["keep_hours"], found["delete_hour"]) == ("12.0", 4)


def test_a_change_by_an_administrator_outlives_roles(tmp_path: Path) -> None:
    """E-29, SG-088: on a replica, until a file says something else."""
    replica = ReplicaProcess(tmp_path / "data", 1, "", durability="memory")
    made = Reloaded(replica)
    with replica:
        with connect(replica) as asker:
            ask(asker, Request.UPDATE_BROKER_CONFIG, b"fileReservedTime=48")
        assert made.in_force()["metaq"]["keep_hours"] == "48.0"
        replica.demote("127.0.0.1:1")
        assert made.in_force()["metaq"]["keep_hours"] == "48.0"
        replica.promote()
        assert made.in_force()["metaq"]["keep_hours"] == "48.0"
        log = made.reload("")
        assert "setting changed name=keep_hours from=48.0 to=72" in log and "changed=1 need_restart=0" in log


def test_a_replica_reloads_and_keeps_it_through_a_change_of_role(tmp_path: Path) -> None:
    """E-29: its broker is made anew with the settings that are in force."""
    replica = ReplicaProcess(tmp_path / "data", 1, "", durability="memory")
    made = Reloaded(replica)
    with replica:
        made.reload("max_topics: 7\n")
        assert made.in_force()["metaq"]["max_topics"] == 7
        replica.demote("127.0.0.1:1")
        assert made.in_force()["metaq"]["max_topics"] == 7
        made.reload("max_topics: 8\n")
        found = made.in_force()["metaq"]
        assert (found["max_topics"], found["replication_listen"]) == (8, replica.replication)


def test_a_registry_reloads(tmp_path: Path) -> None:
    """E-29."""
    file = tmp_path / "registry.yaml"
    file.write_text("max_connections: 5\n")
    with RegistryProcess(tmp_path / "data", "--config", str(file)) as registry:
        file.write_text("max_connections: 6\nregistry_expiry_ms: 5000\nlog_format: json\n")
        os.kill(registry.pid, signal.SIGHUP)
        wait_until(
            lambda: '"event": "settings reloaded", "changed": 2, "need_restart": 1' in registry.stderr(), DEADLINE_S, "it"
        )
        assert registry.terminate() == 0


def test_a_terminal_that_is_closed_ends_the_broker(tmp_path: Path) -> None:
    """E-29: although the signal is the same; while it is open the signal reloads."""
    ours, theirs = pty.openpty()
    log = tmp_path / "log"
    command = [sys.executable, "-m", "metaq", "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    command += ["--remoting-listen", "none", "--registry-listen", "127.0.0.1:0", "--segment-bytes", "2000000"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=theirs, stdout=out, stderr=out, start_new_session=True)
    os.close(theirs)
    try:
        wait_until(lambda: bool(re.search(rb"metaq ready .*\n", log.read_bytes())), DEADLINE_S, "ready")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: b"settings reloaded" in log.read_bytes(), DEADLINE_S, "reloaded")
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
