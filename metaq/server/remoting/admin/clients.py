"""Administrators' requests that clients answer: 307, 309, and 223, which is sent to clients as 221.

(Specs: remoting protocol, sections 3.3 and 3.5.) The broker passes the request on over the client's own connection, and passes
the answer back. It sends the request unsigned: a client that saw an administrator's signature could replay it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from gevent.event import AsyncResult

from metaq.engine.context import Context
from metaq.engine.tables.consumergroup import Member
from metaq.errors import BadRequest, RequestFailed
from metaq.message import MessageQueue
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.remoting.adminbodies import decode_offsets, encode_consumer_status
from metaq.protocol.remoting.codes import VERSION_WITH_RESET, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import ConsumeDirectly, ConsumerStatus, RunningInfo, decode_header, encode_header
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import ASK_TIMEOUT_S, Answer, RemotingSession, RequestHandler
from metaq.store.files.filecache import Run, read_through

KNOWS_RUNNING_INFO: Final = 62
"""V3_1_8: older clients do not answer 307 and 309."""
MOST_OFFSETS_BYTES: Final = 256 * 1024
"""Bytes of a client's answer to 221: some 4,000 queues. It is not plain JSON, so it is parsed in a thread."""


class ClientAdminHandler:
    """Relays requests to one client of a group, or to all of them."""

    def __init__(self, context: Context, later: Later, run: Run) -> None:
        self._context = context
        self._later = later
        self._run, self._read = run, read_through(run)

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.GET_CONSUMER_RUNNING_INFO: self.running_info,
            Request.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.status,
        }

    # -- one client ---------------------------------------------------------------------------------------------------

    def running_info(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return the running state of one consumer, as it reports it (307)."""
        header = decode_header(RunningInfo, request.fields)
        demand(session.principal, Action.INSPECT, header.consumer_group)
        member = self._member(header.consumer_group, header.client_id)
        fields, code = encode_header(header), request.code
        self._later.run(session, request, lambda: self._relay(member, code, fields, b""))

    def consume_directly(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Have a client consume one stored message now, and return the result that it reports (309)."""
        header = decode_header(ConsumeDirectly, request.fields)
        demand(session.principal, Action.ADMINISTER, header.consumer_group)
        if header.client_id is None or header.msg_id is None:
            raise BadRequest(f"the field {'clientId' if header.client_id is None else 'msgId'} is missing")
        member = self._member(header.consumer_group, header.client_id)
        log_offset = decode_offset_id(header.msg_id).log_offset
        fields, code = encode_header(header._replace(broker_name=self._context.settings.broker_name)), request.code
        self._later.run(session, request, lambda: self._relay(member, code, fields, self._message(log_offset)))

    def _message(self, log_offset: int) -> bytes:
        stored = self._context.store.record_at_offset(log_offset, self._read)
        if stored is None:
            raise RequestFailed(Response.SYSTEM_ERROR, f"there is no message at log offset {log_offset}")
        return bytes(stored.buffer[stored.at : stored.at + stored.size])

    def _member(self, group: str, client_id: str) -> Member:
        online = self._context.clients.consumer_group(group)
        members = [] if online is None else [one for one in online.members.values() if one.client.client_id == client_id]
        if not members:
            raise RequestFailed(Response.SYSTEM_ERROR, f"the consumer {client_id} of the group {group} is not connected")
        member = max(members, key=lambda one: one.beat_s)
        if member.client.version < KNOWS_RUNNING_INFO:
            reason = f"the client {client_id} has version {member.client.version}, which does not know this request"
            raise RequestFailed(Response.SYSTEM_ERROR, reason)
        return member

    def _relay(self, member: Member, code: int, fields: dict[str, str], body: bytes) -> Answer:
        [answer] = _ask([member], code, fields, body)
        if answer is None:
            reason = f"the client {member.client.client_id} did not answer within {ASK_TIMEOUT_S:.0f} s, or went away"
            raise RequestFailed(Response.CONSUME_MSG_TIMEOUT, reason)
        return Answer(answer.code, answer.fields, answer.remark, (answer.body,))

    # -- all clients of a group ---------------------------------------------------------------------------------------

    def status(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return the current offsets of all clients of a group, or of the one with the id ``client_addr``, as they report them
        (223)."""
        header = decode_header(ConsumerStatus, request.fields)
        demand(session.principal, Action.INSPECT, header.group)
        online = self._context.clients.consumer_group(header.group)
        if online is None:
            raise RequestFailed(Response.CONSUMER_NOT_ONLINE, f"no consumer of the group {header.group} is connected")
        members = [one for one in online.members.values() if header.client_addr in (None, "", one.client.client_id)]
        for member in members:
            if member.client.version < VERSION_WITH_RESET:
                reason = f"the client {member.client.client_id} of version {member.client.version} does not know this request"
                raise RequestFailed(Response.SYSTEM_ERROR, reason)
        self._later.run(session, request, partial(self._status, members, {"topic": header.topic, "group": header.group}))

    def _status(self, members: list[Member], fields: dict[str, str]) -> Answer:
        answers = _ask(members, Request.GET_CONSUMER_STATUS_FROM_CLIENT, fields, b"")
        table: dict[str, dict[MessageQueue, int]] = {}
        for member, answer in zip(members, answers, strict=True):
            if answer is not None and answer.code == Response.SUCCESS:
                table[member.client.client_id] = self._run(partial(decode_offsets, answer.body, MOST_OFFSETS_BYTES))
        return Answer(body=(encode_consumer_status(table),))


def _ask(members: Iterable[Member], code: int, fields: dict[str, str], body: bytes) -> list[RemotingCommand | None]:
    """Send a request to each member and return their answers; ``None`` for one that does not answer.

    Waits in the calling greenlet.
    """
    results = []
    for member in members:
        result: AsyncResult[RemotingCommand | None] = AsyncResult()
        answered: Callable[[RemotingCommand | None], None] = result.set
        member.session.ask(code, fields, body, answered)
        results.append(result)
    return [result.get() for result in results]
