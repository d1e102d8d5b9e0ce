"""A registry: its tables and keys, and the connections through which brokers registered.

A broker's registration is bound to the connection that carried it last: when that connection closes, the broker is removed.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import cast

from metaq.clock import Clock
from metaq.config import Settings
from metaq.engine.tables.connections import Connection
from metaq.protocol.remoting.codes import ORDER_TOPICS
from metaq.protocol.remoting.routes import TopicConfigs
from metaq.registry.kvconfig import KvConfig
from metaq.registry.routes import BrokerKey, Registered, Removed, RouteTables, nobody_waits

logger = logging.getLogger(__name__)


class Registry:
    """The tables and keys of one registry, and its watch over the brokers' connections."""

    def __init__(self, settings: Settings, config: KvConfig, clock: Clock) -> None:
        self.tables = RouteTables(settings.registry_expiry_ms)
        self.config = config
        self._clock = clock
        self._watched: set[Connection] = set()
        for problem in config.problems:
            logger.error("registry keys damaged, the version before is used problem=%s", problem)

    @property
    def now_ms(self) -> int:
        """A time in milliseconds that never jumps: a changed wall clock removes no broker."""
        return round(self._clock.monotonic() * 1000)

    def register(
        self,
        key: BrokerKey,
        ha_address: str,
        table: TopicConfigs,
        session: Connection | None = None,
        timeout_ms: int | None = None,
        rest: Callable[[], None] = nobody_waits,
    ) -> Registered:
        """Enter or refresh a broker; without a session it is the broker of this process.

        ``rest`` is called from time to time while a long registration is entered.
        """
        if session is not None and session not in self._watched:
            self._watched.add(session)
            session.at_close(partial(self._closed, session))
        done = self.tables.register(key, ha_address, table, session, self.now_ms, timeout_ms, rest)
        if done.first:
            logger.info("broker registered broker=%s topics=%d", key, len(table.topics))
        if done.replaced is not None:
            hint = "if both run, give one of them another broker_name"
            logger.warning("another process took a broker's place broker=%s before=%s hint=%s", key, done.replaced, hint)
        return done

    def ordered_topics(self) -> Mapping[str, str]:
        """Return the topics whose order is configured: topic → ``broker-a:4;broker-b:4``."""
        return self.config.table(ORDER_TOPICS) or {}

    def unregister(self, name: str, address: str) -> None:
        """Remove the broker of this process."""
        self._log_removed(self.tables.unregister(name, address, self.now_ms), "goodbye")

    def scan(self) -> None:
        """Remove the brokers that have been silent for too long, and close their connections; called periodically."""
        removed = self.tables.scan(self.now_ms)
        self._log_removed(removed, "silent")
        for _, connection in removed:
            cast(Connection, connection).close()

    def _closed(self, session: Connection) -> None:
        self._watched.discard(session)
        self._log_removed(self.tables.connection_closed(session, self.now_ms), "connection closed")

    def _log_removed(self, removed: Iterable[Removed], reason: str) -> None:
        for key, _ in removed:
            logger.info("broker removed broker=%s reason=%s", key, reason)
