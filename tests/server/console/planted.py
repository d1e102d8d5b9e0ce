"""What the pages of tests and of pictures show: a shop with topics, messages and groups, one of which stands still."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from string import Formatter
from typing import Any

from metaq.client import connect
from metaq.server.console.routes import ROUTES
from metaq.server.console.visit import ROOT, PageView
from tests.support.broker import BrokerProcess, wait_until
from tests.support.rest import Rest

TOPIC = "orders"
GROUP = "billing"
DEADLINE_S = 60.0
LOST = "order-2017"
"""The key of a message that somebody looks for."""


@contextmanager
def planted(broker: BrokerProcess) -> Iterator[str]:
    """Fill a broker, keep a consumer connected, and yield the broker's id of the message that is looked for."""
    with Rest(broker.http) as rest, connect(broker.registry) as client:
        for topic, partitions in ((TOPIC, 3), ("payments", 2), ("mails", 1), ("audit-log", 1)):
            rest.put(f"/topics/{topic}", {"partitions": partitions, "dedupe_window_ms": 60_000 if topic == "payments" else 0})
        for group in (GROUP, "shipping", "reports"):
            rest.put(f"/groups/{group}", {})
        sent = [rest.post(f"/topics/{TOPIC}/messages", order(number)) for number in range(2000, 2036)]
        for topic, offsets in ((GROUP, {"0": 9, "1": 9, "2": 8}), ("shipping", {"0": 2, "1": 4, "2": 12})):
            rest.post(f"/groups/{topic}/offsets", {"topic": TOPIC, "offsets": offsets})
        rest.publish("payments", '{"paid":true}', keys=["payment-1"], tag="visa")
        with client.consumer(TOPIC, GROUP, tags="paid || refunded"):
            wait_until(lambda: rest.get(f"/groups/{GROUP}")["members"] == 1, DEADLINE_S, "the consumer is connected")
            yield str(sent[17]["offset_id"])


def order(number: int) -> dict[str, Any]:
    """A message of the shop."""
    body = {"order": number, "customer": {"id": number % 7, "name": "Ada"}, "cents": number * 3, "paid": number % 3 > 0}
    return {
        "body": json.dumps(body),
        "keys": [f"order-{number}"],
        "tag": "paid" if number % 3 else "refunded",
        "properties": {"source": "web"},
        "partition": number % 3,
    }


def planted_pages(offset_id: str) -> list[str]:
    """The paths of all pages, with what was planted; ``operated`` plants for the others."""
    names = {"topic": TOPIC, "group": GROUP, "offset_id": offset_id}
    return [f"{ROOT}{path.format(**names)}" for path in shown_paths() if named_in(path) <= names.keys()]


def shown_paths() -> list[str]:
    """The paths of all pages, but those of orders to replicas, which this broker does not have."""
    return [route.path for route in ROUTES if isinstance(route, PageView) and not route.path.startswith("/cluster/")]


def named_in(path: str) -> set[str]:
    """The parameters of a path."""
    return {name for _, name, _, _ in Formatter().parse(path) if name}
