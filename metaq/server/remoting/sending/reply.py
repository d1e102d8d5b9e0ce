"""Replies to requests: 324 and 325, passed on as 326 (specs: remoting protocol, section 3.2.9).

A request is an ordinary message that names its sender. Its consumer sends the reply to any broker to which that sender is
connected, and the broker pushes the reply over the sender's connection.

To reply, a client must be allowed to publish to the cluster's reply topic; a reply to any other topic is refused. The replying
client names the recipient freely. The recipient matches the reply to its request by the correlation id, which is known only to
those that may read the request.
"""

import logging
from functools import partial
from typing import Final, NamedTuple

from metaq.address import Address
from metaq.engine.context import Context
from metaq.engine.tables.topics import reply_topic
from metaq.engine.turn import Turns
from metaq.engine.writing import stage
from metaq.errors import AccessDenied, MetaqError, Overloaded
from metaq.protocol import properties
from metaq.protocol.ids import offset_id_of
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import PushReply, SendMessage, encode_header
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.owed import owe
from metaq.server.remoting.sending.header import draft_of, read_header
from metaq.server.remoting.sending.partitions import Partitions
from metaq.server.remoting.session import Answer, Kept, RemotingSession, RequestHandler
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

PUSH_TIME: Final = "PUSH_REPLY_TIME"
RETRY_MS: Final = 1000


class _Reply(NamedTuple):
    """A reply in progress."""

    session: RemotingSession
    """The session of the client that replied."""
    request: Kept
    header: SendMessage
    body: bytes
    queue: ConsumeQueue
    """The partition in which it is stored."""


class ReplyHandler:
    """Pushes replies to the requesters."""

    def __init__(self, context: Context, turns: Turns, partitions: Partitions) -> None:
        self._context = context
        self._turns = turns
        self._partitions = partitions
        host = context.store_host
        self._store_host = f"{'.'.join(map(str, host[:4]))}:{int.from_bytes(host[4:])}"
        self._topic = reply_topic(context.settings.cluster_name)
        self._pushed_bytes = 0

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.SEND_REPLY_MESSAGE: self.reply, Request.SEND_REPLY_MESSAGE_V2: self.reply}

    def reply(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Push a reply to its requester (324, 325).

        Answered when the requester has taken the reply and, if replies are stored, it is durable.
        """
        header = read_header(request)
        demand(session.principal, Action.PUBLISH, header.topic)
        if header.topic != self._topic:  # the right to publish to other topics does not count here
            raise AccessDenied(f"replies go to the topic {self._topic}, not to {header.topic:.255}")
        queue = self._partitions.admit(session, header, request.body)
        if self._pushed_bytes > self._context.settings.max_waiting_bytes:
            reason = f"{self._pushed_bytes} bytes of replies are being sent to requesters (max_waiting_bytes)"
            raise Overloaded(reason, retry_after_ms=RETRY_MS)
        kept = session.owe(request, len(request.body))
        reply = _Reply(session, kept, header, request.body, queue)
        requester = properties.parse(header.properties or "").get(properties.REPLY_TO, "")
        receiver = self._context.clients.sender(requester)
        if receiver is None:
            self._pushed(reply, f"the requester {requester!r} is not connected to this broker as a producer")
            return None
        self._pushed_bytes += len(request.body)
        fields = self._push_fields(session, header)
        answered = partial(self._answered, reply, requester)
        receiver.ask(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, fields, request.body, answered)
        return None

    def _push_fields(self, session: RemotingSession, header: SendMessage) -> dict[str, str]:
        now_ms = self._context.store.clock.now_ms()
        text = header.properties or ""
        separator = "" if text.endswith("\x02") or not text else "\x02"
        own = f"{text}{separator}{PUSH_TIME}\x01{now_ms}\x02"
        hosts = (str(Address(*session.address[:2])), self._store_host)
        return encode_header(PushReply(*header[:8], *hosts, now_ms, own, header.reconsume_times, header.unit_mode))

    def _answered(self, reply: _Reply, requester: str, answer: RemotingCommand | None) -> None:
        self._pushed_bytes -= len(reply.body)
        failure = None
        if answer is None:
            failure = f"the requester {requester!r} did not take the reply"
        elif answer.code:
            failure = f"the requester {requester!r} refused the reply with {answer.code}: {answer.remark}"
        self._pushed(reply, failure)

    def _pushed(self, reply: _Reply, failure: str | None) -> None:
        """Store the reply, taken or not, if replies are stored, and answer the client that replied."""
        session, request = reply.session, reply.request
        code = Response.SUCCESS if failure is None else Response.SYSTEM_ERROR
        answer = Answer(code, {"msgId": "0", "queueId": "0", "queueOffset": "0"}, failure)
        if self._context.settings.store_replies:
            try:
                answer = answer._replace(fields=self._store(reply))
            except MetaqError as error:  # the requester has the reply all the same
                logger.warning("reply not stored topic=%s reason=%s", reply.header.topic, error)
            else:
                owe(self._turns, session, request, answer, len(reply.body))
                return
        session.pay(request, answer)

    def _store(self, reply: _Reply) -> dict[str, str]:
        """Stage the reply; return the fields that report where it is."""
        session, _, header, body, queue = reply
        self._turns.check_load()
        self._context.store.check_writable()
        draft = draft_of(header, body, queue, session.born_host)
        placed = stage(self._context, draft)
        message_id = offset_id_of(self._context.store_host, placed.log_offset)
        return {"msgId": message_id, "queueId": str(queue.partition), "queueOffset": str(placed.ordinal)}
