"""Failed messages of RocketMQ's unmodified Java client 5 in POP mode. All wait at the same time, for nearly two minutes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import pytest

import metaq
from metaq.client.admin.views import GroupView
from tests.interop.clients import Received
from tests.interop.java5 import VERSIONS, Java5, Sent, java5_command, receipt_of, set_mode, set_up
from tests.interop.mqadmin import AdminTool
from tests.support.broker import BrokerProcess, wait_until

pytestmark = [pytest.mark.partner("java", "mvn"), pytest.mark.timeout(900), pytest.mark.slow]

WAIT_S: Final = 180.0
APART_MS: Final = 1000
"""How much later than asked for may a message be given again."""
TABLE_MS: Final = (10_000, 30_000, 60_000)
"""After how long the client wants a message again that has failed once, twice, three times."""
HELD_S: Final = 15.0
"""How long the client's pops are held."""
WAYS: Final[dict[str, dict[str, Any]]] = {
    "later": {"fail": "later"},
    "null": {"fail": "null"},
    "exception": {"fail": "exception"},
    "level": {"fail": "later", "level": 1},
}
BODY: Final = b"fails"


class Failing(NamedTuple):
    """Consumers of one client that fail each message in their ways, and one that has nothing to do at first."""

    client: Java5
    names: dict[str, str]
    sent: dict[str, Sent]
    begin_s: float

    def deliveries(self, way: str, count: int) -> list[Received]:
        """Wait until the message was delivered so often, and return the deliveries."""
        name = self.names[way]
        self.client.wait(lambda: len(self.client.messages(name)) >= count, f"{count} deliveries", WAIT_S)
        return self.client.messages(name)


def begin(client: Java5, registry: str, version: str) -> Failing:
    tool = AdminTool(client, registry)
    names = {way: re.sub(r"\W", "-", f"{way}-{version}") for way in (*WAYS, "poison", "idle")}
    for way, name in names.items():
        set_up(registry, name, name, 1, group_wishes=GroupView(name, retry_max_times=3 if way == "poison" else 16))
        set_mode(tool, name, name)
        client.start_consumer(name, name, name, **WAYS.get(way, {} if way == "idle" else {"fail": "later"}))
    client.start_producer("failing", "failing")
    sent = {
        way: client.publish("failing", name, BODY, tag="tag", properties={"KEYS": "a key", "colour": "red"})
        for way, name in names.items()
        if way != "idle"
    }
    return Failing(client, names, sent, time.monotonic())


@pytest.fixture(scope="module")
def all_failing(broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Failing]]:
    with ExitStack() as stack:
        yield {
            version: begin(
                stack.enter_context(Java5(java5_command(version), broker.registry, tmp_path_factory.mktemp("java5") / "home")),
                broker.registry,
                version,
            )
            for version in VERSIONS
        }


@pytest.fixture(params=VERSIONS)
def failing(request: pytest.FixtureRequest, all_failing: dict[str, Failing]) -> Failing:
    return all_failing[request.param]


def pop_ms(message: Received) -> int:
    return int(receipt_of(message).split()[1])


@pytest.mark.parametrize("way", ["later", "null", "exception"])
def test_failed_messages_come_again(failing: Failing, way: str) -> None:
    """A-03: what a listener fails, in whatever way, comes after 10, 30 and 60 s, with the same id and place; it says how often
    it has failed and when it was given first."""
    check(failing.deliveries(way, 4), failing.sent[way], TABLE_MS)


def test_a_listener_chooses_the_delay(failing: Failing) -> None:
    """A-03: a listener chooses from the same table."""
    check(failing.deliveries("level", 3), failing.sent["level"], (TABLE_MS[1], TABLE_MS[1]))


def check(messages: list[Received], sent: Sent, delays_ms: tuple[int, ...]) -> None:
    first = messages[0]
    for number, (before, after, delay_ms) in enumerate(zip(messages, messages[1:], delays_ms, strict=False), 1):
        after_ms = pop_ms(after) - before.at
        assert delay_ms - APART_MS <= after_ms <= delay_ms + APART_MS, (number, after_ms)
        assert after.reconsumed == number
        assert int(after.properties["1ST_POP_TIME"]) == pop_ms(first)
    assert first.reconsumed == 0
    for message in messages:
        assert (message.id, message.queue, message.offset) == (sent.id, sent.queue, sent.offset)
        assert (message.body, message.tag, message.properties["colour"]) == (BODY, "tag", "red")


def test_poison(failing: Failing, broker: BrokerProcess) -> None:
    """A-04: a message that always fails is delivered as often as its group allows, and then it is a dead letter, once, which
    says where it comes from. Its consumer never sees it again, and the group's offset passes it."""
    name, sent = failing.names["poison"], failing.sent["poison"]
    with metaq.connect(broker.registry) as client:
        wait_until(lambda: bool(client.admin().dead_letters(name)), WAIT_S, "a dead letter", 0.2)
        (letter,) = client.admin().dead_letters(name)
        (lag,) = client.admin().group_lag(name, name)
    assert len(failing.client.messages(name)) == 3
    assert (letter.body, letter.tag, letter.properties["colour"]) == (BODY, "tag", "red")
    assert letter.properties["RETRY_TOPIC"] == letter.properties["DLQ_ORIGIN_TOPIC"] == name
    assert letter.properties["ORIGIN_MESSAGE_ID"] == letter.properties["DLQ_ORIGIN_MESSAGE_ID"] == sent.offset_id
    assert letter.properties["METAQ_DEAD"] == "times"
    assert (lag.committed, lag.end) == (1, 1)


def test_an_idle_consumer_goes_on(failing: Failing) -> None:
    """A-10: a consumer whose pops found nothing for longer than they are held goes on, and takes what comes then."""
    name = failing.names["idle"]
    wait_until(lambda: time.monotonic() > failing.begin_s + 2 * HELD_S, WAIT_S, "two pops have ended", 0.2)
    failing.client.publish("failing", name, b"at last")
    (message,) = failing.client.wait_for_bodies(name, [b"at last"])
    assert pop_ms(message) - message.stored <= APART_MS
