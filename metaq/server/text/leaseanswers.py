"""The answers to commands about leases, and the frames of messages that are given (specs: text protocol, section 16)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.engine.leases.keyed import records_of
from metaq.engine.leases.leases import Leases
from metaq.engine.leases.planning import PopRequest
from metaq.engine.leases.popping import PopResult, count_given
from metaq.engine.turn import Short
from metaq.errors import MetaqError, UnknownTopic
from metaq.leases.tokens import begun_in, bits_in
from metaq.message import GroupPartition
from metaq.protocol.record import text_position
from metaq.protocol.text.commands import Ack, Extend, Nack
from metaq.protocol.text.ids import MessageId, encode_token
from metaq.protocol.text.messages import Stored
from metaq.protocol.text.pushed import Push, encode_pushed
from metaq.protocol.text.replies import ERROR, NOT_FOUND, OK, write_result
from metaq.server.text.session import TextSession
from metaq.server.wire.session import Buffer

NO_OFFSET: Final = -1
"""Stands for the log offset of a record in a frame, which does not show it."""
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""


class Leased(NamedTuple):
    """A message that an id names: it is open, and the id is that of its last delivery."""

    place: GroupPartition
    ordinal: int
    pop_ms: int


Encode = Callable[[Push, Stored, list[Buffer]], object]
"""Appends one message to buffers, in the form in which its receiver takes it."""


class FrameStyle(NamedTuple):
    """The parts of a message frame that its receiver chose."""

    opaque: str
    with_crc: bool = False
    encode: Encode | None = None
    """Writes each message; ``None``: as a frame of the text protocol."""


def frames(leases: Leases, wanted: PopRequest, result: PopResult, style: FrameStyle) -> list[Buffer]:
    """Return the frames of the messages that a pop gave."""
    group, topic, pop_ms = wanted.group.name, wanted.topic.name, result.pop_ms
    opaque, with_crc, encode = style
    out: list[Buffer] = []
    for partition, ordinals, times, body in result.given:
        begun = begun_in(leases.log.secret, group, topic, partition)
        for record, ordinal, before in zip(records_of(body), ordinals, times, strict=True):
            message_id = _new(MessageId, (partition, ordinal, encode_token(bits_in(begun, ordinal, pop_ms))))
            push = _new(Push, (opaque, message_id, topic, text_position(record), before + 1, with_crc))
            stored = _new(Stored, (record, 0, len(record), NO_OFFSET))
            if encode is None:
                encode_pushed(push, stored, out)
            else:
                encode(push, stored, out)
    return out


def give_frames(leases: Leases, session: TextSession, opaque: str, wanted: PopRequest, result: PopResult) -> None:
    """Answer a pop, which the session owes, with messages once their leases are granted."""
    count_given(leases.context, wanted, result)
    out = frames(leases, wanted, result, FrameStyle(opaque))
    out.append(write_result(OK, str(sum([len(part.ordinals) for part in result.given])), opaque))
    leases.grant(wanted.group, partial(_answer, session, opaque, out))


def _answer(session: TextSession, opaque: str, out: list[Buffer], error: MetaqError | None) -> None:
    if error is not None:
        out = [write_result(error.status, str(error), opaque)]
    session.answer(1, 0, *out)


def counted(command: Ack | Nack | Extend, count: int) -> bytes:
    """Return the reply that says how many ids meant something."""
    if not count and len(command.ids) == 1:
        return write_result(NOT_FOUND, f"{command.ids[0]} means nothing (any more)", command.opaque)
    return write_result(OK, str(count), command.opaque)


def lease_refusal(error: MetaqError, opaque: str) -> bytes:
    """Return the reply to a command that failed. A topic that is not there is 404, which is 500 in replies to puts."""
    return write_result(NOT_FOUND if isinstance(error, UnknownTopic) else error.status, str(error), opaque)


class SafeAnswer:
    """The outcome of a command whose answer waits until what it has stored is as safe as a message."""

    __slots__ = ("_opaque", "_reply", "_session", "size")

    def __init__(self, session: TextSession, opaque: str, reply: bytes) -> None:
        """Prepare the outcome; the session must owe the answer already."""
        self._session = session
        self._opaque = opaque
        self._reply = reply
        self.size = 0

    def stored(self) -> None:
        self._session.answer(1, 0, self._reply)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._session.answer(1, 0, lease_refusal(error, self._opaque))

    def late(self, short: Short) -> None:
        self._session.answer(1, 0, write_result(ERROR, f"stored, but not {short.lacks}", self._opaque))


def push_others(session: TextSession, ended: Sequence[Leased]) -> None:
    """Have the subscriptions of a connection push others for messages that are not out any more."""
    for (group, topic, partition), ordinal, _ in ended:
        subscription = session.subscriptions.get((topic, group))
        if subscription is not None:
            subscription.finished(partition, ordinal)
