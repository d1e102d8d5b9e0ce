"""WebSocket (RFC 6455): the handshake of a request, and the frames by which a subscription and its client talk.

========================================================  ==============================================================
the client sends                                          the broker sends
========================================================  ==============================================================
``{"ready":10}``                                          ``{"message":{…},"receipt":"0-17-4q9zk2"}``
``{"ack":"0-17-4q9zk2"}``                                 ``{"done":"0-17-4q9zk2"}``
``{"nack":"0-17-4q9zk2","delay_ms":5000}``                ``{"problem":{…},"receipt":"0-17-4q9zk2"}``
``{"extend":"0-17-4q9zk2","invisible_ms":60000}``
========================================================  ==============================================================

One greenlet reads what the client says, and that of the request writes. A client that does not read is sent no more than its
session holds (``metaq.server.services.subscribing``); what it says is not read while its answers wait.
"""

import base64
import binascii
import logging
import time
from collections.abc import Iterator
from http import HTTPStatus
from itertools import count
from typing import Any, Final

import falcon
import gevent
import msgspec
from falcon import Request, Response
from gevent.event import Event
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Message, Ping, Pong, TextMessage
from wsproto.events import Event as FrameEvent
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, generate_accept_token

from metaq.errors import BadRequest, MetaqError
from metaq.server.api.events import STEP_S
from metaq.server.api.problems import SubscriptionProblem, problem_of
from metaq.server.http.httpserver import Deadline
from metaq.server.services.call import Call
from metaq.server.services.subscribing import LeaseChanged, LeaseUnchanged, PushStream, SubscriberInput

logger = logging.getLogger(__name__)

VERSION: Final = "13"
KEY_BYTES: Final = 16
READ_BYTES: Final = 4096
MOST_SAID: Final = 2048
"""Characters of one message of a client: a receipt and a number."""
PING_S: Final = 15.0
"""A ping, when nothing else was sent for so long."""
SILENT_S: Final = 40.0
"""A client from which nothing has come for so long, not even the answer to a ping, is gone."""
CLOSE_S: Final = 2.0
"""The time in which a client may answer a close: without it, its answer could cost it what it has not read yet."""
assert PING_S < STEP_S


def switch(request: Request, response: Response) -> None:
    """Answer the handshake. Raise ``falcon.HTTPError`` for a request that is none."""
    wanted = {word.strip().lower() for word in (request.get_header("Connection") or "").split(",")}
    if "upgrade" not in wanted or (request.get_header("Upgrade") or "").lower() != "websocket":
        raise falcon.HTTPError(
            HTTPStatus.UPGRADE_REQUIRED,
            description="a subscription needs WebSocket: the headers Connection: Upgrade and Upgrade: websocket",
            headers={"Upgrade": "websocket"},
        )
    if request.get_header("Sec-WebSocket-Version") != VERSION:
        raise falcon.HTTPError(
            HTTPStatus.UPGRADE_REQUIRED,
            description=f"this broker speaks version {VERSION} of WebSocket (Sec-WebSocket-Version)",
            headers={"Upgrade": "websocket", "Sec-WebSocket-Version": VERSION},
        )
    key = (request.get_header("Sec-WebSocket-Key") or "").encode("latin-1")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == KEY_BYTES
    except binascii.Error:
        is_key = False
    if not is_key:
        raise BadRequest(f"Sec-WebSocket-Key must be {KEY_BYTES} bytes in base64")
    response.status = HTTPStatus.SWITCHING_PROTOCOLS
    response.set_header("Upgrade", "websocket")
    response.set_header("Connection", "Upgrade")
    response.set_header("Sec-WebSocket-Accept", generate_accept_token(key).decode("ascii"))


class Frames:
    """The talk of one subscription with its client."""

    def __init__(self, call: Call, subscription: PushStream, received: Any, deadline: Deadline) -> None:
        """Prepare to talk. ``received`` is the file of what comes over the connection."""
        self._call = call
        self._subscription = subscription
        self._received = received
        self._deadline = deadline
        self._connection = Connection(ConnectionType.SERVER)
        self._decoder = msgspec.json.Decoder(SubscriberInput)
        self._said: list[str] = []
        self._size = 0
        self._pong: Pong | None = None
        self._problem: SubscriptionProblem | None = None
        self._problem_sent = Event()
        self._close: CloseConnection | None = None
        self._gone = False
        self._heard_s = time.monotonic()

    def __iter__(self) -> Iterator[bytes]:
        """Yield what is to be sent until one side ends it, then give back what is out."""
        listener = gevent.spawn(self._listen)
        try:
            yield self._bytes(Ping())  # the answer to the handshake leaves with the first bytes after it
            self._subscription.begin()
            while self._close is None and not self._gone:
                yield from self._next()
            if self._close is not None:
                self._deadline.within(STEP_S)
                yield self._connection.send(self._close)
                listener.join(CLOSE_S)
        finally:
            listener.kill()
            self._subscription.end()
            self._call.end()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _next(self) -> Iterator[bytes]:
        """Yield what there is to send, at the latest a ping."""
        self._deadline.within(STEP_S)
        found = self._subscription.next(PING_S)
        quiet = not found
        for one in found:
            yield self._text(self._json(one))
        if self._pong is not None:
            pong, self._pong, quiet = self._pong, None, False
            yield self._bytes(pong)
        if self._problem is not None:
            problem, self._problem, quiet = self._problem, None, False
            yield self._text(msgspec.json.encode(problem))
            self._problem_sent.set()
        if self._subscription.is_over and self._close is None:
            reason = "the broker stops, changes its role, met an error, or said why; subscribe again"
            self._close = CloseConnection(CloseReason.GOING_AWAY, reason)
        elif time.monotonic() - self._heard_s > SILENT_S:
            logger.info("subscriber lost address=%s reason=silent for %g s", self._call.address, SILENT_S)
            self._gone = True
        elif quiet and not self._gone and self._close is None:
            yield self._bytes(Ping())

    def _text(self, data: bytes) -> bytes:
        self._deadline.within(STEP_S)
        return self._bytes(TextMessage(data.decode()))

    def _bytes(self, event: FrameEvent) -> bytes:
        """Return the bytes of a frame; none when the client has ended it meanwhile."""
        return self._connection.send(event) if self._connection.state is ConnectionState.OPEN else b""

    def _json(self, one: bytes | LeaseChanged | LeaseUnchanged) -> bytes:
        if isinstance(one, bytes):
            return self._subscription.json_of(one)
        return msgspec.json.encode(self._problem_with(one.error, one.receipt) if isinstance(one, LeaseUnchanged) else one)

    def _problem_with(self, error: MetaqError, receipt: str | None = None) -> SubscriptionProblem:
        return SubscriptionProblem(problem=problem_of(error, is_known=True), receipt=receipt)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take what the client says, until it says no more."""
        steps = count(1)
        try:
            while self._close is None and (data := self._received.read1(READ_BYTES)):
                self._heard_s = time.monotonic()
                self._connection.receive_data(data)
                for event in self._connection.events():
                    self._take(event)
                    self._call.rest_after(next(steps))
                self._call.rest_after(next(steps))  # what comes fast enough is read without waiting, and so without others
        except (OSError, LocalProtocolError) as error:  # the connection is lost, or has ended on this side
            logger.debug("subscriber lost address=%s reason=%s", self._call.address, error)
        finally:
            self._gone = True
            self._subscription.wake()

    def _take(self, event: object) -> None:
        if isinstance(event, Ping):
            self._pong = event.response()  # a client that sends several gets the answer to the last one
            self._subscription.wake()
        elif isinstance(event, CloseConnection):
            self._end(event.response())
        elif isinstance(event, BytesMessage):
            self._end(CloseConnection(CloseReason.UNSUPPORTED_DATA, "messages are text"))
        elif isinstance(event, TextMessage) and self._close is None:
            self._gather(event)

    def _gather(self, part: Message[str]) -> None:
        """Put a message together, whatever pieces it comes in, and carry it out."""
        self._size += len(part.data)
        if self._size > MOST_SAID:
            self._end(CloseConnection(CloseReason.MESSAGE_TOO_BIG, f"a message of over {MOST_SAID} characters"))
            return
        if part.data:  # else one without an end and without words would grow for ever
            self._said.append(part.data)
        if part.message_finished:
            text, self._said, self._size = "".join(self._said), [], 0
            self._carry_out(text)

    def _carry_out(self, text: str) -> None:
        try:
            self._subscription.said(self._decoder.decode(text))
        except (msgspec.DecodeError, RecursionError) as error:
            self._refuse(BadRequest(f"the message: {error}"))
        except MetaqError as error:
            self._refuse(error)

    def _refuse(self, error: MetaqError) -> None:
        """Answer with a problem, and read on when it is sent."""
        self._problem_sent.clear()
        self._problem = self._problem_with(error)
        self._subscription.wake()
        self._problem_sent.wait()

    def _end(self, close: CloseConnection) -> None:
        if self._close is None:
            self._close = close
            self._subscription.wake()
