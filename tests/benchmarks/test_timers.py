"""The timers benchmark: the load generator's leases, delays and ids at a broker, what is measured beside it, and the checks."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.figures import MeasurementError, Verdict
from benchmarks.holding import holder, measure_holding
from benchmarks.leasing import allow_many, deduplicate, measure_pushes, open_bytes, seconds_until_pop
from benchmarks.parking import DAY_MS, TOPIC, measure_delivery, measure_idle_lateness, stored_lateness, timer_figures
from benchmarks.peers import Level, Server, metaq
from benchmarks.programs import LoadPlan, run_load, run_loads
from benchmarks.rounds import Rounds
from benchmarks.suites.get import fill
from benchmarks.suites.timers import Sizes, checks
from metaq.client import connect

pytestmark = pytest.mark.partner("gcc")

SMALL = ("--segment-bytes", "33554432")
BODY_BYTES = 100
MESSAGES = 700


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with metaq(Level.MEMORY).running(tmp_path / "server", SMALL) as running:
        yield running


def finished(server: Server, group: str, topic: str = "bench") -> int:
    """The offset of a group: all messages before it are finished."""
    with connect(f"127.0.0.1:{server.registry_port}") as client:
        return sum(client.admin().offsets(group, topic).values())


def stored(server: Server, topic: str) -> int:
    with connect(f"127.0.0.1:{server.registry_port}") as client:
        return sum(queue.end for queue in client.admin().queues(topic))


@pytest.mark.parametrize(
    ("protocol", "connections", "batch"),
    [
        ("remoting-pop-ack", 3, 32),
        ("remoting-pop-ack", 5, 1),
        ("remoting-pop-ack-batch", 3, 32),
        ("metaq-pop-ack", 3, 32),
    ],
)
def test_all_messages_are_leased_once_and_finished(server: Server, protocol: str, connections: int, batch: int) -> None:
    fill(metaq(Level.MEMORY), server, BODY_BYTES, MESSAGES)
    plan = LoadPlan(connections, 1, BODY_BYTES, 60.0, 0.0, batch=batch, group="workers")
    assert run_load(protocol, server.port, plan).messages == MESSAGES
    assert finished(server, "workers") == MESSAGES


@pytest.mark.parametrize("protocol", ["remoting-pop", "metaq-pop"])
def test_pops_without_acks_leave_all_open(server: Server, protocol: str) -> None:
    fill(metaq(Level.MEMORY), server, BODY_BYTES, MESSAGES)
    plan = LoadPlan(2, 1, BODY_BYTES, 60.0, 0.0, batch=10, group="workers")
    assert run_load(protocol, server.port, plan).messages == MESSAGES
    assert finished(server, "workers") == 0


def test_what_is_given_back_comes_again(server: Server) -> None:
    fill(metaq(Level.MEMORY), server, BODY_BYTES, MESSAGES)
    allow_many(server, "workers")
    plan = LoadPlan(2, 1, BODY_BYTES, 60.0, 0.0, 20 * MESSAGES, batch=32, group="workers")
    assert run_load("metaq-pop-nack", server.port, plan).messages >= 20 * MESSAGES
    assert finished(server, "workers") == 0


def test_pushed_messages_are_acked(server: Server) -> None:
    fill(metaq(Level.MEMORY), server, BODY_BYTES, MESSAGES)
    plan = LoadPlan(1, 1, BODY_BYTES, 60.0, 0.0, MESSAGES, batch=100, group="workers")
    assert run_load("metaq-push", server.port, plan).messages == MESSAGES
    assert finished(server, "workers") == MESSAGES


def test_messages_of_another_size_are_an_error(server: Server) -> None:
    fill(metaq(Level.MEMORY), server, BODY_BYTES, MESSAGES)
    for protocol in ("remoting-pop", "metaq-pop"):
        with pytest.raises(MeasurementError, match="another size"):
            run_load(protocol, server.port, LoadPlan(1, 1, BODY_BYTES + 1, 60.0, 0.0, batch=10, group=protocol))


def test_parks_are_due_when_they_should_be(server: Server) -> None:
    soon = LoadPlan(2, 10, BODY_BYTES, 60.0, 0.0, 300, topic=TOPIC, delay_ms=100)
    later = LoadPlan(2, 10, BODY_BYTES, 60.0, 0.0, 200, topic=TOPIC, delay_ms=DAY_MS, spread_ms=DAY_MS)
    run_loads(server.port, ("remoting-park", soon), ("remoting-park", later))
    deadline = time.monotonic() + 30
    while timer_figures(server)["timers_delivered"] < 300 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert timer_figures(server)["timers_pending"] == 200
    with connect(f"127.0.0.1:{server.registry_port}") as client:
        address = client.admin().masters()[0].address
        due = [row.due_ms for row in client.admin().timers().pending(address)]
    now_ms = time.time() * 1000
    assert now_ms + DAY_MS - 120_000 < min(due) and max(due) < now_ms + 2 * DAY_MS
    assert max(due) - min(due) > DAY_MS / 2


def test_deliveries_and_their_lateness(server: Server) -> None:
    assert measure_delivery(server, 500, BODY_BYTES, 2000.0) > 0
    late = stored_lateness(server, TOPIC, 100)
    assert len(late) == 400 and min(late) >= 0
    late = measure_idle_lateness(server, 20)
    assert len(late) == 20 and min(late) >= 0


def test_parks_that_take_longer_than_until_they_are_due_are_no_measurement(server: Server) -> None:
    with pytest.raises(MeasurementError, match="took longer"):
        measure_delivery(server, 100, BODY_BYTES, -200.0)


def test_an_id_is_stored_once(server: Server) -> None:
    deduplicate(server, "once", 600_000)
    plan = LoadPlan(2, 10, BODY_BYTES, 60.0, 0.0, 500, topic="once")
    for _ in range(2):
        assert run_load("remoting-send-once", server.port, plan).messages == 500
    assert 500 <= stored(server, "once") < 1000
    run_load("remoting-send-once", server.port, LoadPlan(2, 10, BODY_BYTES, 60.0, 0.0, 500, topic="once", first=1_000_000))
    assert stored(server, "once") >= 1000


def test_pushes_to_an_idle_subscriber(server: Server) -> None:
    found = measure_pushes(server, 10)
    assert len(found) == 10 and min(found) > 0


@pytest.mark.slow
def test_held_pops_are_woken_one_by_one(tmp_path: Path) -> None:
    with holder(SMALL).running(tmp_path / "server") as server:
        found = measure_holding(server, pulls=20, wakes=25, leased=True)
    assert len(found.wakes_us) == 25 and found.each_bytes > 0


@pytest.mark.slow
def test_open_messages_and_the_start_with_them(tmp_path: Path) -> None:
    system = metaq(Level.MEMORY, SMALL)
    server = system.start(tmp_path / "server")
    try:
        fill(system, server, BODY_BYTES, MESSAGES)
        allow_many(server, "workers")
        assert open_bytes(server, "workers", MESSAGES - 100, BODY_BYTES, 1) > 0
        server.kill()
        seconds, server = seconds_until_pop(system, tmp_path / "server", "workers")
        assert seconds > 0
    finally:
        server.stop()


def test_what_was_not_measured_is_not_missed(tmp_path: Path) -> None:
    taken = Rounds(Bench(Console(quiet=True), tmp_path, [], None, quick=True), 1.0, 0.1)
    taken.add("parks, of sends", 0.85)
    taken.add("nacks, messages/s", 19_999)
    verdicts = {check.name: check.must_verdict for check in checks(taken, Sizes())}
    assert verdicts.pop("N-1 parks, of sends") is Verdict.HELD
    assert verdicts.pop("N-16 nacks, messages/s") is Verdict.MISSED
    assert set(verdicts.values()) == {Verdict.NOT_MEASURED}
