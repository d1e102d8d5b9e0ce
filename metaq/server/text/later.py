"""``put`` with options, among them the time of a message for later, and ``cancel``."""

from collections.abc import Callable
from functools import partial
from typing import Final

import gevent

from metaq.dedupe.records import First, StoredAs
from metaq.engine.context import Context
from metaq.engine.dedupe.asking import ColdIds
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.priorities.levels import prioritize
from metaq.engine.timers.cancelling import Cancels
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft, Placed, stage
from metaq.errors import BadRequest, MetaqError
from metaq.protocol.properties import DEDUPE_ID, PRIORITY, SHARDING_KEY
from metaq.protocol.record import TAGS, java_hash
from metaq.protocol.text.commands import BROKER_CHOOSES, Cancel, Due, Put, PutOptions, PutWith
from metaq.protocol.text.messages import id_base, split_attribute
from metaq.protocol.text.replies import OK, write_result
from metaq.server.access.permissions import Action, demand
from metaq.server.text.put import PutHandler, check_body
from metaq.server.text.session import TextSession, result
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.timers.handles import Handle, read_handle

NO_POSITION: Final = -1
"""The position of a message that gets one when it is delivered."""


class LaterHandler:
    """Stores messages with options, parks those that have a time, and cancels these."""

    def __init__(self, context: Context, puts: PutHandler, timers: Timers, cancels: Cancels, dedupe: Dedupe) -> None:
        self._context = context
        self._puts = puts
        self._timers = timers
        self._cancels = cancels
        self._dedupe = dedupe
        self._id_base = id_base(context.settings.broker_number, context.store.epoch)

    def commands(self) -> dict[type, Callable[..., None]]:
        """Return the handler methods by command."""
        return {PutWith: self.put, Cancel: self.cancel}

    def put(self, session: TextSession, command: PutWith) -> None:
        """Store a message with its options. With a time it is parked, and the reply ends with the handle that cancels it."""
        options = command.options
        put = self._kept_together(command)
        try:
            if put.transaction is not None:
                raise BadRequest("a put in a transaction cannot have options: not priority=, key=, id=, delay= or at=")
            queue = self._puts.partition(session, put)
            check_body(put)
            now_ms, due = self._context.store.clock.now_ms(), options.due
            draft = self._draft(session, put, options, queue, now_ms)
            prioritize(self._context.topics, draft)
            queue = self._context.store.queue(draft.topic, draft.partition)
            position = queue.text_end
            store = partial(stage, self._context) if due is None else partial(self._timers.send, due_ms=_due_ms(due, now_ms))
            placed, first = self._dedupe.once(draft, partial(store, draft))
        except ColdIds as cold:
            self._ask(session, command, cold)
            return
        except MetaqError as error:
            self._refuse(session, command.put, error)
            return
        self._dedupe.duplicates += first is not None
        self._context.counters.put.add(1, len(put.body))
        self._puts.owe(session, [result(OK, self._reply(placed, queue, position, first), put.opaque)], len(put.body))

    def _kept_together(self, command: PutWith) -> Put:
        """Return the put, with the partition of its key if the broker is to choose; all clients choose by the same hash."""
        put, key = command.put, command.options.key
        if key is None or put.partition != BROKER_CHOOSES:
            return put
        topic = self._context.topics.get(put.topic)
        partitions = self._context.settings.default_partitions if topic is None else topic.partitions
        return put._replace(partition=abs(java_hash(key)) % partitions) if partitions else put

    def _ask(self, session: TextSession, command: PutWith, cold: ColdIds) -> None:
        """Have the index asked for the id of a message, and handle its command again."""

        def handle_again() -> Callable[[], None]:
            try:
                self.put(session, command)
            except AssertionError:
                raise  # the broker's own state is wrong: the process ends
            except Exception:  # noqa: BLE001 - logged with its trace; see break_off
                session.break_off()
            return partial(session.answer, 1, 0)  # it is owed once more, or refused

        try:
            self._dedupe.asking.ask(cold, handle_again)
        except MetaqError as error:
            self._refuse(session, command.put, error)
        else:
            session.owed += 1

    def _refuse(self, session: TextSession, put: Put, error: MetaqError) -> None:
        self._context.counters.refuse(error, 1)
        self._context.topic_counters(put.topic).put_failed.add(1)
        session.reply(self._puts.refusal(put, error).encode())

    def _reply(self, placed: Placed, queue: ConsumeQueue, position: int, first: First | None) -> str:
        base, partition = self._id_base, queue.partition
        if first is not None:  # it may be of an earlier epoch
            epoch, _ = self._context.epochs.at(first.log_offset)
            base, partition = id_base(self._context.settings.broker_number, epoch), first.partition
        place = f"{base | placed.log_offset} {partition}"
        if placed.handle is not None:
            return f"{place} {NO_POSITION} {placed.handle}"
        if first is not None:  # one that a RocketMQ client sent with a delay level, or as a half, waits elsewhere
            position = first.detail if first.kind == StoredAs.PLAIN else NO_POSITION
        return f"{place} {position}"

    def _draft(self, session: TextSession, put: Put, options: PutOptions, queue: ConsumeQueue, now_ms: int) -> Draft:
        attribute, payload = split_attribute(put.flag, put.body) if put.flag & 1 else (None, put.body)
        return Draft(
            topic=queue.topic,
            partition=queue.partition if options.key is None else put.partition,  # of a key, whatever priorities the topic has
            body=payload,
            properties=_properties(attribute, options),
            flag=put.flag,
            sys_flag=0,
            born_ms=now_ms,
            born_host=session.born_host,
        )

    def cancel(self, session: TextSession, command: Cancel) -> None:
        """Cancel a delayed message; the reply comes when no delivery can follow any more."""
        try:
            handle = read_handle(command.handle)
        except MetaqError as error:
            session.reply(write_result(error.status, str(error), command.opaque))
            return
        session.owed += 1
        gevent.spawn(self._cancel, session, handle, command.opaque)

    def _cancel(self, session: TextSession, handle: Handle, opaque: str) -> None:
        try:
            try:
                self._cancels.cancel(handle, partial(demand, session.principal, Action.PUBLISH))
                reply = write_result(OK, "cancelled", opaque)
            except MetaqError as error:
                reply = write_result(error.status, str(error), opaque)
            session.answer(1, 0, reply)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            session.break_off()


def _due_ms(due: Due, now_ms: int) -> int:
    return now_ms + due.time_ms if due.is_delay else due.time_ms


def _properties(attribute: str | None, options: PutOptions) -> dict[str, str]:
    priority = None if options.priority is None else str(options.priority)
    pairs = {TAGS: attribute, PRIORITY: priority, DEDUPE_ID: options.id, SHARDING_KEY: options.key}
    return {name: value for name, value in pairs.items() if value is not None}
