"""``pop``, ``ack``, ``nack`` and ``extend`` (specs: text protocol, section 16)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.leases.leasing import Leasing
from metaq.engine.leases.planning import PopRequest
from metaq.engine.reading.filters import EVERY_MESSAGE, Filter, tag_filter
from metaq.engine.tables.groups import SAFE_ACKS, Group
from metaq.engine.tables.topics import Topic
from metaq.errors import (
    AccessDenied,
    BadRequest,
    DiskFull,
    MetaqError,
    Overloaded,
    StoreError,
    UnknownTopic,
    WrongPartition,
)
from metaq.leases.events import Changed
from metaq.leases.state import PartitionLeases
from metaq.leases.tokens import Begun, begun_in, bits_in
from metaq.message import GroupPartition
from metaq.protocol.remoting.codes import READ
from metaq.protocol.text.commands import Ack, Extend, Nack, Pop, Subscribe
from metaq.protocol.text.ids import encode_token
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.text.leaseanswers import Leased, SafeAnswer, counted, give_frames, lease_refusal, push_others
from metaq.server.text.leasewaits import HeldPop, RejectionWait
from metaq.server.text.session import TextSession
from metaq.server.wire.reads import StoreReads

INVISIBLE_MS: Final = 60_000
"""The length of a lease, if the client does not say."""
MOST_PAIRS: Final = 64
"""Topics and groups that are remembered of one connection, because they have open messages or it is subscribed to them."""
RETRY_MS: Final = 1000
_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""

Ending = Callable[[GroupPartition, Sequence[Leased]], int]
"""Ends leases of one place; returns how many."""


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
            wanted = self.request(session, pop, filter_by(pop.attribute), pop.most)
            result = self.leasing.pops.now(wanted)
        except MetaqError as error:
            session.reply(lease_refusal(error, pop.opaque))
            return
        if result is not None:
            session.owed += 1
            give_frames(self.leases, session, pop.opaque, wanted, result)
            return
        wait_ms = min(pop.wait_ms, self.context.settings.max_hold_ms)
        HeldPop(session, pop.opaque).start(self.leasing, self.reads, wanted, wait_ms)

    def request(
        self, session: TextSession, command: Pop | Subscribe, wanted: Filter, most: int, partition: int | None = None
    ) -> PopRequest:
        """Return what a command wants. Raise why it may not."""
        context = self.context
        _check_rights(session.principal, command.topic, command.group)
        topic = context.topics.get(command.topic)
        if topic is None:
            raise UnknownTopic(f"the topic {command.topic} does not exist on this broker")
        context.topics.check(topic, READ)
        if partition is not None and partition >= topic.read_partitions:
            raise WrongPartition(f"the topic {topic.name} has {topic.read_partitions} partitions to read, not {partition}")
        context.store.check_master()
        group = context.groups.ensure(command.group)
        _check_enabled(group)
        invisible_ms = min(INVISIBLE_MS, group.max_invisible_ms) if command.invisible_ms is None else command.invisible_ms
        if invisible_ms > group.max_invisible_ms:
            limit = f"{group.max_invisible_ms} (max_invisible_ms of the group)"
            raise BadRequest(f"invisible={invisible_ms} is over the limit, {limit}")
        self._remember(session, command.topic, command.group)
        return PopRequest(
            group=group,
            topic=topic,
            partitions=None if partition is None else (partition,),
            most=most,
            invisible_ms=invisible_ms,
            wanted=wanted,
            from_first=command.from_first is not False,
        )

    def _remember(self, session: TextSession, topic: str, group: str) -> None:
        """Remember a topic and a group, so that short forms of ``ack`` and others find their messages.

        When there are too many, those are forgotten in which nothing is open; raise ``Overloaded`` if there are none.
        """
        pairs = session.leases_from
        if (topic, group) in pairs:
            return
        if len(pairs) >= MOST_PAIRS:
            for pair in [pair for pair in pairs if pair not in session.subscriptions and not self._has_open(*pair)]:
                del pairs[pair]
        if len(pairs) >= MOST_PAIRS:
            reason = f"this connection leases from {MOST_PAIRS} topics and groups that have messages in work"
            raise Overloaded(f"{reason}; lease over another one", retry_after_ms=RETRY_MS)
        pairs[topic, group] = None

    def _has_open(self, topic: str, group: str) -> bool:
        return any(state.open for state in self.leases.of(group, topic).values())

    def check(self, session: TextSession, topic: Topic, group: Group) -> None:
        """Raise ``AccessDenied`` when a session that was subscribed may lease no more."""
        _check_rights(session.principal, topic.name, group.name)
        self.context.topics.check(topic, READ)
        _check_enabled(group)

    # -- ends of leases -----------------------------------------------------------------------------------------------

    def ack(self, session: TextSession, ack: Ack) -> None:
        """Finish messages."""
        self._change(session, ack, self._finish)

    def extend(self, session: TextSession, extend: Extend) -> None:
        """Let leases end some time from now."""
        self._change(session, extend, partial(self._end_after, extend.ms, given_back=False))

    def nack(self, session: TextSession, nack: Nack) -> None:
        """Give messages back, or up."""
        if nack.dead:
            try:
                found = self._leased(session, nack)
            except MetaqError as error:
                session.reply(lease_refusal(error, nack.opaque))
            else:
                self.reads.start(RejectionWait(self.leasing, session, nack, found))
            return
        self._change(session, nack, partial(self._end_after, nack.delay_ms or 0, given_back=True))

    def _finish(self, place: GroupPartition, found: Sequence[Leased]) -> int:
        """Finish messages of a place; return how many."""
        deliveries: dict[int, list[int]] = {}
        for leased in found:
            deliveries.setdefault(leased.pop_ms, []).append(leased.ordinal)
        return sum([self.leases.ack_all(place, pop_ms, ordinals) for pop_ms, ordinals in deliveries.items()])

    def _end_after(self, after_ms: int, place: GroupPartition, found: Sequence[Leased], *, given_back: bool) -> int:
        """Let leases of a place end some time from now; return how many."""
        most_ms = self.context.groups.ensure(place.group).max_invisible_ms
        due_ms = self.leases.due_ms
        changes = [Changed(pop_ms, ordinal, due_ms(pop_ms, after_ms, most_ms), given_back) for _, ordinal, pop_ms in found]
        return len(self.leases.change_all(place, changes))

    def _change(self, session: TextSession, command: Ack | Nack | Extend, end: Ending) -> None:
        """End leases, and answer how many once that is in the log."""
        count, changed = 0, list[GroupPartition]()
        try:
            self.context.store.check_master()
            self.context.store.check_healthy()
            places: dict[GroupPartition, list[Leased]] = {}
            for leased in self._leased(session, command):
                places.setdefault(leased.place, []).append(leased)
            for place, found in places.items():
                ended = end(place, found)
                count += ended
                if ended:
                    changed.append(place)
                    if session.subscriptions and not isinstance(command, Extend):
                        push_others(session, found)
        except MetaqError as error:
            self._reply(session, lease_refusal(error, command.opaque))
            return
        if count:
            self.answer(session, command, count, changed)
        else:
            self._reply(session, counted(command, 0))

    def _reply(self, session: TextSession, reply: bytes) -> None:
        """Send an answer that waits for nothing but those that are owed before it."""
        if not session.owed:
            session.reply(reply)
            return
        session.owed += 1
        session.lease_changes += 1
        self.leases.turns.with_answers(lambda error: _settle(session, reply))

    def answer(self, session: TextSession, command: Ack | Nack | Extend, count: int, changed: Sequence[GroupPartition]) -> None:
        """Answer once the change is in the log; as safe as a message, if one of the groups wants that (``lease_acks``)."""
        session.owed += 1
        reply = counted(command, count)
        known = [self.context.groups.get(place.group) for place in changed]
        if any(group is not None and group.lease_acks == SAFE_ACKS for group in known):
            self.leases.staged(SafeAnswer(session, command.opaque, reply), changed)
            return
        session.lease_changes += 1
        self.leases.turns.with_answers(partial(_answer, session, command, reply))

    def _leased(self, session: TextSession, command: Ack | Nack | Extend) -> list[Leased]:
        """Return the messages that the ids of a command name, of those that this connection leases, or of a topic and group."""
        if command.topic is not None and command.group is not None:
            _check_rights(session.principal, command.topic, command.group)
            pairs: Sequence[tuple[str, str]] = [(command.topic, command.group)]
        else:
            pairs = list(session.leases_from)
        known: dict[int, list[_Place]] = {}
        found: list[Leased] = []
        for partition, ordinal, token in dict.fromkeys(command.ids):
            places = known.get(partition)
            if places is None:
                places = known[partition] = self._places(pairs, partition)
            leased = _find(places, ordinal, token)
            if leased is None:
                self.leases.counts.meaningless += 1
            else:
                found.append(leased)
        for topic, group in {(leased.place.topic, leased.place.group) for leased in found}:
            _check_rights(session.principal, topic, group)
        return found

    def _places(self, pairs: Sequence[tuple[str, str]], partition: int) -> "list[_Place]":
        """Return the places in which ids of a partition may be, those of them that have leases."""
        places = []
        for topic, group in pairs:
            place = GroupPartition(group, topic, partition)
            state = self.leases.settled(place)
            if state is not None:
                places.append(_Place(place, state, begun_in(self.leases.log.secret, group, topic, partition)))
        return places


class _Place(NamedTuple):
    """A place in which the messages of some ids may be."""

    place: GroupPartition
    state: PartitionLeases
    begun: Begun
    """For the tokens of its ids."""


def _find(places: Sequence[_Place], ordinal: int, token: str) -> Leased | None:
    """Return the open message that an id names; its token says of which topic and group."""
    for place, state, begun in places:
        bunch = state.find(ordinal)
        if bunch is not None and token == encode_token(bits_in(begun, ordinal, bunch.pop_ms)):
            return _new(Leased, (place, ordinal, bunch.pop_ms))
    return None


def _check_rights(principal: Principal, topic: str, group: str) -> None:
    demand(principal, Action.SUBSCRIBE, topic)
    demand(principal, Action.CONSUME, group)


def _check_enabled(group: Group) -> None:
    if not group.consume_enable:
        raise AccessDenied(f"the group {group.name} may not consume (consumeEnable is false)")


def filter_by(attribute: str | None) -> Filter:
    """Return the filter that accepts messages with an attribute; with ``None`` all."""
    return EVERY_MESSAGE if attribute is None else tag_filter(attribute)


def _answer(session: TextSession, command: Ack | Nack | Extend, reply: bytes, error: StoreError | None) -> None:
    """Answer. Only changes for which the disk has no room are kept in memory, and so acknowledged."""
    if error is not None and not isinstance(error, DiskFull):
        reply = lease_refusal(error, command.opaque)
    _settle(session, reply)


def _settle(session: TextSession, reply: bytes) -> None:
    session.lease_changes -= 1
    session.answer(1, 0, reply)
