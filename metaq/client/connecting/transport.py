"""The transport of remoting requests and answers, as an interface.

``metaq.client.connecting.link`` implements it with sockets, ``metaq.testing`` in the same process.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, Self, TypeVar

from metaq.errors import BrokerBusy, ClientError, Refused, RequestTimeout, TooLate, UnknownHandle
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import encode_header
from metaq.protocol.remoting.recall import DELIVERED, TIMER_STATE

BUSY_WAIT_S: Final = 0.1
"""The pause before a busy broker is asked again that names no time itself."""
_FLOW_CONTROL: Final = 215
_RETRY_AFTER: Final = "retry after "

T = TypeVar("T")


class RemotingRequest(NamedTuple):
    """A request that has no opaque (request id) yet."""

    code: int
    fields: Mapping[str, str] | None = None
    body: bytes = b""

    @classmethod
    def of(cls, code: Request, header: tuple[object, ...] | None = None, body: bytes = b"") -> Self:
        """Make a request of a typed header."""
        return cls(code, None if header is None else encode_header(header), body)


class ClientAnswer(NamedTuple):
    """The client's answer to a request of a broker."""

    code: int = Response.SUCCESS
    body: bytes = b""
    remark: str | None = None
    fields: Mapping[str, str] | None = None


Outcome = RemotingCommand | ClientError
Done = Callable[[Outcome], None]
"""A callback that takes the answer or the error. It is called once, on a thread that it must not block."""

Meanwhile = Callable[[], None]
"""What is called when a request was written, before its answer is waited for."""

Asked = Callable[[str, RemotingCommand, Callable[[ClientAnswer], None]], None]
"""A callback that takes a broker's address, its request and a function that answers it, on a thread that it must not block."""

Greet = Callable[[str], RemotingRequest | None]
"""A function that returns the first request to send on a new connection to an address, if any."""


class Transport(Protocol):
    """A carrier of requests. Addresses are ``host:port``; deadlines are readings of ``time.monotonic``."""

    def call(
        self, address: str, request: RemotingRequest, deadline: float, meanwhile: Meanwhile | None = None
    ) -> RemotingCommand:
        """Send a request and wait for the answer, whatever its code. Raise ``ConnectionFailed`` or ``RequestTimeout``."""
        ...

    def submit(self, address: str, request: RemotingRequest, deadline: float, done: Done, *, soon: bool = False) -> None:
        """Send a request without waiting for the answer; ``soon`` says that it may be written by another thread, with others.

        An error that is known at once, such as no connection, is raised, and then ``done`` is not called.
        """
        ...

    def tell(self, address: str, request: RemotingRequest, deadline: float) -> None:
        """Send a one-way request."""
        ...

    def renew(self) -> None:
        """Drop all connections in a child of a fork (``metaq.client.connecting.forks``)."""
        ...

    def close(self) -> None:
        """Close every connection; requests in flight fail."""
        ...


class Waiter:
    """A slot in which one thread waits for the outcome of one request."""

    def __init__(self) -> None:
        self._known = threading.Lock()  # released when the outcome is known; cheaper than an event
        self._known.acquire()
        self._outcome: Outcome | None = None

    @property
    def is_set(self) -> bool:
        """True when the outcome is known."""
        return self._outcome is not None

    def set(self, outcome: Outcome) -> None:
        """Set the outcome, once; a ``Done``."""
        self._outcome = outcome
        self._known.release()

    def wait(self, deadline: float, request: RemotingRequest, address: str) -> RemotingCommand:
        """Return the answer. Raise the ``ClientError`` of a failed request, and ``RequestTimeout`` at the deadline."""
        if self._outcome is None and not self._known.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise unanswered(request.code, address)
        if isinstance(self._outcome, ClientError):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


def ask(transport: Transport, address: str, request: RemotingRequest, deadline: float) -> RemotingCommand:
    """Send a request and wait for success. Raise ``Refused`` or ``BrokerBusy`` for any other code, and what ``call`` raises."""
    return successful(transport.call(address, request, deadline))


def successful(response: RemotingCommand) -> RemotingCommand:
    """Return the response; raise ``Refused`` or ``BrokerBusy`` if its code says that the request failed."""
    if response.code != Response.SUCCESS:
        raise refusal(response)
    return response


def refusal(response: RemotingCommand) -> Refused:
    """Return the error that a response reports."""
    text = response.remark or "no reason given"
    if response.code in {Response.SYSTEM_BUSY, _FLOW_CONTROL}:
        return BrokerBusy(response.code, text, retry_after_s=_retry_after_s(text))
    if response.code == Response.ILLEGAL_OPERATION:  # a cancel
        return (TooLate if response.fields.get(TIMER_STATE) == DELIVERED else UnknownHandle)(response.code, text)
    return Refused(response.code, text)


def may_pass(error: ClientError) -> bool:
    """Return whether the same request may succeed after a while, perhaps at a new master."""
    return error.retriable or (isinstance(error, Refused) and error.code == Response.SERVICE_NOT_AVAILABLE)


def _retry_after_s(text: str) -> float:
    number, _, unit = text.partition(_RETRY_AFTER)[2].partition(" ")
    return int(number) / 1000 if number.isdecimal() and unit.startswith("ms") else BUSY_WAIT_S


def unanswered(code: int, address: str) -> RequestTimeout:
    """Return the error of a request that got no answer by its deadline."""
    return RequestTimeout(f"no answer to {code_name(code)} from {address} in time; its outcome is unknown")


def code_name(code: int) -> str:
    """Return the name of a request code; the number when it has none."""
    return Request(code).name if code in Request.__members__.values() else str(code)
