"""The cases of dramatiq's own tests of brokers, with real workers and a real broker of metaq."""

import threading
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import dramatiq
import pytest
from dramatiq import Message, Middleware, QueueJoinTimeout, QueueNotFound
from dramatiq.errors import ConnectionClosed
from dramatiq_metaq import MetaqBroker
from dramatiq_support import DEADLINE_MS, DEADLINE_S, MakeBroker, broker, dead_letters, make_broker, message_for, working

import metaq
from tests.support.broker import wait_until

__all__ = ["broker", "make_broker"]  # fixtures

SOON_MS: Final = 300
NOBODY: Final = "metaq://127.0.0.1:1/?timeout_s=0.2"
"""Where no registry is."""


# -- messages ---------------------------------------------------------------------------------------------------------


def test_actors_can_be_sent_messages(broker: MetaqBroker) -> None:
    """Each is processed once."""
    database: dict[str, int] = {}

    @dramatiq.actor(broker=broker)
    def put(key: str, value: int) -> None:
        database[key] = database.get(key, 0) + value

    for number in range(100):
        assert put.send(f"key-{number}", number + 1)
    with working(broker):
        broker.join(put.queue_name, timeout=DEADLINE_MS)
    assert database == {f"key-{number}": number + 1 for number in range(100)}


def test_one_thread_processes_in_order(broker: MetaqBroker) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def append(number: int) -> None:
        seen.append(number)

    for number in range(30):
        append.send(number)
    with working(broker, threads=1):
        broker.join(append.queue_name, timeout=DEADLINE_MS)
    assert seen == list(range(30))


def test_queues_are_apart_whatever_their_names(broker: MetaqBroker) -> None:
    """A dot is not a letter of a topic."""
    seen: list[str] = []
    for name in ("plain", "with.dots-and_more", "with%2Edots"):
        broker.declare_queue(name)

    @dramatiq.actor(broker=broker, queue_name="with.dots-and_more")
    def dotted() -> None:
        seen.append("dotted")

    @dramatiq.actor(broker=broker, queue_name="plain")
    def plain() -> None:
        seen.append("plain")

    dotted.send()
    with working(broker):
        broker.join("with.dots-and_more", timeout=DEADLINE_MS)
        assert seen == ["dotted"]
        plain.send()
        broker.join("plain", timeout=DEADLINE_MS)
    assert seen == ["dotted", "plain"]


def test_the_message_is_found_by_its_id(broker: MetaqBroker, namespace: str) -> None:
    """As `metaq message query` does it."""
    broker.declare_queue("default")
    sent = broker.enqueue(message_for("default"))
    (found,) = broker.client.admin().query_by_key(f"{namespace}-default", sent.message_id)
    assert Message.decode(found.body) == sent


# -- delays and retries -----------------------------------------------------------------------------------------------


def test_messages_can_be_delayed(broker: MetaqBroker) -> None:
    """By the broker: no worker has the message before."""
    ran: list[float] = []

    @dramatiq.actor(broker=broker)
    def record() -> None:
        ran.append(time.time())

    with working(broker) as worker:
        sent = time.time()
        record.send_with_options(delay=timedelta(milliseconds=700))
        assert worker.consumers.keys() == {"default"}
        assert broker.get_declared_delay_queues() == set()
        broker.join(record.queue_name, timeout=DEADLINE_MS)
    assert len(ran) == 1 and ran[0] >= sent + 0.7


def test_messages_are_delayed_independently_of_each_other(broker: MetaqBroker) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def append(number: int) -> None:
        seen.append(number)

    append.send_with_options(args=(1,), delay=1500)
    append.send_with_options(args=(2,), delay=500)
    append.send_with_options(args=(3,), delay=-5)
    with working(broker, threads=1):
        broker.join(append.queue_name, timeout=DEADLINE_MS)
    assert seen == [3, 2, 1]


def test_a_delay_may_be_longer_than_a_week_but_not_without_limit(broker: MetaqBroker, namespace: str) -> None:
    broker.declare_queue("default")
    broker.enqueue(message_for("default"), delay=300 * 86_400_000)
    (master,) = broker.client.admin().masters()
    topics = [timer.topic for timer in broker.client.admin().timers().pending(master.address)]
    assert topics.count(f"{namespace}-default") == 1
    with pytest.raises(metaq.Refused, match="delay"):
        broker.enqueue(message_for("default"), delay=500 * 86_400_000)


def test_actors_are_retried_after_a_pause(broker: MetaqBroker) -> None:
    """One that they choose; those of dramatiq are random."""
    tried: list[float] = []

    @dramatiq.actor(broker=broker)
    def fail() -> None:
        tried.append(time.time())
        if len(tried) < 4:
            raise dramatiq.Retry(f"failure {len(tried)}", delay=200)

    fail.send()
    with working(broker):
        broker.join(fail.queue_name, timeout=DEADLINE_MS)
    assert len(tried) == 4
    assert all(after - before >= 0.2 for before, after in pairwise(tried))
    assert dead_letters(broker) == []


def test_a_retry_that_cannot_be_sent_is_not_lost(broker: MetaqBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message itself comes again instead, after the same pause."""
    tried: list[float] = []

    @dramatiq.actor(broker=broker)
    def fail() -> None:
        tried.append(time.time())
        if len(tried) == 1:
            raise dramatiq.Retry("once", delay=200)

    fail.send()

    def unsent(*arguments: object, **named: object) -> None:
        raise metaq.ConnectionFailed("the broker is away")

    monkeypatch.setattr(broker._producer, "send", unsent)
    with working(broker):
        broker.join(fail.queue_name, timeout=DEADLINE_MS)
    assert len(tried) == 2 and tried[1] - tried[0] >= 0.2


# -- dead letters -----------------------------------------------------------------------------------------------------


def test_what_fails_too_often_becomes_a_dead_letter(broker: MetaqBroker) -> None:
    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1, max_backoff=1)
    def fail() -> None:
        raise RuntimeError("always")

    sent = fail.send()
    with working(broker):
        broker.join(fail.queue_name, timeout=DEADLINE_MS)
        wait_until(lambda: bool(dead_letters(broker)), DEADLINE_S, "it is dead")
    (dead,) = dead_letters(broker)
    assert (dead.message_id, dead.options["retries"]) == (sent.message_id, 1)
    assert "always" in dead.options["traceback"]


def test_messages_of_missing_actors_become_dead_letters(broker: MetaqBroker) -> None:
    sent = broker.enqueue(message_for("some-queue"))
    with working(broker):
        wait_until(lambda: bool(dead_letters(broker, "some-queue")), DEADLINE_S, "it is dead")
    assert dead_letters(broker, "some-queue") == [sent]


def test_what_is_no_message_becomes_a_dead_letter(broker: MetaqBroker, namespace: str) -> None:
    """And what comes after it is processed."""
    done = threading.Event()

    @dramatiq.actor(broker=broker)
    def work() -> None:
        done.set()

    broker.client.admin().create_topic(f"{namespace}-default", 1)
    broker.client.producer().send(f"{namespace}-default", b"not JSON")
    work.send()
    with working(broker, threads=1):
        assert done.wait(DEADLINE_S)
        broker.join(work.queue_name, timeout=DEADLINE_MS)
    assert [letter.body for letter in broker.client.admin().dead_letters(f"{namespace}-default")] == [b"not JSON"]


# -- priorities -------------------------------------------------------------------------------------------------------


def test_urgent_messages_come_first(make_broker: MakeBroker) -> None:
    broker = make_broker(max_priority=5)
    order: list[int] = []

    @dramatiq.actor(broker=broker, queue_name="prioritized")
    def work(priority: int) -> None:
        order.append(priority)

    for priority in range(6):
        work.send_with_options(args=(priority,), broker_priority=priority)
    work.send_with_options(args=(9,), broker_priority=9)  # as the greatest
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    worker.queue_prefetch = 1
    worker.start()
    broker.join("prioritized", timeout=DEADLINE_MS)
    worker.stop()
    assert order == [5, 9, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("most", [0, -1, 256])
def test_a_priority_out_of_range_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match="it takes 1 to 255"):
        MetaqBroker(NOBODY, max_priority=most)


# -- middleware -------------------------------------------------------------------------------------------------------


class Recorder(Middleware):
    """Writes down what a broker says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("before_", "after_")):
            return lambda *arguments, **named: self.said.append(name)
        return super().__getattribute__(name)


def test_middleware_is_called(broker: MetaqBroker) -> None:
    recorder = Recorder()
    broker.add_middleware(recorder)

    @dramatiq.actor(broker=broker, max_retries=0)
    def work(fails: bool) -> None:
        if fails:
            raise RuntimeError("as asked")

    work.send(False)
    work.send(True)
    with working(broker, threads=1):
        broker.join(work.queue_name, timeout=DEADLINE_MS)
    said = [what for what in recorder.said if "boot" not in what and "shutdown" not in what]
    declared = ["before_declare_actor", "before_declare_queue", "after_declare_queue", "after_declare_actor"]
    enqueued = ["before_enqueue", "after_enqueue"]
    processed = ["before_process_message", "after_process_message"]
    assert said[:8] == [*declared, *enqueued, *enqueued]
    assert said[8:] == [*processed, "before_ack", "after_ack", *processed, "before_nack", "after_nack"]


def test_no_middleware_is_possible() -> None:
    broker = MetaqBroker(NOBODY, middleware=[])
    assert broker.middleware == []
    broker.close()


def test_pipelines(broker: MetaqBroker) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def add(left: int, right: int) -> int:
        return left + right

    @dramatiq.actor(broker=broker)
    def record(number: int) -> None:
        seen.append(number)

    rest = message_for("default", "add", 3), message_for("default", "record")
    dramatiq.pipeline([add.message(1, 2), *rest], broker=broker).run()
    with working(broker):
        broker.join("default", timeout=DEADLINE_MS)
    assert seen == [6]


def test_messages_that_are_too_old_become_dead_letters(broker: MetaqBroker) -> None:
    @dramatiq.actor(broker=broker, max_age=1)
    def work() -> None:
        raise AssertionError("too old")

    work.send_with_options(delay=50)
    with working(broker):
        wait_until(lambda: bool(dead_letters(broker)), DEADLINE_S, "it is dead")


# -- the rest of a broker's methods -----------------------------------------------------------------------------------


def test_connections_are_lazy() -> None:
    broker = MetaqBroker(NOBODY)
    broker.declare_queue("default")
    assert broker.get_declared_queues() == {"default"}
    with pytest.raises(ConnectionClosed):
        broker.enqueue(message_for("default"))
    with pytest.raises(ConnectionClosed):
        broker.consume("default")
    broker.close()


def test_a_queue_must_be_declared(broker: MetaqBroker) -> None:
    with pytest.raises(QueueNotFound):
        broker.consume("never")


def test_join_has_a_timeout(broker: MetaqBroker) -> None:
    """Also without a worker, and while a message is processed."""
    go_on = threading.Event()

    @dramatiq.actor(broker=broker)
    def work() -> None:
        assert go_on.wait(DEADLINE_S)

    work.send()
    with pytest.raises(QueueJoinTimeout):
        broker.join(work.queue_name, timeout=200)
    with working(broker):
        with pytest.raises(QueueJoinTimeout):
            broker.join(work.queue_name, timeout=500)
        go_on.set()
        broker.join(work.queue_name, timeout=DEADLINE_MS)


def test_queues_can_be_flushed(broker: MetaqBroker) -> None:
    """All of them, with what is delayed; a recurring message of the same topic goes on."""

    @dramatiq.actor(broker=broker)
    def work() -> None:
        raise AssertionError("it was flushed")

    work.send()
    work.send_with_options(delay=3_600_000)
    admin = broker.client.admin()
    [master] = admin.masters()
    admin.timers().define(master.address, "yearly", "0 0 1 1 *", f"{broker.namespace}-default", b"happy new year")
    with pytest.raises(QueueJoinTimeout):
        broker.join(work.queue_name, timeout=0)
    broker.flush_all()
    broker.join(work.queue_name, timeout=DEADLINE_MS)
    assert [row.name for row in admin.timers().recurring(master.address)] == ["yearly"]
    admin.timers().undefine(master.address, "yearly")
    with working(broker):
        work_again = broker.enqueue(message_for("default"))
        wait_until(lambda: dead_letters(broker) == [work_again], DEADLINE_S, "only what came later is here")
