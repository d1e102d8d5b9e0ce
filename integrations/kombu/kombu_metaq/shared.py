"""State that the connections of a process to one virtual host share: queues as declared, bindings, temporary queues.

An AMQP broker would know these. Celery declares a reply queue on one connection and consumes it on another one. What was
declared stays known to the process after its last connection; temporary queues end then, or when they have expired unless
they are declared or consumed before.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Final, NamedTuple

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


class Temporary:
    """The messages of a temporary queue, and the connection that consumes it."""

    def __init__(self) -> None:
        self.waiting: deque[Raw] = deque(maxlen=MOST_WAITING)
        self.bell: Bell | None = None
        self.logs: set[tuple[str, str]] = set()
        """The topics and tags that are read for it."""
        self.ends_at: float | None = None
        """When it ends, on the monotonic clock; ``None`` while connections use it."""
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
        self.terms: dict[str, QueueTerms] = {}
        self.state = virtual.base.BrokerState()
        self.temporaries: dict[str, Temporary] = {}
        self._client: Client | None = None
        self._ending: threading.Timer | None = None
        self._guard = threading.Lock()
        self._logs: dict[tuple[str, str], LogReader] = {}

    def renew(self) -> None:
        """Let connections that a child of a fork has inherited go on there: with a new lock, timer and readers of its own.

        Those of the parent may have been held or waited for by its threads, which the child does not have.
        """
        self._guard = threading.Lock()
        self._ending = None
        self._logs = {}

    def temporary(self, queue: str) -> Temporary:
        """Return a temporary queue; for one that another connection has ended an empty one, which gets nothing."""
        return self.temporaries.get(queue) or Temporary()

    def use(self, queue: str, terms: QueueTerms) -> None:
        """Have a temporary queue that is declared or consumed now, at least until no connection is left."""
        with self._guard:  # it may be ending, with its terms
            self.terms.setdefault(queue, terms)
            self.temporaries.setdefault(queue, Temporary()).ends_at = None

    def read(self, queue: str, topic: str, tag: str, deliver: Callable[[Raw], None]) -> None:
        """Have what is sent to an exchange from now on delivered for a temporary queue: all of it, or what has a tag.

        Nothing is read for a queue that another connection has ended.
        """
        with self._guard:
            temporary = self.temporaries.get(queue)
            if temporary is None:
                return
            if (topic, tag) not in self._logs:
                if self._client is None:
                    self._client = self.connect()
                self._logs[topic, tag] = LogReader(self._client, topic, tag, deliver)
            temporary.logs.add((topic, tag))

    def put(self, queue: str, raw: Raw) -> None:
        """Take a message for a temporary queue, on any thread; it is dropped when the queue has ended."""
        temporary = self.temporaries.get(queue)
        if temporary is not None:
            temporary.put(raw)

    def route(self, exchange: str, raw: Raw) -> None:
        """Take what was sent to an exchange, on the thread that reads its topic, for the temporary queues bound to it."""
        declared = self.state.exchanges.get(exchange)
        if declared is None:
            return
        kind = virtual.Channel.exchange_types[declared["type"]](None)
        for queue in kind.lookup(list(declared["table"]), exchange, raw["properties"]["delivery_info"]["routing_key"], None):
            self.put(queue, raw)

    def begin_waiting(self) -> None:
        """Have the temporary queues wait for the next connection from now on, if they do not wait for it already."""
        now = time.monotonic()
        with self._guard:
            for queue, temporary in self.temporaries.items():
                if temporary.ends_at is None:
                    temporary.ends_at = now + self.terms[queue].expires_s

    def end_expired(self) -> None:
        """End the temporary queues whose time is over, and come back for the next one."""
        with contextlib.ExitStack() as closing, self._guard:
            now = time.monotonic()
            deadlines = [(at, queue) for queue, temporary in self.temporaries.items() if (at := temporary.ends_at) is not None]
            self._end({queue for at, queue in deadlines if at <= now}, closing)
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            next_at = min((at for at, _ in deadlines if at > now), default=None)
            if next_at is not None:
                self._ending = threading.Timer(next_at - now, self.end_expired)
                self._ending.daemon = True
                self._ending.start()

    def end(self, queue: str) -> None:
        """End a temporary queue."""
        with contextlib.ExitStack() as closing, self._guard:
            self._end({queue}, closing)

    def _end(self, queues: Set[str], closing: contextlib.ExitStack) -> None:
        """Forget temporary queues and their bindings, and have closed what has read for them alone."""
        for declared in list(self.state.exchanges.values()):
            table = declared["table"]  # kombu changes it on other threads meanwhile, without the lock
            for binding in [binding for binding in list(table) if binding[-1] in queues]:
                with contextlib.suppress(ValueError):
                    table.remove(binding)
        for queue in queues:
            self.state.queue_bindings_delete(queue)
            self.terms.pop(queue, None)
            self.temporaries.pop(queue, None)
        read = {place for temporary in self.temporaries.values() for place in temporary.logs}
        unread = self._logs.keys() - read
        if not self.connections and not read and self._client is not None:
            closing.callback(self._client.close)  # the first one is called last
            self._client = None
        for place in unread:
            closing.callback(self._logs.pop(place).close)


_guard = threading.Lock()
_shared: dict[SharedKey, Shared] = {}


def join(key: SharedKey, connect: "Callable[[], Client]") -> Shared:
    """Return what a connection shares with others; from then on it connects as the newest one does."""
    with _guard:
        shared = _shared.setdefault(key, Shared(connect))
        shared.connect = connect
        shared.connections += 1
        return shared


def leave(shared: Shared) -> None:
    """Leave what a connection has joined. With the last one temporary queues end, or when they have expired.

    A reply queue is declared on the connection that sends a task, and consumed later on another one.
    """
    with _guard:
        shared.connections -= 1
        if shared.connections:
            return
        shared.begin_waiting()
    shared.end_expired()


def _forget() -> None:
    """Begin anew in a child of a fork: threads that read, and their positions, are the parent's."""
    global _guard  # noqa: PLW0603 - a thread of the parent may have held it
    _guard = threading.Lock()
    for shared in _shared.values():
        shared.renew()
    _shared.clear()


os.register_at_fork(after_in_child=_forget)
