"""Tracks of messages: which groups have consumed one, and which have not yet."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from metaq.client.admin.views import GroupMembers, read_members
from metaq.client.message import ReceivedMessage
from metaq.diagnosis.tracks import track_of
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import ConsumerGroupOnly
from metaq.server.access.permissions import Action
from metaq.server.services.call import Call
from metaq.server.services.groups import lags_of
from metaq.server.services.messages import by_offset_id, found_by_id
from metaq.server.services.rows import NamesQuery, OffsetId, Output, RowPage, page_of


class GroupTrack(Output, frozen=True):
    """The state of a message in one group."""

    group: str
    state: Annotated[str, Meta(description="As far as offsets, tags, retries and dead letters show it.")]


def track_message(call: Call, offset_id: OffsetId, query: NamesQuery) -> RowPage[GroupTrack]:
    """Return a page of the groups that consume a message's topic, by name, and the state of the message in each."""
    message = by_offset_id(call, offset_id)
    call.demand(Action.INSPECT, message.queue.topic)
    traces = _OwnTraces(call)

    def row(group: str) -> GroupTrack:
        return GroupTrack(group=group, state=track_of(traces, group, message))

    return page_of(call, traces.groups_of_topic(message.queue.topic), query, str, row)


class _OwnTraces:
    """Where messages leave traces on this broker."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def groups_of_topic(self, topic: str) -> Sequence[str]:
        context = self._call.context
        return sorted({*context.clients.consumers_of(topic), *context.offsets.groups_of(topic)})

    def copies(self, topic: str, message_id: str) -> Sequence[ReceivedMessage]:
        return [] if self._call.context.topics.get(topic) is None else found_by_id(self._call, topic, message_id)

    def offsets(self, group: str, topic: str) -> Mapping[MessageQueue, int]:
        return {view.queue: view.committed for view in lags_of(self._call, group, topic)}

    def members(self, group: str) -> GroupMembers | None:
        return members_of(self._call, group)


def members_of(call: Call, group: str) -> GroupMembers | None:
    """Return the connected members of a group; ``None`` when there are none."""
    header = ConsumerGroupOnly(group)
    answer = call.ask(Request.GET_CONSUMER_CONNECTION_LIST, header, also=(Response.CONSUMER_NOT_ONLINE,))
    return None if answer.code == Response.CONSUMER_NOT_ONLINE else read_members(bytes(answer.body))
