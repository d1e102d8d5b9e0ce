"""What workers of dramatiq have is leased: bounded, kept while they work, and given back."""

import threading
import time
from typing import Final

import dramatiq
import pytest
from dramatiq.errors import ConnectionClosed
from dramatiq_metaq import MetaqBroker
from dramatiq_metaq.errors import told_to_dramatiq
from dramatiq_support import (
    DEADLINE_MS,
    DEADLINE_S,
    MakeBroker,
    broker,
    dead_letters,
    make_broker,
    message_for,
    taken,
    working,
)

import metaq
from tests.support.broker import wait_until

__all__ = ["broker", "make_broker"]  # fixtures

SOON_MS: Final = 300


def test_a_long_task_keeps_its_message(make_broker: MakeBroker, namespace: str) -> None:
    """And what waits for a thread, too: leases of 3 s last for longer, while another worker would take what it gets."""
    one, other = make_broker(invisible=3.0), make_broker(invisible=3.0)
    seen: list[str] = []
    go_on = threading.Event()

    @dramatiq.actor(broker=one)
    def work(name: str) -> None:
        seen.append(name)
        assert go_on.wait(DEADLINE_S)

    work.send("runs")
    work.send("waits")
    topic = f"{namespace}-default"

    def in_flight() -> int:
        views = one.client.admin().group_lag(topic, topic)
        return sum(view.leased.in_flight for view in views if view.leased is not None)

    with working(one, threads=1):
        wait_until(lambda: in_flight() == 2, DEADLINE_S, "both are leased")
        other.declare_queue("default")
        consumer = other.consume("default", prefetch=1, timeout=4500)
        assert next(consumer) is None
        consumer.close()
        go_on.set()
        one.join(work.queue_name, timeout=DEADLINE_MS)
    assert seen == ["runs", "waits"]


def test_prefetch_is_the_most_that_a_worker_has(broker: MetaqBroker, namespace: str) -> None:
    """In the worker and on the way to it; what it settles makes room."""
    broker.declare_queue("default")
    for _ in range(12):
        broker.enqueue(message_for("default"))
    topic = f"{namespace}-default"
    for prefetch, most in ((1, 1), (4, 3), (7, 5)):
        consumer = broker.consume("default", prefetch=prefetch, timeout=SOON_MS)
        held = [taken(consumer) for _ in range(most)]
        assert next(consumer) is None
        (view,) = broker.client.admin().group_lag(topic, topic)
        assert view.leased is not None
        assert most <= view.leased.in_flight <= prefetch
        consumer.ack(held[0])
        consumer.requeue([*held[1:], taken(consumer)])
        consumer.close()


def test_what_was_not_begun_is_given_back_on_shutdown(make_broker: MakeBroker) -> None:
    """At once: the leases would last for an hour."""
    broker = make_broker(invisible=3600)
    seen: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker)
    def work(number: int) -> None:
        seen.append(number)
        begun.set()
        assert go_on.wait(DEADLINE_S)

    for number in range(6):
        work.send(number)
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.start()
    assert begun.wait(DEADLINE_S)
    for thread in worker.workers:
        thread.stop()
    go_on.set()
    worker.stop()
    assert seen == [0]

    other = make_broker(invisible=3600)
    other.declare_queue("default")
    consumer = other.consume("default", prefetch=16, timeout=SOON_MS)
    assert sorted(taken(consumer).args[0] for _ in range(5)) == [1, 2, 3, 4, 5]
    consumer.close()


def test_delayed_messages_stay_where_they_are_on_shutdown(broker: MetaqBroker, namespace: str) -> None:
    @dramatiq.actor(broker=broker)
    def work() -> None: ...

    work.send_with_options(delay=3_600_000)
    with working(broker):
        pass
    (master,) = broker.client.admin().masters()
    topics = [timer.topic for timer in broker.client.admin().timers().pending(master.address)]
    assert topics.count(f"{namespace}-default") == 1


def test_a_message_that_was_given_again_is_settled_without_an_error(
    broker: MetaqBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """By the worker that had it first: there is nothing that dramatiq could do."""
    broker.declare_queue("default")
    sent = broker.enqueue(message_for("default"))
    consumer = broker.consume("default", prefetch=4, timeout=SOON_MS)
    before = taken(consumer)
    consumer.requeue([before])
    after = taken(consumer)
    assert before == after == sent
    for settle in (consumer.ack, consumer.nack):
        settle(before)
        assert "not this worker's any more" in caplog.text
        caplog.clear()
    consumer.ack(after)
    consumer.close()
    broker.join("default", timeout=DEADLINE_MS)
    assert caplog.text == "" and dead_letters(broker) == []


def test_a_paused_worker_goes_on(broker: MetaqBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its consumers are made anew."""
    monkeypatch.setattr(dramatiq.worker, "CONSUMER_RESTART_DELAY_SECS", 0.01)
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def append(number: int) -> None:
        seen.append(number)

    with working(broker) as worker:
        append.send(1)
        broker.join(append.queue_name, timeout=DEADLINE_MS)
        worker.pause()
        append.send(2)
        time.sleep(SOON_MS / 1000)
        assert seen == [1]
        worker.resume()
        broker.join(append.queue_name, timeout=DEADLINE_MS)
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (metaq.ConnectionFailed("lost"), ConnectionClosed),
        (metaq.Refused(14, "no master"), ConnectionClosed),
        (metaq.Refused(16, "no permission"), metaq.Refused),
    ],
    ids=["lost", "deposed", "refused"],
)
def test_what_may_pass_is_tried_again(error: metaq.ClientError, raised: type[Exception]) -> None:
    """By dramatiq's workers, which do so after ``ConnectionClosed`` only."""
    with pytest.raises(raised), told_to_dramatiq():
        raise error
