"""`metaq get` and `tail` read all partitions of a topic as one stream, and follow it through a restart of the broker."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from metaq.cli.messages.partitions import Numbered, placed
from metaq.client import TextClient, parse_stats
from metaq.message import Message, TextPosition
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cli import Cli

DEADLINE_S = 60.0
ORDER = [2, 0, 0, 3, 1, 2, 2, 0, 3, 3, 1, 0]
"""The partitions of messages, in the order in which they are stored."""


@pytest.fixture(scope="module")
def spread(broker: BrokerProcess) -> list[str]:
    """The bodies of the topic `spread`, in the order in which they were stored."""
    with TextClient(broker.host, broker.port) as client:
        client.create("spread", 4)
        for number, partition in enumerate(ORDER):
            client.put("spread", b"%d" % number, partition=partition)
    return [str(number) for number in range(len(ORDER))]


def run(broker: BrokerProcess, *arguments: str, code: int = 0) -> str:
    done = Cli(broker.registry).run(*arguments, "--broker", broker.address, code=code)
    return done.stderr if code else done.stdout


def test_get_reads_all_partitions_in_the_order_of_storing(broker: BrokerProcess, spread: list[str]) -> None:
    assert run(broker, "get", "spread").splitlines() == spread
    assert run(broker, "get", "spread", "--count", "5").splitlines() == spread[:5]
    rows = [json.loads(line) for line in run(broker, "get", "spread", "--json").splitlines()]
    assert [(row["partition"], row["body"]) for row in rows] == list(zip(ORDER, spread, strict=True))
    of_one = [body for body, partition in zip(spread, ORDER, strict=True) if partition == 2]
    assert run(broker, "get", "spread", "--partition", "2").splitlines() == of_one


def test_tail_shows_the_newest_of_all_partitions(broker: BrokerProcess, spread: list[str]) -> None:
    for count in (1, 3, 7, 100):
        assert run(broker, "tail", "spread", "-n", str(count)).splitlines() == spread[-count:]
    assert run(broker, "tail", "spread", "-n", "1", "--partition", "0").splitlines() == spread[-1:]
    assert run(broker, "tail", "spread", "-n", "1", "--partition", "1").splitlines() == spread[-2:-1]


def test_a_position_is_one_of_a_partition(broker: BrokerProcess, spread: list[str]) -> None:
    answer = run(broker, "get", "spread", "--position", "21", code=2)
    assert "spread has 4 partitions: say with --partition of which --position is" in answer
    assert run(broker, "get", "spread", "--partition", "2", "--position", "21").splitlines() == ["5", "6"]


def test_few_messages_of_many_are_read_without_the_others(broker: BrokerProcess) -> None:
    """Lazily: whatever there is, the first message costs one get of each partition, and 16 KiB of it."""
    with TextClient(broker.host, broker.port) as client:
        client.create("large", 3)
        for partition in range(3):
            client.put_many("large", [b"x" * 10_000] * 100, partition=partition)
        before = int(parse_stats(client.stats())["cmd_get"])
        assert len(run(broker, "get", "large", "--count", "1", "--max-bytes", "1")) == 10_001
        assert int(parse_stats(client.stats())["cmd_get"]) - before == 3
    assert run(broker, "get", "large", "--max-bytes", "1").count("\n") == 300


def test_what_is_missing_is_called_missing(broker: BrokerProcess, spread: list[str]) -> None:
    assert run(broker, "get", "spraed", code=1) == "metaq: there is no topic spraed; did you mean spread?\n"
    assert run(broker, "tail", "spraed", code=1) == "metaq: there is no topic spraed; did you mean spread?\n"
    assert run(broker, "get", "zzz", code=1) == "metaq: there is no topic zzz; metaq topic list shows the topics\n"
    answer = "metaq: spread has no partition 4; it has partitions 0 to 3\n"
    assert run(broker, "get", "spread", "--partition", "4", code=1) == answer
    assert run(broker, "tail", "spread", "--partition", "4", code=1) == answer
    run(broker, "topic", "create", "hollow")
    assert run(broker, "get", "hollow", code=1) == "metaq: nothing in hollow\n"
    answer = "metaq: hollow has no partition 1; it has only partition 0\n"
    assert run(broker, "get", "hollow", "--partition", "1", code=1) == answer


def test_a_message_of_a_transaction_follows_the_one_before_it() -> None:
    """Its id is negative, and says nothing about when it was stored."""
    ids = [5, -900, 7, -901, 6]
    messages = [Message(id_, 0, None, b"", TextPosition(0), TextPosition(1)) for id_ in ids]
    places = [place for place, _ in placed(Numbered(0, message) for message in messages)]
    assert places == [5, 5, 7, 7, 7]


@pytest.mark.slow
def test_tail_goes_on_when_the_broker_is_back(tmp_path: Path) -> None:
    """No message twice, none left out, also of partitions that are added meanwhile; and it says that it waits."""
    numbers = itertools.count()
    expected: list[bytes] = []

    def put(partition: int) -> None:
        with TextClient(own.host, own.port) as client:
            expected.append(b"%d" % next(numbers))
            client.put("followed", expected[-1], partition=partition)

    with BrokerProcess(tmp_path / "data") as own, (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        with TextClient(own.host, own.port) as client:
            client.create("followed", 3)
        for partition in (0, 2, 1):
            put(partition)
        command = [sys.executable, "-m", "metaq", "tail", "followed", "-f", "-n", "2", "--broker", own.address]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
        process = subprocess.Popen(command, stdout=out, stderr=err, env=clean)

        def shown(lines: list[bytes]) -> None:
            content = b"".join(line + b"\n" for line in lines)
            wait_until(lambda: (tmp_path / "out").read_bytes() == content, DEADLINE_S, f"{lines} are shown")

        try:
            shown(expected[1:])
            for partition in (1, 1, 0, 2):
                put(partition)
                shown(expected[1:])
            own.kill()
            waits = "; waiting until the broker is back\n"
            wait_until(lambda: waits in (tmp_path / "err").read_text(), DEADLINE_S, "it says that it waits")
            own.restart(same_port=True)
            with TextClient(own.host, own.port) as client:
                client.create("followed", 4)
            for partition in (3, 0, 2, 3):
                put(partition)
            wait_until(lambda: "metaq: the broker is back after " in (tmp_path / "err").read_text(), DEADLINE_S, "it is back")
            wait_until(lambda: (tmp_path / "out").read_bytes().count(b"\n") == 10, DEADLINE_S, "all are shown")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_S)
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert sorted(lines, key=int) == expected[1:]
    assert len((tmp_path / "err").read_text().splitlines()) == 2
