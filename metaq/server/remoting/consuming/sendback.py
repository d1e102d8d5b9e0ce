"""Messages that consumers could not process: 36 (specs: remoting protocol, sections 3.2.2 and 5.3).

A copy is parked at a delay level and then delivered to the group's retry topic. After too many retries it goes to the group's
dead-letter topic, where it stays for an operator to look at.
"""

import random
from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.deadletters import dead_letter, most_retries, report_dead_letter
from metaq.engine.tables.groups import Group
from metaq.engine.tables.topics import Topic
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, again, delayed, note, stage
from metaq.errors import AccessDenied, MetaqError, RequestFailed
from metaq.protocol import properties
from metaq.protocol.ids import offset_id_of
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import FIRST_RETRY_LEVEL, UNIT_SUBSCRIBED, WRITE, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import SendBack, decode_header
from metaq.protocol.text.messages import Stored
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.change import Change
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.server.wire.reads import StoreReads
from metaq.store.files.filecache import Read

MOST_TIMES: Final = (1 << 31) - 1
"""How often a message can have been sent back: the field has 32 bits, and its first value comes from the sender."""


class SendBackHandler:
    """Handles messages that consumers send back."""

    def __init__(self, context: Context, turns: Turns, reads: StoreReads) -> None:
        self.context = context
        self.turns = turns
        self._reads = reads

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Store a copy of the message for a retry, or as a dead letter (36).

        Answered when the copy is as durable as any message.
        """
        header = decode_header(SendBack, request.fields)
        demand(session.principal, Action.CONSUME, header.group)
        group = self.context.groups.ensure(header.group)
        if not self.context.topics.permission & WRITE:
            raise AccessDenied("the broker does not accept messages (broker_permission)")
        if group.retry_queue_nums <= 0:
            return DONE
        check_retry_topic(self.context, group, unit=header.unit_mode)
        self._reads.start(_SendBack(self, session, request, header, group))
        return None


def check_retry_topic(context: Context, group: Group, *, unit: bool) -> None:
    """Create the retry topic of a group if needed. Raise ``AccessDenied`` when the topic may not be written."""
    name, count = group.retry_topic, group.retry_queue_nums
    topic = context.topics.get(name) or context.topics.put(Topic(name, count, count, sys_flag=UNIT_SUBSCRIBED * unit))
    if not context.topics.permission_of(topic) & WRITE:
        raise AccessDenied(f"the topic {topic.name} does not accept messages (perm {topic.permission})")


class _SendBack(Change):
    """A request in progress: the message is read, then its copy is stored."""

    __slots__ = ("_group", "_header")

    def __init__(
        self, handler: SendBackHandler, session: RemotingSession, request: RemotingCommand, header: SendBack, group: Group
    ) -> None:
        super().__init__(handler.context, handler.turns, session, request)
        self._header = header
        self._group = group

    def read(self, read: Read) -> Stored | None:
        return self._context.store.record_at_offset(self._header.offset, read)

    def found(self, stored: Stored | None) -> None:
        context = self._context
        if stored is None:
            raise RequestFailed(Response.SYSTEM_ERROR, f"there is no message at the log offset {self._header.offset}")
        record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
        demand(self.principal, Action.SUBSCRIBE, record.topic)
        self.check_load()
        check_retry_topic(context, self._group, unit=self._header.unit_mode)  # it may have gone during the read
        draft = self._again(record)
        stage(context, draft)
        note(self._turns, partial(self._count, record.topic))
        if draft.topic == self._group.dead_topic:
            report_dead_letter(context, self._turns, draft)
        self.answer_stored(len(record.body))

    def _count(self, topic: str, error: MetaqError | None) -> None:
        if error is None:
            self._context.counters.sent_back.add(1)
            self._context.statistics.sent_back(self._group.name, topic)

    def _again(self, record: Record) -> Draft:
        """Return the copy to be stored."""
        group, header = self._group, self._header
        pairs = properties.parse(record.properties.decode(errors="replace"))
        pairs.setdefault(properties.RETRY_TOPIC, record.topic)
        if properties.ORIGIN_ID not in pairs:
            pairs[properties.ORIGIN_ID] = offset_id_of(record.store_host, record.log_offset)
        draft = again(record, group.retry_topic, random.randrange(group.retry_queue_nums), pairs)
        draft.reconsume_times = min(record.reconsume_times, MOST_TIMES - 1) + 1
        most = most_retries(group, self._request.version, header.max_reconsume_times)
        if record.reconsume_times >= most or header.delay_level < 0:
            return dead_letter(self._context, group, draft)
        pairs[properties.DELAY] = str(header.delay_level or FIRST_RETRY_LEVEL + record.reconsume_times)
        return delayed(draft)
