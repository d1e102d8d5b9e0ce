"""A session of the remoting protocol: requests of the client, answered in any order, and requests to the client."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from metaq.engine.tables.connections import Answered
from metaq.errors import MetaqError
from metaq.protocol.remoting.codes import JSON, ONEWAY_FLAG, RESPONSE_FLAG
from metaq.protocol.remoting.frames import (
    Asked,
    FrameReader,
    RemotingCommand,
    encode_bare,
    encode_done,
    encode_request,
    encode_response,
)
from metaq.protocol.remoting.leases.plainacks import PlainAcks
from metaq.protocol.remoting.requests import Received, RequestReader
from metaq.protocol.remoting.sending.plain import PlainSend
from metaq.server.wire.session import Buffer, Session, SessionHost, Stream

logger = logging.getLogger(__name__)

MOST_COPIED: Final = 2048
"""Bytes of a body that are copied behind its header: that costs less than to send two buffers."""
KEPT_BYTES: Final = 128
"""What an owed request takes of memory, at most, when neither its fields nor its body are kept."""
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""
ASK_TIMEOUT_S: Final = 10.0
"""The time that a client has to answer a request of the broker (specs: remoting protocol, section 3.5)."""


class Answer(NamedTuple):
    """A handler's answer; ``body`` is sent as it is."""

    code: int = 0
    fields: Mapping[str, str] | None = None
    remark: str | None = None
    body: Sequence[Buffer] = ()


DONE: Final = Answer()
"""Success, with nothing more to report."""


def failure(error: MetaqError) -> Answer:
    """Return the answer that reports an error."""
    return Answer(error.code, remark=str(error))


class Kept(NamedTuple):
    """The part of a request that is kept while its answer is owed: neither its body nor its fields."""

    opaque: int
    flag: int
    version: int
    serialization: int
    size: int
    """Bytes that the broker still holds for it: the handler's copies of fields and body."""


def bare(request: RemotingCommand, opaque: int) -> Kept:
    """Return what is kept of a request like ``request`` when it is only what the answer needs."""
    return _new(Kept, (opaque, request.flag, request.version, request.serialization, KEPT_BYTES))


class RemotingHandlers(SessionHost, Protocol):
    """The parts of the broker that a remoting session needs."""

    runs: "dict[int, RunHandler]"
    """What takes runs of plain requests of the same code, by code."""

    def request(self, session: "RemotingSession", request: RemotingCommand) -> None:
        """Answer one request, or make it owed."""
        ...

    def timer(self, seconds: float) -> Any:
        """Return a timer of the hub's loop, not yet started."""
        ...


class _Asked(NamedTuple):
    """A request of the broker that the client has not answered yet."""

    answered: Answered
    timer: Any


class RemotingSession(Session):
    """One client that speaks the remoting protocol."""

    __slots__ = ("_asked", "_at_close", "_handlers", "_last_opaque", "_reader", "serialization")

    def __init__(
        self, connection: Stream, address: Any, reader: FrameReader | RequestReader, handlers: RemotingHandlers
    ) -> None:
        super().__init__(connection, address, handlers, self._read)
        self._reader = reader
        self._handlers = handlers
        self._asked: dict[int, _Asked] = {}
        self._last_opaque = 0
        self.serialization = JSON
        """The header serialization of the client's last request, also used for requests to it."""
        self._at_close: dict[Callable[[], None], None] = {}  # a set that keeps the order

    # -- requests of the client ---------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> Sequence[Received]:
        frames: Sequence[Received] = self._reader.receive(data)
        if self._reader.error is not None and not frames:
            self._lost()
        return frames

    def _count_unfinished(self) -> int:
        return self._reader.waiting

    def _handle(self, commands: Sequence[Received]) -> None:
        limit, handlers, runs = self._handlers.max_unsent_bytes, self._handlers, self._handlers.runs
        at, end = 0, len(commands)
        while at < end:
            if self._socket is None:
                return
            if self._unsent > limit or (at and handlers.spent):
                self._backlog = commands[at:]
                return
            frame = commands[at]
            run = None if frame.flag & RESPONSE_FLAG else runs.get(frame.code)
            if run is not None:
                following = run(self, commands, at)
                if following > at:
                    at = following
                    continue
            at += 1
            if isinstance(frame, PlainAcks):
                for each in frame.commands():
                    handlers.request(self, each)
                continue
            if isinstance(frame, PlainSend):
                frame = frame.command()
            if frame.flag & RESPONSE_FLAG:
                self._take_answer(frame)
            else:
                self.serialization = frame.serialization
                handlers.request(self, frame)
        if self._reader.error is not None:
            self._lost()

    def _lost(self) -> None:
        """Close the connection: the stream is out of step, so the client could not match any answer."""
        logger.warning("connection closed peer=%s reason=%s", self.address, self._reader.error)
        self.close()

    def _ended(self) -> None:
        self.close()  # clients never close one direction only

    def respond(self, request: RemotingCommand, answer: Answer) -> None:
        """Answer a request while it is being handled; a one-way request gets no answer."""
        if not request.is_oneway:
            self.reply(*_encoded(request, answer))

    def owe(self, request: RemotingCommand | Kept, more: int = 0) -> Kept:
        """Make the request owed: it is answered later, by ``pay``, and its frame is freed now.

        ``more`` is the number of bytes of its body that are kept.
        """
        if isinstance(request, Kept):
            return request
        size = sum(map(len, request.fields.values())) + more
        self.owed += 1
        self.owed_bytes += size
        return Kept(request.opaque, request.flag, request.version, request.serialization, size)

    def owe_bare(self, request: RemotingCommand) -> Kept:
        """Make a request owed of which nothing is kept but what the answer needs."""
        self.owed += 1
        self.owed_bytes += KEPT_BYTES
        return bare(request, request.opaque)

    def owe_opaques(self, count: int) -> None:
        """Make requests owed of which only the opaques are kept: ``pay_done`` answers them, or ``pay_all`` (``bare``)."""
        self.owed += count
        self.owed_bytes += KEPT_BYTES * count

    def pay_done(self, opaques: Sequence[int]) -> None:
        """Answer requests in JSON that were owed: they are done."""
        self.answer(len(opaques), KEPT_BYTES * len(opaques), encode_done(opaques))

    def pay(self, kept: Kept, answer: Answer) -> None:
        """Answer a request that was owed."""
        self.answer(1, kept.size, *_owed(kept, answer))

    def payment(self, kept: Kept, answer: Answer) -> Callable[[], None]:
        """Return what answers a request that was owed, with the answer encoded already."""
        return partial(self.answer, 1, kept.size, *_owed(kept, answer))

    def pay_all(self, answers: Sequence[tuple[Kept, Answer]]) -> None:
        """Answer requests that were owed, in one piece; the answers have no bodies."""
        size, heads = 0, list[bytes]()
        for kept, (code, fields, remark, _) in answers:
            opaque, flag, _, serialization, kept_size = kept  # by position, which is cheaper than by name
            size += kept_size
            if flag & ONEWAY_FLAG:
                continue
            is_bare = fields is None and remark is None and serialization == JSON
            heads.append(encode_bare(code, opaque) if is_bare else encode_response(kept, code, fields, remark))
        self.answer(len(answers), size, b"".join(heads))

    def settle(self, request: RemotingCommand | Kept, answer: Answer) -> None:
        """Answer a request, whether it is owed or still being handled."""
        if isinstance(request, Kept):
            self.pay(request, answer)
        else:
            self.respond(request, answer)

    # -- requests of the broker ---------------------------------------------------------------------------------------

    def tell(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> bool:
        """Send a one-way request and return true; return false when the client is gone, or does not read what it is sent."""
        if not self._is_read:
            return False
        self._push(encode_request(code, self._new_opaque(), fields, body, oneway=True, serialization=self.serialization))
        return self._socket is not None

    def ask(self, code: int, fields: Mapping[str, str], body: bytes, answered: Answered) -> None:
        """Send a request. ``answered`` is called with the client's answer, or with ``None`` when the connection closes or
        ``ASK_TIMEOUT_S`` passes.

        To a client that does not read what it is sent, no request is sent, and ``answered`` is called at once with ``None``.
        """
        if not self._is_read:
            answered(None)
            return
        opaque = self._new_opaque()
        frame = encode_request(code, opaque, fields, body, oneway=False, serialization=self.serialization)
        timer = self._handlers.timer(ASK_TIMEOUT_S)
        self._asked[opaque] = _Asked(answered, timer)  # before it is sent: that may show that the connection is lost
        timer.start(self._expire, opaque)
        self._push(frame)

    @property
    def _is_read(self) -> bool:
        """True when the connection is open, and its client reads what it is sent."""
        return self._socket is not None and self._unsent <= self._handlers.max_unsent_bytes

    def _new_opaque(self) -> int:
        self._last_opaque = self._last_opaque % 0x7FFFFFFF + 1  # never 0, which one client library replaces
        return self._last_opaque

    def _push(self, frame: bytes) -> None:
        self.reply(frame)
        self.flush()

    def _take_answer(self, answer: RemotingCommand) -> None:
        asked = self._asked.pop(answer.opaque, None)
        if asked is None:
            logger.info("an answer to nothing that was asked, ignored peer=%s opaque=%d", self.address, answer.opaque)
            return
        asked.timer.close()
        asked.answered(answer)

    def _expire(self, opaque: int) -> None:
        asked = self._asked.pop(opaque)
        asked.timer.close()
        asked.answered(None)

    def _drop_waiting(self) -> None:
        asked, self._asked = self._asked, {}
        for one in asked.values():
            one.timer.close()
            one.answered(None)
        calls, self._at_close = self._at_close, {}
        for call in calls:
            call()

    def at_close(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when the connection closes."""
        self._at_close[call] = None

    def not_at_close(self, call: Callable[[], None]) -> None:
        """Undo ``at_close``; do nothing when there is nothing to undo. One connection may hold thousands of requests."""
        self._at_close.pop(call, None)


def _owed(kept: Kept, answer: Answer) -> Sequence[Buffer]:
    """Return the answer to a request that was owed, encoded; nothing when nobody waits for it."""
    return () if kept.flag & ONEWAY_FLAG else _encoded(kept, answer)


def _encoded(request: Asked, answer: Answer) -> list[Buffer]:
    code, fields, remark, body = answer
    size = sum(map(len, body))
    head = encode_response(request, code, fields, remark, size)
    if not body:
        return [head]
    return [b"".join((head, *body))] if size <= MOST_COPIED else [head, *body]


RequestHandler = Callable[[RemotingSession, RemotingCommand], Answer | None]
"""Answers one request; returns ``None`` when the answer comes later, or not at all."""
RunHandler = Callable[[RemotingSession, Sequence[Received], int], int]
"""Takes the run of plain requests of one code that begins at an index, each of which is owed from then on.

Returns where it ends: it takes none that needs more, which is then handled by itself.
"""


class Family(Protocol):
    """Handlers of related requests."""

    def requests(self) -> Mapping[int, RequestHandler]:
        """Return the handler methods by request code."""
        ...
