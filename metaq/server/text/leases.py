"""``pop``, ``ack``, ``nack`` and ``extend`` (specs: text protocol, section 16)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.leases.keyed import records_of
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import PopRequest
from metaq.engine.leases.poison import Reason
from metaq.engine.leases.popping import PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.engine.reading.filters import EVERY_MESSAGE, Filter, filter_of, parse_cached
from metaq.engine.tables.groups import SAFE_ACKS
from metaq.engine.writing import note
from metaq.errors import (
    AccessDenied,
    BadRequest,
    DiskFull,
    Fenced,
    MetaqError,
    Overloaded,
    StoreError,
    UnknownTopic,
    WrongPartition,
)
from metaq.leases.events import Dead
from metaq.leases.state import ReceiptState
from metaq.leases.tokens import bits_of
from metaq.message import GroupPartition
from metaq.protocol.record import identity
from metaq.protocol.remoting.codes import READ
from metaq.protocol.subscription import ExpressionKind
from metaq.protocol.text.commands import Ack, Extend, Nack, Pop, Subscribe
from metaq.protocol.text.ids import MessageId, encode_token
from metaq.protocol.text.messages import Stored
from metaq.protocol.text.pushed import Push, encode_pushed
from metaq.protocol.text.replies import NOT_FOUND, NOTHING_TO_POP, OK, write_result
from metaq.server.access.permissions import Action, demand
from metaq.server.text.reads import TextRead
from metaq.server.text.session import TextSession
from metaq.server.wire.pops import PopRead
from metaq.server.wire.reads import StoreReads
from metaq.server.wire.session import Buffer
from metaq.store.files.filecache import Read

INVISIBLE_MS: Final = 60_000
"""The length of a lease, if the client does not say."""
MOST_PAIRS: Final = 64
"""Topics and groups from which one connection leases messages."""
RETRY_MS: Final = 1000
NO_OFFSET: Final = -1
"""Stands for the log offset of a record in a frame, which does not show it."""


class Leased(NamedTuple):
    """A message that an id names: it is open, and the id is that of its last delivery."""

    place: GroupPartition
    ordinal: int
    pop_ms: int


class LeaseHandler:
    """Handles pops, and what ends leases."""

    def __init__(self, context: Context, leasing: Leasing, reads: StoreReads) -> None:
        self.context = context
        self.leasing = leasing
        self.leases = leasing.leases
        self.reads = reads

    def commands(self) -> dict[type, Callable[..., None]]:
        """Return the handler methods by command."""
        return {Pop: self.pop, Ack: self.ack, Nack: self.nack, Extend: self.extend}

    # -- pops ---------------------------------------------------------------------------------------------------------

    def pop(self, session: TextSession, pop: Pop) -> None:
        """Lease messages; the reply is a frame for each, and a result with their number."""
        self.context.counters.get.add(1)
        self.context.topic_counters(pop.topic).get.add(1)
        try:
            wanted = self.request(session, pop, pop.most)
        except MetaqError as error:
            session.reply(lease_refusal(error, pop.opaque))
            return
        wait_ms = min(pop.wait_ms, self.context.settings.max_hold_ms)
        _Pop(self, session, pop.opaque).start(self.leasing, self.reads, wanted, wait_ms)

    def request(self, session: TextSession, command: Pop | Subscribe, most: int, partition: int | None = None) -> PopRequest:
        """Return what a command wants. Raise why it may not."""
        context = self.context
        demand(session.principal, Action.SUBSCRIBE, command.topic)
        demand(session.principal, Action.CONSUME, command.group)
        topic = context.topics.get(command.topic)
        if topic is None:
            raise UnknownTopic(f"the topic {command.topic} does not exist on this broker")
        context.topics.check(topic, READ)
        if partition is not None and partition >= topic.read_partitions:
            raise WrongPartition(f"the topic {topic.name} has {topic.read_partitions} partitions to read, not {partition}")
        context.store.check_master()
        group = context.groups.ensure(command.group)
        if not group.consume_enable:
            raise AccessDenied(f"the group {group.name} may not consume (consumeEnable is false)")
        invisible_ms = min(INVISIBLE_MS, group.max_invisible_ms) if command.invisible_ms is None else command.invisible_ms
        if invisible_ms > group.max_invisible_ms:
            limit = f"{group.max_invisible_ms} (max_invisible_ms of the group)"
            raise BadRequest(f"invisible={invisible_ms} is over the limit, {limit}")
        _remember(session, command.topic, command.group)
        return PopRequest(
            group=group,
            topic=topic,
            partitions=None if partition is None else (partition,),
            most=most,
            invisible_ms=invisible_ms,
            wanted=_filter(command),
            from_first=command.from_first is not False,
        )

    # -- ends of leases -----------------------------------------------------------------------------------------------

    def ack(self, session: TextSession, ack: Ack) -> None:
        """Finish messages."""
        self._change(session, ack, lambda leased: self.leases.ack(leased.place, leased.pop_ms, leased.ordinal, 1) > 0)

    def extend(self, session: TextSession, extend: Extend) -> None:
        """Let leases end some time from now."""
        self._change(session, extend, lambda leased: self._end_at(leased, extend.ms, given_back=False))

    def nack(self, session: TextSession, nack: Nack) -> None:
        """Give messages back, or up."""
        if nack.dead:
            try:
                found = self._leased(session, nack)
            except MetaqError as error:
                session.reply(lease_refusal(error, nack.opaque))
            else:
                self.reads.start(_Rejection(self, session, nack, found))
            return
        self._change(session, nack, lambda leased: self._end_at(leased, nack.delay_ms or 0, given_back=True))

    def _end_at(self, leased: Leased, after_ms: int, *, given_back: bool) -> bool:
        group = self.context.groups.ensure(leased.place.group)
        due_ms = self.leases.due_ms(leased.pop_ms, after_ms, group.max_invisible_ms)
        changed = self.leases.change(leased.place, leased.ordinal, leased.pop_ms, due_ms, given_back=given_back)
        return changed is ReceiptState.LEASED

    def _change(self, session: TextSession, command: Ack | Nack | Extend, end: Callable[[Leased], bool]) -> None:
        """End leases, and answer how many once that is in the log."""
        try:
            self.context.store.check_master()
            self.context.store.check_healthy()
            found = self._leased(session, command)
            ended = [leased for leased in found if end(leased)]
        except MetaqError as error:
            session.reply(lease_refusal(error, command.opaque))
            return
        if not ended:
            session.reply(_counted(command, 0))
            return
        if not isinstance(command, Extend):
            _finish(session, ended)
        groups = {leased.place.group for leased in ended}
        self.answer(session, command, len(ended), groups)

    def answer(self, session: TextSession, command: Ack | Nack | Extend, count: int, groups: set[str]) -> None:
        """Answer once the change is in the log; as safe as a message, if one of the groups wants that (``lease_acks``)."""
        session.owed += 1
        reply = _counted(command, count)
        known = [self.context.groups.get(name) for name in groups]
        if any(group is not None and group.lease_acks == SAFE_ACKS for group in known):
            note(self.leases.turns, partial(_answer_safe, session, command, reply))
            return
        session.lease_changes += 1
        self.leases.turns.after_append(partial(_answer, session, command, reply))

    def _leased(self, session: TextSession, command: Ack | Nack | Extend) -> list[Leased]:
        """Return the messages that the ids of a command name, of those that this connection leases, or of a topic and group."""
        if command.topic is not None and command.group is not None:
            demand(session.principal, Action.SUBSCRIBE, command.topic)
            demand(session.principal, Action.CONSUME, command.group)
            pairs: Sequence[tuple[str, str]] = [(command.topic, command.group)]
        else:
            pairs = list(session.leases_from)
        found = [self.find(pairs, message_id) for message_id in dict.fromkeys(command.ids)]
        self.leases.counts.meaningless += found.count(None)
        return [leased for leased in found if leased is not None]

    def find(self, pairs: Sequence[tuple[str, str]], message_id: MessageId) -> Leased | None:
        """Return the open message that an id names; its token says of which topic and group."""
        for topic, group in pairs:
            place = GroupPartition(group, topic, message_id.partition)
            state = self.leases.settled(place)
            bunch = None if state is None else state.find(message_id.ordinal)
            if bunch is not None and message_id.token == self.token(place, message_id.ordinal, bunch.pop_ms):
                return Leased(place, message_id.ordinal, bunch.pop_ms)
        return None

    def token(self, place: GroupPartition, ordinal: int, pop_ms: int) -> str:
        """Return the token in the id of a message."""
        return encode_token(bits_of(self.leases.log.secret, place.group, place.topic, place.partition, ordinal, pop_ms))


def lease_refusal(error: MetaqError, opaque: str) -> bytes:
    """Return the reply to a command that failed. A topic that is not there is 404, which is 500 in replies to puts."""
    return write_result(NOT_FOUND if isinstance(error, UnknownTopic) else error.status, str(error), opaque)


def _remember(session: TextSession, topic: str, group: str) -> None:
    """Remember a topic and a group, so that short forms of ``ack`` and others find their messages."""
    if (topic, group) not in session.leases_from:
        if len(session.leases_from) >= MOST_PAIRS:
            raise Overloaded(f"this connection leases from {MOST_PAIRS} topics and groups already", retry_after_ms=RETRY_MS)
        session.leases_from[topic, group] = None


def _finish(session: TextSession, ended: Sequence[Leased]) -> None:
    """Have the subscriptions of a connection push others for what has ended."""
    for (group, topic, partition), ordinal, _ in ended:
        subscription = session.subscriptions.get((topic, group))
        if subscription is not None:
            subscription.finished(partition, ordinal)


def _filter(command: Pop | Subscribe) -> Filter:
    if command.attribute is None:
        return EVERY_MESSAGE
    return filter_of(parse_cached(command.topic, command.attribute, kind=ExpressionKind.TAG))


def _counted(command: Ack | Nack | Extend, count: int) -> bytes:
    """Return the reply that says how many ids meant something."""
    if not count and len(command.ids) == 1:
        return write_result(NOT_FOUND, f"{command.ids[0]} means nothing (any more)", command.opaque)
    return write_result(OK, str(count), command.opaque)


def _answer(session: TextSession, command: Ack | Nack | Extend, reply: bytes, error: StoreError | None) -> None:
    """Answer. Only changes for which the disk has no room are kept in memory, and so acknowledged."""
    session.lease_changes -= 1
    if error is not None and not isinstance(error, DiskFull):
        reply = lease_refusal(error, command.opaque)
    session.answer(1, 0, reply)


def _answer_safe(session: TextSession, command: Ack | Nack | Extend, reply: bytes, error: MetaqError | None) -> None:
    session.answer(1, 0, reply if error is None else lease_refusal(error, command.opaque))


class FrameStyle(NamedTuple):
    """The parts of a message frame that its receiver chose."""

    opaque: str
    with_crc: bool = False


def frames(handler: LeaseHandler, wanted: PopRequest, result: PopResult, style: FrameStyle) -> list[Buffer]:
    """Return the frames of the messages that a pop gave."""
    out: list[Buffer] = []
    for part in result.given:
        place = GroupPartition(wanted.group.name, wanted.topic.name, part.partition)
        for record, ordinal, times in zip(records_of(part.body), part.ordinals, part.times, strict=True):
            message_id = MessageId(part.partition, ordinal, handler.token(place, ordinal, result.pop_ms))
            position = identity(record).text_position
            push = Push(style.opaque, message_id, wanted.topic.name, position, times + 1, style.with_crc)
            encode_pushed(push, Stored(record, 0, len(record), NO_OFFSET), out)
    return out


class _Pop(PopRead, TextRead):
    """A pop in progress."""

    def __init__(self, handler: LeaseHandler, session: TextSession, opaque: str) -> None:
        super().__init__(session, opaque)
        self._handler = handler

    def hold(self, place: Waiting) -> None:
        self.session.held = place

    def release(self, place: Waiting) -> None:
        self.session.held = None

    def give(self, result: PopResult) -> None:
        self.count(result)
        out = frames(self._handler, self.wanted, result, FrameStyle(self._opaque))
        out.append(write_result(OK, str(sum(len(part.ordinals) for part in result.given)), self._opaque))
        self.leasing.leases.turns.after_append(partial(self._answer, out))

    def _answer(self, out: list[Buffer], error: StoreError | None) -> None:
        if isinstance(error, Fenced):
            self.fail(error)
        else:
            self.settle(*out)

    def give_nothing(self, *, is_full: bool) -> None:
        self.settle(write_result(NOT_FOUND, NOTHING_TO_POP, self._opaque))


class _Rejection(TextRead):
    """Messages on their way to the dead letters, whose records must be read first."""

    def __init__(self, handler: LeaseHandler, session: TextSession, command: Nack, found: list[Leased]) -> None:
        super().__init__(session, command.opaque)
        self._handler = handler
        self._command = command
        self._found = found

    def read(self, read: Read) -> list[tuple[Leased, bytes | None]]:
        return [(leased, self._handler.leases.message(leased.place, leased.ordinal, read)) for leased in self._found]

    def found(self, records: list[tuple[Leased, bytes | None]]) -> None:
        """Give the messages up; answer when the dead letters are as safe as promised."""
        handler, count = self._handler, 0
        handler.context.store.check_writable()
        for leased, record in records:
            place, ordinal, pop_ms = leased
            if handler.leases.receipt_state(place, ordinal, pop_ms) is not ReceiptState.LEASED:
                continue
            count += 1
            if record is None:
                handler.leases.record(place, Dead(ordinal))
            else:
                handler.leasing.poison.give_up(place, ordinal, record, Reason.REJECTED)
        if not count:
            self.settle(_counted(self._command, 0))
            return
        _finish(self.session, self._found)
        self.defer()
        note(handler.leases.turns, partial(self._answer, count))

    def _answer(self, count: int, error: MetaqError | None) -> None:
        if error is not None:
            self.fail(error)
        else:
            self.settle(_counted(self._command, count))
