"""Names of topics, the terms of queues and connections, the times of tasks, and the bell."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Final

import pytest
from kombu import Connection
from kombu_metaq import shared
from kombu_metaq.bell import Bell
from kombu_metaq.delivery import Raw
from kombu_metaq.logs import LogReader
from kombu_metaq.names import MOST_CHARACTERS, exchange_topic, queue_topic, tag_of
from kombu_metaq.terms import MOST_DELIVERIES, due_of, terms_of
from kombu_metaq.transport import _tls
from kombu_programs import COME_S

from metaq.client import Client, ReceivedMessage, checks
from metaq.errors import ClientClosed, ConnectionFailed
from metaq.message import MessageQueue
from tests.packaging.built import clean_environment
from tests.support.broker import wait_until

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("virtual_host", "queue", "topic"),
    [("/", "celery", "celery"), ("/", "a.b c", "a%2Eb%20c"), ("/", "100%", "100%25"), ("prod", "é", "prod|%C3%A9")],
)
def test_a_queue_has_a_topic_that_shows_its_name(virtual_host: str, queue: str, topic: str) -> None:
    assert queue_topic(virtual_host, queue) == topic


def test_no_two_names_are_one_topic() -> None:
    names = ["a", "b", "a|b", "a%7Cb", "", "exchange", "a|exchange"]
    hosts = ["/", "a", "b", "a|b"]
    queues = [queue_topic(host, name) for host in hosts for name in names if name]
    exchanges = [exchange_topic(host, name) for host in hosts for name in names]
    assert len({*queues, *exchanges}) == len(queues) + len(exchanges)


def test_a_long_name_is_cut_and_stays_its_own() -> None:
    one, other = (queue_topic("/", f"{'é' * 100}{end}") for end in "ab")
    assert len(one) == len(other) == MOST_CHARACTERS
    assert one != other
    for name in (one, exchange_topic("/", "x.y"), exchange_topic("a", "")):
        checks.topic(name)
        checks.group(name)


def test_tags_can_be_chosen_by_consumers() -> None:
    for key in ("", "*", "a||b", " a ", "media.video"):
        checks.tag(tag_of(key))


@pytest.mark.parametrize(
    ("declared", "is_temporary"),
    [
        ({"durable": True}, False),
        ({"durable": True, "auto_delete": True}, False),
        ({"durable": False, "auto_delete": True}, True),
        ({"durable": True, "auto_delete": True, "arguments": {"x-expires": 1000}}, True),
        ({"durable": True, "arguments": {"x-expires": 1000}}, False),
        ({"durable": False, "exclusive": True}, True),
    ],
)
def test_queues_that_vanish_with_their_consumer_are_temporary(declared: dict[str, Any], is_temporary: bool) -> None:
    terms = terms_of(**{"exclusive": False, "auto_delete": False, "arguments": None, **declared})
    assert terms.is_temporary is is_temporary


def test_arguments_say_how_many_levels_and_deliveries_there_are() -> None:
    arguments = {"x-max-priority": 9, "x-delivery-limit": 3}
    terms = terms_of(durable=True, exclusive=False, auto_delete=False, arguments=arguments)
    assert (terms.levels, terms.deliveries) == (10, 3)
    plain = terms_of(durable=True, exclusive=False, auto_delete=False, arguments={"x-max-priority": None})
    assert (plain.levels, plain.deliveries) == (1, MOST_DELIVERIES)


@pytest.mark.parametrize("visibility_timeout", [0, 0.5, 30 * 24 * 3600 + 1, -1, float("nan"), float("inf"), "soon", None])
def test_a_visibility_timeout_is_from_a_second_to_30_days(visibility_timeout: object) -> None:
    connection = Connection("metaq://127.0.0.1:1//", transport_options={"visibility_timeout": visibility_timeout})
    with pytest.raises(ValueError, match=r"visibility_timeout is .*from 1 to 2592000 \(30 days\)"):
        connection.create_transport()


def test_a_visibility_timeout_may_be_a_text() -> None:
    assert Connection("metaq://127.0.0.1:1//", transport_options={"visibility_timeout": "60"}).create_transport()


@pytest.mark.parametrize(
    ("one", "other"),
    [("metaq://a//", "metaq://b//"), ("metaq://[::1]//", "metaq://b:9876//"), ("metaq:////", "metaq://b//")],
)
def test_connections_share_their_state_whether_their_urls_have_ports_or_not(one: str, other: str) -> None:
    first, second = (Connection(f"{urls[0]};{urls[1]}").create_transport() for urls in ((one, other), (other, one)))
    assert first._key == second._key


@pytest.mark.parametrize(
    ("given", "tls"),
    [
        ({"ca_certs": "ca.pem"}, "ca.pem"),
        ({"ca_certs": None}, True),
        ({"ca_certs": ""}, True),
        ({}, True),
        (True, True),
        (False, False),
        (None, False),
    ],
)
def test_broker_use_ssl_with_options_is_always_tls(given: object, tls: object) -> None:
    assert _tls(given) == tls


def test_only_a_time_to_come_delays_a_message() -> None:
    later = NOW + timedelta(days=90)
    assert due_of({"eta": later.isoformat()}, NOW) == later
    assert due_of({"eta": later.replace(tzinfo=None).isoformat()}, NOW) == later
    for eta in (None, NOW.isoformat(), "soon", 5):
        assert due_of({"eta": eta}, NOW) is None
    assert due_of({}, NOW) is None


def test_the_bell_wakes_who_waits_or_waits_next() -> None:
    bell = Bell()
    bell.ring()
    bell.wait(60.0)
    thread = threading.Thread(target=bell.wait, args=(60.0,))
    thread.start()
    bell.ring()
    thread.join(60.0)
    assert not thread.is_alive()


def test_the_bell_makes_its_descriptor_readable_until_it_is_answered() -> None:
    bell = Bell()
    descriptor = bell.fileno()
    for _ in range(3):
        bell.ring()
        bell.ring()
        assert select.select([descriptor], [], [], 60.0)[0]
        bell.answer()
        assert not select.select([descriptor], [], [], 0.0)[0]
    bell.close()
    bell.ring()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_a_bell_that_is_closed_meanwhile_rings_in_no_other_file() -> None:
    def ring(bell: Bell, done: threading.Event) -> None:
        while not done.is_set():
            bell.ring()
            bell.wait(0.0)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(500):
            bell, done = Bell(), threading.Event()
            bell.fileno()
            ringing = pool.submit(ring, bell, done)
            bell.close()
            other = os.pipe()  # with the numbers of those that were closed
            done.set()
            ringing.result()
            heard, _, _ = select.select([other[0]], [], [], 0.0)
            for end in other:
                os.close(end)
            assert heard == []


def test_temporary_queues_end_when_they_were_not_used_for_as_long_as_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: now))
    waits = {
        name: terms_of(durable=True, exclusive=not expires_ms, auto_delete=True, arguments={"x-expires": expires_ms})
        for name, expires_ms in (("unused", 100_000), ("used", 100_000), ("longer", 1_000_000), ("exclusive", 0))
    }

    def connection(*used: str) -> set[str]:
        """Connect, use some queues, and return the queues that are left when the connection is closed."""
        state = shared.join(shared.SharedKey("a", "", "/"), nothing_is_read)
        for queue in used:
            state.use(queue, waits[queue])
        shared.leave(state)
        assert state.terms.keys() == state.temporaries.keys()
        return set(state.temporaries)

    assert connection(*waits) == {"unused", "used", "longer"}
    now = 60.0
    assert connection("used") == {"unused", "used", "longer"}
    now = 120.0
    assert connection() == {"used", "longer"}
    now = 170.0
    assert connection() == {"longer"}
    now = 1000.0
    assert connection() == set()


class Closable:
    """A client, or what reads for temporary queues, that counts how often it is closed, and may fail then."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


def test_all_that_reads_for_temporary_queues_is_closed_also_when_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = Closable()
    readers = [Closable(ConnectionFailed("it is gone")), Closable(ConnectionFailed("it is gone"))]
    unused = iter(readers)
    monkeypatch.setattr(shared, "LogReader", lambda *_: next(unused))
    state = shared.join(shared.SharedKey("b", "", "/"), lambda: client)
    state.use("news", terms_of(durable=False, exclusive=True, auto_delete=False, arguments=None))
    for tag in "ab":
        state.read("news", "exchange", tag, nothing_comes)
    with pytest.raises(ConnectionFailed):
        shared.leave(state)
    assert [closable.closed for closable in [*readers, client]] == [1, 1, 1]


def test_nothing_is_read_for_a_temporary_queue_that_another_connection_has_ended() -> None:
    state = shared.join(shared.SharedKey("d", "", "/"), nothing_is_read)
    state.use("news", terms_of(durable=False, exclusive=True, auto_delete=False, arguments=None))
    state.end("news")
    assert state.temporary("news").bell is None
    state.read("news", "exchange", "", nothing_comes)
    shared.leave(state)
    assert state.terms.keys() == state.temporaries.keys() == set()


class Busy(list[Any]):
    """The bindings of an exchange, of which another thread makes one and deletes one when they have been read."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.copy()
        self.append(("new", None, "other"))
        self.pop(0)


def test_a_temporary_queue_that_ends_takes_along_no_binding_that_another_thread_makes() -> None:
    state = shared.join(shared.SharedKey("e", "", "/"), nothing_is_read)
    state.use("news", terms_of(durable=False, exclusive=True, auto_delete=False, arguments=None))
    table = Busy([("a", None, "news"), ("b", None, "other"), ("c", None, "news"), ("d", None, "news")])
    state.state.exchanges["exchange"] = {"type": "direct", "table": table}
    for key in "acd":
        state.state.binding_declare("news", "exchange", key, None)
    shared.leave(state)
    assert table.copy() == [("b", None, "other"), ("new", None, "other")]


def test_a_temporary_queue_expires_whatever_exchanges_and_bindings_are_deleted_meanwhile() -> None:
    state = shared.join(shared.SharedKey("f", "", "/"), nothing_is_read)
    state.use("news", terms_of(durable=False, exclusive=True, auto_delete=False, arguments=None))
    state.state.binding_declare("news", "deleted", "a", None)
    shared.leave(state)
    assert state.terms.keys() == state.temporaries.keys() == set()


def test_a_connection_that_fails_to_close_has_left_its_process_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LogReader", lambda *_: Closable(ConnectionFailed("it is gone")))
    transport = Connection("metaq://127.0.0.1:1/e").create_transport()
    state = transport.shared
    state.use("news", terms_of(durable=False, exclusive=True, auto_delete=False, arguments=None))
    state.read("news", "exchange", "", nothing_comes)
    with pytest.raises(ConnectionFailed):
        transport.close_connection(transport)
    transport.close_connection(transport)
    assert state.connections == 0


FORKING: Final = f"""
import os, signal, threading
from kombu_metaq import shared
from kombu_metaq.terms import terms_of

signal.alarm({COME_S:.0f})  # one that hangs ends
readers, is_held, may_end = [], threading.Event(), threading.Event()

class Reader:
    def __init__(self, client, topic, tag, deliver):
        readers.append((os.getpid(), tag))
        if tag == "slow":
            is_held.set()
            may_end.wait()

    def close(self):
        pass

class Client:
    def close(self):
        pass

def connection():
    return shared.join(shared.SharedKey("c", "", "/"), Client)

shared.LogReader = Reader
terms = terms_of(durable=True, exclusive=False, auto_delete=True, arguments={{"x-expires": 3_600_000}})
state = connection()
state.use("news", terms)
state.read("news", "exchange", "quick", print)
shared.leave(state)
connection()
held = threading.Thread(target=state.read, args=("news", "exchange", "slow", print))
held.start()
is_held.wait()
timer = state._ending.finished._cond
timer.acquire()  # as its thread does for a moment
child = os.fork()
if child == 0:
    signal.alarm({COME_S:.0f})
    state.use("news", terms)
    state.read("news", "exchange", "quick", print)
    assert readers[-1] == (os.getpid(), "quick"), readers
    shared.leave(state)
    assert connection() is not state
    state.end("news")
    os._exit(0)
timer.release()
may_end.set()
held.join()
assert os.waitpid(child, 0)[1] == 0, "the child has failed"
"""


def test_a_child_of_a_fork_uses_and_closes_a_connection_while_threads_of_its_parent_are_busy() -> None:
    """A program of its own: a test that forks itself would copy what other tests have left."""
    environment = clean_environment(PYTHONPATH=":".join(sys.path))
    done = subprocess.run([sys.executable, "-c", FORKING], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Consumer(Closable):
    """A consumer that another thread has closed."""

    def partitions(self) -> list[MessageQueue]:
        return []

    def poll(self, timeout_s: float) -> list[ReceivedMessage]:
        raise ClientClosed("this consumer was closed")


def test_a_reader_closes_its_consumer_again_as_it_may_have_added_a_partition_meanwhile() -> None:
    consumer = Consumer()
    client: Any = SimpleNamespace(pull_consumer=lambda *_, **__: consumer)
    LogReader(client, "exchange", "", nothing_comes)
    wait_until(lambda: consumer.closed == 1, COME_S, "its thread has closed it")


def nothing_is_read() -> Client:
    raise AssertionError


def nothing_comes(raw: Raw) -> None:
    raise AssertionError(raw)
