"""The answer to a pop that has got messages."""

from functools import partial
from typing import Final

from metaq.engine.leases.leases import Leases
from metaq.engine.leases.planning import PopRequest
from metaq.engine.leases.popping import PopResult, count_given
from metaq.errors import MetaqError
from metaq.leases.tokens import token_of
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.leases.described import PoppedQueue, describe_popped
from metaq.server.remoting.session import Answer, Kept, RemotingSession, failure
from metaq.server.wire.session import Buffer

_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""


def give_records(leases: Leases, session: RemotingSession, request: Kept, wanted: PopRequest, result: PopResult) -> None:
    """Answer with messages once their leases are granted."""
    group, topic, given = wanted.group.name, wanted.topic.name, result.given
    token = token_of(leases.log.secret, group, topic, result.pop_ms)
    with_times = wanted.in_order
    queues = [_new(PoppedQueue, (part.partition, part.ordinals, part.times if with_times else None)) for part in given]
    start_offset_info, msg_offset_info, order_count_info = describe_popped(queues)
    fields = {  # of PopAnswer
        "popTime": str(result.pop_ms),
        "invisibleTime": str(wanted.invisible_ms),
        "reviveQid": str(token),
        "restNum": str(result.rest),
        "startOffsetInfo": start_offset_info,
        "msgOffsetInfo": msg_offset_info,
    }
    if order_count_info is not None:
        fields["orderCountInfo"] = order_count_info
    body: list[Buffer] = []
    for part in given:
        body += part.body
    count_given(leases.context, wanted, result)
    answer = Answer(Response.SUCCESS, fields, "FOUND", body)
    leases.grant(wanted.group, partial(_answer, session, request, answer))


def _answer(session: RemotingSession, request: Kept, answer: Answer, error: MetaqError | None) -> None:
    session.pay(request, answer if error is None else failure(error))
