"""The parts of a broker in the process of the test: a real store, but no socket, and a loop that the test turns.

A test builds the handlers it is about from ``Parts``, and adds them to the endpoint, which checks rights and reports errors as
in a broker. ``Text`` and ``Remoting`` are clients: real sessions over a connection that keeps what it is sent. Nothing is
answered from the log before ``Parts.end_turn``, and the clock stands still unless the test moves it.
"""

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import gevent

from metaq.config import Settings
from metaq.engine.context import Context
from metaq.engine.figures.counters import Counters
from metaq.engine.figures.statistics import Statistics
from metaq.engine.parts import store_settings
from metaq.engine.reading.hold import Holds
from metaq.engine.role import NoReplicas
from metaq.engine.tables.clients import Clients
from metaq.engine.tables.loading import load_tables
from metaq.engine.tables.observed import Observed
from metaq.engine.tables.offsets import OffsetTable
from metaq.engine.turn import Turns
from metaq.fields import from_values
from metaq.protocol.record import host_bytes
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.protocol.remoting.headers import encode_header
from metaq.server.endpoint import Endpoint
from metaq.server.remoting.later import Later
from metaq.server.wire.reads import StoreReads
from metaq.store.copies.epochs import Epochs
from metaq.store.files.disk import Disk
from metaq.store.files.filecache import run_here
from metaq.store.recovery.recovery import open_store
from tests.support.manualclock import ManualClock

ADDRESS: Final = ("127.0.0.1", 40_000)
SMALL: Final = {"segment_bytes": 8 << 20, "durability": "memory"}


class Watcher:
    """A watcher or timer of the loop, to which nothing ever happens."""

    def start(self, *_: object) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Timer:
    """A timer that fires once when the test moves the clock, after each start."""

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._due_s = 0.0
        self._call: Callable[[], object] | None = None

    @property
    def is_due(self) -> bool:
        return self._call is not None and self._due_s <= self._clock.monotonic()

    def start(self, callback: Callable[..., object], *arguments: object) -> None:
        self._call = partial(callback, *arguments)
        self._due_s = self._clock.monotonic() + self._seconds

    def stop(self) -> None:
        self._call = None

    close = stop

    def fire(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


class Loop:
    """A loop whose turns the test ends."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._callbacks: deque[Callable[[], object]] = deque()
        self._timers: list[Timer] = []

    def run_callback(self, callback: Callable[..., object], *arguments: object) -> None:
        self._callbacks.append(partial(callback, *arguments))

    def io(self, fd: int, events: int) -> Watcher:
        return Watcher()

    def timer(self, seconds: float) -> Timer:
        timer = Timer(self._clock, seconds)
        self._timers.append(timer)
        return timer

    def fire_timers(self) -> None:
        """Fire the timers that are due."""
        for timer in [timer for timer in self._timers if timer.is_due]:
            timer.fire()

    def end_turn(self) -> None:
        """Make the calls that wait for the end of the turn, and let greenlets run."""
        while self._callbacks:
            self._callbacks.popleft()()
        gevent.sleep(0)


class Parts:
    """The parts of a master without slaves. Settings are those of ``metaq serve``."""

    def __init__(self, data: Path, disk: Disk | None = None, **settings: Any) -> None:
        self.settings = from_values(Settings, {**SMALL, "data": data, **settings})
        self.clock = ManualClock()
        self.loop = Loop(self.clock)
        self.store = open_store(data, store_settings(self.settings), self.clock, disk)[0]
        self.context = self._make_context()
        self.holds = Holds()
        hub = cast(Any, SimpleNamespace(loop=self.loop))
        self.turns = Turns(self.store, self.settings, hub, run_here, self.holds.wake)
        self.reads = StoreReads(self.settings, run_here)
        self.later = Later(self.reads)
        self.endpoint = Endpoint(self.settings, self.loop, None)

    def _make_context(self) -> Context:
        store, monotonic, counters = self.store, self.clock.monotonic, Counters()
        tables = load_tables(self.settings, store, is_master=True, goes_on=False, run=run_here)
        return Context(
            settings=self.settings,
            store=store,
            topics=tables.topics,
            host="127.0.0.1",
            port=8123,
            store_host=host_bytes("127.0.0.1", 8123),
            groups=tables.groups,
            modes=tables.modes,
            offsets=OffsetTable(),
            clients=Clients(tables.groups, monotonic, self.loop.run_callback),
            statistics=Statistics(store.queues, self.clock, counters),
            counters=counters,
            epochs=Epochs(store),
            observed=Observed(monotonic),
            replicas=NoReplicas(),
        )

    def end_turn(self) -> None:
        """Append what was put in this turn, and send the answers."""
        self.loop.end_turn()

    def advance(self, seconds: float) -> None:
        """Move the clock, fire the timers that are due, and end the turn."""
        self.clock.advance(seconds)
        self.loop.fire_timers()
        self.loop.end_turn()

    def close(self) -> None:
        self.store.close()


class Connection:
    """A connection that keeps what it is sent."""

    def __init__(self) -> None:
        self._received: list[bytes] = []

    def fileno(self) -> int:
        return -1

    def send(self, data: bytes) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes]) -> int:
        self._received.append(b"".join(buffers))
        return len(self._received[-1])

    def close(self) -> None: ...

    def take(self) -> bytes:
        """Return what was sent since the last call."""
        received, self._received = b"".join(self._received), []
        return received


class Text:
    """A client of the text protocol."""

    def __init__(self, parts: Parts) -> None:
        self._connection = Connection()
        self._session = parts.endpoint.text(cast(Any, self._connection), ADDRESS)

    def send(self, data: bytes) -> bytes:
        """Send commands; return what is answered at once."""
        self._session.receive(data)
        return self.answers()

    def answers(self) -> bytes:
        """Return what has been answered since."""
        return self._connection.take()


class Remoting:
    """A client of the remoting protocol."""

    def __init__(self, parts: Parts) -> None:
        self._connection = Connection()
        self._session = parts.endpoint.remoting(cast(Any, self._connection), ADDRESS)
        self._opaques = itertools.count()
        self._reader = FrameReader()

    def call(self, code: int, header: tuple[Any, ...] = (), body: bytes = b"") -> RemotingCommand:
        """Send a request that is answered at once; return the answer."""
        self.send(code, header, body)
        (answer,) = self.answers()
        return answer

    def send(self, code: int, header: tuple[Any, ...] = (), body: bytes = b"") -> None:
        self.send_fields(code, encode_header(header) if header else {}, body)

    def send_fields(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        """Send a request, given by its fields."""
        self._session.receive(encode_request(code, next(self._opaques), fields, body))

    def send_together(self, code: int, requests: Sequence[Mapping[str, str]]) -> None:
        """Send requests of one code, given by their fields, in one piece."""
        self._session.receive(b"".join(encode_request(code, next(self._opaques), fields) for fields in requests))

    def answers(self) -> list[RemotingCommand]:
        """Return the frames that have come since."""
        return self._reader.receive(self._connection.take())
