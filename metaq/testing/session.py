"""The broker's side of one client of the in-memory broker."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from metaq.client.connecting.transport import Asked, ClientAnswer, Done, Meanwhile, RemotingRequest, Waiter
from metaq.errors import ClientClosed
from metaq.protocol.remoting.codes import JSON, ONEWAY_FLAG, RESPONSE_FLAG, VERSION, Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import encode_header
from metaq.testing.log import ADDRESS

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """The broker, as a session uses it."""

    def _take(self, session: "InMemorySession", request: RemotingRequest, done: Done) -> None:
        """Answer a request."""
        ...

    def _leave(self, session: "InMemorySession") -> None:
        """Forget a client."""
        ...


class InMemorySession:
    """One client of the broker: a ``Transport``. A thread of its own delivers answers to the client, as over a connection."""

    def __init__(self, broker: Answers, asked: Asked) -> None:
        self._broker = broker
        self._asked = asked
        self._deliveries: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.client_id = ""
        self.closed = False
        self._is_inherited = False
        threading.Thread(target=self._deliver, name="metaq-testing", daemon=True).start()

    def renew(self) -> None:
        self._is_inherited = True

    def call(
        self, address: str, request: RemotingRequest, deadline: float, meanwhile: Meanwhile | None = None
    ) -> RemotingCommand:
        waiter = Waiter()
        self.submit(address, request, deadline, waiter.set)
        if meanwhile is not None:
            meanwhile()
        return waiter.wait(deadline, request, address)

    def submit(self, address: str, request: RemotingRequest, deadline: float, done: Done, *, soon: bool = False) -> None:
        if self._is_inherited:
            raise ClientClosed("a broker of metaq.testing belongs to one process: a forked process has only a copy of it")
        self._broker._take(self, request, done)

    def tell(self, address: str, request: RemotingRequest, deadline: float) -> None:
        self.submit(address, request, deadline, lambda outcome: None)

    def close(self) -> None:
        self.closed = True
        if self._is_inherited:
            return
        self._broker._leave(self)
        self._deliveries.put(None)

    def answer(self, done: Done, answer: ClientAnswer) -> None:
        """Deliver an answer to the client, on the session's thread."""
        fields = dict(answer.fields or {})
        response = RemotingCommand(answer.code, 0, RESPONSE_FLAG, fields, answer.body, answer.remark, "JAVA", VERSION, JSON)
        self._deliveries.put(lambda: done(response))

    def ask(self, code: Request, header: tuple[object, ...], body: bytes = b"") -> None:
        """Send a request to the client; its answer is dropped."""
        request = RemotingCommand(code, 0, ONEWAY_FLAG, encode_header(header), body, None, "JAVA", VERSION, JSON)
        self._deliveries.put(lambda: self._asked(ADDRESS, request, lambda answer: None))

    def _deliver(self) -> None:
        while (deliver := self._deliveries.get()) is not None:
            try:
                deliver()
            except Exception:
                logger.exception("a client failed on an answer")
