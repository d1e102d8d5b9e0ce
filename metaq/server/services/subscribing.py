"""Subscriptions: messages are leased to a member of a group and pushed to it as they come, as far as its credit goes.

A subscription is one of the text protocol (``metaq.server.text.push``), in a session without a socket that the endpoint knows
like every other: it counts among the connections, is listed with them, and is closed with them when the broker stops or changes
its role. What it pushes becomes JSON when it is sent. Commands go to it as lines of the text protocol, so they are answered in
order.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from gevent.event import Event
from msgspec import Meta

from metaq.client.consuming.records import decode_messages
from metaq.engine.reading.filters import exact_filter, parse_cached
from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.protocol.remoting.codes import Response
from metaq.protocol.subscription import EVERYTHING, ExpressionKind
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import NO_OPAQUE, Command, Subscribe
from metaq.protocol.text.ids import read_id
from metaq.protocol.text.leaselines import DELAY, INVISIBLE, READY
from metaq.protocol.text.messages import Stored
from metaq.protocol.text.pushed import Push, Pushed
from metaq.protocol.text.replies import BAD_REQUEST, FORBIDDEN, NOT_FOUND, OK, UNAVAILABLE, Reply, TextReader
from metaq.server.endpoint import Endpoint
from metaq.server.services.call import Call
from metaq.server.services.leases import MessageLease, ReceiptText
from metaq.server.services.messages import row_of
from metaq.server.services.rows import Input, Name, Output
from metaq.server.text.leaseanswers import FrameStyle
from metaq.server.text.session import TextSession
from metaq.server.wire.session import READABLE, Buffer

LINE_BYTES = 256
"""The longest command is ``nack`` with an ID of 33 characters."""
MOST_OPAQUE = 1 << 30
_MESSAGE = b"{"
"""Begins a buffer with a message, as it begins no reply."""
_CODES = {
    BAD_REQUEST: Response.SYSTEM_ERROR,
    FORBIDDEN: Response.NO_PERMISSION,
    NOT_FOUND: Response.NO_MESSAGE,
    UNAVAILABLE: Response.SYSTEM_BUSY,
}
"""The remoting protocol's codes for the text protocol's replies to what ends leases."""


class SubscribeQuery(Input, frozen=True):
    """The messages that a subscription is about, and how they are leased."""

    topic: Name
    ready: Annotated[
        int, Meta(ge=READY[0], le=READY[1], description="How many messages may be out and not finished; 0 pauses.")
    ] = 1
    invisible_ms: Annotated[
        int, Meta(ge=INVISIBLE[0], le=INVISIBLE[1], description="How long a message is leased, in milliseconds.")
    ] = 60_000
    tags: Annotated[str, Meta(max_length=1024)] = EVERYTHING
    from_first: Annotated[bool, Meta(description="A group without an offset begins with the oldest message.")] = True


class SubscriberInput(Input, frozen=True):
    """A word of a subscriber: exactly one of `ready`, `ack`, `nack` and `extend`."""

    ready: Annotated[int, Meta(ge=READY[0], le=READY[1], description="How many messages may be out from now on.")] | None = None
    ack: Annotated[ReceiptText | None, Meta(description="A message to finish.")] = None
    nack: Annotated[ReceiptText | None, Meta(description="A message to give back.")] = None
    extend: Annotated[ReceiptText | None, Meta(description="A message whose lease ends later.")] = None
    delay_ms: (
        Annotated[int, Meta(ge=DELAY[0], le=DELAY[1], description="With `nack`: after so many milliseconds it is given again.")]
        | None
    ) = None
    reject: Annotated[bool, Meta(description="With `nack`: make it a dead letter.")] = False
    invisible_ms: (
        Annotated[int, Meta(ge=INVISIBLE[0], le=INVISIBLE[1], description="With `extend`: how long it is leased from now on.")]
        | None
    ) = None


class LeaseChanged(Output, frozen=True):
    """The answer to an `ack`, a `nack` or an `extend` that was carried out."""

    done: Annotated[str, Meta(description="The receipt.")]


class LeaseUnchanged(NamedTuple):
    """A word of a subscriber that was refused; ``receipt`` is that of the message, if it is about one."""

    receipt: str | None
    error: MetaqError


class PushStream:
    """One subscription, from its ``begin`` to its ``end``."""

    def __init__(self, call: Call, group: str, query: SubscribeQuery) -> None:
        """Prepare it. Raise why the user may not have it."""
        self._call = call
        self._replies = TextReader()
        self._asked: dict[int, str | None] = {}
        self._last = 0
        self._outlet = _Outlet()
        wanted = exact_filter(parse_cached(query.topic, query.tags, kind=ExpressionKind.TAG))
        host = _Host(call.interior.endpoint, self._outlet)
        host.anonymous = call.principal
        limits = TextLimits(LINE_BYTES, 0)
        self._session = TextSession(self._outlet, call.address, CommandReader(limits), host)
        command = Subscribe(
            topic=query.topic,
            group=group,
            ready=query.ready,
            invisible_ms=query.invisible_ms,
            from_first=query.from_first,
            partition=None,
            attribute=None,
            owns=False,
            name=None,
            with_crc=False,
            opaque=NO_OPAQUE,
        )
        try:
            self._pushes = call.interior.pushes.open(self._session, command, wanted, FrameStyle(NO_OPAQUE, encode=self._write))
        except BaseException:
            self._session.close()
            raise
        call.interior.endpoint.sessions.add(self._session)

    def begin(self) -> None:
        """Push what there is."""
        self._pushes.begin()

    def end(self) -> None:
        """Push nothing more, and give back what is out."""
        self._session.close()

    @property
    def is_over(self) -> bool:
        """True when the broker has ended it: it stops, changes its role, met an error, or the user may lease no more."""
        return self._session.closed

    def said(self, word: SubscriberInput) -> None:
        """Begin to carry out what a subscriber said; ``next`` has the answer. Raise ``BadRequest``.

        Waits while earlier words are being carried out that must be finished first.
        """
        command, receipt = _command(word)
        self._outlet.reading.wait()
        self._last = self._last % MOST_OPAQUE + 1
        self._asked[self._last] = receipt
        self._session.receive(f"{command} {self._last}\r\n".encode())

    def next(self, seconds: float) -> list[bytes | LeaseChanged | LeaseUnchanged]:
        """Return what is to be sent now, messages for ``json_of``; wait so long for it. Empty after ``wake`` and ``end``."""
        found: list[bytes | LeaseChanged | LeaseUnchanged] = []
        for data in self._outlet.take(seconds):
            if data.startswith(_MESSAGE):
                found.append(data)
            else:
                found += [answer for reply in self._replies.receive(data) if (answer := self._answer(reply)) is not None]
        return found

    def json_of(self, data: bytes) -> bytes:
        """Return a message from ``next`` as JSON. That may be a thousand times as large: make it when it is to be sent."""
        receipt, _, record = data.removeprefix(_MESSAGE).partition(b"\n")
        [message] = decode_messages(record, self._call.broker, damaged_too=True)
        return msgspec.json.encode(MessageLease(message=row_of(message), receipt=receipt.decode()))

    def wake(self) -> None:
        """Have ``next`` return."""
        self._outlet.changed.set()

    def _answer(self, reply: Reply | Pushed) -> LeaseChanged | LeaseUnchanged | None:
        assert not isinstance(reply, Pushed), "messages are written as JSON"
        if reply.opaque not in self._asked:  # not an answer: the reason why nothing more is pushed
            self.end()
        receipt = self._asked.pop(reply.opaque, None)
        if reply.code != OK:
            code = _CODES.get(reply.code, Response.SYSTEM_ERROR)
            return LeaseUnchanged(receipt, RequestFailed(code, reply.body.decode()))
        return None if receipt is None else LeaseChanged(done=receipt)

    def _write(self, push: Push, stored: Stored, out: list[Buffer]) -> None:
        """Append a message as it is stored, after its receipt: one buffer. ``json_of`` makes JSON of it, as it may wait."""
        out.append(b"".join((_MESSAGE, str(push.id).encode(), b"\n", stored.buffer)))


def subscribe(call: Call, group: Name, query: SubscribeQuery) -> PushStream:
    """Lease messages of a topic to a member of a group and push them as they come, over WebSocket."""
    return PushStream(call, group, query)


def _command(word: SubscriberInput) -> tuple[str, str | None]:
    """Return the command for what a subscriber said, without its opaque, and the receipt in it. Raise ``BadRequest``."""
    kinds = [name for name in ("ready", "ack", "nack", "extend") if getattr(word, name) is not None]
    if len(kinds) != 1:
        raise BadRequest(f"exactly one of ready, ack, nack and extend is needed, not {len(kinds)} of them")
    [kind] = kinds
    if (word.delay_ms is not None or word.reject) and kind != "nack":
        raise BadRequest(f"delay_ms and reject belong to nack, not to {kind}")
    if (word.invisible_ms is not None) != (kind == "extend"):
        raise BadRequest("extend needs an invisible_ms, and nothing else takes one")
    if word.ready is not None:
        return f"ready {word.ready}", None
    receipt = str(getattr(word, kind))
    ident = read_id(receipt)
    if kind == "extend":
        return f"extend {ident} {word.invisible_ms}", receipt
    if word.reject:
        if word.delay_ms is not None:
            raise BadRequest("a nack has a delay_ms or a reject, not both")
        return f"nack {ident} dead", receipt
    return f"{kind} {ident}" + (f" delay={word.delay_ms}" if word.delay_ms is not None else ""), receipt


class _Watcher:
    """Stands for a watcher of the loop: there is no socket, and whoever takes what is sent calls ``fire``."""

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._started = Event()

    def start(self, call: Callable[[], None]) -> None:
        self._call = call
        self._started.set()

    def stop(self) -> None:
        self._call = None
        self._started.clear()

    def close(self) -> None:
        """Stop for good; who waits goes on, and finds the session closed."""
        self._call = None
        self._started.set()

    def wait(self) -> None:
        self._started.wait()

    def fire(self) -> None:
        if self._call is not None:
            self._call()


class _Outlet:
    """The stream that the session writes to. It takes whole buffers, those of one send at a time, as a full socket would.

    So what a subscriber does not read stays in its session, which pushes nothing more from ``MOST_UNREAD`` bytes on.
    """

    def __init__(self) -> None:
        self.changed = Event()
        self.reading = _Watcher()
        self.writing = _Watcher()
        self._sent: Sequence[Buffer] = ()

    def take(self, seconds: float) -> list[bytes]:
        """Return what was sent, and let the session send on; wait so long for it."""
        if not self._sent:
            self.changed.wait(seconds)
        self.changed.clear()
        taken, self._sent = self._sent, ()
        if taken:
            self.writing.fire()
        return [bytes(data) for data in taken]

    def send(self, data: Buffer, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        if self._sent:
            raise BlockingIOError
        self._sent = buffers
        self.changed.set()
        return sum(map(len, buffers))

    def recv(self, size: int, /) -> bytes:
        raise BlockingIOError

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.changed.set()


class _Host:
    """The endpoint, as the host of a session whose principal is known and whose socket is an outlet."""

    def __init__(self, endpoint: Endpoint, outlet: _Outlet) -> None:
        self._endpoint = endpoint
        self._outlet = outlet
        self.anonymous = endpoint.anonymous
        self.max_unsent_bytes = endpoint.max_unsent_bytes
        self.memory = endpoint.memory
        self.put_off = endpoint.put_off
        self.now = endpoint.now
        self.closed = endpoint.closed
        self.command = endpoint.command

    @property
    def spent(self) -> bool:
        return self._endpoint.spent

    def io(self, fd: int, events: int) -> Any:
        return self._outlet.reading if events == READABLE else self._outlet.writing

    def puts(self, session: TextSession, commands: Sequence[Command], at: int) -> int:
        raise NotImplementedError("a subscriber puts nothing")

    transactional_puts = puts
