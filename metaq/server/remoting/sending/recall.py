"""Cancels of delayed messages: 370."""

from functools import partial

from metaq.engine.timers.cancelling import Cancels
from metaq.errors import BadRequest, RequestFailed, TimerDelivered, UnknownTimer
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import RecallMessage, decode_header
from metaq.protocol.remoting.recall import DELIVERED, TIMER_STATE, RecallHandle, decode_recall
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler
from metaq.timers.handles import Handle, read_handle


class RecallHandler:
    """Cancels delayed messages for RocketMQ's clients."""

    def __init__(self, cancels: Cancels, later: Later, broker_name: str) -> None:
        self._cancels = cancels
        self._later = later
        self._broker_name = broker_name

    def requests(self) -> dict[int, RequestHandler]:
        return {Request.RECALL_MESSAGE: self.recall}

    def recall(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Cancel a delayed message (370); the answer has its unique key, which is what clients call its id.

        Answers 604 when the message was delivered already, and when no message of this broker is meant; a field tells which.
        """
        header = decode_header(RecallMessage, request.fields)
        demand(session.principal, Action.PUBLISH, header.topic)
        try:
            recall = decode_recall(header.recall_handle)
            handle = read_handle(recall.handle)
        except BadRequest as error:
            raise RequestFailed(Response.ILLEGAL_OPERATION, str(error)) from error
        if recall.broker_name != self._broker_name or recall.topic != header.topic:
            raise UnknownTimer(f"the recallHandle is of the topic {recall.topic} of the broker {recall.broker_name}")
        self._later.run(session, request, lambda: self._cancel(recall, handle))
        return None

    def _cancel(self, recall: RecallHandle, handle: Handle) -> Answer:
        try:
            self._cancels.cancel(handle, partial(_check_topic, recall.topic))
        except TimerDelivered as error:
            return Answer(error.code, {TIMER_STATE: DELIVERED}, str(error))
        return Answer(Response.SUCCESS, {"msgId": recall.unique_key})


def _check_topic(named: str, topic: str) -> None:
    if topic != named:
        raise UnknownTimer(f"the handle is not of a message of the topic {named}")
