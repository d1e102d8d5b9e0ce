"""Leases over the text protocol: pop, ack, nack, extend, and pushes to subscriptions, in the process of the test."""

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import gevent
import pytest
from gevent.event import Event

from metaq.engine.leases.leasing import Leasing
from metaq.engine.tables.groups import Group
from metaq.message import TopicPartition
from metaq.server.text.get import GetHandler
from metaq.server.text.leases import LeaseHandler
from metaq.server.text.push import PushHandler
from metaq.server.text.put import PutHandler
from metaq.server.wire.pops import LOOK_S
from metaq.server.wire.reads import StoreRead
from metaq.store.files.filecache import run_here
from tests.support.controlled import ControlledDisk
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.inprocess import Parts, Text

T = TypeVar("T")
LEASE_S: Final = 60.0


class Broker:
    """A broker that leases messages of the topic ``orders``."""

    def __init__(self, data: Path, **settings: Any) -> None:
        self.parts = Parts(data, topics={"orders": {"partitions": 4}}, **settings)
        context = self.parts.context
        self.leasing = Leasing.open(context, self.parts.turns, self.parts.loop.timer)
        leases = LeaseHandler(context, self.leasing, self.parts.reads)
        puts = PutHandler(context, self.parts.turns).puts
        gets = GetHandler(context, self.parts.holds, self.parts.reads, self.parts.loop)
        pushes = PushHandler(leases)
        context.topics.changed = pushes.topic_changed
        commands = {**leases.commands(), **pushes.commands(), **gets.commands()}
        self.parts.endpoint.answer_text(commands, puts, puts)
        self._producer = Text(self.parts)

    def put(self, *bodies: str, partition: int = 0) -> None:
        """Store messages; those who wait for them get them."""
        for body in bodies:
            self._producer.send(f"put orders {partition} {len(body)} 0 1\r\n{body}".encode())
        self.settle()

    def settle(self) -> None:
        """End turns until nothing more happens, and let readers see what was stored."""
        for _ in range(5):
            self.parts.end_turn()
            self.leasing.lines.wake(self.parts.store.queues.values())
        self.parts.end_turn()
        self._producer.answers()

    def advance(self, seconds: float) -> None:
        self.parts.advance(seconds)
        self.settle()

    def sync(self) -> None:
        """Let a sync make everything safe."""
        self.parts.store.sync(run_here)
        self.parts.turns.release()
        self.settle()

    def make_late(self) -> None:
        """Let the time pass that answers wait for a sync."""
        self.parts.clock.advance(self.parts.settings.sync_timeout_ms / 1000)
        self.parts.turns.expire()

    def dead_letters(self) -> int:
        queue = self.parts.store.queues.get(TopicPartition("%DLQ%billing", 0))
        return 0 if queue is None else queue.readable


class Client:
    """A client; tokens of ids are hidden, but remembered."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.text = Text(broker.parts)
        self.ids: dict[str, str] = {}

    def say(self, line: str) -> list[str]:
        """Send a command, in which ``0-17`` stands for the id; return the lines that come."""
        told = re.sub(r"\b\d+-\d+\b", lambda found: self.ids.get(found[0], found[0] + "-000000"), line)
        at_once = self.text.send(told.encode() + b"\r\n")
        self._broker.settle()
        return self.heard(at_once)

    def heard(self, before: bytes = b"") -> list[str]:
        """Return the lines that have come."""
        lines = (before + self.text.answers()).decode().splitlines()
        shown = []
        for line in lines:
            for found in re.finditer(r"\b(\d+-\d+)-[0-9a-z]{6}\b", line):
                self.ids[found[1]] = found[0]
            shown.append(re.sub(r"\b(\d+-\d+)-[0-9a-z]{6}\b", r"\1", line))
        return shown


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


@pytest.fixture
def client(broker: Broker) -> Client:
    return Client(broker)


def test_pop_and_ack(broker: Broker, client: Client) -> None:
    """ES-102: a message is given once, until its lease ends, and never after its ack."""
    broker.put("hello", "world")
    assert client.say("pop orders billing 2 7") == [
        "message 5 7 0-0 orders 0 0 1 0",
        "hellomessage 5 7 0-1 orders 0 25 1 0",
        "worldresult 200 1 7",
        "2",
    ]
    assert client.say("pop orders billing 1 7") == ["result 404 23 7", "there is nothing to pop"]
    assert client.say("ack 0-0 8") == ["result 200 1 8", "1"]
    assert client.say("ack 0-0 9")[0].startswith("result 404 ")
    broker.advance(LEASE_S)
    assert client.say("pop orders billing 2 7") == ["message 5 7 0-1 orders 0 25 2 0", "worldresult 200 1 7", "1"]


def test_an_id_is_good_on_any_connection(broker: Broker, client: Client) -> None:
    """Elsewhere, topic and group have to be named; and the id of one group means nothing to another one."""
    broker.put("a")
    client.say("pop orders billing 1 7")
    other = Client(broker)
    other.ids = client.ids
    assert other.say("ack 0-0 1")[0].startswith("result 404 ")
    assert other.say("ack orders audit 0-0 1")[0].startswith("result 404 ")
    assert other.say("ack orders billing 0-0 1") == ["result 200 1 1", "1"]


def test_ends_of_leases_follow_each_other_in_one_turn(broker: Broker, client: Client) -> None:
    """Their answers come in order, and a get after them waits for them."""
    broker.put("a", "b", "c")
    client.say("pop orders billing 3 7")
    lines = "".join(f"ack {client.ids[f'0-{number}']} {number}\r\n" for number in range(3))
    assert client.text.send(lines.encode() + b"offset orders billing 0 0 9\r\n") == b""
    broker.parts.end_turn()
    answers = client.text.answers().decode()
    assert re.findall(r"result 200 \d+ (\d)", answers) == ["0", "1", "2", "9"]
    assert broker.parts.context.offsets.get("billing", "orders", 0) == 3


def test_nack_and_extend(broker: Broker, client: Client) -> None:
    """E-08, ES-103: after a time, with the number of its delivery; later than it would be; and never again."""
    broker.put("a")
    client.say("pop orders billing 1 7")
    assert client.say("extend 0-0 120000 1") == ["result 200 1 1", "1"]
    broker.advance(LEASE_S + 1)
    assert client.say("pop orders billing 1 7")[0].startswith("result 404 ")
    assert client.say("nack 0-0 delay=5000 1") == ["result 200 1 1", "1"]
    assert client.say("pop orders billing 1 7")[0].startswith("result 404 ")
    broker.advance(5)
    assert client.say("pop orders billing 1 7")[0] == "message 1 7 0-0 orders 0 0 2 0"
    assert client.say("nack 0-0 dead 1") == ["result 200 1 1", "1"]
    assert broker.dead_letters() == 1
    broker.advance(LEASE_S)
    assert client.say("pop orders billing 1 7")[0].startswith("result 404 ")


def test_a_pop_waits_for_a_message(broker: Broker, client: Client) -> None:
    """ES-012, ES-103: and says so when there is none by the end of its time."""
    assert client.say("pop orders billing 1 wait=5000 7") == []
    broker.put("a")
    assert client.heard() == ["message 1 7 0-0 orders 0 0 1 0", "aresult 200 1 7", "1"]
    assert client.say("pop orders billing 1 wait=5000 7") == []
    broker.advance(5)
    assert client.heard()[0].startswith("result 404 ")


def test_a_pop_that_waits_ends_with_its_connection(broker: Broker, client: Client) -> None:
    """ES-103: a message that comes later is for those who are there."""
    client.say("pop orders billing 1 wait=5000 7")
    client.text._session._ended()
    assert client.heard()[0].startswith("result 404 ")
    other = Client(broker)
    other.say("pop orders billing 1 wait=5000 7")
    broker.put("a")
    assert other.heard()[0] == "message 1 7 0-0 orders 0 0 1 0"


def test_push_with_credit(broker: Broker, client: Client) -> None:
    """MY-008, MY-031: never more than the credit are out; an ack makes room for the next."""
    broker.put("a", "b", "c")
    assert client.say("subscribe orders billing ready=2 1") == [
        "result 200 0 1",
        "message 1 1 0-0 orders 0 0 1 0",
        "amessage 1 1 0-1 orders 0 21 1 0",
        "b",
    ]
    assert client.say("ack 0-0 2") == ["result 200 1 2", "1message 1 1 0-2 orders 0 42 1 0", "c"]
    broker.put("d")
    assert client.heard() == []
    assert client.say("ready 3 3") == ["result 200 0 3", "message 1 1 0-3 orders 0 63 1 0", "d"]
    assert client.say("ready 0 3") == ["result 200 0 3"]
    assert client.say("ack 0-1 2") == ["result 200 1 2", "1"]


class SlowReads:
    """A ``Run`` whose calls wait until the test lets them go on."""

    def __init__(self) -> None:
        self.waiting: deque[Event] = deque()

    def __call__(self, call: Callable[[], T]) -> T:
        event = Event()
        self.waiting.append(event)
        event.wait()
        return call()

    def let_one(self) -> None:
        self.waiting.popleft().set()
        gevent.sleep(0)

    def let_all(self) -> None:
        while self.waiting:
            self.let_one()


def reopened(broker: Broker, folder: Path) -> tuple[Broker, SlowReads]:
    """End a broker and start another one with its folder, and with nothing of it in the page cache."""
    broker.parts.close()
    (folder / "cold").touch()
    other, slow = Broker(folder / "data", disk=ControlledDisk(folder)), SlowReads()
    other.parts.reads._run = slow
    return other, slow


@pytest.mark.parametrize("line", ["subscribe orders billing 7", "pop orders billing 1 wait=5000 7"])
def test_what_comes_while_the_disk_is_read_is_not_missed(tmp_path: Path, line: str) -> None:
    """ES-012, MY-008: also in a partition that was looked at before, for which nobody stood in line."""
    first = Broker(tmp_path / "data")
    client = Client(first)
    for partition in (0, 1):
        first.put("old", partition=partition)
        client.say("pop orders billing 1 7")
        client.say(f"ack {partition}-0 7")
    broker, slow = reopened(first, tmp_path)
    client = Client(broker)
    client.say(line)
    slow.let_one()
    assert slow.waiting, "the first partition was read, and the second one is"
    broker.put("new", partition=0)
    slow.let_all()
    broker.parts.advance(LOOK_S)  # nobody is woken any more
    slow.let_all()
    broker.parts.end_turn()
    assert client.heard()[:1] == ["message 3 7 0-1 orders 0 23 1 0"]
    broker.parts.close()


def test_a_pop_whose_connection_is_closed_while_the_disk_is_read_takes_nothing(tmp_path: Path) -> None:
    first = Broker(tmp_path / "data")
    first.put("old")
    broker, slow = reopened(first, tmp_path)
    client = Client(broker)
    client.say("pop orders billing 1 wait=5000 7")
    assert slow.waiting
    client.text._session.close()
    slow.let_all()
    broker.parts.reads._run = run_here
    other = Client(broker)
    assert (other.say("pop orders billing 1 7") + other.heard())[0] == "message 3 7 0-0 orders 0 0 1 0"
    broker.parts.close()


def test_a_message_that_is_given_back_comes_again(broker: Broker, client: Client) -> None:
    client.say("subscribe orders billing 1")
    broker.put("a")
    client.heard()
    assert client.say("nack 0-0 2") == ["result 200 1 2", "1message 1 1 0-0 orders 0 0 2 0", "a"]
    broker.advance(LEASE_S)  # the lease ends
    assert client.heard() == ["message 1 1 0-0 orders 0 0 3 0", "a"]


def test_what_is_out_goes_to_others_at_the_end(broker: Broker, client: Client) -> None:
    """Closing, and unsubscribing, give back at once what is not finished."""
    client.say("subscribe orders billing ready=5 1")
    broker.put("a", "b")
    client.heard()
    other = Client(broker)
    assert other.say("subscribe orders billing ready=5 4") == ["result 200 0 4"]
    assert client.say("unsubscribe orders billing 2") == ["result 200 0 2"]
    broker.settle()
    assert [line for line in other.heard() if "message" in line] == [
        "message 1 4 0-0 orders 0 0 2 0",
        "amessage 1 4 0-1 orders 0 21 2 0",
    ]
    assert client.say("unsubscribe orders billing 2")[0].startswith("result 404 ")


def test_subscribers_share_what_comes(broker: Broker, client: Client) -> None:
    """Those that have waited longest come first."""
    other = Client(broker)
    client.say("subscribe orders billing ready=10 1")
    other.say("subscribe orders billing ready=10 1")
    for number in range(4):
        broker.put(str(number))
    assert "".join(client.heard()).count("message") == 2
    assert "".join(other.heard()).count("message") == 2


def test_own_partitions(broker: Broker, client: Client) -> None:
    """MY-010, MY-021: even shares; a partition moves only when what its former owner has out of it is finished."""
    client.say("subscribe orders billing assign=own ready=9 1")
    broker.put("a", partition=1)
    assert "".join(client.heard()).count("message") == 1
    other = Client(broker)
    other.say("subscribe orders billing assign=own ready=9 2")
    broker.put("b", partition=1)
    assert client.heard() == []
    assert other.heard() == []
    assert client.say("ack 1-0 3") == ["result 200 1 3", "1"]
    assert other.heard()[0].startswith("message 1 2 1-1 orders")
    broker.put("c", partition=0)
    assert client.heard()[0].startswith("message 1 1 0-0 orders")


def test_a_partition_that_moves_while_the_disk_is_read_is_its_new_owners(tmp_path: Path) -> None:
    """MY-010: the former one takes nothing of it, although it has read it."""
    first = Broker(tmp_path / "data")
    for partition in (0, 1):
        first.put("a", partition=partition)
    broker, slow = reopened(first, tmp_path)
    former, owner = Client(broker), Client(broker)
    former.say("subscribe orders billing assign=own ready=9 1")
    assert slow.waiting
    owner.say("subscribe orders billing assign=own ready=9 2")
    later = slow.waiting.pop()  # the owner is slower
    slow.let_all()
    slow.waiting.append(later)
    broker.parts.advance(LOOK_S)
    slow.let_all()
    broker.settle()
    assert [line for line in former.heard() if "message" in line] == ["message 1 1 0-0 orders 0 0 1 0"]
    assert [line for line in owner.heard() if "message" in line] == ["message 1 2 1-0 orders 1 0 1 0"]
    broker.parts.close()


def test_members_look_once_when_many_join_in_a_turn(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand workers that come back after a failover must not cost seconds of the loop."""
    looks: Counter[StoreRead] = Counter()
    start = broker.parts.reads.start

    def count(request: StoreRead) -> None:
        looks[request] += 1
        start(request)

    monkeypatch.setattr(broker.parts.reads, "start", count)
    members = [Client(broker) for _ in range(40)]
    for member in members:
        member.text.send(b"subscribe orders billing assign=own ready=9 1\r\n")
    broker.parts.end_turn()
    assert sorted(looks.values()) == [2, 2, 2, 2]  # at its subscription, and when all are known
    members[0].say("unsubscribe orders billing 2")
    for partition in range(4):
        broker.put("a", partition=partition)
    assert ["".join(member.heard()).count("message") for member in members[1:6]] == [1, 1, 1, 1, 0]


def test_members_beyond_the_partitions_get_nothing(broker: Broker) -> None:
    """MY-013: until another one leaves."""
    members = [Client(broker) for _ in range(5)]
    for member in members:
        member.say("subscribe orders billing assign=own ready=9 1")
    for partition in range(4):
        broker.put("a", partition=partition)
    assert ["".join(member.heard()).count("message") for member in members] == [1, 1, 1, 1, 0]
    for partition in range(4):
        members[partition].say(f"ack {partition}-0 2")
    members[0].say("unsubscribe orders billing 2")
    for partition in range(4):
        broker.put("b", partition=partition)
    assert "".join(members[4].heard()).count("message") == 1


def test_one_worker_for_each_partition(broker: Broker) -> None:
    """MY-025: it has one message at a time, and all of its partition in their order."""
    workers = {partition: Client(broker) for partition in range(4)}
    for partition, worker in workers.items():
        worker.say(f"subscribe orders billing assign=own ready=1 name=w{partition} 1")
        broker.put("a", "b", partition=partition)
    for partition, worker in workers.items():
        assert worker.heard() == [f"message 1 1 {partition}-0 orders {partition} 0 1 0", "a"]
        assert worker.say(f"ack {partition}-0 2")[1] == f"1message 1 1 {partition}-1 orders {partition} 21 1 0"
        assert worker.say(f"ack {partition}-1 2") == ["result 200 1 2", "1"]


def test_a_new_owner_takes_a_partition_over(broker: Broker, client: Client) -> None:
    """MY-022, MY-027: the former one is told."""
    assert client.say("subscribe orders billing assign=own partition=2 1") == ["result 200 0 1"]
    other = Client(broker)
    assert other.say("subscribe orders billing assign=own partition=2 5") == ["result 200 0 5"]
    assert client.heard() == ["result 301 10 1", "taken over"]
    broker.put("a", partition=2)
    assert client.heard() == []
    assert other.heard() == ["message 1 5 2-0 orders 2 0 1 0", "a"]


@pytest.mark.parametrize(
    ("attributes", "line"),
    [({"lease_acks": "safe"}, "ack 0-0 8"), ({"lease_acks": "safe"}, "extend 0-0 120000 8"), ({}, "nack 0-0 dead 8")],
)
def test_what_is_not_as_safe_as_a_message_in_time_is_said(tmp_path: Path, attributes: dict[str, str], line: str) -> None:
    """ES-102: acks of a group with safe acks, and dead letters, are answered as puts are."""
    broker = Broker(tmp_path / "data", durability="disk")
    broker.parts.context.groups.put(Group("billing", attributes=attributes))
    broker.put("hello")
    broker.sync()
    client = Client(broker)
    client.say("pop orders billing 1 7")
    assert client.say(line) == []
    broker.make_late()
    assert client.heard() == ["result 500 31 8", "stored, but not yet on the disk"]
    broker.parts.close()


@pytest.mark.parametrize(("acks", "code"), [("safe", 503), ("appended", 200)])
def test_what_must_be_safe_is_refused_while_the_disk_is_full(acks: str, code: int) -> None:
    """What need not be goes on in memory."""
    disk = FaultyDisk(random.Random(0))
    broker = Broker(DATA, disk=disk)
    broker.parts.context.groups.put(Group("billing", attributes={"lease_acks": acks}))
    broker.put("a", "b", "c")
    disk.fill()
    broker.parts.store.sweep()
    client = Client(broker)
    client.say("pop orders billing 3 7")
    for line in ("ack 0-0 8", "nack 0-1 8", "extend 0-2 120000 8"):
        assert client.say(line)[0].startswith(f"result {code} "), line


def test_a_message_that_cannot_be_given_up_stays_out(tmp_path: Path) -> None:
    """The answer says why, and the message can be rejected again."""
    broker = Broker(tmp_path / "data", max_topics=1)
    client = Client(broker)
    client.say("subscribe orders billing ready=1 7")
    broker.put("a", "b")
    client.heard()
    assert client.say("nack 0-0 dead 8") == ["result 503 61 8", "there are already 1 topics (max_topics); retry after 60000 ms"]
    broker.parts.context.topics.max_topics = 2  # there is room for the topic of dead letters
    assert client.say("nack 0-0 dead 8") == ["result 200 1 8", "1message 1 7 0-1 orders 0 21 1 0", "b"]
    assert broker.dead_letters() == 1
    broker.parts.close()


def test_acks_that_need_not_be_safe_are_answered_before_the_sync(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "data", durability="disk")
    broker.put("hello")
    broker.sync()
    client = Client(broker)
    client.say("pop orders billing 1 7")
    assert client.say("ack 0-0 8") == ["result 200 1 8", "1"]
    broker.parts.close()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("pop orders", 400),
        ("subscribe orders", 400),
        ("subscribe", 400),
        ("pop nowhere billing 1", 404),
        ("subscribe nowhere billing 1", 404),
        ("subscribe orders billing partition=4 1", 500),
        ("ready 5 1", 404),
        ("pop orders billing invisible=99999999 1", 400),
    ],
)
def test_refusals(client: Client, line: str, code: int) -> None:
    """MY-001, MY-002: without a group or a topic, or from a topic that is not there."""
    assert client.say(line)[0].startswith(f"result {code} ")


def test_a_second_subscription_to_the_same_is_refused(client: Client) -> None:
    client.say("subscribe orders billing 1")
    assert client.say("subscribe orders billing 2")[0].startswith("result 400 ")
    assert client.say("subscribe orders audit 2") == ["result 200 0 2"]
    assert client.say("ready 4 3")[0].startswith("result 400 ")
    assert client.say("ready 4 orders audit 3") == ["result 200 0 3"]
