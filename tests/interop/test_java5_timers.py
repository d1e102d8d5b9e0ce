"""RocketMQ's unmodified Java client 5: delayed messages, recalls, priorities, and sends that it repeats by itself."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from metaq.client.admin.views import GroupView
from metaq.protocol.remoting.codes import Request, Response
from tests.interop.clients import ClientError, Received
from tests.interop.conftest import Start5
from tests.interop.java5 import NEWEST, Java5, Place, let_pop, receipt_of, set_up
from tests.support.admin import ask_body, connect
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900)]

SOON_MS: Final = 1500
DAY_MS: Final = 86_400_000
LEVELS: Final = 13


class ControlledBroker(BrokerProcess):
    """A broker whose clock and syncs the test controls."""

    program: ClassVar[tuple[str, ...]] = ("tests.support.controlled",)

    def set_clock(self, fast_ms: int) -> None:
        """Let its clock be fast from the next start on."""
        self.data.with_name("clock").write_text(str(fast_ms), "ascii")


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[ControlledBroker]:
    yield ControlledBroker(tmp_path / "data")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def refused(client: Java5, *arguments: object, **wishes: object) -> ClientError:
    """Send a message that must be refused."""
    with pytest.raises(ClientError) as caught:
        client.publish(*arguments, **wishes)  # type: ignore[arg-type]
    return caught.value


def consume(client: Java5, broker: BrokerProcess, name: str, **wishes: Any) -> None:
    """Let a new group of that name consume the topic in POP mode."""
    let_pop(broker, name, name)
    client.start_consumer(name, name, name, **wishes)


def test_delays(java5: Java5, broker: BrokerProcess, name: str) -> None:
    """A-11, ES-004, ES-101: each way to ask for a time is kept, never early; what is past comes at once; what is too far away,
    and what is no time, is refused so that the client does not try elsewhere."""
    set_up(broker.registry, name, name)
    java5.start_producer(name, name)
    consume(java5, broker, name)
    begin_ms = now_ms()
    wishes: dict[bytes, dict[str, Any]] = {
        b"ms": {"delay_ms": 50},
        b"s": {"delay_s": 1},
        b"at": {"deliver_ms": begin_ms + SOON_MS},
        b"past": {"deliver_ms": begin_ms - DAY_MS},
        b"seconds win": {"delay_s": 1, "properties": {"TIMER_DELAY_MS": str(DAY_MS)}},
        b"never": {"delay_s": 40 * DAY_MS // 1000},
    }
    sent = {body: java5.publish(name, name, body, **each) for body, each in wishes.items()}
    for body, result in sent.items():
        assert result.status == "SEND_OK"
        assert (result.recall_handle is None) == (body == b"past"), body
    for strange in ({"TIMER_DELAY_MS": "soon"}, {"TIMER_DELAY_SEC": "-"}, {"TIMER_DELIVER_MS": "1e9"}):
        assert refused(java5, name, name, b"no", properties=strange).code == Response.MESSAGE_ILLEGAL
    assert refused(java5, name, name, b"no", delay_s=401 * DAY_MS // 1000).code == Response.MESSAGE_ILLEGAL
    due_ms = {b"ms": 50, b"s": 1000, b"at": SOON_MS, b"past": 0, b"seconds win": 1000}
    got = {message.body: message for message in java5.wait_for_bodies(name, due_ms)}
    assert sorted(got) == sorted(due_ms) and len(java5.messages(name)) == len(due_ms)
    for body, delay_ms in due_ms.items():
        assert got[body].stored >= begin_ms + delay_ms, body
        assert got[body].id == sent[body].id
        assert (got[body].topic, got[body].reconsumed) == (name, 0)


@pytest.mark.slow
def test_a_delay_of_forty_days(controlled: ControlledBroker, start5: Start5, name: str) -> None:
    """A-11: a message is delivered after 40 days, not a day before; its broker was restarted meanwhile."""
    with controlled as broker:
        client = start5(broker.registry)
        set_up(broker.registry, name, name, 1)
        client.start_producer(name, name)
        sent = client.publish(name, name, b"later", delay_s=40 * DAY_MS // 1000)
        place = Place(client, broker.address, name, name)
        broker.set_clock(39 * DAY_MS)
        broker.restart(same_port=True)
        assert place.pop(poll_ms=500).messages == []
        broker.set_clock(40 * DAY_MS)
        broker.restart(same_port=True)
        (message,) = place.pop(poll_ms=20_000).messages
        assert (message.body, message.id) == (b"later", sent.id)
        client.kill()


def test_recalls(java5: Java5, broker: BrokerProcess, name: str) -> None:
    """A-12, ES-101, E-12: what is recalled in time is never delivered, and the client gets the id that it gave it; a handle of
    what was delivered, of another topic, or made up, is refused."""
    other = f"{name}-other"
    for topic in (name, other):
        set_up(broker.registry, topic, topic, 1)
    java5.start_producer(name, name)
    consume(java5, broker, name)
    recalled, kept, delivered = (
        java5.publish(name, name, body, delay_ms=delay_ms)
        for body, delay_ms in ((b"recalled", 2000), (b"kept", 2000), (b"delivered", 1))
    )
    handles = [sent.recall_handle or "" for sent in (recalled, kept, delivered)]
    for _ in ("first", "again"):
        assert java5.recall(name, name, handles[0]) == recalled.id
    java5.wait_for_bodies(name, [b"delivered"])
    plain = base64.urlsafe_b64decode(handles[1])
    forged = base64.urlsafe_b64encode(plain[:-1] + bytes([plain[-1] ^ 1])).decode()
    for topic, handle in ((name, handles[2]), (other, handles[1]), (name, forged)):
        with pytest.raises(ClientError) as caught:
            java5.recall(name, topic, handle)
        assert caught.value.code == Response.ILLEGAL_OPERATION, caught.value
    java5.wait_for_bodies(name, [b"kept"])
    assert sorted(java5.bodies(name)) == [b"delivered", b"kept"]


def test_a_delayed_message_is_passed_on(java5: Java5, broker: BrokerProcess, name: str) -> None:
    """A-13: what was delayed, and is published again with all its properties, is not delayed again."""
    target = f"{name}-target"
    for topic in (name, target):
        set_up(broker.registry, topic, topic, 1)
    java5.start_producer(name, name)
    consume(java5, broker, target)
    consume(java5, broker, name, producer=name, pass_to=target)
    java5.publish(name, name, b"passed on", delay_s=2)
    (first,) = java5.wait_for_bodies(name, [b"passed on"])
    (second,) = java5.wait_for_bodies(target, [b"passed on"])
    assert second.stored - first.stored < 1900


@pytest.mark.parametrize("version", [NEWEST], indirect=True, scope="module")
class TestPriorities:
    """What the client marks with setPriority, which came with 5.4."""

    def test_the_most_urgent_comes_first(self, java5: Java5, broker: BrokerProcess, name: str) -> None:
        """A-14: a slow consumer gets what is most urgent first, of all that is there."""
        set_up(broker.registry, name, name, LEVELS, priority=True)
        java5.start_producer(name, name)
        for number in range(2 * LEVELS):
            level = (5 * number) % (LEVELS + 1)
            sent = java5.publish(name, name, b"%d" % level, priority=level)
            assert sent.queue == min(level, LEVELS - 1)
        consume(java5, broker, name, batch=1, threads=1)
        java5.wait(lambda: len(java5.messages(name)) == 2 * LEVELS, "all messages")
        queues = [message.queue for message in sorted(java5.messages(name), key=pop_ms)]
        assert queues == sorted(queues, reverse=True)

    @pytest.mark.parametrize("factor", [0, 50, 100])
    def test_the_share_of_pops_by_priority(self, java5: Java5, broker: BrokerProcess, name: str, factor: int) -> None:
        """A-14: of 100 pops so many begin with what is most urgent as the group wants; the others at each queue in turn."""
        levels, each = 4, 10
        set_up(broker.registry, name, name, levels, priority=True, group_wishes=GroupView(name, priority_factor=factor))
        java5.start_producer(name, name)
        for level in range(levels):
            for _ in range(each):
                java5.publish(name, name, b"x", priority=level)
        place = Place(java5, broker.address, name, name)
        popped = [place.pop(1).messages[0].queue for _ in range(8)]
        in_turn = [0, 1, 2, 3, 0, 1, 2, 3]
        if factor == 100:
            assert popped == [levels - 1] * 8
        elif factor == 0:
            assert popped == in_turn
        else:
            assert (popped[0::2], popped[1::2]) == (in_turn[:4], [levels - 1] * 4)


def pop_ms(message: Received) -> int:
    return int(receipt_of(message).split()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("ahead_s", "works"), [(50, True), (70, False), (-3600, True)])
def test_clocks_that_differ(controlled: ControlledBroker, start5: Start5, name: str, ahead_s: int, works: bool) -> None:
    """A-15: a client whose clock is ahead by less than its invisible time consumes, and one behind as well; one that is further
    ahead drops what it gets."""
    controlled.set_clock(-1000 * ahead_s)
    with controlled as broker:
        client = start5(broker.registry)
        set_up(broker.registry, name, name, 1)
        consume(client, broker, name)
        client.start_producer(name, name)
        client.publish(name, name, b"now")
        if works:
            client.wait_for_bodies(name, [b"now"])
        else:
            wait_until(lambda: given(broker, name) == 1, 30, "the client has popped the message")
            assert Place(client, broker.address, name, name).pop(poll_ms=2000).messages == []
            assert client.bodies(name) == []
        client.kill()


def given(broker: BrokerProcess, group: str) -> int:
    """Return how many messages the group was given from its topic of the same name."""
    with connect(broker) as client:
        table = ask_body(client, Request.GET_CONSUME_STATS, consumerGroup=group, topic=group)["offsetTable"]
        return sum(row["pullOffset"] for row in table.values())


@pytest.mark.slow
def test_sends_that_the_client_repeats(tmp_path: Path, start5: Start5, name: str) -> None:
    """E-07, D-1: a broker that cannot answer in time gets the same message again from the client, and stores it once."""
    with ControlledBroker(tmp_path / "data", durability="disk") as broker, ThreadPoolExecutor() as threads:
        client = start5(broker.registry)
        set_up(broker.registry, name, name, 4, dedupe_window_ms=600_000)
        client.start_producer(name, name, attempt_ms=1000)
        client.publish(name, name, b"before")
        stall = broker.data.with_name("stall")
        stall.touch()
        result = threads.submit(client.publish, name, name, b"once")
        first_s = time.monotonic()
        wait_until(lambda: time.monotonic() > first_s + 1.5, 5, "the client has given up its first attempt")
        stall.unlink()
        sent = result.result()
        assert sent.status == "SEND_OK"
        client.publish(name, name, b"after")
        place = Place(client, broker.address, name, name)
        bodies = [message.body for _ in range(8) for message in place.pop().messages]
        assert sorted(bodies) == [b"after", b"before", b"once"]
        client.kill()
