"""What operators see of leases: on the command line, in stats, in metrics, and in the export of offsets."""

import json
import re
import zlib
from collections.abc import Iterator

import pytest

from metaq.client.admin.views import BrokerView, MemberWork, QueueWork
from metaq.diagnosis.findings import Level
from metaq.diagnosis.groupfacts import BrokerSide, GroupFacts, LeaseSide
from metaq.diagnosis.leasechecks import check_leases, check_mode
from metaq.message import MessageQueue
from metaq.protocol.remoting.leases.figures import PlaceRow, TopicRow
from metaq.protocol.sysflag import COMPRESSED
from tests.cli.test_why import why
from tests.support.broker import BrokerProcess
from tests.support.cli import Cli
from tests.support.messages import send, send_header, sent
from tests.support.metrics import families
from tests.support.remoting import RemotingClient

OK, PROBLEM = 0, 2
HOUR_MS = 3_600_000


class Person:
    """Somebody with telnet, who leases messages of a topic for the group ``GROUP-of-TOPIC``."""

    def __init__(self, broker: BrokerProcess, topic: str) -> None:
        self._socket = broker.connect()
        self._file = self._socket.makefile("rwb")
        self.topic, self.group = topic, f"workers-of-{topic}"
        self.ids: list[str] = []

    def say(self, line: str, body: bytes = b"") -> list[str]:
        """Send a command; return what comes, with the result last."""
        self._file.write(f"{line}\r\n".encode() + body)
        self._file.flush()
        told: list[str] = []
        while not told or not told[-1].startswith("result"):
            told.append(self._file.readline().decode().strip())
            if told[-1].startswith("message"):
                self._file.read(int(told[-1].split()[1]))
        told += [self._file.read(int(told[-1].split()[2])).decode()]
        return told

    def put(self, *bodies: bytes, partition: int = 0) -> None:
        for body in bodies:
            assert self.say(f"put {self.topic} {partition} {len(body)} 0 1", body)[0].startswith("result 200")

    def pop(self, count: int, *options: str) -> list[str]:
        """Return the IDs of the messages that came."""
        told = self.say(" ".join([f"pop {self.topic} {self.group} {count}", *options, "2"]))
        return [line.split()[3] for line in told if line.startswith("message")]

    def stats(self) -> dict[str, str]:
        return dict(line.split(" ", 1) for line in self.say("stats 3")[-1].splitlines() if " " in line)

    def __enter__(self) -> "Person":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def person(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Person]:
    """Who has leased 4 of 6 messages: one is given back for an hour, one at once, and one is finished."""
    topic = re.sub(r"\W", "-", request.node.name.removeprefix("test_"))
    with Person(broker, topic) as person:
        person.say(f"create {topic} 2 1")
        person.put(*[b"%d" % number for number in range(6)])
        ids = person.ids = person.pop(4)
        person.say(f"nack {ids[0]} delay={HOUR_MS} 1")
        person.say(f"nack {ids[1]} 1")
        person.say(f"ack {ids[2]} 1")
        person.say(f"extend {ids[3]} {HOUR_MS} 1")
        yield person


def test_list_and_show(person: Person, cli: Cli) -> None:
    """MY-033: the figures of a partition, and what is open there; pages go on where one ends."""
    row = cli.row("lease", "list", person.group)
    oldest_ms = row.pop("oldest_ms")
    place = {"broker": "metaq", "topic": person.topic, "partition": 0, "base": 0, "next": 4, "end": 6}
    assert row == place | {"lag": 5, "ready": 3, "in_flight": 1, "waiting": 1, "delayed": 1, "lined": 0}
    assert cli.rows("lease", "list", person.group, person.topic)[0]["lag"] == 5
    cli.run("lease", "list", person.group, "another", code=1)
    shown = cli.rows("lease", "show", person.group, person.topic, "0")
    assert [(row["ordinal"], row["times"], row["state"]) for row in shown] == [
        (0, 1, "delayed"),
        (1, 1, "waiting"),
        (3, 1, "leased"),
    ]
    assert {row["first_ms"] for row in shown} == {oldest_ms}
    assert all(abs(shown[number]["due_ms"] - oldest_ms - HOUR_MS) < 60_000 for number in (0, 2))
    assert "nothing is open there" in cli.run("lease", "show", person.group, person.topic, "1").stderr
    cli.run("group", "update", "idle")
    assert "idle leases no messages" in cli.run("lease", "list", "idle").stderr
    assert "no broker knows the group nobody" in cli.run("lease", "list", "nobody", code=1).stderr


def test_messages_in_line_for_their_key(broker: BrokerProcess, cli: Cli) -> None:
    """MY-033, E-22: they are open and have no times, as they were never given."""
    with Person(broker, "in-line") as person:
        person.say(f"create {person.topic} 1 1")
        cli.run("group", "update", person.group, "--attribute", "order=key")
        for body in (b"0", b"1", b"2"):
            assert person.say(f"put {person.topic} 0 1 0 key=a 1", body)[0].startswith("result 200")
        person.pop(3)
    row = cli.row("lease", "list", person.group)
    assert [row[name] for name in ("lag", "ready", "in_flight", "lined", "next")] == [3, 0, 1, 2, 3]
    shown = cli.rows("lease", "show", person.group, person.topic, "0")
    assert [(each["state"], each["times"]) for each in shown] == [("leased", 1), ("lined", 0), ("lined", 0)]
    assert [(each["first_ms"], each["due_ms"]) for each in shown[1:]] == [(0, 0)] * 2
    lines = cli.run("lease", "show", person.group, person.topic, "0").stdout.splitlines()
    assert [line.split() for line in lines[2:]] == [["metaq", ordinal, "0", "lined"] for ordinal in "12"]
    assert cli.rows("group", "lag", person.group)[0]["lag"] == 3


def test_pages(person: Person, cli: Cli) -> None:
    """MY-033: more open messages than one page has, alone and together."""
    person.put(*[b"x"] * 300)
    ids = [name for _ in range(5) for name in person.pop(32)]
    person.say(f"extend {','.join(ids[:30])} 1000000 1")
    person.say(f"ack {','.join(ids[40:60])} 1")
    rows = cli.rows("lease", "show", person.group, person.topic, "0", "--count", "1000")
    assert [row["ordinal"] for row in rows] == [0, *sorted({int(name.split("-")[1]) for name in (*ids[:40], *ids[60:])} | {3})]
    assert len(cli.rows("lease", "show", person.group, person.topic, "0", "--count", "120")) == 120


def test_lags(person: Person, cli: Cli) -> None:
    """MY-033: everywhere the lag is what is ready, in flight and delayed, and not all from the offset on."""
    row = next(row for row in cli.rows("group", "lag", person.group) if row["partition"] == 0)
    assert [row[name] for name in ("committed", "end", "lag", "in_flight", "delayed")] == [0, 6, 5, 1, 1]
    shown = cli.row("group", "show", person.group)
    assert [shown[name] for name in ("lag", "in_flight", "delayed")] == [5, 1, 1]
    exported = [row for row in cli.rows("offsets", "export", "--out", "-") if row["topic"] == person.topic]
    assert [exported[0][name] for name in ("consumed", "lag", "in_flight", "delayed")] == [0, 5, 1, 1]
    assert [exported[1][name] for name in ("lag", "in_flight", "delayed")] == [None] * 3


def test_groups_that_lease_are_listed_with_those_that_do_not(person: Person, cli: Cli) -> None:
    """MY-033, E-04: whichever comes first, every row has the same columns; they are shown if a group has something in them."""
    for name in ("a-puller", "z-puller"):
        cli.run("group", "update", name)
    listed = {row["group"]: (row["in_flight"], row["delayed"]) for row in cli.rows("group", "list")}
    assert listed.items() >= {"a-puller": (None, None), person.group: (1, 1), "z-puller": (None, None)}.items()
    heading, *lines = cli.text("group", "list").splitlines()
    assert "IN FLIGHT" in heading
    assert {line.split()[0] for line in lines} >= {"a-puller", person.group, "z-puller"}
    assert "in flight" in cli.text("group", "show", person.group)
    assert "in flight" not in cli.text("group", "show", "a-puller")


def test_stats_and_metrics(person: Person, broker: BrokerProcess) -> None:
    """MY-033, E-01: what became of leases, and how many there are."""
    before = {name: int(value) for name, value in person.stats().items() if name.startswith("lease") and value.isdecimal()}
    other = person.pop(1)
    person.say(f"ack {other[0]} 1")
    person.say(f"ack {other[0]} 1")
    person.say(f"nack {person.pop(1)[0]} dead 1")
    person.say(f"subscribe {person.topic} pushed ready=0 7")
    after = {name: int(value) for name, value in person.stats().items() if name in before}
    changes = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    assert changes.pop("lease_log_bytes") > 0
    # the first was given before, the other was not
    assert changes.pop("leases_waiting") == -1
    counts = {"leases_given": 1, "leases_again": 1, "leases_acked": 1, "leases_dead": 1, "leases_meaningless": 1}
    assert changes == counts | {"leases_open": -1, "leases_subscriptions": 1}
    found = families(broker)

    def value(name: str) -> float:
        samples = found[name].samples
        wanted = {"group": person.group, "topic": person.topic}
        return next(sample.value for sample in samples if sample.labels in (wanted, {}))

    figures = {"ready": 1, "in_flight": 1, "delayed": 1, "lined": 0}
    assert {name: value(f"metaq_lease_{name}_messages") for name in figures} == figures
    assert value("metaq_consumer_lag_messages") == 3
    counters = ("metaq_lease_given_total", "metaq_lease_given_again_total", "metaq_lease_given_up_total")
    assert [value(name) for name in counters] == [5, 1, 1]
    assert 0 < value("metaq_lease_oldest_seconds") < 600
    assert value("metaq_lease_open_messages") == int(person.stats()["leases_open"])
    assert value("metaq_subscriptions") == 1 and value("metaq_lease_unkept_partitions") == 0


def test_what_is_delayed_is_not_late(person: Person, broker: BrokerProcess) -> None:
    """MY-033: the age of the lag is that of what could be given; so an alarm about it means consumers that do not keep up."""

    def value(name: str) -> float:
        wanted = {"group": person.group, "topic": person.topic}
        return next(sample.value for sample in families(broker)[name].samples if sample.labels == wanted)

    assert value("metaq_consumer_lag_seconds") > 0
    for name in person.pop(9):
        person.say(f"nack {name} delay={HOUR_MS} 1")
    assert value("metaq_consumer_lag_seconds") == 0
    assert value("metaq_consumer_lag_messages") == 5


def test_why(person: Person, cli: Cli) -> None:
    """MY-033: while somebody has messages, all is well; when some are ready and nobody has or wants any, it is not."""
    assert why(cli, person.group, code=OK) == {}
    assert person.say(f"ack {person.ids[3]} 1")[-1] == "1"
    found = why(cli, person.group, code=PROBLEM)
    assert found["leases"] == [f"3 messages of {person.topic} are ready on metaq, and no consumer waits for them or has any"]
    assert found["consumers"] == ["no consumer is connected"]
    person.say(f"subscribe {person.topic} {person.group} ready=0 7")
    assert why(cli, person.group, code=OK) == {}


def test_a_compressed_body_is_printed_as_it_was(broker: BrokerProcess, cli: Cli) -> None:
    """SG-098: and one that is marked as compressed and is not, as it is stored; scripts get the reason."""
    with Person(broker, "unzipping") as person, RemotingClient(broker.host, broker.port) as producer:
        person.say(f"create {person.topic} 1 1")
        for body in (zlib.compress(b"x" * 5000), b"not zlib"):
            sent(producer, send(producer, send_header(person.topic, sys_flag=COMPRESSED), body))
    whole, broken = cli.rows("lease", "pop", person.group, person.topic, "--count", "2", "--broker", broker.address)
    assert (whole["body"], "error" in whole) == ("x" * 5000, False)
    assert broken["body"] == "not zlib"
    assert "cannot be inflated" in broken["error"]


def test_take_finish_and_give_back(broker: BrokerProcess, cli: Cli) -> None:
    """E-04: what is taken stays taken when the command is over, until it is finished or given back."""
    with Person(broker, "by-hand") as person:
        person.say(f"create {person.topic} 1 1")
        person.put(b"a", b"b", b"c", b"\xff")
    place = ("--broker", broker.address)
    taken = (person.group, person.topic)
    first, second, third = cli.rows("lease", "pop", *taken, "--count", "3", "--invisible", "10m", *place)
    assert [(row["body"], row["attempt"], row["partition"]) for row in (first, second, third)] == [
        ("a", 1, 0),
        ("b", 1, 0),
        ("c", 1, 0),
    ]
    assert cli.row("lease", "pop", *taken, "--count", "3", *place)["body_base64"] == "/w=="
    assert cli.rows("lease", "pop", *taken, *place) == []
    assert "nothing to take" in cli.run("lease", "pop", *taken, "--wait", "1s", *place).stderr
    assert cli.run("lease", "ack", *taken, first["id"], *place).stdout == "1 of 1 messages finished\n"
    again = cli.run("lease", "ack", *taken, first["id"], second["id"], *place, code=1)
    assert again.stdout == "1 of 2 messages finished; the others were finished, or given again, before\n"
    assert cli.row("lease", "ack", *taken, first["id"], *place, code=1) == {"asked": 1, "done": 0}
    assert "1 of 1 messages given back" in cli.run("lease", "nack", *taken, third["id"], "--delay", "1h", *place).stdout
    assert cli.rows("lease", "pop", *taken, *place) == []
    assert cli.row("lease", "list", *taken)["delayed"] == 1


def test_give_back_and_give_up(broker: BrokerProcess, cli: Cli) -> None:
    """E-04: at once, and for ever."""
    with Person(broker, "given-up") as person:
        person.say(f"create {person.topic} 1 1")
        person.put(b"a")
    place, taken = ("--broker", broker.address), (person.group, person.topic)
    row = cli.row("lease", "pop", *taken, *place)
    assert cli.row("lease", "nack", *taken, row["id"], *place) == {"asked": 1, "done": 1}
    row = cli.row("lease", "pop", *taken, *place)
    assert row["attempt"] == 2
    cli.run("lease", "nack", *taken, row["id"], "--dead", "--delay", "1m", *place, code=2)
    assert "1 of 1 messages sent to the dead" in cli.run("lease", "nack", *taken, row["id"], "--dead", *place).stdout
    assert [letter["body"] for letter in cli.rows("dlq", "show", person.group)] == ["a"]
    for wrong in (("nonsense",), ()):
        cli.run("lease", "ack", *taken, *wrong, *place, code=2)
    assert "does not exist" in cli.run("lease", "pop", person.group, "no-topic", *place, code=1).stderr


def test_the_doctor_finds_groups_that_lease(person: Person, cli: Cli) -> None:
    """MY-033: also those of the text protocol, which have no members; those that are done with everything are left out."""

    def is_found() -> bool:
        lines = cli.run_any("doctor", "--watch", "0", "--json").stdout.splitlines()
        return any(json.loads(line)["check"] == f"group {person.group}" for line in lines)

    assert is_found()
    for name in [*person.ids, *person.pop(9)]:
        person.say(f"ack {name} 1")
    left = cli.rows("lease", "show", person.group, person.topic, "0")
    assert is_found() == bool(left)


FIGURES = PlaceRow("orders", 0, 0, 100, 120, 75, 40, 20, 20, 10, 5, 1)
TOPIC = TopicRow("orders", "POP", 1, 100, 5, 5, 50, 100, 0)


@pytest.mark.parametrize(
    ("place", "topic", "level", "says"),
    [
        (FIGURES, TOPIC, Level.OK, "20 in flight, 40 ready"),
        (FIGURES, TOPIC._replace(again=11), Level.WARNING, "11 messages of orders were given again"),
        (FIGURES, TOPIC._replace(given=500, again=11), Level.OK, "in flight"),
        (FIGURES, TOPIC._replace(dead=11), Level.WARNING, "11 messages of orders were given up"),
        (
            FIGURES,
            TOPIC._replace(max_in_flight=30),
            Level.PROBLEM,
            "30 messages (max_in_flight) are in flight or delayed in orders-0",
        ),
        (FIGURES, TOPIC._replace(max_open=55), Level.PROBLEM, "55 messages (max_open) are not finished in orders-0"),
        (FIGURES, TOPIC._replace(unkept=3), Level.PROBLEM, "the leases of 3 partitions of metaq are in memory only"),
        (FIGURES._replace(in_flight=0), TOPIC._replace(waiting_consumers=0), Level.PROBLEM, "40 messages of orders are ready"),
        (FIGURES._replace(in_flight=0), TOPIC, Level.OK, "0 in flight"),
    ],
)
def test_what_is_checked(place: PlaceRow, topic: TopicRow, level: Level, says: str) -> None:
    """MY-033: each figure alone that shows that something is wrong, and just not wrong."""
    side = BrokerSide(BrokerView("c", "metaq", 0, "h:1"), leases=(LeaseSide(topic, (place,)),))
    (finding,) = check_leases(GroupFacts("billing", (side,)))
    assert finding.level is level and says in finding.found
    assert bool(finding.advice) == (level is not Level.OK)


def test_members_that_pull_in_a_group_that_pops() -> None:
    """MY-033: their commits are ignored."""
    side = BrokerSide(BrokerView("c", "metaq", 0, "h:1"), leases=(LeaseSide(TOPIC, (FIGURES,)),))
    pulls = MemberWork({}, {MessageQueue("orders", "metaq", 0): QueueWork(0, 0, 0)}, "")
    facts = GroupFacts("billing", (side,), works={"old": pulls, "new": MemberWork({}, {}, ""), "silent": None})
    (finding,) = check_mode(facts)
    assert finding.level is Level.WARNING and finding.found.startswith("old pull orders")
    pull_side = side._replace(leases=(LeaseSide(TOPIC._replace(mode="PULL"), (FIGURES,)),))
    assert list(check_mode(facts._replace(brokers=(pull_side,)))) == []
