"""Consuming by a listener that is called for each message."""

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from metaq.client import checks, intercepting
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import ClientAnswer
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.client.consuming.fetching import Fetcher, PulledBatch
from metaq.client.consuming.group import GroupConsumer
from metaq.client.consuming.offsets import OFFSETS_FOLDER
from metaq.client.consuming.progress import Progress
from metaq.client.consuming.records import decode_messages
from metaq.client.consuming.sendback import MAX_RECONSUME_TIMES, TO_DEAD_LETTERS, send_back
from metaq.client.consuming.sharing import Model
from metaq.client.message import ReceivedMessage
from metaq.client.retries import Backoff, Retry, check_retry, level_for
from metaq.client.serializers import Serializer, check_serializer, decoded
from metaq.errors import BadRequest, ClientError
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.subscription import EVERYTHING
from metaq.registry.assign import Assign, average

logger = logging.getLogger(__name__)

Listener = Callable[[ReceivedMessage], object]
"""A function that is called for each message. It returns when the message is consumed, and raises to have it again later."""
BatchListener = Callable[[list[ReceivedMessage]], object]
"""A function that is called for several messages. It returns when all are consumed, and raises to have all again later."""

DEFAULT_THREADS: Final = 8
_DRAIN_S: Final = 10.0
"""The longest time that a closing consumer waits for running listeners."""
LOCAL_BACKOFF: Final = Backoff(first=1.0, factor=2.0, most=30.0, jitter=0.25)
"""The pauses between local retries, of ordered messages and of messages that no broker takes back."""
_BUSY_PAUSE_S: Final = 0.05
_TURN: Final = 64
"""The most messages of an ordered queue that a thread consumes before it turns to another queue."""
_MOST_HELD: Final = 100_000
"""The most messages of a queue that are remembered because an older one is not finished; two more pulls may come on top."""
_serving: Final[ContextVar[object]] = ContextVar("metaq_serving", default=None)
"""The call of a listener to which this code belongs: on its thread, as a coroutine of asyncio, and on what that has called."""


class _Work:
    """The messages of one queue that are being consumed. All but ``fetcher`` is guarded by the lock."""

    def __init__(self, fetcher: Fetcher, begin: QueueOffset) -> None:
        self.fetcher = fetcher
        self.lock = threading.Lock()
        self.generation = fetcher.generation
        self.progress = Progress(begin)
        self.is_held_back = False
        """True while the queue is read no further because one message takes so long."""
        self.waiting: deque[ReceivedMessage] = deque()
        """The messages of an ordered queue that are not consumed yet."""
        self.is_taken = False
        """True while a thread consumes the ordered queue, or will do so after a pause."""
        self.failures = 0
        """The failures of the first messages of an ordered queue."""
        self.failed = 0
        """The number of these messages, which are tried again together."""


class _Turn(NamedTuple):
    """The next task of a thread: messages of one queue, or an ordered queue."""

    work: _Work
    messages: Sequence[ReceivedMessage]
    """Empty for an ordered queue."""
    generation: int
    failures: int = 0


class PushConsumer(GroupConsumer):
    """A member of a group that calls a listener; made by ``Client.listen``. It runs until it is closed.

    Several threads consume messages at once, in any order. A message whose listener raises goes back to the broker, is
    delivered again to some member of the group after 10 s, 30 s, 1 min and so on, and becomes a dead letter when it fails once
    more after ``max_reconsume_times`` redeliveries. With ``ordered`` the messages of a partition are consumed one after the
    other: one that fails is tried again here, and the messages after it wait. A broadcast consumer logs failures and continues.
    """

    _passively = True

    def __init__(
        self,
        core: Core,
        topic: str,
        group: str,
        listener: Listener | BatchListener,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        ordered: bool = False,
        threads: int = DEFAULT_THREADS,
        batch_size: int | None = None,
        model: Model = Model.CLUSTERING,
        consume_from: ConsumeFrom | datetime = ConsumeFrom.LAST,
        assign: Assign = average,
        max_reconsume_times: int | None = None,
        offsets_folder: Path = OFFSETS_FOLDER,
        deserializer: Serializer[Any] | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Join the group and start to consume. ``max_reconsume_times`` is 16 by default, unlimited for an ordered consumer."""
        checks.subscription(topic, tags, sql)
        checks.function("listener", listener, "takes a message")
        checks.number("threads", threads, 1)
        if batch_size is not None:
            checks.number("batch_size", batch_size, 1)
        check_serializer("deserializer", deserializer)
        most = _times(retry, max_reconsume_times)
        super().__init__(
            core,
            group,
            model=model,
            consume_from=consume_from,
            assign=assign,
            ordered=ordered,
            offsets_folder=offsets_folder,
        )
        self._listener = cast(BatchListener, listener) if batch_size is not None else _one_by_one(cast(Listener, listener))
        self._batch_size = batch_size or 1
        self._loads = None if deserializer is None else deserializer.loads
        self._ordered = ordered
        self._most = most
        self._retry = retry
        self._backoff = LOCAL_BACKOFF if retry is None else retry.backoff
        self._turns: queue.SimpleQueue[_Turn | None] = queue.SimpleQueue()
        self._works: dict[Fetcher, _Work] = {}
        self._busy: set[MessageQueue] = set()
        """The ordered queues for which the listener is being called; under the guard."""
        self._calls: dict[threading.Thread, object] = {}
        """The call of the listener that each thread makes now. A task may outlive the call that has made it."""
        self._threads: list[threading.Thread] = []
        try:
            self._start_threads(threads)
            self.subscribe(topic, tags, sql=sql)
            self._start()
        except BaseException:
            self._stop()
            raise

    def _start_threads(self, count: int) -> None:
        """Start the threads that call the listener. ``ClientError`` when there cannot be so many."""
        for number in range(count):
            thread = threading.Thread(target=self._consume, name=f"metaq-{self.group}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                advice = "end threads, ask for fewer here (threads), or raise the limit of them (ulimit -u, pids.max)"
                text = f"no thread {number + 1} of {count} for the listener of group {self.group}: {error}; {advice}"
                raise ClientError(text) from error
            self._threads.append(thread)

    # -- from the fetchers --------------------------------------------------------------------------------------------

    def _gained(self, fetcher: Fetcher, offset: QueueOffset) -> None:
        work = _Work(fetcher, offset)
        with self._guard:
            kept = {known: old for known, old in self._works.items() if not known.stopped or known.queue in self._leaving}
            self._works = kept | {fetcher: work}

    def _is_busy(self, queue: MessageQueue) -> bool:
        return queue in self._busy

    def _position(self, fetcher: Fetcher) -> QueueOffset | None:
        work = self._works.get(fetcher)
        if work is None:
            return None
        with work.lock:
            return work.progress.position

    def _deliver(self, batch: PulledBatch) -> None:
        work = self._works.get(batch.fetcher)
        if work is None or work.generation != batch.generation:
            return
        beside_bodies = batch.size - sum(message.stored_size for message in batch.messages)
        batch.fetcher.consumed(batch.generation, 0, beside_bodies)
        with work.lock:
            work.progress.add((message.queue_offset for message in batch.messages), batch.next_offset)
            self._limit(work)
            if self._ordered:
                work.waiting.extend(batch.messages)
                if work.is_taken or not work.waiting:
                    return
                work.is_taken = True
        if self._ordered:
            self._turns.put(_Turn(work, (), batch.generation))
            return
        for start in range(0, len(batch.messages), self._batch_size):
            self._turns.put(_Turn(work, batch.messages[start : start + self._batch_size], batch.generation))

    def _limit(self, work: _Work) -> None:
        """Read a queue no further while a message is not finished after which so many have come; called under its lock."""
        held, fetcher = work.progress.held, work.fetcher
        if not work.is_held_back and held > _MOST_HELD:
            work.is_held_back = True
            fetcher.hold_back()
            logger.warning(
                "a message takes long, its queue is read no further group=%s queue=%s offset=%s held=%d",
                self.group,
                fetcher.queue,
                work.progress.position,
                held,
            )
        elif work.is_held_back and held <= _MOST_HELD // 2:
            work.is_held_back = False
            fetcher.go_on()

    # -- the threads that call the listener ---------------------------------------------------------------------------

    def _consume(self) -> None:
        while (turn := self._turns.get()) is not None:
            try:
                if self._closed or turn.generation != turn.work.fetcher.generation:
                    continue
                if turn.messages:
                    self._consume_some(turn)
                else:
                    self._consume_in_order(turn)
            except BaseException:
                logger.exception("consuming failed group=%s queue=%s", self.group, turn.work.fetcher.queue)
                self._later(turn._replace(failures=turn.failures + 1), turn.failures)

    def _later(self, turn: _Turn, failures: int) -> None:
        """Queue a turn again after a pause, which is longer the more often it has failed."""
        self._core.scheduler.after(self._backoff.pause_s(failures), lambda: self._turns.put(turn))

    def _consume_some(self, turn: _Turn) -> None:
        """Consume messages of a queue; those that failed and that no broker takes back are tried again here."""
        kept = {message.queue_offset for message in self._call(turn.messages) if not self._give_back(message)}
        for message in turn.messages:
            if message.queue_offset not in kept:
                self._finish(turn.work, message, turn.generation)
        if kept:
            left = [message for message in turn.messages if message.queue_offset in kept]
            self._later(turn._replace(messages=left, failures=turn.failures + 1), turn.failures)

    def _give_back(self, message: ReceivedMessage, delay_level: int = 0) -> bool:
        """Send a failed message back to the broker; return false when no broker takes it and it must be tried again here.

        A broadcast consumer does not send messages back: they are done.
        """
        if self._model is Model.BROADCASTING:
            return True
        most = MAX_RECONSUME_TIMES if self._most is None else self._most
        if self._retry is not None and delay_level != TO_DEAD_LETTERS:
            delay_level = level_for(self._retry.backoff.pause_s(message.reconsume_times))
        try:
            send_back(self._core, self.group, message, delay_level, most, self._core.deadline())
        except ClientError as error:
            logger.warning("no broker takes a message back, it is tried again here message=%s reason=%s", message.id, error)
            return False
        return True

    def _consume_in_order(self, turn: _Turn) -> None:
        """Consume messages of one ordered queue, 64 times; while ``is_taken`` is set, no other thread consumes the queue."""
        work = turn.work
        for _ in range(_TURN):
            with work.lock:
                if not work.waiting:
                    work.is_taken = False
                    return
                first = itertools.islice(work.waiting, work.failed or self._batch_size)
                messages = [message._after_failures(work.failures) for message in first]
            if self._locks is not None and not self._locks.holds(work.fetcher.queue):
                # Another member may have continued with the queue: start again from its offset, if it is still assigned here.
                self._core.scheduler.run(lambda: self._begin_anew(work.fetcher.queue))
                return
            if not self._begin_call(turn):
                return
            try:
                kept = {message.queue_offset for message in self._call(messages) if not self._is_given_up(message)}
                self._take_off(work, messages, kept)
                for message in messages:
                    if message.queue_offset not in kept:
                        self._finish(work, message, turn.generation)
            finally:
                self._end_call(work.fetcher.queue)
            if kept:
                self._later(turn, work.failures - 1)
                return
            if self._closed or turn.generation != work.fetcher.generation:
                return
        self._turns.put(turn)

    def _take_off(self, work: _Work, messages: Sequence[ReceivedMessage], kept: set[QueueOffset]) -> None:
        """Take the messages off an ordered queue that are done; those that are kept stay its first ones."""
        with work.lock:
            tried = [work.waiting.popleft() for _ in messages]
            work.waiting.extendleft(message for message in reversed(tried) if message.queue_offset in kept)
            work.failures = work.failures + 1 if kept else 0
            work.failed = len(kept)

    def _begin_call(self, turn: _Turn) -> bool:
        """Reserve the queue for a call; return false when it was lost or repositioned, or an earlier call for it still runs.

        In the last case the turn is queued again.
        """
        queue = turn.work.fetcher.queue
        with self._guard:
            if turn.generation != turn.work.fetcher.generation:
                return False
            if queue not in self._busy:
                self._busy.add(queue)
                return True
        self._core.scheduler.after(_BUSY_PAUSE_S, lambda: self._turns.put(turn))
        return False

    def _end_call(self, queue: MessageQueue) -> None:
        with self._guard:
            self._busy.discard(queue)
            leaves = queue in self._leaving
        if leaves:
            self._core.scheduler.run(lambda: self._left(queue))

    def _begin_anew(self, lost: MessageQueue) -> None:
        self._drop([lost])
        self._rebalance()

    def _is_given_up(self, message: ReceivedMessage) -> bool:
        """Return whether a failed message of an ordered queue is given up: it is broadcast, or a broker dead-lettered it."""
        if self._model is Model.BROADCASTING:
            return True
        if message.error is not None:
            return self._give_back(message, TO_DEAD_LETTERS)
        return self._most is not None and message.reconsume_times >= self._most and self._give_back(message, TO_DEAD_LETTERS)

    def _call(self, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Call the listener, and return the messages that failed. What it calls knows that it belongs to this call."""
        thread, call = threading.current_thread(), object()
        self._calls[thread] = call
        before = _serving.set(call)
        try:
            return self._consumed(messages)
        finally:
            _serving.reset(before)
            del self._calls[thread]

    def _consumed(self, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Call the listener, and return the messages that failed. One with an ``error`` fails without a call."""
        if self._loads is not None:
            messages = [decoded(message, self._loads) for message in messages]
        failed = [message for message in messages if message.error is not None]
        for message in failed:
            logger.warning("message unreadable group=%s message=%s reason=%s", self.group, message.id, message.error)
        readable = [message for message in messages if message.error is None] if failed else list(messages)
        if not readable:
            return failed
        ended = intercepting.processing(self._core.id, self.group, readable)
        try:
            self._listener(readable)
        except BaseException as error:  # asyncio.CancelledError or SystemExit would end only this thread
            first = readable[0]
            logger.exception(
                "listener failed group=%s message=%s times=%s count=%d",
                self.group,
                first.id,
                first.reconsume_times,
                len(readable),
            )
            ended(error)
            return failed + readable
        ended(None)
        return failed

    def _finish(self, work: _Work, message: ReceivedMessage, generation: int) -> None:
        with work.lock:
            work.progress.finish(message.queue_offset)
            self._limit(work)
        work.fetcher.consumed(generation, 1, message.stored_size)

    # -- what brokers ask ---------------------------------------------------------------------------------------------

    def _asked(self, request: RemotingCommand) -> ClientAnswer:
        """Answer a broker: consume one message now and report the result (309), or answer as every group member does."""
        if request.code != Request.CONSUME_MESSAGE_DIRECTLY:
            return super()._asked(request)
        messages = decode_messages(request.body, request.fields.get("brokerName", ""), most=self._core.max_inflated_bytes)
        if len(messages) != 1:
            return ClientAnswer(Response.SYSTEM_ERROR, remark=f"{len(messages)} messages where one is due")
        began = time.monotonic()
        succeeded = not self._call(messages)
        result = {
            "autoCommit": True,
            "consumeResult": "CR_SUCCESS" if succeeded else "CR_THROW_EXCEPTION",
            "order": self._ordered,
            "spentTimeMills": round((time.monotonic() - began) * 1000),
        }
        return ClientAnswer(body=fastjson.encode(result))

    def _running_info(self) -> dict[str, Any]:
        info = super()._running_info()
        info["properties"]["PROP_THREADPOOL_CORE_SIZE"] = str(len(self._threads))
        return info

    def _is_inside(self) -> bool:
        own = _serving.get()
        return own is not None and own in list(self._calls.values())

    def _stop(self) -> None:
        """Start no more calls, and wait up to 10 s for the listeners that run, but for one that calls this itself."""
        for _ in self._threads:
            self._turns.put(None)
        deadline = time.monotonic() + _DRAIN_S
        own = _serving.get()
        for thread in self._threads:
            if own is None or self._calls.get(thread) is not own:
                thread.join(max(0.0, deadline - time.monotonic()))


def _times(retry: Retry | None, max_reconsume_times: int | None) -> int | None:
    """Return how often a message is delivered again, ``None`` for the default; refuse what contradicts itself."""
    check_retry(retry)
    if max_reconsume_times is None:
        return None if retry is None else retry.times
    if retry is not None:
        raise BadRequest("retry and max_reconsume_times contradict each other; give one of them")
    checks.number("max_reconsume_times", max_reconsume_times)
    return max_reconsume_times


def _one_by_one(listener: Listener) -> BatchListener:
    """Return a listener to a batch of one message."""
    return lambda messages: listener(messages[0])
