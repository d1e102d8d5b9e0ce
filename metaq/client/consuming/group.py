"""Membership in a consumer group: heartbeats, rebalancing and offsets."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from metaq.client import checks
from metaq.client.closing import Closing
from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.forks import MADE_BEFORE, renewed_in_children
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import ClientAnswer
from metaq.client.consuming.beginning import Beginning, ConsumeFrom
from metaq.client.consuming.fetching import Budget, FetchContext, Fetcher, PulledBatch, subscription_to
from metaq.client.consuming.locks import RENEW_S, HeldQueueLocks
from metaq.client.consuming.offsets import OFFSETS_FOLDER, BrokerOffsets, LocalOffsets, Offsets, QueueEnds
from metaq.client.consuming.running import queue_info, running_info
from metaq.client.consuming.sharing import Model, Sharing
from metaq.errors import ClientClosed, ClientError, RouteNotFound, RouteProblem
from metaq.message import RETRY_PREFIX, MessageQueue, QueueOffset
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import decode_offsets
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.heartbeats import subscription_row
from metaq.protocol.subscription import EVERYTHING, Subscription
from metaq.registry.assign import Assign, average

logger = logging.getLogger(__name__)

REBALANCE_S: Final = 20.0
COMMIT_S: Final = 5.0
_SOON_S: Final = 1.0
"""The pause before an incomplete rebalance is repeated: a queue could not be taken, or the members are not known."""
_REBALANCE_MOST_S: Final = 10.0
"""The longest time that a closing ordered consumer waits for a rebalance."""


class GroupConsumer:
    """A member of a consumer group; its subclasses consume the messages. A context manager."""

    _passively = False
    """True when messages are pushed to a listener; brokers learn it from heartbeats."""

    def __init__(
        self,
        core: Core,
        group: str,
        *,
        model: Model = Model.CLUSTERING,
        consume_from: ConsumeFrom | datetime = ConsumeFrom.LAST,
        assign: Assign = average,
        ordered: bool = False,
        offsets_folder: Path = OFFSETS_FOLDER,
    ) -> None:
        checks.group(group)
        checks.choice("model", model, Model)
        checks.choice("consume_from", consume_from, ConsumeFrom, or_time=True)
        checks.function("assign", assign, "shares queues, of metaq.registry.assign")
        checks.flag("ordered", ordered)
        checks.folder("offsets_folder", offsets_folder)
        self.group = group
        self._core = core
        self._model = model
        self._sharing = Sharing(core, group, model, assign)
        self._beginning = Beginning(QueueEnds(core), consume_from)
        self._locks = HeldQueueLocks(core, group) if ordered and model is Model.CLUSTERING else None
        self._offsets: Offsets
        if model is Model.BROADCASTING:
            self._offsets = LocalOffsets(offsets_folder / (core.instance or "default") / f"{group}.json")
        else:
            self._offsets = BrokerOffsets(core, group)
        self._source = FetchContext(core, group, self._deliver, Budget())
        self._started_ms = time.time_ns() // 1_000_000
        self._is_inherited = False
        self._remembering = threading.Lock()  # so that no position from before a reset is remembered after it
        self._rebalancing = threading.RLock()  # ``assign``, which is called under it, may close this
        self._rebalance_again = False
        self._rebalance_planned = False
        self._closing = Closing()
        self._guard = threading.Lock()  # guards what follows
        self._started = False
        self._closed = False
        self._subscriptions: dict[str, Subscription] = {}
        self._fetchers: dict[MessageQueue, Fetcher] = {}
        self._leaving: dict[MessageQueue, Fetcher | None] = {}
        """The queues that are given up but of which a message is still being consumed, so that their locks are still held;
        without a fetcher when a reset has come meanwhile."""
        self._taking: dict[MessageQueue, QueueOffset | None] = {}
        """The queues that are being taken, with the offset that a reset has set meanwhile, if any."""
        renewed_in_children(self)

    def _renew(self) -> None:
        """Become closed in a child of a fork: membership, queues and fetched messages are the parent's."""
        self._guard = threading.Lock()
        self._is_inherited = self._closed = True
        for fetcher in self._fetchers.values():
            fetcher.generation += 1  # ends a loop over its messages
        self._fetchers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _deliver(self, batch: PulledBatch) -> None:
        """Take a batch of messages, on a thread that must not be blocked."""
        raise NotImplementedError

    def _gained(self, fetcher: Fetcher, offset: QueueOffset) -> None:
        """Note that a new fetcher's queue is this member's from now on and begins at ``offset``; called before it pulls."""
        raise NotImplementedError

    def _position(self, fetcher: Fetcher) -> QueueOffset | None:
        """Return the offset to commit for the queue of a fetcher; ``None`` when it is not known."""
        raise NotImplementedError

    def _is_busy(self, queue: MessageQueue) -> bool:
        """Return whether a message of an ordered queue is being consumed now; then ``_left`` must be called after it.

        Called under the guard.
        """
        return False

    # -- subscriptions ------------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, tags: str = EVERYTHING, *, sql: str | None = None) -> None:
        """Consume one more topic, or change the filter of one.

        Args:
            topic: the topic; it need not exist yet.
            tags: ``*``, or tags with ``||`` between them.
            sql: an SQL92 condition on properties, in place of tags.

        Raises:
            SubscriptionInvalid: the expression is invalid.
            ClientClosed: the consumer was closed.
            BadRequest: the name is invalid.
        """
        checks.subscription(topic, tags, sql)
        subscription = subscription_to(topic, tags, sql, time.time_ns() // 1_000_000)
        with self._guard:
            self._check_open()
            self._subscriptions[topic] = subscription
        self._drop([queue for queue in self.assignment() if queue.topic == topic])
        if self._started:
            self._core.scheduler.run(self._changed)

    def _start(self) -> None:
        """Join the group. Topics that do not exist yet are consumed once they do.

        ``RouteNotFound`` when no registry answers; ``ClientError`` when the offsets cannot be used, or the client already has a
        consumer of the group.
        """
        if self._model is Model.CLUSTERING:
            self.subscribe(f"{RETRY_PREFIX}{self.group}")
        self._core.check_open()
        deadline = self._core.deadline()
        for topic in self._topics():
            try:
                self._core.routes.route(topic, deadline)
            except RouteNotFound as error:
                if error.reason is RouteProblem.REGISTRY_UNREACHABLE:
                    raise
                if not topic.startswith(RETRY_PREFIX):
                    logger.warning("topic waited for group=%s reason=%s", self.group, error)
        self._offsets.open()
        try:
            self._core.add_consumer(self)
        except ClientError:
            self._offsets.close()
            raise
        try:
            self._started = True
            self._changed()
            self._core.scheduler.every(REBALANCE_S, self._rebalance, self._is_closed)
            self._core.scheduler.every(COMMIT_S, self._save_positions, self._is_closed)
            if self._locks is not None:
                self._core.scheduler.every(RENEW_S, self._locks.renew, self._is_closed)
        except BaseException:  # as of an ``assign``, or Ctrl-C: nobody else could make this member leave
            self.close()
            raise

    def _changed(self) -> None:
        """Send a heartbeat with the new subscriptions, then rebalance."""
        self._core.heartbeat(wait_s=CONTROL_TIMEOUT_S)
        self._rebalance()

    def _topics(self) -> list[str]:
        with self._guard:
            return list(self._subscriptions)

    def _heartbeat_row(self) -> dict[str, Any]:
        """Return this member's entry in heartbeats."""
        with self._guard:
            subscriptions = list(self._subscriptions.values())
        return {
            "groupName": self.group,
            "consumeType": self._kind,
            "consumeFromWhere": self._beginning.wire,
            "messageModel": self._model.value,
            "unitMode": False,
            "subscriptionDataSet": [subscription_row(subscription) for subscription in subscriptions],
        }

    @property
    def _kind(self) -> str:
        return "CONSUME_PASSIVELY" if self._passively else "CONSUME_ACTIVELY"

    # -- rebalance ----------------------------------------------------------------------------------------------------

    def assignment(self) -> list[MessageQueue]:
        """Return the queues that are assigned to this member now."""
        with self._guard:
            return sorted(self._fetchers)

    def _rebalance(self) -> None:
        """Take and give up queues as the members and queues of the group now require. Failures are logged and tried again soon.

        One thread at a time does this; a call meanwhile returns at once and makes that thread do it once more.
        """
        self._rebalance_again = True
        while self._rebalance_again and self._rebalancing.acquire(blocking=False):
            try:
                self._rebalance_again = False
                unfinished = [topic for topic in self._topics() if not self._closed and not self._rebalance_topic(topic)]
                if unfinished and not self._rebalance_planned:
                    self._rebalance_planned = True
                    self._core.scheduler.after(_SOON_S, self._rebalance_as_planned)
            finally:
                self._rebalancing.release()

    def _rebalance_as_planned(self) -> None:
        self._rebalance_planned = False
        self._rebalance()

    def _rebalance_topic(self, topic: str) -> bool:
        """Rebalance one topic; return false when that is incomplete and must be tried again soon."""
        own, is_final = self._sharing.share(topic)
        if own is None:
            return is_final
        with self._guard:
            has = {queue for queue in self._fetchers if queue.topic == topic}
        self._drop(sorted(has - set(own)))
        return self._take([queue for queue in own if queue not in has])

    def _take(self, queues: Sequence[MessageQueue]) -> bool:
        """Take queues that are newly assigned; return whether all were taken."""
        with self._guard:
            free = [queue for queue in queues if queue not in self._leaving and not self._closed]
        permitted = set(free if self._locks is None else self._locks.take(free))
        unused = []
        for queue in free:
            if queue not in permitted:
                continue
            if self._closed:
                unused.append(queue)
                continue
            with self._guard:
                self._taking[queue] = None
            fetcher = None
            try:
                fetcher = self._begin(queue)
            except ClientError as error:
                logger.log(level_of(error), "queue not begun group=%s queue=%s reason=%s", self.group, queue, error)
                permitted.discard(queue)
            finally:
                with self._guard:
                    commanded = self._taking.pop(queue)
            if fetcher is None:
                unused.append(queue)
            if commanded is not None:
                self._reset(queue, commanded)
            elif fetcher is not None:
                fetcher.pull()
        if unused and self._locks is not None:  # held locks are renewed, and another member may get the queue
            self._locks.release(unused)
        return len(permitted) == len(queues)

    def _begin(self, queue: MessageQueue) -> Fetcher | None:
        """Take a queue, without pulling yet; ``None`` when the consumer is closed or no longer subscribes to its topic."""
        offset = self._first_offset(queue)
        with self._guard:
            if self._closed or queue.topic not in self._subscriptions:
                return None
            fetcher = Fetcher(self._source, queue, self._subscriptions[queue.topic], offset)
            self._fetchers[queue] = fetcher
        self._gained(fetcher, offset)
        logger.info("queue taken group=%s queue=%s from=%s", self.group, queue, offset)
        return fetcher

    def _first_offset(self, queue: MessageQueue) -> QueueOffset:
        deadline = time.monotonic() + CONTROL_TIMEOUT_S
        saved = self._offsets.read(queue, deadline)
        return self._beginning.offset(queue, deadline) if saved is None else saved

    def _drop(self, queues: Sequence[MessageQueue]) -> None:
        """Give up queues after committing their offsets; a busy queue is given up when its message is consumed."""
        free = []
        for queue in queues:
            with self._guard:
                fetcher = self._fetchers.pop(queue, None)
                if fetcher is not None:
                    fetcher.stop()
                    if self._is_busy(queue):
                        self._leaving[queue] = fetcher
                        continue
            if fetcher is not None:
                self._remember(fetcher)
                logger.info("queue given up group=%s queue=%s", self.group, queue)
            free.append(queue)
        if free:
            self._let_go(free)

    def _let_go(self, queues: Sequence[MessageQueue]) -> None:
        self._save_in_background()
        for queue in queues:
            self._offsets.forget(queue)
        if self._locks is not None:
            self._locks.release(queues)

    def _left(self, queue: MessageQueue) -> None:
        """Complete the giving up of a queue that is no longer busy."""
        with self._guard:
            fetcher = self._leaving[queue]
        if fetcher is not None:
            self._remember(fetcher)
        logger.info("queue given up group=%s queue=%s", self.group, queue)
        self._let_go([queue])
        with self._guard:
            del self._leaving[queue]

    # -- offsets ------------------------------------------------------------------------------------------------------

    def _remember(self, fetcher: Fetcher) -> None:
        with self._remembering:
            queue, position = fetcher.queue, self._position(fetcher)
            current = self._fetchers.get(queue, self._leaving.get(queue, fetcher))
            if position is not None and current is fetcher:  # else it was reset
                self._offsets.update(queue, position)

    def _remember_all(self) -> None:
        with self._guard:
            fetchers = list(self._fetchers.values())
        for fetcher in fetchers:
            self._remember(fetcher)

    def _save_positions(self) -> None:
        self._remember_all()
        self._save_in_background()

    def _save_in_background(self) -> None:
        try:
            self._offsets.save()
        except ClientError as error:
            logger.log(level_of(error), "offsets not saved group=%s reason=%s", self.group, error)

    def _reset(self, queue: MessageQueue, offset: QueueOffset) -> None:
        """Continue at ``offset`` in a queue, by a broker's command; a queue that is being given up is left at that offset."""
        fetcher = None
        with self._guard:
            if queue in self._taking:
                self._taking[queue] = offset
                return
            if queue in self._leaving:
                self._leaving[queue] = None
            elif queue in self._fetchers:
                self._fetchers[queue].stop()
                # a new fetcher, so that messages that the old one still delivers are not taken for those at the new offset
                fetcher = self._fetchers[queue] = Fetcher(self._source, queue, self._subscriptions[queue.topic], offset)
            else:
                return
        if fetcher is not None:
            self._gained(fetcher, offset)
        with self._remembering:
            self._offsets.forget(queue)  # a known offset is saved again: the broker ignores others until it gets this one
            self._offsets.update(queue, offset)
        self._save_in_background()
        if fetcher is not None:
            fetcher.pull()
        logger.warning("offset set by command group=%s queue=%s offset=%s", self.group, queue, offset)

    # -- what brokers ask ---------------------------------------------------------------------------------------------

    def _asked(self, request: RemotingCommand) -> ClientAnswer:
        """Answer a broker: reset offsets (220), report offsets (221) or this member's state (307); subclasses know more."""
        topic = request.fields.get("topic", "")
        if request.code == Request.RESET_CONSUMER_CLIENT_OFFSET:
            for queue, offset in decode_offsets(request.body).items():
                self._reset(queue, QueueOffset(offset))
            return ClientAnswer()
        if request.code == Request.GET_CONSUMER_STATUS_FROM_CLIENT:
            table = {queue: self._offsets.known(queue) or 0 for queue in self.assignment() if queue.topic == topic}
            return ClientAnswer(body=fastjson.encode({"messageQueueTable": table, "consumerTable": {}}))
        if request.code == Request.GET_CONSUMER_RUNNING_INFO:
            return ClientAnswer(body=fastjson.encode(self._running_info()))
        return ClientAnswer(Response.REQUEST_CODE_NOT_SUPPORTED, remark="this consumer has no listener")

    def _running_info(self) -> dict[str, Any]:
        """Return the state for the answer to 307."""
        with self._guard:
            fetchers = list(self._fetchers.values())
            subscriptions = list(self._subscriptions.values())
        locks, committed = self._locks, self._offsets.known
        return running_info(
            registries=self._core.routes.registries,
            kind=self._kind,
            started_ms=self._started_ms,
            ordered=locks is not None,
            subscriptions=subscriptions,
            queues={
                one.queue: queue_info(one, committed(one.queue) or 0, locked=locks is not None and locks.holds(one.queue))
                for one in fetchers
            },
        )

    # -- end ----------------------------------------------------------------------------------------------------------

    def _is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            reason = MADE_BEFORE if self._is_inherited else "was closed"
            raise ClientClosed(f"this consumer of group {self.group} {reason}")

    def close(self) -> None:
        """Stop consuming, save the offsets and leave the group. The client stays open.

        When another thread does so already, wait for it, within limits.
        """
        with self._guard:
            is_first, self._closed = not self._closed, True
        if not is_first:
            if not self._is_inherited and not self._is_inside():
                self._closing.wait()
            return
        with self._closing.begun(), ExitStack() as steps:  # the last one that is pushed is done first, also after Ctrl-C
            steps.callback(self._core.remove_consumer, self)
            steps.callback(self._offsets.close)
            steps.callback(self._give_up_all)
            self._stop()

    def _is_inside(self) -> bool:
        """Return whether this code belongs to a call of a listener, for which ``close`` on another thread waits."""
        return False

    def _give_up_all(self) -> None:
        self._remember_all()
        try:
            self._offsets.save(deadline=time.monotonic() + CONTROL_TIMEOUT_S)
        except ClientError as error:
            logger.warning("offsets not saved at the end group=%s reason=%s", self.group, error)
        self._drop(self.assignment())
        self._end_rebalance()

    def _end_rebalance(self) -> None:
        """Wait, within limits, for a thread that takes queues: it releases the locks of those that it does not begin."""
        if self._locks is not None and self._rebalancing.acquire(timeout=_REBALANCE_MOST_S):
            self._rebalancing.release()

    def _stop(self) -> None:
        """Stop consuming; a message that is being consumed may be finished."""
