"""Order by key, beyond what lines may hold and what one pop may look at."""

import itertools
import time
from typing import Final

import gevent
import pytest

from metaq.engine.leases.draining import Drain
from metaq.engine.leases.figures import OpenMessage
from metaq.engine.leases.keyed import MOST_LINED, MOST_LOOKED
from metaq.engine.leases.planning import PopRequest
from metaq.engine.reading.filters import filter_of, parse_cached
from metaq.leases.events import EVENTS, decode_events
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition, TopicPartition
from metaq.protocol.record import decode_record
from metaq.store.files.filecache import read_here, run_here
from tests.engine.leases.leased import GROUPS, PARTITIONS, TOPIC, LeasedBroker

PLACE: Final = GroupPartition(GROUPS[0], TOPIC, 0)
LEASE_MS: Final = 10_000
MOST: Final = 32


@pytest.fixture
def broker() -> LeasedBroker:
    broker = LeasedBroker()
    broker.order_by_key()
    return broker


def put(broker: LeasedBroker, *keys: str) -> None:
    for key in keys:
        assert broker.put(TOPIC, 0, b"", key=key)
    broker.end_turn()


def request(broker: LeasedBroker) -> PopRequest:
    return broker.request(PLACE.group, 0, MOST, LEASE_MS)


def pop(broker: LeasedBroker) -> list[int]:
    wanted = request(broker)
    result = broker.take(wanted, broker.plan(wanted))
    broker.end_turn()
    return [] if result is None or not result.given else list(result.given[0].ordinals)


def test_a_pop_that_finds_the_lines_full_changes_nothing(broker: LeasedBroker) -> None:
    """A change would wake its consumer again; what waits is given all the same, as much as is wanted."""
    put(broker, *(str(number) for number in range(MOST)))
    put(broker, *itertools.repeat("0", MOST_LINED + 2))
    assert pop(broker) == list(range(MOST))
    for _ in range(32):
        assert pop(broker) == []
    state = broker.state(PLACE)
    assert state is not None and state.lined == MOST_LINED
    assert broker.plan(request(broker)) == []
    broker.advance(LEASE_MS / 1000)
    assert pop(broker) == list(range(MOST))


def test_messages_in_line_become_retries_at_once(broker: LeasedBroker) -> None:
    """E-22: nobody has had them, so no lease has to end before a group that pulls from now on gets them."""
    put(broker, "a", "a", "a")
    assert pop(broker) == [0]
    drain = Drain(broker.context, broker.leases, broker.leasing.moves, run_here)
    draining = gevent.spawn(drain.drain, broker.context.groups.ensure(PLACE.group), TOPIC)
    for _ in range(5):
        broker.end_turn()
    draining.get(block=False)
    retries = broker.store.queues[TopicPartition(f"%RETRY%{PLACE.group}", 0)]
    assert (broker.leases.open, retries.next) == (0, 2)


def test_what_was_in_line_and_is_leased_stays_leased_after_a_restart(broker: LeasedBroker) -> None:
    """E-22: its turn came before the restart."""
    put(broker, "a", "a")
    assert pop(broker) == [0]
    broker.leases.ack(PLACE, opened(broker)[0].first_ms, 0, 1)
    assert pop(broker) == [1]
    broker = broker.killed()
    broker.order_by_key()
    figures = broker.leasing.figures.of(PLACE)
    assert figures is not None and (figures.in_flight, figures.lined) == (1, 0)
    assert pop(broker) == []
    broker.advance(LEASE_MS / 1000)
    assert pop(broker) == [1]


def test_a_filter_ends_a_pop_after_some_milliseconds(broker: LeasedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is served meanwhile; the next pop goes on where this one ended."""
    put(broker, *(str(number) for number in range(100)))
    clock = itertools.count(step=0.005)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    wanted = request(broker)._replace(wanted=filter_of(parse_cached(TOPIC, "a = 1", kind="SQL92")))
    broker.take(wanted, broker.plan(wanted))
    state = broker.state(PLACE)
    assert state is not None and 0 < state.next < 5


def opened(broker: LeasedBroker) -> list[OpenMessage]:
    return broker.leasing.figures.open_from(PLACE, 0, MOST, lambda: None)


def test_lined_messages_are_not_finished_and_were_never_given(broker: LeasedBroker) -> None:
    """They count in the lag, have no times, and what gives one of them gives it for the first time."""
    put(broker, *itertools.repeat("a", 4))
    assert pop(broker) == [0]
    figures, counts = broker.leasing.figures.of(PLACE), broker.leases.counts.of(PLACE.group, TOPIC)
    assert figures is not None and (figures.lag, figures.in_flight, figures.lined) == (4, 1, 3)
    assert figures.oldest_ms == opened(broker)[0].first_ms == broker.clock.now_ms()
    assert broker.leasing.figures.numbers()["leases_lined"] == 3
    assert [each.state for each in opened(broker)] == ["leased", "lined", "lined", "lined"]
    assert opened(broker)[1:] == [OpenMessage(ordinal, 0, 0, 0, "lined") for ordinal in (1, 2, 3)]
    broker.leases.ack(PLACE, opened(broker)[0].first_ms, 0, 1)
    figures = broker.leasing.figures.of(PLACE)
    assert figures is not None and (figures.lag, figures.ready, figures.lined) == (3, 1, 2)
    assert figures.oldest_ms is None and opened(broker)[0] == OpenMessage(1, 0, 0, 0, "waiting")
    assert pop(broker) == [1] and (counts.given, counts.again) == (2, 0)
    broker.advance(LEASE_MS / 1000)
    assert pop(broker) == [1] and (counts.given, counts.again) == (2, 1)


def test_a_log_that_ends_after_any_record_of_a_pop_has_nothing_done(
    broker: LeasedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-22: a power cut or a failover may come between two records of one turn; what is in line then waits still."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    for partition in range(PARTITIONS):
        for key in itertools.repeat("a", MOST_LOOKED):
            assert broker.put(TOPIC, partition, b"", key=key)
        broker.end_turn()
    wanted = broker.request(PLACE.group, None, MOST, LEASE_MS)
    assert broker.take(wanted, broker.plan(wanted)) is not None
    broker.end_turn()
    states = {GroupPartition(PLACE.group, TOPIC, partition): PartitionLeases(0) for partition in range(PARTITIONS)}
    bodies = bodies_of(broker, EVENTS)
    for body in bodies:
        for place, event in decode_events(body).events:
            states[place].apply(event, 0, 0)
        assert all(state.open == state.next for state in states.values())
    assert len(bodies) > 1 and [state.open for state in states.values()] == [MOST_LOOKED] * PARTITIONS


def bodies_of(broker: LeasedBroker, key: TopicPartition) -> list[bytes]:
    records = list(broker.store.records(broker.store.queues[key], 0, 1 << 20, read_here))
    found = [each for each in records if each is not None]
    return [bytes(decode_record(each.buffer[each.at : each.at + each.size]).body) for each in found]
