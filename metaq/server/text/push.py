"""``subscribe``, ``ready`` and ``unsubscribe``: messages are leased and pushed as they come (specs: text protocol, section 16).

A subscription always waits in line (``metaq.engine.leases.waiting``), also while it may push nothing. When it is woken, it
pushes what it may and takes the last place.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from metaq.engine.leases.planning import Plan, PopRequest
from metaq.engine.leases.popping import PopResult
from metaq.engine.leases.waiting import Waiting
from metaq.engine.reading.filters import Filter
from metaq.errors import AccessDenied, BadRequest, MetaqError, RequestFailed, StoreError
from metaq.message import GroupPartition
from metaq.protocol.text.commands import Ready, Subscribe, Unsubscribe
from metaq.protocol.text.replies import BAD_REQUEST, MOVED, NOT_FOUND, OK, write_result
from metaq.server.text.leaseanswers import FrameStyle, frames, lease_refusal
from metaq.server.text.leases import LeaseHandler, filter_by
from metaq.server.text.session import TextSession
from metaq.server.text.shares import Shares
from metaq.server.wire.pops import LOOK_S
from metaq.server.wire.reads import StoreRead
from metaq.server.wire.session import Buffer
from metaq.store.files.filecache import Read

MOST_AT_ONCE: Final = 32
"""Messages that are pushed to one subscription in one turn; then it is the turn of others in line."""
FULL_S: Final = 0.25
"""The pause between two looks of a subscription that may push nothing: for messages that are not out any more, and for room."""
FEW: Final = 64


class PushHandler:
    """Handles subscriptions."""

    def __init__(self, leases: LeaseHandler) -> None:
        self._leases = leases
        self._shares: dict[tuple[str, str], Shares[PushSubscription]] = {}
        self._changed: dict[tuple[str, str], None] = {}  # in this turn

    def commands(self) -> dict[type, Callable[..., None]]:
        """Return the handler methods by command."""
        return {Subscribe: self.subscribe, Ready: self.ready, Unsubscribe: self.unsubscribe}

    def subscribe(self, session: TextSession, command: Subscribe) -> None:
        """Push messages of a topic from now on."""
        try:
            style = FrameStyle(command.opaque, command.with_crc)
            subscription = self.open(session, command, filter_by(command.attribute), style)
        except MetaqError as error:
            session.reply(lease_refusal(error, command.opaque))
            return
        session.reply(write_result(OK, "", command.opaque))
        if command.owns:
            self._deal(subscription, command)
        subscription.begin()

    def open(self, session: TextSession, command: Subscribe, wanted: Filter, style: FrameStyle) -> "PushSubscription":
        """Return a new subscription of a session, which pushes from its ``begin`` on. Raise why it may not."""
        key = command.topic, command.group
        if key in session.subscriptions:
            raise BadRequest(f"this connection is subscribed to {command.topic} for {command.group} already")
        request = self._leases.request(session, command, wanted, MOST_AT_ONCE, command.partition)
        subscription = PushSubscription(self, self._leases, session, command.ready, request, style)
        self._leases.leasing.lines.subscriptions += 1
        session.subscriptions[key] = subscription
        return subscription

    def _deal(self, subscription: "PushSubscription", command: Subscribe) -> None:
        """Give a subscription its share of the partitions, or the one that it takes over from another one."""
        key = subscription.key
        shares = subscription.shares = self._shares.get(key) or Shares(partial(self._count, command.topic))
        self._shares[key] = shares
        replaced = shares.add(subscription, command.name or "", command.partition)
        if replaced is not None:
            replaced.end_by(MOVED, "taken over")
        self._deal_again(key)

    def _count(self, name: str) -> int:
        topic = self._leases.context.topics.get(name)
        return 0 if topic is None else topic.read_partitions

    def topic_changed(self, name: str) -> None:
        """Deal the partitions of a topic anew: there may be more of them, or fewer."""
        for key in self._shares:
            if key[0] == name:
                self._deal_again(key)

    def _deal_again(self, key: tuple[str, str]) -> None:
        """Have those members of a group look whose partitions are others at the end of this turn, in which more may come."""
        if not self._changed:
            self._leases.leases.turns.with_answers(self._look_again)
        self._changed[key] = None

    def _look_again(self, error: StoreError | None) -> None:
        changed, self._changed = self._changed, {}
        for key in changed:
            shares = self._shares.get(key)
            for member in () if shares is None else shares.moved():
                member.look()

    def left(self, subscription: "PushSubscription") -> None:
        """Take note that a subscription is over."""
        self._leases.leasing.lines.subscriptions -= 1
        shares = subscription.shares
        if shares is not None:
            shares.remove(subscription)
            if shares.members:
                self._deal_again(subscription.key)
            else:
                self._shares.pop(subscription.key, None)

    def ready(self, session: TextSession, command: Ready) -> None:
        """Change how many messages of a subscription may be out and not finished."""
        subscriptions = session.subscriptions
        if command.topic is not None and command.group is not None:
            subscription = subscriptions.get((command.topic, command.group))
        elif len(subscriptions) > 1:
            text = f"this connection has {len(subscriptions)} subscriptions: ready needs topic and group"
            session.reply(write_result(BAD_REQUEST, text, command.opaque))
            return
        else:
            subscription = next(iter(subscriptions.values()), None)
        if not isinstance(subscription, PushSubscription):
            session.reply(write_result(NOT_FOUND, "this connection has no such subscription", command.opaque))
            return
        session.reply(write_result(OK, "", command.opaque))
        subscription.set_ready(command.ready)

    def unsubscribe(self, session: TextSession, command: Unsubscribe) -> None:
        """Push nothing more, and give back what is out."""
        subscription = session.subscriptions.pop((command.topic, command.group), None)
        if subscription is None:
            session.reply(write_result(NOT_FOUND, "this connection has no such subscription", command.opaque))
            return
        subscription.end()
        session.reply(write_result(OK, "", command.opaque))


class PushSubscription(StoreRead):
    """One subscription of a session."""

    def __init__(
        self,
        handler: PushHandler,
        leases: LeaseHandler,
        session: TextSession,
        ready: int,
        wanted: PopRequest,
        style: FrameStyle,
    ) -> None:
        self.session: TextSession = session
        self.shares: Shares[PushSubscription] | None = None
        self._handler = handler
        self._leases = leases
        self._lines = leases.leasing.lines
        self._wanted = wanted
        self._style = style
        self._ready = ready
        self._out: dict[tuple[int, int], int] = {}  # the delivery of each message that is out, by partition and ordinal
        self._place: Waiting | None = None
        self._number = self._lines.next_number()
        self._dropped_s = 0.0
        self._is_reading = False
        self._wakes = 0
        self._planned: Sequence[int] | None = None
        self._ended = False

    @property
    def key(self) -> tuple[str, str]:
        """Its topic and group."""
        return self._wanted.topic.name, self._wanted.group.name

    def begin(self) -> None:
        """Push what there is."""
        self._wait()
        self.look()

    def set_ready(self, ready: int) -> None:
        self._ready = ready
        self.look()

    # -- in line ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Push now what may be pushed."""
        if self._place is not None:
            self._place.cancel()
            self._woken()

    def _wait(self, seconds: float | None = None) -> None:
        if not self._ended and self._place is None:
            topic, group = self.key
            again, number, mine = self._woken, self._number, self._mine()
            self._place = self._lines.wait(group, topic, number=number, again=again, partitions=mine, seconds=seconds)

    def _woken(self) -> None:
        self._place = None
        if self._ended or self._is_reading:
            return
        self._drop_finished()
        if self._credit > 0 and self.session.takes_pushes and self._partitions() != ():
            self._is_reading = True
            self._wakes = self._lines.wakes
            self._leases.reads.start(self)
        else:
            is_full = self._credit <= 0 or not self.session.takes_pushes  # unread may be what is sent after this turn
            self._wait(FULL_S if self._ready and is_full else None)

    @property
    def _credit(self) -> int:
        """How many messages more may be pushed now."""
        return min(MOST_AT_ONCE, self._ready - len(self._out))

    def finished(self, partition: int, ordinal: int) -> None:
        """Take note that a message is not out any more."""
        self._out.pop((partition, ordinal), None)

    def _drop_finished(self) -> None:
        """Find messages that are not out any more: their leases are over, or somebody else finished them or gave them back.

        When many are out, it is not done each time, because it looks at all of them.
        """
        now_s = self._leases.context.store.clock.monotonic()
        if self._credit > 0 or (len(self._out) > FEW and now_s < self._dropped_s + FULL_S):
            return
        self._dropped_s = now_s
        for message, pop_ms in list(self._out.items()):
            if not self._is_out(message, pop_ms):
                del self._out[message]

    def _is_out(self, message: tuple[int, int], pop_ms: int) -> bool:
        topic, group = self.key
        state = self._leases.leases.settled(GroupPartition(group, topic, message[0]))
        return state is not None and state.is_out(message[1], pop_ms)

    def _mine(self) -> tuple[int, ...] | None:
        """Return its partitions; ``None``: all."""
        if self.shares is None:
            return None if self._wanted.partitions is None else tuple(self._wanted.partitions)
        return self.shares.of(self)

    def _partitions(self) -> tuple[int, ...] | None:
        """Return those of its partitions from which it may take messages now; ``None``: all."""
        mine = self._mine()
        if mine is None or self.shares is None or not self.shares.former:
            return mine
        return tuple([partition for partition in mine if not self._is_out_elsewhere(partition)])

    def _is_out_elsewhere(self, partition: int) -> bool:
        """Return whether a former owner of a partition has messages of it out: until then, its order is not safe."""
        assert self.shares is not None
        former = self.shares.former.pop(partition, set())
        holders = {other for other in former if other is not self and other.has_out(partition)}
        if holders:
            self.shares.former[partition] = holders
        return bool(holders)

    def has_out(self, partition: int) -> bool:
        """Return whether messages of a partition are out and not finished."""
        return any(self._is_out(message, pop_ms) for message, pop_ms in self._out.items() if message[0] == partition)

    # -- pushing ------------------------------------------------------------------------------------------------------

    def _request(self) -> PopRequest:
        """Return what it wants now. Raise ``AccessDenied`` when its client may lease no more.

        A group that was deleted is made anew; raise ``RequestFailed`` when that is not allowed.
        """
        context = self._leases.context
        group = context.groups.ensure(self._wanted.group.name)
        topic = context.topics.get(self._wanted.topic.name) or self._wanted.topic
        self._leases.check(self.session, topic, group)  # the rights may have changed since it was subscribed
        return self._wanted._replace(group=group, topic=topic, partitions=self._partitions(), most=max(1, self._credit))

    def read(self, read: Read) -> Plan:
        wanted = self._request()
        self._planned = wanted.partitions
        return self._leases.leasing.pops.plan(wanted, read)

    def defer(self) -> None:
        """Do nothing: no command is owed anything."""

    def fail(self, error: MetaqError) -> None:
        """End it if its client may lease no more, or its group is gone for good, else try again.

        A broker that is no master any more closes connections.
        """
        self._is_reading = False
        if isinstance(error, (AccessDenied, RequestFailed)):
            self.end_by(error.status, str(error))
        else:
            self._wait(LOOK_S)

    def found(self, plan: Plan) -> None:
        """Push what a plan has, and take the last place in line."""
        self._is_reading = False
        if self._ended:
            return
        wanted = self._request()
        if wanted.partitions != self._planned or not self._may_push(plan):  # its share or its credit has changed while it read
            self._wait(LOOK_S)
            return
        result = self._leases.leasing.pops.take(wanted, plan)
        if result is not None and result.given:
            self._number = self._lines.next_number()
            self._push(wanted, result)
            self._wait()
        else:
            self._wait(None if not plan and self._lines.wakes == self._wakes else LOOK_S)

    def _may_push(self, plan: Plan) -> bool:
        """Return whether all messages of a plan may be pushed now."""
        gives = sum([part.gives for part in plan])
        return not gives or (gives <= self._credit and self.session.takes_pushes)

    def _push(self, wanted: PopRequest, result: PopResult) -> None:
        for part in result.given:
            for ordinal in part.ordinals:
                self._out[part.partition, ordinal] = result.pop_ms
        out = frames(self._leases.leases, wanted, result, self._style)
        messages = sum(len(part.ordinals) for part in result.given)
        self._leases.context.statistics.got(wanted.group.name, wanted.topic.name, messages, sum(map(len, out)))
        self._leases.leases.grant(wanted.group, partial(self._send, out))

    def _send(self, out: list[Buffer], error: MetaqError | None) -> None:
        if error is None and not self._ended:  # what it had out when it ended was given back
            self.session.push(*out)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end_by(self, code: int, reason: str) -> None:
        """End it by the will of the broker, and tell the client the reason."""
        if not self._ended:
            self.session.subscriptions.pop(self.key, None)
            self.end()
            self.session.push(write_result(code, reason, self._style.opaque))

    def end(self) -> None:
        """Push nothing more, and give back what is out."""
        if self._ended:
            return
        self._ended = True
        if self._place is not None:
            self._place.cancel()
            self._place = None
        topic, group = self.key
        now_ms = self._leases.context.store.clock.now_ms()
        for message, pop_ms in self._out.items():
            if self._is_out(message, pop_ms):
                place = GroupPartition(group, topic, message[0])
                self._leases.leases.change(place, message[1], pop_ms, now_ms, given_back=True)
        self._out = {}
        self._handler.left(self)
