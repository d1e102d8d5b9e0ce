"""One call of a user to the broker that this process is: who asks, and the ways to an answer.

What is only looked at comes from the tables (``Call.context``), after a ``demand``. All else, every change above all, goes to
the handlers of the remoting protocol's requests (``Call.ask``): rights, limits, sentences of errors, and what a slave refuses
are then the same for all protocols.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary

import gevent
from gevent.event import Event
from gevent.hub import get_hub
from gevent.lock import BoundedSemaphore

from metaq.engine.context import Context
from metaq.engine.leases.figures import LeaseFigures
from metaq.engine.reading.hold import Holds
from metaq.engine.timers.cancelling import Cancels
from metaq.engine.turn import Turns
from metaq.errors import Fenced, MetaqError, Overloaded, RequestFailed
from metaq.protocol.remoting.codes import JSON, RESPONSE_FLAG, VERSION, Request, Response
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand
from metaq.protocol.remoting.headers import encode_header
from metaq.protocol.remoting.requests import Received
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.endpoint import Endpoint
from metaq.server.lasting import Lasting
from metaq.server.registering.registration import Registration
from metaq.server.reload import Origins
from metaq.server.remoting.session import RemotingSession, RunHandler
from metaq.server.text.push import PushHandler
from metaq.server.wire.memory import Memory
from metaq.server.wire.session import Buffer, Session
from metaq.store.files.filecache import Read

if TYPE_CHECKING:
    from metaq.server.registering.cluster import ClusterWatch

ANSWER_S: Final = 30.0
"""The longest that a handler may take."""
AT_ONCE: Final = 32
"""Messages, or other things of some 50 µs each, that one call works on before others run for"""
REST_S: Final = 0.001
"""seconds; with a sleep of 0, connections would not go on."""
HTTP: Final = "HTTP"
"""The language that requests inside of the process name."""
Value = TypeVar("Value")
_UNBOUNDED: Final = 1 << 30
"""Answers inside of the process are read at once, and ``metaq.server.http.bounded`` bounds how many calls there are."""


class Recent:
    """A value that is made once for all who ask within some time."""

    def __init__(self) -> None:
        self._value: Any = None
        self._made_s = -math.inf

    def value(self, make: Callable[[], Value], seconds: float) -> Value:
        """Return what ``make`` returned in the last ``seconds``, or returns now; it is the same for all calls."""
        now_s = time.monotonic()
        if now_s - self._made_s >= seconds:
            self._value, self._made_s = make(), now_s
        value: Value = self._value
        return value


class Locks:
    """A lock for each name that somebody uses."""

    def __init__(self) -> None:
        self._locks = WeakValueDictionary[str, BoundedSemaphore]()

    def of(self, name: str) -> BoundedSemaphore:
        """Return the lock of a name, for ``with``."""
        lock = self._locks.get(name)
        if lock is None:
            self._locks[name] = lock = BoundedSemaphore(1)
        return lock


@dataclass(frozen=True)
class Interior:
    """The parts of the broker that services use."""

    context: Context
    endpoint: Endpoint
    holds: Holds
    turns: Turns
    sends: Callable[[Session, Sequence[Received], int], int]
    """Stages the run of plain sends at an index (``SendHandler.sends``)."""
    read: Read
    """Reads of the store, for which the greenlet waits."""
    reasons: Callable[[], list[str]]
    """The reasons why clients cannot work with this broker; empty when they can."""
    cancels: Cancels
    """Cancels of delayed messages."""
    origins: Callable[[], Origins]
    """Returns the origins of the settings."""
    pushes: PushHandler
    """Subscriptions."""
    registration: Registration
    lasting: Lasting
    """The state that outlives a role."""
    leases: LeaseFigures
    live: Recent = field(default_factory=Recent)
    """The state of the broker, for those who watch it."""
    replays: Locks = field(default_factory=Locks)
    """One replay of a group's dead letters at a time."""

    @cached_property
    def cluster(self) -> "ClusterWatch":
        """The other brokers. What it takes to look at them is imported when somebody does."""
        from metaq.server.registering.cluster import ClusterWatch  # noqa: PLC0415

        return ClusterWatch(self.registration, self.lasting.seen)


class Call:
    """One call, until its ``end``."""

    def __init__(self, interior: Interior, principal: Principal, address: tuple[str, int]) -> None:
        """Prepare the call of a principal from a host and a port."""
        self.interior = interior
        self.principal = principal
        self.address = address
        self._inside: _Inside | None = None

    def end(self) -> None:
        """End what still waits at the broker."""
        if self._inside is not None:
            self._inside.session.close()

    @property
    def context(self) -> Context:
        """The tables of the broker."""
        return self.interior.context

    @property
    def broker(self) -> str:
        """The name of the broker."""
        return self.context.settings.broker_name

    def demand(self, action: Action, resource: str = "") -> None:
        """Raise ``AccessDenied`` when the user may not do this."""
        demand(self.principal, action, resource)

    def check_goes_on(self) -> None:
        """Raise ``Fenced`` when this broker stops, or changes its role: what the call sees from then on is of the past."""
        if self.interior.holds.stopping:
            raise Fenced("this broker stops, or changes its role; ask again")

    def ask(
        self,
        code: Request,
        header: tuple[Any, ...] | None = None,
        body: bytes = b"",
        *,
        more: Mapping[str, str] | None = None,
        also: Collection[int] = (),
        wait_s: float = 0.0,
    ) -> RemotingCommand:
        """Return a handler's answer; ``more`` are fields beside those of the header.

        ``also`` are the codes that are no errors beside 0. Raise what the handler raises, ``RequestFailed`` for another code
        of its answer. The handler may take ``wait_s`` longer than usual.
        """
        fields = {**({} if header is None else encode_header(header)), **(more or {})}
        [answer] = self.ask_all(code, [(fields, body)], wait_s=wait_s)
        if isinstance(answer, MetaqError):
            if answer.code not in also:
                raise answer
            return RemotingCommand(answer.code, 0, RESPONSE_FLAG, {}, b"", str(answer), HTTP, VERSION, JSON)
        if answer.code != Response.SUCCESS and answer.code not in also:
            raise failed(answer)
        return answer

    def ask_all(
        self, code: Request, requests: Sequence[tuple[Mapping[str, str], bytes]], wait_s: float = 0.0
    ) -> list[RemotingCommand | MetaqError]:
        """Begin all requests, fields and body of each, and return the answers in their order.

        Raise ``Overloaded`` when one does not come in time: its request may have been carried out.
        """
        answers = self.ask_each(code, requests, ANSWER_S + wait_s)
        late = next((answer for answer in answers if isinstance(answer, Late)), None)
        if late is not None:
            raise late
        return answers

    def ask_each(
        self, code: Request, requests: Sequence[tuple[Mapping[str, str], bytes]], seconds: float
    ) -> list[RemotingCommand | MetaqError]:
        """Begin all requests as ``ask_all`` does; in the place of an answer that does not come in time is a ``Late``.

        Raise ``CutOff`` when the broker ends what goes on.
        """
        if self._inside is None:
            self._inside = _Inside(self.interior.endpoint, self.principal, self.address)
        inside = self._inside
        opaques = []
        for number, (fields, body) in enumerate(requests, 1):
            opaques.append(inside.begin(code, dict(fields), body))
            self.rest_after(number)
        return inside.wait(opaques, seconds)

    def rest_after(self, number: int) -> None:
        """Let others run after each ``AT_ONCE`` of many things, which are counted from 1."""
        if number % AT_ONCE == 0:
            gevent.sleep(REST_S)


def failed(answer: RemotingCommand) -> RequestFailed:
    """Return the error that a handler's answer reports."""
    return RequestFailed(answer.code, answer.remark or f"the broker answered {answer.code} without a reason")


class Late(Overloaded):
    """An answer has not come in time: its request may have been carried out."""


class CutOff(Fenced):
    """The broker ends what goes on, so that no answer comes: its request may have been carried out."""


class InDoubt(RequestFailed):
    """The broker answers that it does not know what became of a send: the message may be stored."""


class _Inside:
    """A session of the remoting protocol without a socket, whose requests nobody has to sign: its principal is known."""

    max_unsent_bytes = _UNBOUNDED
    spent = False

    def __init__(self, endpoint: Endpoint, principal: Principal, address: tuple[str, int]) -> None:
        self.anonymous = principal
        self.memory = Memory((), time.monotonic)
        self.memory.most = _UNBOUNDED
        self._endpoint = endpoint
        self._frames = FrameReader()
        self.runs: dict[int, RunHandler] = {}
        self._answers: dict[int, RemotingCommand | MetaqError] = {}
        self._arrived = Event()
        self._last = 0
        self.session = RemotingSession(self, address, FrameReader(), self)

    def begin(self, code: int, fields: dict[str, str], body: bytes) -> int:
        """Hand a request to its handler; return the number under which its answer comes."""
        self._last += 1
        request = RemotingCommand(code, self._last, 0, fields, body, None, HTTP, VERSION, JSON)
        try:
            needs, handler = self._endpoint.answering(code)
            needs.check_size(request)
            needs.check_right(self.session.principal)
            run = self._endpoint.known_runs.get(code)
            if run is not None and run(self.session, (request,), 0):
                return self._last
            answer = handler(self.session, request)
        except MetaqError as error:
            self._answers[self._last] = error
            return self._last
        if answer is not None:
            self.session.respond(request, answer)
        self.session.flush()
        return self._last

    def wait(self, numbers: Sequence[int], seconds: float) -> list[RemotingCommand | MetaqError]:
        """Return the answers; a ``Late`` in the place of each that has not come by then. Raise ``CutOff``."""
        end = time.monotonic() + seconds
        while any(number not in self._answers for number in numbers) and time.monotonic() < end:
            if self.session.closed:
                raise CutOff("the broker met an error, or changes its role, while it answered; see its log")
            self._arrived.clear()
            self._arrived.wait(max(0.0, end - time.monotonic()))
        late = Late(f"the broker has not answered within {seconds:g} s", retry_after_ms=1000)
        return [self._answers.pop(number, late) for number in numbers]

    # -- the stream that the session writes to ------------------------------------------------------------------------

    def send(self, data: Buffer, /) -> int:
        for answer in self._frames.receive(bytes(data)):
            if answer.flag & RESPONSE_FLAG:  # other frames are questions to a client, which this one does not answer
                self._answers[answer.opaque] = answer
        self._arrived.set()
        return len(data)

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        return self.send(b"".join(buffers))

    def recv(self, size: int, /) -> bytes:
        raise BlockingIOError

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._arrived.set()

    # -- the host of the session --------------------------------------------------------------------------------------

    def io(self, fd: int, events: int) -> Any:
        return self

    def start(self, *_: object) -> None:
        """Watch nothing."""

    def stop(self) -> None:
        """Watch nothing."""

    def timer(self, seconds: float) -> Any:
        return get_hub().loop.timer(seconds)

    def now(self) -> float:
        return time.monotonic()

    def put_off(self, session: object) -> None:
        raise NotImplementedError("a turn is never spent here")

    def closed(self, session: object) -> None:
        self._arrived.set()

    def request(self, session: object, request: object) -> None:
        raise NotImplementedError("nothing is received here")
