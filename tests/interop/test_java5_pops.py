"""RocketMQ's unmodified Java client 5 in POP mode: its push consumer, which the broker assigns queues to, and single calls."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

import metaq
from tests.interop.clients import Received
from tests.interop.conftest import Start5
from tests.interop.java5 import Java5, Place, let_pop, receipt_of, set_mode, set_up
from tests.interop.mqadmin import AdminTool
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

WAIT_S: Final = 60.0
INVISIBLE_MS: Final = 5000
"""The shortest that a push consumer asks for."""
APART_MS: Final = 1000
"""How much later than it may a message be given again."""
SLEEP_MS: Final = 7000
"""Longer than a lease, and more than the client needs to see that."""
LEASE_MS: Final = 6000
WAKE_MS: Final = 5


@pytest.fixture(scope="module")
def tool(java5: Java5, broker: BrokerProcess) -> AdminTool:
    return AdminTool(java5, broker.registry)


def prepare(broker: BrokerProcess, name: str, queues: int) -> None:
    """Make a topic and a group of that name, which consumes it in POP mode."""
    set_up(broker.registry, name, name, queues)
    let_pop(broker, name, name)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def send(java5: Java5, topic: str, bodies: Iterable[bytes]) -> None:
    for body in bodies:
        java5.publish(topic, topic, body)


def offsets(broker: BrokerProcess, group: str) -> tuple[int, int]:
    """Return the sums of a group's offsets in its topic of the same name, and of the ends of the partitions."""
    with metaq.connect(broker.registry) as client:
        lags = client.admin().group_lag(group, group)
        return sum(lag.committed or 0 for lag in lags), sum(lag.end for lag in lags)


def wait_consumed(broker: BrokerProcess, group: str) -> None:
    """Wait until everything of the topic is done."""

    def done() -> bool:
        committed, end = offsets(broker, group)
        return committed == end

    wait_until(done, WAIT_S, f"{group} has consumed everything", 0.05)


def pop_ms(message: Received) -> int:
    """Return when the broker gave the message: each is given by a pop."""
    return int(receipt_of(message).split()[1])


@pytest.mark.parametrize("share", [1, 8])
def test_members_come_and_go(java5: Java5, broker: BrokerProcess, tool: AdminTool, name: str, share: int) -> None:
    """A-02: members that the broker gives shares of the queues come and go, and each message is consumed."""
    set_up(broker.registry, name, name)
    set_mode(tool, name, name, share=share)
    java5.start_producer(name, name)
    members = [f"{name}-{number}" for number in range(4)]
    for number, member in enumerate(members):
        java5.start_consumer(member, name, name, invisible_ms=INVISIBLE_MS)
        send(java5, name, numbers(20 * number, 20 * number + 20))
        if number >= 2:
            java5.call("stop", consumer=members[number - 2])

    def missing() -> set[bytes]:
        return set(numbers(0, 80)).difference(*(java5.bodies(member) for member in members))

    java5.wait(lambda: not missing(), "each message at some member", WAIT_S)
    assert all(receipt_of(message) for member in members for message in java5.messages(member))
    wait_consumed(broker, name)


def test_a_lease_ends_with_its_consumer_or_its_time(java5: Java5, broker: BrokerProcess, start5: Start5, name: str) -> None:
    """A-05: what a killed consumer had, and what one had that slept too long, others get after the invisible time; what comes
    back late is not acked by the client."""
    killed, slow = f"{name}-killed", f"{name}-slow"
    other = start5(broker.registry)
    for topic in (killed, slow):
        prepare(broker, topic, queues=1)
        java5.start_producer(topic, topic)
        send(java5, topic, numbers(0, 4))
    other.start_consumer(killed, killed, killed, invisible_ms=INVISIBLE_MS, sleep_ms=600_000)
    java5.start_consumer(slow, slow, slow, invisible_ms=INVISIBLE_MS, sleep_ms=SLEEP_MS)
    for client, topic in ((other, killed), (java5, slow)):
        client.wait_for_bodies(topic, numbers(0, 4))
    other.kill()
    java5.start_consumer(f"{killed}-2", killed, killed, invisible_ms=INVISIBLE_MS)
    java5.start_consumer(f"{slow}-2", slow, slow, invisible_ms=60_000)
    for topic, client in ((killed, other), (slow, java5)):
        java5.wait_for_bodies(f"{topic}-2", numbers(0, 4))
        wait_consumed(broker, topic)
        check_deliveries([*client.messages(topic), *java5.messages(f"{topic}-2")])


def check_deliveries(messages: list[Received]) -> None:
    """Each message is given again when its lease is over, as it was, and says how often it was given."""
    for offset in {message.offset for message in messages}:
        first, *others = sorted((message for message in messages if message.offset == offset), key=pop_ms)
        assert others and first.reconsumed == 0
        for number, other in enumerate(others, 1):
            assert (other.id, other.body, other.queue, other.reconsumed) == (first.id, first.body, first.queue, number)
            late_ms = pop_ms(other) - pop_ms(first) - number * INVISIBLE_MS
            assert 0 <= late_ms <= number * APART_MS, late_ms
            assert int(other.properties["1ST_POP_TIME"]) == pop_ms(first)


def take(place: Place, bodies: list[bytes], **wishes: Any) -> list[Received]:
    """Pop these messages, with as many pops as it takes."""
    taken: list[Received] = []
    while len(taken) < len(bodies):
        popped = place.pop(len(bodies) - len(taken), **wishes)
        assert popped.status == "FOUND", (popped, taken)
        taken += popped.messages
    assert [message.body for message in taken] == bodies
    return taken


@pytest.mark.parametrize("kind", ["tags", "sql"])
def test_filters(java5: Java5, broker: BrokerProcess, name: str, kind: str) -> None:
    """A-06: a member gets what its tags or its SQL expression want and nothing else, and the offset passes the others."""
    prepare(broker, name, queues=2)
    java5.start_producer(name, name)
    for number in range(30):
        tag = ("red", "green", "blue")[number % 3]
        java5.publish(name, name, b"%d" % number, tag=tag, properties={"number": str(number)})
    if kind == "tags":
        java5.start_consumer(name, name, name, "red || blue")
        colours = set()
        looks = Place(java5, broker.address, f"{name}-looks", name)
        while (popped := looks.pop(expression="red || blue")).messages:  # the push consumer filters once more
            colours |= {message.tag for message in popped.messages}
        assert colours == {"red", "blue"}
        wanted = [body for body in numbers(0, 30) if int(body) % 3 != 1]
    else:
        java5.start_consumer(name, name, name, "number BETWEEN 5 AND 20 AND TAGS = 'green'", sql=True)
        wanted = [body for body in numbers(5, 21) if int(body) % 3 == 1]
    java5.wait_for_bodies(name, wanted)
    wait_consumed(broker, name)
    assert sorted(java5.bodies(name)) == sorted(wanted)


def test_pops_in_order(java5: Java5, broker: BrokerProcess, name: str) -> None:
    """A-07: a partition that is popped in order gives the next messages when those before are done; when their lease is over it
    gives what is open of them again, from the first on, and says how often."""
    set_up(broker.registry, name, name, 1)
    java5.start_producer(name, name)
    java5.publish_numbers(name, name, 70)
    place = Place(java5, broker.address, name, name)
    first = place.pop(order=True, invisible_ms=1000)
    assert first.bodies == numbers(0, 32)
    assert {message.reconsumed for message in first.messages} == {0}
    assert place.pop(order=True).status == "POLLING_NOT_FOUND"
    assert place.ack_many(first.receipts[:10]) == "OK"
    assert place.ack(first.receipts[20]) == "OK"
    second = place.pop(order=True, poll_ms=10_000)
    assert second.bodies == [body for body in numbers(10, 32) if body != b"20"]
    assert {message.reconsumed for message in second.messages} == {1}
    assert place.ack(first.receipts[11]) == "NO_EXIST", "it was given again"
    assert place.ack_many(second.receipts) == "OK"
    assert place.pop(order=True).bodies == numbers(32, 64)


def test_acks_and_changes(java5: Java5, broker: BrokerProcess, name: str) -> None:
    """A-07: the client's own acks of one and of many messages, its changes of invisible times, receipts that mean nothing."""
    set_up(broker.registry, name, name, 1)
    java5.start_producer(name, name)
    java5.publish_numbers(name, name, 40)
    place = Place(java5, broker.address, name, name)
    first = place.pop(32, invisible_ms=60_000)
    assert (first.status, first.bodies, first.rest) == ("FOUND", numbers(0, 32), 8)
    assert place.ack_many(first.receipts[:30]) == "OK"
    status, changed = place.change(first.receipts[30], 1000)
    assert (status, changed is not None) == ("OK", True)
    assert place.change(first.receipts[31], 0)[0] == "OK"
    second = place.pop(1)
    assert (second.bodies, second.messages[0].reconsumed) == ([b"31"], 1)
    assert place.change(first.receipts[31], 60_000)[0] == "NO_EXIST", "it was given again"
    assert place.ack(first.receipts[31]) == "NO_EXIST"
    assert place.ack(second.receipts[0]) == "OK"
    assert place.ack(second.receipts[0]) == "OK", "it was acked before"
    assert place.pop(32).bodies == numbers(32, 40)
    third = place.pop(32, poll_ms=10_000)
    assert third.bodies == [b"30"]
    assert pop_ms(third.messages[0]) - pop_ms(first.messages[0]) >= 1000
    words = third.receipts[0].split()
    words[3] = str(int(words[3]) ^ 1)
    assert place.ack(" ".join(words)) == "NO_EXIST", "it was made up"
    assert place.ack(third.receipts[0]) == "OK"


def test_where_a_group_begins(java5: Java5, broker: BrokerProcess, tool: AdminTool, name: str) -> None:
    """A-09: a new group begins at the first message, whatever it asks for, in a young partition; a reset by the tool gives
    all messages since a time again, those that were open too; and what it says of progress is right meanwhile."""
    prepare(broker, name, queues=1)
    set_up(broker.registry, f"%RETRY%{name}", name)  # the tool looks there for the brokers of a group
    java5.start_producer(name, name)
    send(java5, name, numbers(0, 5))
    place = Place(java5, broker.address, name, name)
    first = take(place, numbers(0, 4), init_mode=1)
    assert place.ack(receipt_of(first[0])) == "OK"
    assert progress(tool, name) == [5, 1, 4, 3]
    between_ms = int(time.time() * 1000)
    wait_until(lambda: time.time() * 1000 > between_ms + 1, 5, "another millisecond")
    send(java5, name, numbers(5, 8))
    tool.run("resetOffsetByTime", "-g", name, "-t", name, "-s", str(between_ms), "-f", "true")
    take(place, numbers(5, 8))
    assert place.ack(receipt_of(first[1])) == "OK", "it is done"
    assert progress(tool, name) == [8, 5, 3, 3]
    tool.run("resetOffsetByTime", "-g", name, "-t", name, "-s", "0", "-f", "true")
    java5.start_consumer(name, name, name)
    java5.wait_for_bodies(name, numbers(0, 8))
    wait_consumed(broker, name)
    assert sorted(java5.bodies(name)) == sorted(numbers(0, 8))


def progress(tool: AdminTool, group: str) -> list[int]:
    """Return what the admin tool says about queue 0: the end, the group's offset, the difference, and what is in flight."""
    (row,) = [row for row in tool.table("consumerProgress", "-g", group) if row and row[0] == group]
    return [int(word) for word in row[3:7]]


def test_a_held_pop(java5: Java5, broker: BrokerProcess, name: str) -> None:
    """A-10: a message wakes a held pop within 5 ms; a pop that finds nothing is answered when its time is over."""
    prepare(broker, name, queues=1)
    java5.start_producer(name, name)
    place = Place(java5, broker.address, name, name)
    begin = time.monotonic()
    assert place.pop(poll_ms=1500).status == "POLLING_NOT_FOUND"
    assert time.monotonic() - begin >= 1.4
    java5.start_consumer(name, name, name)
    late_ms = []
    for number in range(5):
        java5.publish(name, name, b"%d" % number)
        woken = java5.wait_for_bodies(name, [b"%d" % number])[-1]
        late_ms.append(pop_ms(woken) - woken.stored)
        wait_consumed(broker, name)  # an ack wakes pops as well
    assert min(late_ms) <= WAKE_MS, late_ms


@pytest.mark.slow
def test_a_broker_is_killed(java5: Java5, start5: Start5, tmp_path: Path, name: str) -> None:
    """A-01, F-9: after a SIGKILL of the broker what was acked stays done, what was leased stays leased until its time is over,
    and members go on by themselves."""
    with BrokerProcess(tmp_path / "data") as broker:
        client = start5(broker.registry)
        prepare(broker, name, queues=2)
        client.start_producer(name, name)
        send(client, name, numbers(0, 20))
        place = Place(client, broker.address, name, name)
        first = [message for _ in range(4) for message in place.pop(5, invisible_ms=LEASE_MS).messages]
        done, leased = first[: len(first) // 2], first[len(first) // 2 :]
        assert place.ack_many([receipt_of(message) for message in done]) == "OK"
        broker.restart(same_port=True)
        assert place.ack(receipt_of(leased[0])) == "OK", "receipts stay good"
        client.start_consumer(name, name, name, invisible_ms=INVISIBLE_MS)
        broker.restart(same_port=True)
        send(client, name, numbers(20, 30))
        expected = set(numbers(0, 30)) - {message.body for message in [*done, leased[0]]}
        client.wait_for_bodies(name, expected)
        wait_consumed(broker, name)
        assert set(client.bodies(name)) == expected
        popped_ms = {message.body: pop_ms(message) for message in leased}
        for message in client.messages(name):
            assert pop_ms(message) >= popped_ms.get(message.body, -LEASE_MS) + LEASE_MS
        client.kill()
