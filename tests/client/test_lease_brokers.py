"""Consumers that lease while brokers are killed and come back."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from metaq.client import Client, LeaseConsumer, LeasedMessage, connect
from metaq.errors import ClientError
from tests.client.test_cluster import FIRST_KEY, TOPIC, Pair, pair, stack
from tests.support.broker import BrokerProcess, wait_until

__all__ = ["pair", "stack"]  # fixtures

DEADLINE_S = 120.0


class Seen:
    """A handler that notes ids, and how often it was called."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.calls = 0

    def __call__(self, message: LeasedMessage) -> None:
        self.ids.add(message.id)
        self.calls += 1


@contextmanager
def handled(consumer: LeaseConsumer, seen: Seen) -> Iterator[None]:
    """Have a consumer handle messages on threads during a block."""
    running = threading.Thread(target=consumer.run, args=(seen,))
    running.start()
    try:
        yield
    finally:
        consumer.close()
        running.join(DEADLINE_S)
        assert not running.is_alive()


@contextmanager
def sending(client: Client) -> Iterator[list[str]]:
    """Send messages, one after the other, during a block; the ids of those that were stored."""
    sent: list[str] = []
    stop = threading.Event()

    def send() -> None:
        producer = client.producer()
        while not stop.wait(0.001):
            try:
                sent.append(producer.send(TOPIC, b"%d" % len(sent)).id)
            except ClientError:
                time.sleep(0.02)  # it may be stored or not

    producing = threading.Thread(target=send)
    producing.start()
    try:
        yield sent
    finally:
        stop.set()
        producing.join(DEADLINE_S)


def test_every_message_is_handled_whatever_happens_to_its_broker(process: BrokerProcess) -> None:
    """ES-102, SG-135: kills end leases and lose answers, so messages come again, but none is lost and all end acked."""
    seen, after = Seen(), Seen()
    with connect(process.registry, timeout_s=5.0) as client, connect(process.registry) as consuming:
        client.producer().send(TOPIC, b"the topic exists")
        with handled(consuming.lease_consumer(TOPIC, "billing", invisible=2), seen):
            with sending(client) as sent:
                for _ in range(2):
                    before = len(sent)
                    wait_until(lambda before=before: len(sent) > before + 50, DEADLINE_S, "sends go on")  # type: ignore[misc]
                    process.restart(same_port=True)
                before = len(sent)
                wait_until(lambda: len(sent) > before + 50, DEADLINE_S, "sends go on")
            wait_until(lambda: seen.ids >= set(sent), DEADLINE_S, "every message is handled")
        with handled(consuming.lease_consumer(TOPIC, "billing"), after):
            time.sleep(2.5)  # no lease of before lasts longer
    assert after.calls < 50  # those whose acks were lost, not all


def test_messages_of_all_brokers_are_leased(pair: Pair, stack: ExitStack) -> None:
    """MY-010, ES-011: while one of them is away, those of the other; afterwards its own again."""
    seen = Seen()
    producer = pair.client.producer()

    def send(ordering_key: str | None = None) -> set[str]:
        """Return the brokers that have taken messages, all of which are handled."""
        try:
            results = [producer.send(TOPIC, b"x", ordering_key=ordering_key) for _ in range(8)]
        except ClientError:
            return set()
        wait_until(lambda: seen.ids >= {result.id for result in results}, DEADLINE_S, "all are handled")
        return {result.queue.broker_name for result in results}

    with handled(pair.connect(stack).lease_consumer(TOPIC, "billing"), seen):
        assert send() == {"a", "b"}
        pair.brokers["a"].kill()
        assert send() == {"b"}
        pair.brokers["a"].restart(same_port=True)
        wait_until(lambda: "a" in send(FIRST_KEY), DEADLINE_S, "both take messages again")
