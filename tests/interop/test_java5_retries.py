"""Messages that RocketMQ's unmodified Java client 5 fails in POP mode. All wait at the same time, for nearly two minutes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import metaq
from metaq.client.admin.views import GroupView
from tests.interop.clients import Received
from tests.interop.java5 import NEWEST, OLDER, Java5, Sent, java5_command, let_pop, receipt_of, set_up
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
POISON: Final = "poison"
"""Its group allows a few deliveries."""
MOST_TIMES: Final = 3
IDLE: Final = "idle"
BODY: Final = b"fails"


class Failing:
    """Consumers of one client that fail each message in their ways, and one that has nothing to do at first."""

    def __init__(self, client: Java5, broker: BrokerProcess) -> None:
        self._client = client
        self._registry = broker.registry
        self._sent: dict[str, Sent] = {}
        for way in (*WAYS, POISON, IDLE):
            set_up(
                broker.registry, way, way, 1, group_wishes=GroupView(way, retry_max_times=MOST_TIMES if way == POISON else 16)
            )
            let_pop(broker, way, way)
            client.start_consumer(way, way, way, **WAYS.get(way, {} if way == IDLE else {"fail": "later"}))
        client.start_producer("failing", "failing")
        for way in (*WAYS, POISON):
            properties = {"KEYS": "a key", "colour": "red"}
            self._sent[way] = client.publish("failing", way, BODY, tag="tag", properties=properties)
        self._begin_s = time.monotonic()

    def check_that_an_idle_one_goes_on(self) -> None:
        wait_until(lambda: time.monotonic() > self._begin_s + 2 * HELD_S, WAIT_S, "two pops have ended", 0.2)
        self._client.publish("failing", IDLE, b"at last")
        (message,) = self._client.wait_for_bodies(IDLE, [b"at last"])
        assert pop_ms(message) - message.stored <= APART_MS

    def check_deliveries(self, way: str, delays_ms: Sequence[int]) -> None:
        """Wait for deliveries after these delays: each says how often the message has failed, and when it was given first."""
        client, sent = self._client, self._sent[way]
        client.wait(lambda: len(client.messages(way)) > len(delays_ms), f"{way}: deliveries after {delays_ms}", WAIT_S)
        first, *others = messages = client.messages(way)
        assert first.reconsumed == 0
        for number, (before, after, delay_ms) in enumerate(zip(messages, others, delays_ms, strict=False), 1):
            after_ms = pop_ms(after) - before.at
            assert delay_ms - APART_MS <= after_ms <= delay_ms + APART_MS, (way, number, after_ms)
            assert after.reconsumed == number
            assert int(after.properties["1ST_POP_TIME"]) == pop_ms(first)
        for message in messages:
            assert (message.id, message.queue, message.offset) == (sent.id, sent.queue, sent.offset)
            assert (message.body, message.tag, message.properties["colour"]) == (BODY, "tag", "red")

    def check_poison(self) -> None:
        """Wait for the dead letter: there is one, which says where it comes from, and the offset of the group has passed it."""
        with metaq.connect(self._registry) as client:
            admin = client.admin()
            wait_until(lambda: bool(admin.dead_letters(POISON)), WAIT_S, "a dead letter", 0.2)
            (letter,) = admin.dead_letters(POISON)
            (lag,) = admin.group_lag(POISON, POISON)
        assert len(self._client.messages(POISON)) == MOST_TIMES
        assert (letter.body, letter.tag, letter.properties["colour"]) == (BODY, "tag", "red")
        assert letter.properties["RETRY_TOPIC"] == letter.properties["DLQ_ORIGIN_TOPIC"] == POISON
        place = self._sent[POISON].offset_id
        assert letter.properties["ORIGIN_MESSAGE_ID"] == letter.properties["DLQ_ORIGIN_MESSAGE_ID"] == place
        assert letter.properties["METAQ_DEAD"] == "times"
        assert (lag.committed, lag.end) == (1, 1)


def pop_ms(message: Received) -> int:
    return int(receipt_of(message).split()[1])


def test_what_fails(tmp_path: Path) -> None:
    """A-03: what a listener fails, in whatever way, comes after 10, 30 and 60 s, or after the delay that it chose, with its
    id and place. A-04: what always fails is delivered as often as its group allows, and then it is a dead letter, once.
    A-10: a consumer whose pops found nothing for longer than they are held goes on, and takes what comes then.

    The versions wait at the same time, each at a broker of its own."""
    with ExitStack() as stack:
        all_failing = []
        for version in (*OLDER, NEWEST):
            broker = stack.enter_context(BrokerProcess(tmp_path / f"data-{version}"))
            client = stack.enter_context(Java5(java5_command(version), broker.registry, tmp_path / f"home-{version}"))
            all_failing.append(Failing(client, broker))
        for failing in all_failing:
            failing.check_that_an_idle_one_goes_on()
            failing.check_deliveries("level", (TABLE_MS[1], TABLE_MS[1]))
            for way in ("later", "null", "exception"):
                failing.check_deliveries(way, TABLE_MS)
            failing.check_deliveries(POISON, TABLE_MS[: MOST_TIMES - 1])
            failing.check_poison()
