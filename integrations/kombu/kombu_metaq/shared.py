"""State that the connections of a process to one virtual host share: queues as declared, bindings, temporary queues.

An AMQP broker would know these. Celery declares a reply queue on one connection and consumes it on another one. What was
declared stays known to the process after its last connection; temporary queues end then, or when they have expired.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kombu.transport import virtual

from kombu_metaq.bell import Bell
from kombu_metaq.delivery import Raw
from kombu_metaq.logs import LogReader
from kombu_metaq.terms import QueueTerms

if TYPE_CHECKING:
    from metaq.client import Client

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
"""Messages that wait in a temporary queue for their consumer; older ones are dropped then."""


class SharedKey(NamedTuple):
    """The names that connections have in common which share their state."""

    registries: str
    user: str
    virtual_host: str


class Reader(Protocol):
    """What reads for temporary queues."""

    def close(self) -> None: ...


class Temporary:
    """The messages of a temporary queue, and the connection that consumes it."""

    def __init__(self) -> None:
        self.waiting: deque[Raw] = deque(maxlen=MOST_WAITING)
        self.bell: Bell | None = None
        self._is_full = False

    def put(self, raw: Raw) -> None:
        """Take a message, on any thread."""
        if len(self.waiting) == MOST_WAITING and not self._is_full:
            self._is_full = True
            logger.warning("a temporary queue is full, its oldest messages are dropped most=%d", MOST_WAITING)
        self.waiting.append(raw)
        if self.bell is not None:
            self.bell.ring()


class Shared:
    """The part of a virtual host that the connections of this process have declared."""

    def __init__(self, connect: "Callable[[], Client]") -> None:
        self.connect = connect
        self.connections = 0
        self.ending: threading.Timer | None = None
        self.terms: dict[str, QueueTerms] = {}
        self.state = virtual.base.BrokerState()
        self.temporaries: dict[str, Temporary] = {}
        self._client: Client | None = None
        self._guard = threading.Lock()
        self._logs: dict[tuple[str, str], LogReader] = {}

    def temporary(self, queue: str) -> Temporary:
        """Return a temporary queue, which is made with the first call."""
        return self.temporaries.setdefault(queue, Temporary())

    def read(self, topic: str, tag: str, deliver: Callable[[Raw], None]) -> None:
        """Have what is sent to an exchange from now on delivered: all of it, or what has a tag."""
        with self._guard:
            if (topic, tag) not in self._logs:
                if self._client is None:
                    self._client = self.connect()
                self._logs[topic, tag] = LogReader(self._client, topic, tag, deliver)

    def leave_log(self, topic: str, tag: str) -> None:
        """Read no more what was sent to an exchange, all of it or what has a tag."""
        with self._guard:
            log = self._logs.pop((topic, tag), None)
        if log is not None:
            log.close()

    def route(self, exchange: str, raw: Raw) -> None:
        """Take what was sent to an exchange, on the thread that reads its topic, for the temporary queues bound to it."""
        declared = self.state.exchanges.get(exchange)
        if declared is None:
            return
        kind = virtual.Channel.exchange_types[declared["type"]](None)
        for queue in kind.lookup(list(declared["table"]), exchange, raw["properties"]["delivery_info"]["routing_key"], None):
            temporary = self.temporaries.get(queue)
            if temporary is not None:
                temporary.put(raw)

    def expires_s(self) -> float:
        """Return how long a temporary queue waits for the next connection, at most; 0 when there is none that waits."""
        return max((self.terms[queue].expires_s for queue in self.temporaries), default=0.0)

    def end_temporaries(self) -> list[Reader]:
        """Forget all temporary queues and their bindings, and return what has read for them and is to be closed."""
        for queue in self.temporaries:
            for exchange, _, _ in self.state.queue_bindings(queue):
                table = self.state.exchanges[exchange]["table"]
                table[:] = [binding for binding in table if binding[-1] != queue]
            self.state.queue_bindings_delete(queue)
            del self.terms[queue]
        self.temporaries.clear()
        readers: list[Reader] = [*self._logs.values()]
        self._logs.clear()
        if self._client is not None:
            readers.append(self._client)
            self._client = None
        return readers


_guard = threading.Lock()
_shared: dict[SharedKey, Shared] = {}


def join(key: SharedKey, connect: "Callable[[], Client]") -> Shared:
    """Return what a connection shares with others; from then on it connects as the newest one does."""
    with _guard:
        shared = _shared.setdefault(key, Shared(connect))
        shared.connect = connect
        shared.connections += 1
        if shared.ending is not None:
            shared.ending.cancel()
            shared.ending = None
        return shared


def leave(shared: Shared) -> None:
    """Leave what a connection has joined. With the last one temporary queues end, or when the last of them has expired.

    A reply queue is declared on the connection that sends a task, and consumed later on another one.
    """
    with _guard:
        shared.connections -= 1
        if shared.connections:
            return
        expires_s = shared.expires_s()
        if expires_s:
            shared.ending = threading.Timer(expires_s, _end, (shared,))
            shared.ending.daemon = True
            shared.ending.start()
            return
    _end(shared)


def _end(shared: Shared) -> None:
    """End the temporary queues, if no connection has joined meanwhile."""
    with _guard:
        if shared.connections:
            return
        readers = shared.end_temporaries()
    for reader in readers:
        reader.close()


def _forget() -> None:
    """Begin anew in a child of a fork: threads that read, and their positions, are the parent's."""
    global _guard  # noqa: PLW0603 - a thread of the parent may have held it
    _guard = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget)
