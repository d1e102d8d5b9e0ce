"""Routes of topics over all brokers of the cluster, as this broker's registries know them, for clients that ask the broker."""

from collections.abc import Callable
from typing import Any, Final

from gevent.event import AsyncResult

from metaq.protocol.remoting.routes import TopicRoute
from metaq.server.registering.registration import Registration

KEEP_S: Final = 30.0
"""Seconds for which a route of an external registry counts."""
MOST_ROUTES: Final = 1024
"""Routes that are kept; of more topics the oldest is dropped."""


class ClusterRoutes:
    """The routes of topics: the own registry is asked each time, external ones once in ``KEEP_S``."""

    def __init__(self, registration: Registration, monotonic: Callable[[], float]) -> None:
        self._registration = registration
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, TopicRoute]] = {}  # by topic, the oldest first, with the time of the answer
        self._asked: dict[str, Any] = {}

    def known(self, topic: str) -> TopicRoute | None:
        """Return a route without waiting; ``None`` when a registry must be asked first.

        Raise ``UnknownTopic`` when no broker has the topic.
        """
        if self._registration.is_registry:
            return self._registration.route(topic)
        answered_s, route = self._kept.get(topic, (0.0, None))
        return route if self._monotonic() - answered_s < KEEP_S else None

    def fetch(self, topic: str) -> TopicRoute:
        """Ask a registry, together with all others that want the same route meanwhile; errors are those of
        ``Registration.route``."""
        asked = self._asked.get(topic)
        if asked is not None:
            answer: TopicRoute = asked.get()
            return answer
        asked = self._asked[topic] = AsyncResult()
        try:
            route = self._registration.route(topic)
        except Exception as error:
            asked.set_exception(error)
            raise
        finally:
            del self._asked[topic]
        asked.set(route)
        self._keep(topic, route)
        return route

    def _keep(self, topic: str, route: TopicRoute) -> None:
        self._kept.pop(topic, None)
        self._kept[topic] = self._monotonic(), route
        if len(self._kept) > MOST_ROUTES:
            del self._kept[next(iter(self._kept))]
