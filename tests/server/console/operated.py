"""What the pages for operators show: dead letters, delayed and recurring messages, leases, and transactions in doubt."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from metaq.server.console.visit import ROOT
from tests.server.console.planted import shown_paths
from tests.support.broker import BrokerProcess, wait_until
from tests.support.consumer import Consumer, subscription
from tests.support.halves import Producer
from tests.support.rest import Rest, named

TOPIC: Final = "orders"
GROUP: Final = "archive"
DEAD_TOPIC: Final = "mails"
DEAD_GROUP: Final = "mailer"
RECURRING: Final = "nightly"
HOUR_MS: Final = 3_600_000
DEADLINE_S: Final = 60.0


def dead_letters(rest: Rest, topic: str, group: str, bodies: list[str], **options: object) -> list[dict[str, Any]]:
    """Publish messages, and have a group give them up; return its dead letters, at most 256."""
    path = f"/groups/{named(group)}"
    before = rest.get(f"{path}/dead-letters")["end"]
    messages = [{"body": body, "partition": 0, **options} for body in bodies]
    for begin in range(0, len(messages), 1000):
        rest.post(f"/topics/{named(topic)}/messages/many", {"messages": messages[begin : begin + 1000]})
    left = len(bodies)
    while left:
        leased = rest.post(f"{path}/leases", {"topic": topic, "limit": 32, "wait_ms": 5000})["messages"]
        for each in leased:
            rest.post(f"{path}/leases/nack", {"topic": topic, "receipt": each["receipt"], "reject": True})
        left -= len(leased)
    all_dead = before + len(bodies)
    wait_until(lambda: rest.get(f"{path}/dead-letters")["end"] == all_dead, DEADLINE_S, "all are dead letters")
    found: list[dict[str, Any]] = rest.get(f"{path}/dead-letters", offset=before, limit=256)["messages"]
    return found


@contextmanager
def operated(broker: BrokerProcess) -> Iterator[dict[str, str]]:
    """Fill a broker that asks no producer, keep clients connected, and yield the parameters of its pages."""
    with Rest(broker.http) as rest, Producer(broker) as producer, Consumer(broker, GROUP, "10.0.4.17@2811#archive") as consumer:
        for topic, partitions in ((TOPIC, 3), (DEAD_TOPIC, 1)):
            rest.put(f"/topics/{topic}", {"partitions": partitions})
        rest.put(f"/groups/{GROUP}", {})
        consumer.beat(subscription(TOPIC, "*"))
        mails = [f'{{"to":"{name}@example.org"}}' for name in ("ada", "bob", "eve")]
        dead_letters(rest, DEAD_TOPIC, DEAD_GROUP, mails, keys=["mail-7"])
        for number in range(3):
            rest.publish(TOPIC, f"later {number}", delay_ms=HOUR_MS * (number + 1))
        rest.publish(DEAD_TOPIC, "another", delay_ms=HOUR_MS)
        rest.put(f"/recurring/{RECURRING}", {"cron": "0 2 * * *", "topic": TOPIC, "body": "go", "zone": "Europe/Berlin"})
        rest.publish(DEAD_TOPIC, *map(str, range(4)))
        rest.post(f"/groups/{DEAD_GROUP}/leases", {"topic": DEAD_TOPIC, "limit": 3, "invisible_ms": HOUR_MS})
        half = producer.half(b"undecided")
        names = {"topic": TOPIC, "group": DEAD_GROUP, "name": RECURRING, "key": half.offset_id, "partition": "0"}
        yield names


def operated_pages(names: dict[str, str]) -> list[str]:
    """The paths of the pages for operators, with what was planted."""
    others = ("/topics", "/groups", "/messages", "/new-topic", "/new-group", "/search")
    leased = {**names, "topic": DEAD_TOPIC}
    return [f"{ROOT}{path.format(**leased)}" for path in shown_paths() if path and not path.startswith(others)]
