"""The table of connected clients, with sessions that only record what is sent to them."""

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from metaq.engine.tables.clients import Clients
from metaq.engine.tables.groups import Group, GroupTable, group_of
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.heartbeats import MOST_GROUPS, MOST_SUBSCRIPTIONS, ConsumerData, Heartbeat
from metaq.protocol.subscription import Subscription, parse_subscription
from metaq.server.access.permissions import ANYBODY, Principal
from metaq.server.remoting.session import RemotingSession


class FakeSession:
    """A connection that is lost when it is told something, if the test says so."""

    def __init__(self, name: str, principal: Principal = ANYBODY) -> None:
        self.address = (name, 1)
        self.principal = principal
        self.closed = False
        self.calls: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.lost = False

    def tell(self, code: int, fields: Mapping[str, str]) -> None:
        assert code == Request.NOTIFY_CONSUMER_IDS_CHANGED
        if self.lost:
            self.close()
        elif not self.closed:
            self.told.append(fields["consumerGroup"])

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for call in self.calls:
                call()

    def at_close(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


class Table:
    """A table of clients, its clock, and what it does at the end of a turn."""

    def __init__(self, directory: Path) -> None:
        self.now_s = 1000.0
        self.due: list[Callable[[], None]] = []
        groups = GroupTable(directory, max_groups=10, auto_create=True)
        self.clients = Clients(groups, lambda: self.now_s, self.due.append)

    def beat(
        self, session: FakeSession, *subscriptions: Subscription, group: str = "g", producers: tuple[str, ...] = ()
    ) -> None:
        consumers = (ConsumerData(group, subscriptions),) if subscriptions else ()
        heartbeat = Heartbeat(f"{session.address[0]}@1", producers, consumers)
        self.clients.beat(cast(RemotingSession, session), "JAVA", 409, heartbeat)

    def end_turn(self) -> None:
        due, self.due = self.due, []
        for call in due:
            call()

    def ids(self, group: str = "g") -> list[str]:
        found = self.clients.consumer_group(group)
        return [] if found is None else found.client_ids


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


ANY = parse_subscription("T", "*")


def test_many_that_are_lost_at_once(table: Table) -> None:
    """SG-089: who is told of one loss may turn out to be lost too. It ends, and those who are left know of the last one."""
    sessions = [FakeSession(f"c{number}") for number in range(500)]
    for session in sessions:
        table.beat(session, ANY)
    assert len(table.ids()) == 500
    survivor, first, *others = sessions
    for session in others:
        session.lost = True
    survivor.told.clear()
    first.close()
    assert survivor.told == []
    while table.due:
        table.end_turn()
    assert table.ids() == ["c0@1"]
    assert len(survivor.told) == 2


def test_expiry(table: Table) -> None:
    """SG-087, SG-089: a group that a client no longer names is left; a client that says nothing loses its connection."""
    kept, silent = FakeSession("kept"), FakeSession("silent")
    table.beat(kept, ANY, producers=("p",))
    table.beat(kept, ANY, group="other")
    table.beat(silent, ANY, producers=("p",))
    table.now_s += 10
    table.beat(kept, ANY)
    table.clients.expire(table.now_s - 5)
    assert (table.ids(), table.ids("other")) == (["kept@1"], [])
    assert table.clients.producer_groups() == []
    assert (kept.closed, silent.closed) == (False, True)
    table.beat(silent, ANY)  # a heartbeat that was under way
    assert table.ids() == ["kept@1"]


def test_a_sender_is_found_by_its_id(table: Table) -> None:
    """SG-087: on the connection where it was heard last, as long as it sends on it."""
    old, new = FakeSession("same"), FakeSession("same")
    table.beat(old, producers=("p",))
    assert table.clients.sender("same@1") is cast(Any, old)
    table.beat(new, producers=("p", "q"))
    assert table.clients.sender("same@1") is cast(Any, new)
    table.clients.unregister(cast(RemotingSession, new), "q", None)
    old.close()
    assert table.clients.sender("same@1") is cast(Any, new)
    assert [member.session for member in table.clients.producers("p")] == cast(Any, [new])
    new.close()
    assert table.clients.sender("same@1") is None
    assert table.clients.producer_groups() == []


def test_a_sender_is_replaced_by_its_own_user_only(table: Table) -> None:
    """E-05, P21: and by others when it has gone, also when it had said another id before."""
    first, second = FakeSession("same", Principal("ann")), FakeSession("same", Principal("ann"))
    other = FakeSession("same", Principal("bob"))
    for session in (first, other, second, other):
        table.beat(session, producers=("p",))
    assert table.clients.sender("same@1") is cast(Any, second)
    heartbeat = Heartbeat("another@1", ("q",), ())
    table.clients.beat(cast(RemotingSession, second), "JAVA", 409, heartbeat)
    table.beat(other, producers=("p",))
    assert table.clients.sender("same@1") is cast(Any, other)
    for session in (first, second, other):
        session.close()
    assert (table.clients._senders, table.clients._client_ids) == ({}, {})


def test_a_sender_that_changes_its_id(table: Table) -> None:
    """SG-087: is found by the last one only, however many it has had."""
    session = cast(RemotingSession, FakeSession("same"))
    for client_id in ("first", "second"):
        table.clients.beat(session, "JAVA", 409, Heartbeat(client_id, ("p", "q"), ()))
    assert table.clients.sender("second") is session
    assert table.clients.sender("first") is None
    session.close()
    assert table.clients.sender("second") is None


def test_the_newest_subscription_is_the_group_s(table: Table) -> None:
    """SG-055, SG-087: whoever has it; a topic is gone with the last member that wants it."""
    one, two = FakeSession("one"), FakeSession("two")
    table.beat(one, parse_subscription("T", "A", 2), parse_subscription("U", "*"))
    table.beat(two, parse_subscription("T", "B", 1))
    group = table.clients.consumer_group("g")
    assert group is not None
    assert group.subscriptions["T"].tags == {"A"}
    assert table.clients.consumers_of("U") == ["g"]
    for session, tag in ((one, "A"), (two, "B"), (FakeSession("new"), "A")):
        wanted = group.subscription(cast(RemotingSession, session), "T")
        assert wanted is not None
        assert wanted.tags == {tag}
    one.close()
    assert group.subscriptions["T"].tags == {"B"}
    assert table.clients.consumers_of("U") == []


def test_differences_are_reported_once(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    """SG-088: when they begin and when they change; not the order of tags, nor the version."""
    caplog.set_level(logging.WARNING, "metaq.engine.tables.clients")
    one, two = FakeSession("one"), FakeSession("two")
    beats: list[Callable[[], None]] = [
        partial(table.beat, one, parse_subscription("T", "A||B", 1)),
        partial(table.beat, two, parse_subscription("T", "B || A", 2)),
        partial(table.beat, two, parse_subscription("T", "a = 1", 3, "SQL92")),
        partial(table.beat, one, parse_subscription("T", "A||B", 4)),
        partial(table.beat, two, parse_subscription("T", "A||B", 5), parse_subscription("U", "*", 5)),
        two.close,
    ]
    seen = []
    for beat in beats:
        beat()
        seen.append([record.getMessage().partition("wants=")[2].partition(" hint=")[0] for record in caplog.records])
        caplog.clear()
    assert seen == [
        [],
        [],
        ["topic T: A||B by one@1; a = 1 by two@1"],
        [],
        ["topic U: not subscribed by one@1; * by two@1"],
        [],
    ]
    group = table.clients.consumer_group("g")
    assert group is not None
    assert group.differences == []


def test_a_group_is_read_as_it_is_shown() -> None:
    """SG-070: with defaults for what is absent; what is of the wrong type is refused by name."""
    group = Group("g", consume_enable=False, retry_queue_nums=3, retry_max_times=2)
    assert group_of(group.row()) == group
    assert group_of({"groupName": "g", "attributes": {}}) == Group("g")
    for row in ({}, {"groupName": 1}, {"groupName": "g", "retryMaxTimes": True}, {"groupName": "g", "consumeEnable": 1}):
        with pytest.raises(BadRequest, match=r"groupName|retryMaxTimes|consumeEnable"):
            group_of(row)


def wanted_by_all(members: Mapping[str, tuple[Subscription, ...]]) -> tuple[dict[str, int], dict[str, dict[str, list[str]]]]:
    """By looking at everything: the newest version of each topic, and where members differ."""
    newest: dict[str, int] = {}
    for each in (one for wanted in members.values() for one in wanted):
        newest[each.topic] = max(each.version, newest.get(each.topic, -1))
    differing = {}
    for topic in sorted(newest):
        ways: dict[str, list[str]] = {}
        for name, wanted in sorted(members.items()):
            (words,) = [each.expression for each in wanted if each.topic == topic] or [""]
            ways.setdefault(words, []).append(f"{name}@1")
        if len(ways) > 1:
            differing[topic] = dict(sorted(ways.items()))
    return newest, differing


@pytest.mark.parametrize("seed", range(20))
def test_a_group_is_what_its_members_say(table: Table, seed: int) -> None:
    """SG-055, SG-087, SG-088: whoever came, changed or went before."""
    chance = random.Random(seed)
    sessions: dict[str, FakeSession] = {}
    members: dict[str, tuple[Subscription, ...]] = {}
    for _ in range(200):
        name = f"c{chance.randrange(5)}"
        if name in members and chance.random() < 0.3:
            sessions.pop(name).close()
            del members[name]
        else:
            topics = chance.sample("TUVW", chance.randrange(1, 4))
            members[name] = tuple(parse_subscription(topic, chance.choice("AB*"), chance.randrange(3)) for topic in topics)
            table.beat(sessions.setdefault(name, FakeSession(name)), *members[name])
        group = table.clients.consumer_group("g")
        assert (group is None) == (not members)
        if group is not None:
            newest, differing = wanted_by_all(members)
            assert {topic: each.version for topic, each in group.subscriptions.items()} == newest
            assert {each.topic: each.wanted for each in group.differences} == differing
            for name, wanted in members.items():
                session = cast(RemotingSession, sessions[name])
                assert [group.subscription(session, each.topic) for each in wanted] == list(wanted)


def test_a_connection_is_in_so_many_groups_and_no_more(table: Table) -> None:
    """SG-087: over all its heartbeats, of which each replaces what it said of a group."""
    session = FakeSession("c")

    def room(*consumers: ConsumerData, producers: tuple[str, ...] = ()) -> None:
        table.clients.check_room(cast(RemotingSession, session), Heartbeat("c@1", producers, consumers))

    table.beat(session, *[ANY] * (MOST_SUBSCRIPTIONS - 1), producers=tuple(f"p{number}" for number in range(MOST_GROUPS - 2)))
    room(ConsumerData("g", (ANY,) * MOST_SUBSCRIPTIONS))
    room(ConsumerData("h", (ANY,)), producers=("p0", "p1"))
    for refused in (ConsumerData("h", (ANY, ANY)), ConsumerData("g", (ANY,) * (MOST_SUBSCRIPTIONS + 1))):
        with pytest.raises(BadRequest, match=f"at most {MOST_SUBSCRIPTIONS}; use several connections"):
            room(refused)
    with pytest.raises(BadRequest, match=f"at most in {MOST_GROUPS}; use several connections"):
        room(ConsumerData("h", ()), producers=("another",))
