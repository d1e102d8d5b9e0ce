"""How requests of the remoting protocol reach a broker and answers come back, independent of what carries them.

``metaq.client.connecting.link`` carries them over sockets; ``metaq.testing`` answers them in the same process.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, Self, TypeVar

from metaq.errors import BrokerBusy, ClientError, Refused, RequestTimeout
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import encode_header

BUSY_WAIT_S: Final = 0.1
"""How long to leave a busy broker alone that does not say it itself."""
_FLOW_CONTROL: Final = 215
_RETRY_AFTER: Final = "retry after "

T = TypeVar("T")


class Question(NamedTuple):
    """A request before it is given an opaque."""

    code: int
    fields: Mapping[str, str] | None = None
    body: bytes = b""

    @classmethod
    def of(cls, code: Request, header: tuple[object, ...] | None = None, body: bytes = b"") -> Self:
        """The request that a typed header makes."""
        return cls(code, None if header is None else encode_header(header), body)


class Answer(NamedTuple):
    """What the client answers when a broker asks."""

    code: int = Response.SUCCESS
    body: bytes = b""
    remark: str | None = None
    fields: Mapping[str, str] | None = None


Outcome = RemotingCommand | ClientError
Done = Callable[[Outcome], None]
"""Takes the answer, or why there is none. Called once, on a thread that must not be kept."""

Asked = Callable[[str, RemotingCommand, Callable[[Answer], None]], None]
"""Takes the address of a broker, its request and the way to answer it. Called on a thread that must not be kept."""

Greet = Callable[[str], Question | None]
"""What is to be asked first on every new connection to an address."""


class Transport(Protocol):
    """What carries requests. Addresses are ``host:port``; deadlines are readings of ``time.monotonic``."""

    def submit(self, address: str, question: Question, deadline: float, done: Done) -> None:
        """Ask without waiting for the answer. What can be told at once (no connection) is raised, and ``done`` not called."""
        ...

    def tell(self, address: str, question: Question, deadline: float) -> None:
        """Send a one-way request."""
        ...

    def renew(self) -> None:
        """Have no connection yet, in a child of a fork (``metaq.client.connecting.forks``)."""
        ...

    def close(self) -> None:
        """Close every connection; what is in flight fails."""
        ...


class Waiter:
    """The place where one thread waits for one outcome."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._outcome: Outcome | None = None

    def set(self, outcome: Outcome) -> None:
        """Tell the outcome; a ``Done``."""
        self._outcome = outcome
        self._known.set()

    def wait(self, deadline: float, question: Question, address: str) -> RemotingCommand:
        """The answer; raises why there is none, and ``RequestTimeout`` at the deadline."""
        if not self._known.wait(max(0.0, deadline - time.monotonic())):
            raise unanswered(question.code, address)
        if isinstance(self._outcome, ClientError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def call(transport: Transport, address: str, question: Question, deadline: float) -> RemotingCommand:
    """Ask and wait for the answer, whatever its code. ``ConnectionFailed``, ``RequestTimeout``."""
    waiter = Waiter()
    transport.submit(address, question, deadline, waiter.set)
    return waiter.wait(deadline, question, address)


def ask(transport: Transport, address: str, question: Question, deadline: float) -> RemotingCommand:
    """Ask and wait for success; another code raises ``Refused`` or ``BrokerBusy``."""
    return successful(call(transport, address, question, deadline))


def successful(response: RemotingCommand) -> RemotingCommand:
    """The response itself, unless its code says that the request failed."""
    if response.code != Response.SUCCESS:
        raise refusal(response)
    return response


def refusal(response: RemotingCommand) -> Refused:
    """The error that a response tells."""
    text = response.remark or "no reason given"
    if response.code in {Response.SYSTEM_BUSY, _FLOW_CONTROL}:
        return BrokerBusy(response.code, text, retry_after_s=_retry_after_s(text))
    return Refused(response.code, text)


def _retry_after_s(text: str) -> float:
    number, _, unit = text.partition(_RETRY_AFTER)[2].partition(" ")
    return int(number) / 1000 if number.isdecimal() and unit.startswith("ms") else BUSY_WAIT_S


def unanswered(code: int, address: str) -> RequestTimeout:
    """The error of a request that got no answer by its deadline."""
    return RequestTimeout(f"no answer to {code_name(code)} from {address} in time; its outcome is unknown")


def code_name(code: int) -> str:
    """A request code as people know it."""
    return Request(code).name if code in Request.__members__.values() else str(code)
