"""Leases as operators see them: 30052, 30054 and 30055, in the process of the test."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gevent
import pytest

from metaq.message import GroupPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.server.remoting.admin.leases import LeaseAdminHandler
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer

DEADLINE_S = 30.0
PLACE = GroupPartition(GROUP, TOPIC, 0)


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(tmp_path / "data")
    handler = LeaseAdminHandler(consumer.parts.context, consumer.leasing, consumer.parts.later)
    consumer.parts.endpoint.answer(handler.requests())
    yield consumer
    consumer.parts.close()


def page(consumer: Consumer, code: Request, **members: Any) -> dict[str, Any]:
    answer = consumer.ask(code, (), json.dumps({"group": GROUP, **members}).encode())
    deadline_s = time.monotonic() + DEADLINE_S
    while answer is None and time.monotonic() < deadline_s:  # a list of messages comes from a greenlet of its own
        gevent.sleep(0.001)
        answer = next(iter(consumer.client.answers()), None)
    assert answer is not None and answer.code == Response.SUCCESS, answer
    found: dict[str, Any] = json.loads(bytes(answer.body))
    return found


def test_partitions_come_in_pages(consumer: Consumer) -> None:
    """MY-033: each page begins where the one before ends, whatever came between them."""
    consumer.put("a", "b")
    consumer.put("c", partition=1)
    consumer.popped(1, queue=0)
    consumer.popped(1, queue=1)
    first = page(consumer, Request.LIST_LEASES, limit=1)
    assert [row["partition"] for row in first["rows"]] == [0] and first["next"] == f"{TOPIC} 0"
    last = page(consumer, Request.LIST_LEASES, limit=1, after=first["next"])
    assert [row["partition"] for row in last["rows"]] == [1] and last["next"] is None
    assert page(consumer, Request.LIST_LEASES, topic="another") == {"rows": [], "next": None}
    assert [row["lag"] for row in page(consumer, Request.LIST_LEASES)["rows"]] == [2, 1]


def test_messages_come_in_pages(consumer: Consumer) -> None:
    """MY-033: by ordinal, those in bunches and those alone."""
    consumer.put(*"abcdef")
    popped = consumer.popped(6, queue=0)
    consumer.change(popped[1][1], 100)
    consumer.change(popped[4][1], INVISIBLE_MS)
    after, rows = -1, []
    while after is not None:
        found = page(consumer, Request.LIST_OPEN_MESSAGES, topic=TOPIC, partition=0, limit=2, after=after)
        rows += found["rows"]
        after = found["next"]
    assert [row["ordinal"] for row in rows] == list(range(6))
    # the time of the pop extends a lease, any other gives the message back
    assert [row["state"] for row in rows] == ["leased", "delayed", "leased", "leased", "leased", "leased"]
    consumer.parts.advance(0.1)
    found = page(consumer, Request.LIST_OPEN_MESSAGES, topic=TOPIC, partition=0, after=0, limit=1)
    assert [(row["ordinal"], row["state"]) for row in found["rows"]] == [(1, "waiting")]


def test_topics(consumer: Consumer) -> None:
    """MY-033: what became of the messages of a topic; a topic that is deleted is forgotten."""
    consumer.put("a", "b")
    assert consumer.popped(2)
    consumer.parts.advance(INVISIBLE_MS / 1000)
    again = consumer.popped(2)
    consumer.ack(again[0][1])
    consumer.ack(again[0][1])
    (row,) = page(consumer, Request.LEASE_STATS)["rows"]
    assert [row[name] for name in ("topic", "mode", "given", "again", "dead", "unkept")] == [TOPIC, "PULL", 2, 2, 0, 0]
    assert consumer.leasing.leases.counts.acked == consumer.leasing.leases.counts.meaningless == 1
    consumer.leasing.leases.forget(GROUP, TOPIC)
    assert page(consumer, Request.LEASE_STATS) == {"rows": [], "next": None}
    assert consumer.leasing.leases.counts.pairs == {}


def test_a_start_counts_nothing_of_before(consumer: Consumer) -> None:
    """MY-033: but knows what is open, and what is delayed."""
    consumer.put("a", "b")
    consumer.change(consumer.popped(2)[0][1], 5_000)
    other = consumer.reopened()
    figures = other.leasing.figures.of(PLACE)
    assert figures is not None and (figures.in_flight, figures.delayed, figures.lag) == (1, 1, 2)
    assert other.leasing.figures.numbers()["leases_given"] == 0
    assert other.leasing.figures.numbers()["leases_delayed"] == 1
    other.parts.close()


def test_a_slave_has_no_figures(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    """MY-033: what it learned when it was opened may be over long since."""
    consumer.put("a")
    consumer.popped(1)
    figures = consumer.leasing.figures
    assert figures.of(PLACE) is not None
    monkeypatch.setattr(figures, "_context", cast(Any, SimpleNamespace(replicas=SimpleNamespace(is_master=False))))
    assert figures.of(PLACE) is None
    assert not figures.pairs() and not figures.partitions(GROUP, TOPIC)
    assert not figures.open_from(PLACE, 0, 9, lambda: None)


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (Request.LIST_LEASES, b"[]"),
        (Request.LIST_LEASES, b"{}"),
        (Request.LIST_LEASES, b'{"group":7}'),
        (Request.LIST_LEASES, b'{"group":"g","after":"orders"}'),
        (Request.LIST_LEASES, b'{"group":"g","after":"orders -1"}'),
        (Request.LIST_LEASES, b'{"group":"g","limit":101}'),
        (Request.LIST_OPEN_MESSAGES, b'{"group":"g","topic":"t"}'),
        (Request.LIST_OPEN_MESSAGES, b'{"group":"g","topic":"t","partition":"0"}'),
        (Request.LIST_OPEN_MESSAGES, b'{"group":"g","topic":"t","partition":0,"after":1e99}'),
        (Request.LEASE_STATS, b'{"group":"g","limit":0}'),
        (Request.LEASE_STATS, b"\xff"),
    ],
)
def test_what_is_no_request(consumer: Consumer, code: Request, body: bytes) -> None:
    """MY-033: refused with a reason, and the broker goes on."""
    answer = consumer.ask(code, (), body)
    assert answer is not None and answer.code == Response.SYSTEM_ERROR and answer.remark
    assert page(consumer, Request.LIST_LEASES) == {"rows": [], "next": None}
