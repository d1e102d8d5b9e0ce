"""Routes of all brokers that are kept for clients' questions: how long, how many, and who waits for whom."""

from typing import Any, Final, cast

import gevent
import pytest
from gevent.event import Event

from metaq.errors import ConnectionFailed, MetaqError
from metaq.protocol.remoting.routes import QueueData, TopicRoute
from metaq.server.registering import clusterroutes
from metaq.server.registering.clusterroutes import KEEP_S, ClusterRoutes
from tests.support.manualclock import ManualClock

TOPIC: Final = "orders"


class Registration:
    """One whose registry answers when the test lets it."""

    def __init__(self, *, is_registry: bool = False) -> None:
        self.is_registry = is_registry
        self.asked: list[str] = []
        self.answers = Event()
        self.answers.set()
        self.problem: MetaqError | None = None

    def route(self, topic: str) -> TopicRoute:
        self.asked.append(topic)
        self.answers.wait()
        if self.problem is not None:
            raise self.problem
        return TopicRoute((QueueData("b", len(self.asked), 1, 6),), ())


def routes_of(registration: Registration, clock: ManualClock) -> ClusterRoutes:
    return ClusterRoutes(cast(Any, registration), clock.monotonic)


def test_a_route_counts_for_a_while() -> None:
    """Then a registry is asked again."""
    registration, clock = Registration(), ManualClock()
    routes = routes_of(registration, clock)
    assert routes.known(TOPIC) is None
    first = routes.fetch(TOPIC)
    clock.advance(KEEP_S - 1)
    assert routes.known(TOPIC) == first
    clock.advance(1)
    assert routes.known(TOPIC) is None
    assert routes.fetch(TOPIC) != first
    assert registration.asked == [TOPIC, TOPIC]


def test_the_own_registry_is_asked_each_time() -> None:
    """It answers at once, and changes count at once."""
    registration = Registration(is_registry=True)
    routes = routes_of(registration, ManualClock())
    assert routes.known(TOPIC) != routes.known(TOPIC)


@pytest.mark.parametrize("problem", [None, ConnectionFailed("gone")])
def test_many_that_ask_at_once_make_one_request(problem: MetaqError | None) -> None:
    """All members of a group ask after each change of it, and all get its outcome."""
    registration = Registration()
    registration.problem = problem
    registration.answers.clear()
    routes = routes_of(registration, ManualClock())

    def outcome() -> TopicRoute | MetaqError:
        try:
            return routes.fetch(TOPIC)
        except MetaqError as error:
            return error

    asking = [gevent.spawn(outcome) for _ in range(5)]
    gevent.sleep(0)
    registration.answers.set()
    gevent.joinall(asking, timeout=30)
    assert len({id(each.value) for each in asking}) == 1
    assert registration.asked == [TOPIC]
    assert (routes.known(TOPIC) is None) == (problem is not None)


def test_kept_routes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes."""
    monkeypatch.setattr(clusterroutes, "MOST_ROUTES", 2)
    routes = routes_of(Registration(), ManualClock())
    for topic in ("a", "b", "a", "c"):
        routes.fetch(topic)
    assert [topic for topic in "abc" if routes.known(topic) is not None] == ["a", "c"]
